"""The reverse pass over an IR function: rules, functions of scalars, random functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings

from archir.diagnostics import PassError, UnsupportedError
from archir.dims import symbol
from archir.fuzz.modules import modules
from archir.ir import Function, Module
from archir.ops import lookup
from archir.passes.gradient import gradient
from archir.passes.rewrite import Rewriter
from archir.recurrence.lift import batch
from archir.text import parse, print_function
from archir.types import Tensor
from tests.derivatives import (
    check_differences,
    check_text,
    check_torch,
    draw,
    is_float,
    run,
    slopes,
)
from tests.goldens import check_golden
from tests.recurrence.rules import RULES

SIZES = {"B": 2, "T": 3, "N": 3, "R": 2, "P": 3, "S": 3, "J": 3, "K": 4, "V": 3}


def inputs_of(function: Function, seed: int = 0, sizes: Mapping[str, int] = SIZES) -> list[Any]:
    """Random inputs; those that came from an op's sample are positive, as it may ask."""
    return [
        draw([v.type], sizes, seed + i, low=0.1 if v.name.startswith("sample") else -1.0)[0]
        for i, v in enumerate(function.inputs)
    ]


def rule_inputs(function: Function) -> list[Any]:
    """Inputs within a rule's domain."""
    found = inputs_of(function)
    for index, value in enumerate(function.inputs):
        domain = function.attrs.get("domain", {}).get(value.name, "")
        if domain in ("<= 0", "0..1"):
            found[index] = np.abs(found[index]) * (-0.5 if domain == "<= 0" else 0.9)
    return found


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str) -> None:
    rule = RULES[name].function
    found, given = gradient(rule), rule_inputs(rule)
    check_text(found)
    assert [v.type for v in found.outputs] == [v.type for v in rule.inputs]
    assert found.role == "rule" and found.inputs[: len(rule.inputs)] == rule.inputs
    check_differences(rule, given)
    check_torch(rule, given)


@pytest.mark.parametrize("name", RULES)
def test_gradient_of_a_gradient(name: str) -> None:
    rule = RULES[name].function
    first = gradient(rule)
    given = [*rule_inputs(rule), *draw([v.type for v in rule.outputs], SIZES, seed=7)]
    check_text(gradient(first))
    check_differences(first, given)
    check_torch(first, given)


@pytest.mark.parametrize("name", RULES)
def test_size(name: str) -> None:
    """Each op's share is a few ops, so a gradient is a few times as long as its function."""
    rule = RULES[name].function
    assert len(gradient(rule).ops) <= 3 * len(rule.ops)
    assert len(gradient(gradient(rule)).ops) <= 10 * len(rule.ops)


@pytest.mark.parametrize("name", RULES)
def test_a_gradient_lifts_as_its_rule_does(name: str) -> None:
    """Over leading axes it gives what it gives at each place."""
    rule = RULES[name].function
    found = gradient(rule)
    lifted = batch(found, (symbol("R"), symbol("B")), {}, "lifted")
    given = inputs_of(lifted, sizes={**SIZES, "R": 2, "B": 3})
    given = [np.abs(x) * 0.5 for x in given]
    whole = run(lifted, given)
    for place in np.ndindex(2, 3):
        alone = run(found, [x[place] for x in given])
        for x, y in zip(whole, alone, strict=True):
            np.testing.assert_allclose(x[place], y, rtol=1e-12, atol=1e-14)


def test_golden() -> None:
    check_golden("passes/gradient_kda", print_function(gradient(RULES["kda"].function), False))


def test_golden_of_its_docstring() -> None:
    """The before → after that the pass draws."""
    before, after = DRAWN.split("→")
    module = parse(f"@rule(states=1){before}\n\n@entry\ndef nothing() -> ():\n    return ()\n")
    assert print_function(gradient(module["f"])).split() == ["@rule(states=1)", *after.split()]


DRAWN = """
def f(x: F[K], w: F) -> F[K]:
    exp: F[K] = exp(x)
    mul: F[K] = mul(w, exp)
    return mul
→
def f_gradient(x: F[K], w: F, d_mul: F[K]) -> (F[K], F):
    exp: F[K] = exp(x)
    mul: F[K] = mul(d_mul, exp)
    d_exp: F[K] = mul(d_mul, w)
    d_w: F = reduce_sum(mul, axes=(0,))
    d_x: F[K] = mul(d_exp, exp)
    return d_x, d_w
"""

MIXED = """\
@pointwise
def gate(a: F, b: F) -> F:
    s: F = silu(a)
    y: F = mul(s, b)
    return y

@entry
def model(x: f[B, 8], i: i64[B], unread: f[B], scale: f, *,
    w: f[4, 8] = weight("w", init=zeros(), decay=True),
    g: F[4] = weight("g", init=ones(), decay=False, dtype="float32"),
) -> (f[B, 4], i64[B]):
    h: f[B, 4] = linear(x, w)
    n: f[B, 4] = rms_norm(h, g, eps=1e-05)
    y: f[B, 4] = pointwise(n, scale, fn=gate)
    z: f[B, 4] = add(y, h)
    return z, i
"""


