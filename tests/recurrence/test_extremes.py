"""Decays at their extremes: finite and right, forward and backward, in float64 and float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import archir as ar
from archir.check.placed import Placed, draw
from archir.check.tolerance import UNIT as UNITS
from archir.recurrence import Rule
from archir.recurrence.literal import Loop, literal
from tests.recurrence.forms import BOUND, Form, Ran, chunks_of, difference, start
from tests.recurrence.library import (
    delta_product,
    gated_deltanet,
    gla,
    kda,
    read_first,
    rg_lru,
    two_sided,
    value_by_key,
)

T, UNIT = 37, UNITS["f32"]
FORMS = ("chunk", "parallel")
Operands = dict[str, np.ndarray]
CASES: dict[str, tuple[Rule, Callable[[Operands], None]]] = {}


@ar.recurrence("q:K k:K v:V m: -> o:V")
def reset(S: Any, q: Any, k: Any, v: Any, m: Any) -> Any:
    """Ours: a document begins where m is not above zero."""
    S = np.where(m > 0, S, 0) + np.outer(k, v)
    return S, q @ S


def extreme(*rules: Rule) -> Callable[[Callable[[Operands], None]], Callable[[Operands], None]]:
    """What a case does to drawn operands [2, 37, 2, …] of these rules."""

    def add(change: Callable[[Operands], None]) -> Callable[[Operands], None]:
        for rule in rules:
            CASES[f"{change.__name__}-{rule.name}"] = rule, change
        return change

    return add


@extreme(read_first, value_by_key, rg_lru)
def zero_mid_chunk(x: Operands) -> None:
    x["a"][:, 5] = 0
    x["a"][:, 20, 0] = 0


@extreme(read_first, rg_lru)
def zero_in_one_channel(x: Operands) -> None:
    x["a"][:, 5, :, 0] = x["a"][:, 6, :, 1] = x["a"][:, 20, 0, 2] = 0


@extreme(read_first, value_by_key, rg_lru)
def zeros_about_the_end_of_a_chunk(x: Operands) -> None:
    x["a"][:, [0, 15, 16, 17, 36]] = 0


@extreme(read_first, value_by_key, rg_lru)
def all_zero(x: Operands) -> None:
    x["a"][:] = 0


@extreme(kda, gla, gated_deltanet, delta_product)
def gate_of_minus_a_million(x: Operands) -> None:
    x["g"][:, 7] = x["g"][:, 22, 0] = -1e6


@extreme(kda, gla)
def gate_of_one_channel(x: Operands) -> None:
    x["g"][:, 7, :, 1] = -1e6


@extreme(kda, gated_deltanet)
def huge_first_gate(x: Operands) -> None:
    x["g"][:, 0] = -2661


@extreme(kda, gla, gated_deltanet)
def no_gate(x: Operands) -> None:
    x["g"][:] = 0


@extreme(kda, gated_deltanet)
def strong_gates(x: Operands) -> None:
    """Products run through subnormal numbers to zero."""
    x["g"][:] = -40 * (1 + x["g"] * 0.1)


@extreme(read_first, value_by_key, rg_lru)
def tiny_factors(x: Operands) -> None:
    """The smallest normal number of float32, numbers whose product is below it, and 1 again."""
    x["a"][:, 3] = x["a"][:, 20] = 2.0**-126
    x["a"][:, 5:9] = 1e-12


@extreme(read_first, rg_lru)
def subnormal_factors(x: Operands) -> None:
    x["a"][:, 3] = x["a"][:, 20] = 1e-41


@extreme(kda, gated_deltanet)
def growth(x: Operands) -> None:
    x["g"][:] = 0.4


@extreme(read_first, value_by_key)
def growth_by_a_factor(x: Operands) -> None:
    x["a"][:] = 1.5


@extreme(read_first)
def factors_of_both_signs(x: Operands) -> None:
    x["a"][:, ::3] *= -1.2
    x["a"][:, 7] = 0


@extreme(two_sided)
def nothing_erased(x: Operands) -> None:
    x["e"][:] = 0


@extreme(two_sided)
def all_erased(x: Operands) -> None:
    x["e"][:] = 1


@extreme(two_sided)
def nothing_and_all_in_turn(x: Operands) -> None:
    x["e"][:, ::2], x["e"][:, 1::2, :, 0], x["e"][:, 16] = 0, 1, 1


@extreme(reset)
def documents(x: Operands) -> None:
    """One that begins inside of a chunk, one of one token, one with a chunk, one that never ends
    and one of single tokens."""
    x["m"][:] = np.abs(x["m"]) + 0.1
    x["m"][0, [5, 6, 16]], x["m"][1, :, 1] = 0, -1


@cache
def made(name: str, dtype: str) -> tuple[Operands, list[np.ndarray], Loop]:
    """Operands and states before, rounded to the dtype, and the literal loop of them."""
    rule, change = CASES[name]
    rng = np.random.default_rng(len(name))
    operands = draw(rule, placed(rule.name).shapes(2, T), rng)
    change(operands)
    states = start(placed(rule.name), 2, rng)
    operands = {k: x.astype(dtype) for k, x in operands.items()}
    states = [s.astype(dtype) for s in states]
    return operands, states, literal(rule, list(operands.values()), states)


RULES = {rule.name: rule for rule, _ in CASES.values()}


@cache
def placed(name: str) -> Placed:
    return Placed(RULES[name], {"K": 5, "V": 3}, 2, {})


@cache
def form_of(name: str, form: str, dtype: str) -> Form:
    return Form(placed(name), form, dtype=dtype)


@cache
def operator(name: str, form: str) -> Any:
    return ar.op(RULES[name], "eager", form=form)


def on_torch(
    name: str, form: str, dtype: str, of: str = ""
) -> tuple[Ran, list[np.ndarray], list[str]]:
    """Outputs and final states of torch in a dtype, on operands rounded to `of`, and the gradients
    of operands and states before."""
    rule, _ = CASES[name]
    operands, states, loop = made(name, of or dtype)
    xs = [torch.tensor(x, dtype=getattr(torch, dtype)) for x in (*operands.values(), *states)]
    xs = [x.requires_grad_() for x in xs]
    with chunks_of(16):
        outputs, after = operator(rule.name, form)(
            *xs[: len(operands)], initial_state=tuple(xs[len(operands) :]), return_state=True
        )
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    after = after if isinstance(after, tuple) else (after,)
    rng = np.random.default_rng(1)
    weights = [rng.uniform(-1, 1, x.shape) for x in (*loop.outputs, *loop.states)]
    ends = [torch.tensor(w, dtype=xs[0].dtype) for w in weights]
    found = torch.autograd.grad([*outputs, *after], xs, ends, materialize_grads=True)
    ran = Ran(tuple(x.detach().numpy() for x in outputs), tuple(x.detach().numpy() for x in after))
    return ran, [x.numpy() for x in found], [*operands, *rule.states]


@pytest.mark.parametrize("name", CASES)
def test_float64(name: str) -> None:
    rule, _ = CASES[name]
    operands, states, want = made(name, "float64")
    _, slopes, _ = on_torch(name, "recurrent", "float64")
    for form in FORMS:
        assert difference(form_of(rule.name, form, "float64").run(operands, states), want) <= BOUND
        ran, found, labels = on_torch(name, form, "float64")
        assert difference(ran, want) <= BOUND
        for label, x, y in zip(labels, found, slopes, strict=True):
            assert relative(x, y) <= 1e-9, (form, label)


@pytest.mark.parametrize("name", CASES)
def test_float32(name: str) -> None:
    """T roundings at most, of the running maximum and of the largest gradient; where states grow,
    the substitution of a chunk repeats what it was given by as much as L grows."""
    bound = T * UNIT * (16 if name.startswith("growth") else 1)
    rule, _ = CASES[name]
    operands, states, want = made(name, "float32")
    _, slopes, _ = on_torch(name, "recurrent", "float64", of="float32")
    for form in FORMS:
        ran, found, labels = on_torch(name, form, "float32")
        for have in (form_of(rule.name, form, "float32").run(operands, states), ran):
            assert difference(have, want) <= bound, form
        for label, x, y in zip(labels, found, slopes, strict=True):
            assert relative(x, y) <= bound, (form, label)


def relative(have: np.ndarray, want: np.ndarray) -> float:
    """The largest difference as a part of the largest number; infinite where it is no number."""
    far = np.max(np.abs(have - want)) / np.max(np.abs(want), initial=1e-300)
    return float(np.inf if np.isnan(far) else far)
