"""`state_update` against the rule's body run literally, token by token and head by head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import archir as ar
from archir import dims, types
from archir.diagnostics import PassError, ShapeError
from archir.interp import interpret
from archir.ir import Module, fields
from archir.passes.laws import compare_layouts, compare_phases
from archir.pipeline import lower
from archir.recurrence import Rule, recurrence
from archir.recurrence.literal import literal
from archir.trace import trace_entry
from archir.types import Tensor
from tests.goldens import check_golden
from tests.recurrence.rules import RULES

B, T = 2, 5
KDA = {
    "q": "B, T, 2, 8",
    "k": "B, T, 2, 8",
    "v": "B, T, 2, 6",
    "g": "B, T, 2, 8",
    "beta": "B, T, 2",
}
QKV = {"q": "B, T, 2, 8", "k": "B, T, 2, 8", "v": "B, T, 2, 6"}

# rule, operands, and those that a case places otherwise (D8)
CASES: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "kda": ("kda", KDA, {}),
    "grouped keys": ("kda", KDA, {"v": "B, T, 4, 6", "beta": "B, T, 4"}),
    "grouped three ways": ("kda", KDA, {"v": "B, T, 4, 6", "q": "B, T, 1, 8", "beta": "B, T, 1"}),
    "one value head": ("kda", KDA, {"q": "B, T, 1, 8", "v": "B, T, 1, 6"}),
    "strength shared by heads": ("kda", KDA, {"beta": "B, T"}),
    "keys shared by heads": ("kda", KDA, {"k": "B, T, 8", "g": "B, T, 8"}),
    "no head axis at all": (
        "kda", KDA,
        {"q": "B, T, 8", "k": "B, T, 8", "v": "B, T, 6", "g": "B, T, 8", "beta": "B, T"},
    ),
    "a decay per head": ("kda", KDA, {"g": "2, 8"}),
    "a decay per key head": ("kda", KDA, {"g": "2, 8", "v": "B, T, 4, 6", "beta": "4"}),
    "constants": ("kda", KDA, {"g": "8", "beta": ""}),
    "two states": ("ratio", QKV, {"v": "B, T, 4, 6"}),
    "a transposed state": ("transposed", QKV, {"a": "2"}),
    "a vector state": ("vector", {"x": "B, T, 3, 8", "a": "B, T, 3, 8"}, {}),
    "a square state": ("square", QKV, {"v": "B, T, 2, 8"}),
    "matrices and dims": ("matrices", QKV, {"a": "B, T, 2, 8", "beta": "B, T, 2"}),
    "pointwise functions": ("capped", QKV, {}),
    "everything": ("everything", QKV, {"v": "B, T, 4, 6"}),
}  # fmt: skip


def module_of(rule: Rule, operands: dict[str, str]) -> Module:
    """A module that runs a rule on operands of the given shapes."""
    inputs: dict[str, Any] = {
        name: types.parse(f"f[{shape}]" if shape else "f") for name, shape in operands.items()
    }
    return trace_entry(lambda **given: rule(*given.values(), name="s"), "run", inputs, {})


def case(name: str) -> tuple[Rule, Module, list[np.ndarray]]:
    rule, operands, other = CASES[name]
    module = module_of(RULES[rule], operands | other)
    rng = np.random.default_rng(len(name))
    arrays = []
    for value in module.entry.inputs:
        assert isinstance(value.type, Tensor)
        shape = tuple(dims.evaluate(size, {"B": B, "T": T}) for size in value.type.shape)
        x = rng.standard_normal(shape)
        domain = RULES[rule].domain.get(value.name, "")
        arrays.append({"<= 0": -np.abs(x), "0..1": np.abs(np.sin(x))}.get(domain, x))
    return RULES[rule], module, arrays


def literally(rule: Rule, arrays: list[np.ndarray], states: dict[str, np.ndarray]) -> list[Any]:
    """The outputs [B, T, H, …]; `states`, each [B, H, …], become the final ones."""
    loop = literal(rule, arrays, [*states.values()])
    states |= zip(states, loop.states, strict=True)
    return [*loop.outputs]


@pytest.mark.parametrize("name", CASES)
def test_full_is_the_literal_loop(name: str) -> None:
    rule, module, arrays = case(name)
    states = {
        path.removeprefix("s."): np.zeros(
            [dims.evaluate(d, {"R": B}) for d in field.value.type.shape]
        )
        for path, field in fields(lower(module, "decode", stage="specialize"), "state").items()
        if path != "length" and isinstance(field.value.type, Tensor)
    }
    assert tuple(states) == rule.states
    got, _ = interpret(module, arrays)
    want = literally(rule, arrays, states)
    for ours, theirs in zip(got.values(), want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_decode_goes_on_from_a_state(name: str) -> None:
    rule, module, arrays = case(name)
    step = lower(module, "decode", stage="specialize")
    rng = np.random.default_rng(1)
    start: dict[str, np.ndarray] = {"length": np.full(B, 7)}
    for path, field in fields(step, "state").items():
        assert isinstance(field.value.type, Tensor)
        if path != "length":
            shape = [dims.evaluate(d, {"R": B}) for d in field.value.type.shape]
            start[path] = rng.standard_normal(shape)
    states = {path.removeprefix("s."): x.copy() for path, x in start.items() if path != "length"}
    got, stored = interpret(step, arrays, state=start)
    want = literally(rule, arrays, states)
    for ours, theirs in zip(got.values(), want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13)
    for label, final in states.items():
        np.testing.assert_allclose(stored[f"s.{label}"], final, rtol=1e-12, atol=1e-13)
    assert stored["length"].tolist() == [12, 12]


@pytest.mark.parametrize("name", CASES)
def test_expanded_and_in_pieces(name: str) -> None:
    """The scan over lifted tensor ops is the loop; prefill in pieces and decode are full."""
    _, module, _ = case(name)
    lower(module, "full", dtype="bfloat16", check=2)
    lower(module, "decode", dtype="bfloat16", check=2)
    lower(module, "decode", "ragged", dtype="bfloat16", check=2)
    compare_phases(module)
    compare_layouts(module, "full")


@recurrence("q:K k:K v:K -> o:K")
def linear_read(S: Any, q: Any, k: Any, v: Any) -> Any:
    S = S + np.outer(k, v)
    return S, ar.linear(q, S)


def test_an_op_that_cannot_be_lifted_is_refused() -> None:
    module = module_of(linear_read, {**QKV, "v": "B, T, 2, 8"})
    with pytest.raises(PassError) as caught:
        lower(module)
    check_golden("recurrence/lift_refused", str(caught.value))


REFUSED = {
    "a key of another size": (
        {"k": "B, T, 2, 7"},
        "operand k of rule kda: K = 8 expected, 7 given",
    ),
    "heads that do not divide": ({"v": "B, T, 3, 6"}, "2 heads of q do not divide 3"),
    "a rank that means nothing": (
        {"beta": "B, T, 2, 8, 1"},
        "beta: F of rule kda cannot be f[B, T",
    ),
    "other tokens": ({"k": "B, 3, 2, 8"}, "k has tokens [B, 3], the operands before it [B, T]"),
    "no tokens anywhere": (
        {"q": "2, 8", "k": "2, 8", "v": "2, 6", "g": "2, 8", "beta": "2"},
        "no operand of rule kda has tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    other, message = REFUSED[name]
    with pytest.raises(ShapeError) as caught:
        module_of(RULES["kda"], KDA | other)
    assert message in str(caught.value)