def test_weights_integers_and_what_nothing_reads() -> None:
    """Integers have no cotangent, an input that nothing reads has zeros, weights are named."""
    module = parse(MIXED)
    functions = {f.name: f for f in module.functions}
    found = gradient(module.entry, functions)
    assert str(parse(str(Module((found,))))) == str(Module((found,)))
    assert [v.name for v in found.inputs] == ["x", "i", "unread", "scale", "d_z"]
    assert [str(v.type) for v in found.outputs] == ["f[B, 8]", "f[B]", "f"]
    weights = gradient(module.entry, functions, wrt=["g", "w", "scale"])
    assert [str(v.type) for v in weights.outputs] == ["F[4]", "f[4, 8]", "f"]
    assert [f.path for f in weights.fields] == ["w", "g"]
    free, given = _free(module.entry, functions)
    check_differences(free, given, functions)
    check_torch(free, given, functions)
    unread = slopes(free, given, draw([free.outputs[0].type], SIZES), functions)[1]
    assert unread.shape == (2,) and not unread.any()


def _free(function: Function, functions: Mapping[str, Function]) -> tuple[Function, list[Any]]:
    """The part of a function that has a gradient in IR ops, as a function of its own: what other
    ops gave, and weights, become inputs. And inputs for it."""
    new = Rewriter(function, dict(functions))
    for value in (*function.inputs, *(f.value for f in function.fields)):
        if isinstance(value.type, Tensor):
            new.inputs.append(value)
            new.values[value] = value
    for op in function.ops:
        known = all(v in new.values for v in op.values)
        if known and op.results and (op.kind == "pointwise" or callable(lookup(op.kind).vjp)):
            new.copy(op)
            continue
        for value in op.results:
            if isinstance(value.type, Tensor):
                new.inputs.append(value)
                new.values[value] = value
    read = {v for op in new.ops for v in op.values}
    ends = [v for op in new.ops for v in op.results if v not in read and is_float(v.type)]
    cut = Function(f"part_of_{function.name}", tuple(new.inputs), (), tuple(new.ops), tuple(ends))
    return cut, inputs_of(cut)


@settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
@given(modules("smooth"))
def test_random_functions(module: Module) -> None:
    functions = {f.name: f for f in module.functions}
    for function in module.functions:
        part, given = _free(function, functions)
        if not part.outputs:
            continue
        note(str(part))
        check_differences(part, given, functions)
        results = (v.type for op in part.ops for v in op.results)
        narrow = any(isinstance(t, Tensor) and t.dtype in ("f32", "bf16", "f16") for t in results)
        floored = any(op.kind == "floor_divide" for op in part.ops)
        if not floored and not narrow:  # to which torch rounds, and the interpreter does not
            check_torch(part, given, functions)


REFUSED = {
    "an op without one": (
        "embedding has no gradient in IR ops: it adds into rows of the table",
        "y: f[B, 8] = embedding(i, w)", ["w"], UnsupportedError,
    ),
    "no such value": ("ww is no float tensor among", "y: f[B, 8] = mul(x, 2)", ["ww"], PassError),
    "an integer": ("i is no float tensor among", "y: f[B, 8] = mul(x, 2)", ["i"], PassError),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    message, line, wrt, kind = REFUSED[case]
    head = 'def f(i: i64[B], x: f[B, 8], *,\n    w: f[4, 8] = weight("w", init=zeros()),\n)'
    entry = parse(f"@entry\n{head} -> f[B, 8]:\n    {line}\n    return y\n").entry
    with pytest.raises(kind) as caught:
        gradient(entry, wrt=wrt)
    assert message in str(caught.value)


def test_a_state_is_refused() -> None:
    text = """\
@entry
def f(x: f[B, 8], *,
    s: f[B, 8] = state("s", kind="matrix"),
) -> f[B, 8]:
    y: f[B, 8] = add(x, s)
    return y
"""
    with pytest.raises(UnsupportedError, match="f has the state 's'"):
        gradient(parse(text).entry)


def test_what_an_op_without_gradient_feeds_is_a_constant() -> None:
    """Only ops through which the result depends on an input need one."""
    text = """\
@entry
def f(i: i64[B], x: f[B, 8], *,
    w: f[4, 8] = weight("w", init=zeros()),
) -> f[B, 8]:
    e: f[B, 8] = embedding(i, w)
    y: f[B, 8] = mul(x, e)
    return y
"""
    found = gradient(parse(text).entry)
    assert [op.kind for op in found.ops] == ["embedding", "mul"]
