"""Chunked forms of every size against the literal loop, in every layout; and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import archir as ar
from archir.check.tolerance import distance
from archir.recurrence.literal import literal
from tests.recurrence.forms import BOUND, Form, Ran, chunks_of, cut, difference, laid_out, start
from tests.recurrence.library import CHUNKABLE, draw, placed

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 130)
LAYOUTS = ("dense", "packed", "left", "right")
# form, chunk
SIZES = (("recurrent", 16), ("chunk", 1), ("chunk", 16), ("chunk", 32), ("chunk", 64))
FORMS = (*SIZES, ("parallel", 16))
STEP = 2**-17  # near the cube root of float64's u, where both errors of a central difference meet


@cache
def form_of(name: str, form: str, chunk: int) -> Form:
    return Form(placed(name), form, chunk)


def lengths_of(layout: str, T: int) -> tuple[int, ...]:
    """Rows of unlike length, the first and another empty; dense rows are equally long."""
    return (T, T) if layout == "dense" else (0, T, T // 3, 0, min(T, 1), T - T // 4)


def check_forms(name: str, T: int, layout: str, forms: Sequence[tuple[str, int]]) -> None:
    """At once from zeros, and into states that have seen tokens."""
    rng = np.random.default_rng([T, LAYOUTS.index(layout)])
    lengths = lengths_of(layout, T)
    rows = laid_out(layout, lengths)
    batch, width = (len(lengths), T) if rows is None else (rows.batch, rows.length)
    rule, operands = placed(name).rule, draw(name, batch, width, rng)
    for states in (None, start(placed(name), len(lengths), rng)):
        want = literal(rule, list(operands.values()), states, rows)
        for form, chunk in forms:
            have = form_of(name, form, chunk).run(operands, states, rows)
            assert difference(have, want, rows) <= BOUND, (form, chunk, states is None)


def check_pieces(name: str, T: int, cuts: Sequence[int], forms: Sequence[tuple[str, int]]) -> None:
    """Cut anywhere and resumed is the whole; pieces may be empty."""
    rng = np.random.default_rng(T)
    operands, before = draw(name, 2, T, rng), start(placed(name), 2, rng)
    want = literal(placed(name).rule, list(operands.values()), before)
    for form, chunk in forms:
        states, made = before, []
        for a, b in zip([0, *cuts], [*cuts, T], strict=True):
            ran = form_of(name, form, chunk).run(cut(placed(name), operands, slice(a, b)), states)
            states = list(ran.states)
            made.append(ran.outputs)
        outputs = tuple(np.concatenate(parts, axis=1) for parts in zip(*made, strict=True))
        assert difference(Ran(outputs, tuple(states)), want) <= BOUND, (form, chunk)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CHUNKABLE)
def test_every_size_is_the_literal_loop(name: str, layout: str) -> None:
    """T = 17 with chunks of 1, 16 and 32 and of all; and one chunk's end and its neighbours."""
    check_forms(name, 17, layout, [f for f in FORMS if f[1] < 64])
    check_forms(name, (1, 2, 15, 16)[LAYOUTS.index(layout)], layout, [("chunk", 16)])


@pytest.mark.parametrize("name", CHUNKABLE)
def test_split_and_resumed(name: str) -> None:
    check_pieces(name, 35, [16, 16, 19], [("chunk", 16), ("parallel", 16)])


@pytest.mark.parametrize("name", ["kda", "delta_product", "cascade", "value_by_key"])
def test_long_rows(name: str) -> None:
    check_forms(name, 65, "packed", [("chunk", 64), ("parallel", 16)])
    check_forms(name, 130, "dense", [("chunk", 16)])


def test_a_chunk_is_as_long_as_asked() -> None:
    module = form_of("kda", "chunk", 32)._module("dense")
    assert "chunk=32" in str(module) and "chunk=16" not in str(module)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHUNKABLE)
def test_the_whole_product(name: str) -> None:
    for T in LENGTHS:
        for layout in LAYOUTS:
            check_forms(name, T, layout, FORMS)
        cuts = sorted(np.random.default_rng(T).integers(0, T + 1, 3).tolist())
        check_pieces(name, T, [*cuts, cuts[-1]], FORMS)


# ---- float32


def check_float32(name: str, T: int) -> None:
    """As near to the literal loop in float64 as D16 asks, on NumPy and torch; the anchor is the
    recurrent form in float32."""
    operands = {k: x.astype("float32") for k, x in draw(name, 2, T, T).items()}
    want = literal(placed(name).rule, list(operands.values()))
    anchor = Form(placed(name), "recurrent", dtype="float32").run(operands)
    for form in ("chunk", "parallel"):
        with chunks_of(16):
            xs = [torch.tensor(x) for x in operands.values()]
            made = operator(name, form)(*xs, return_state=True)
        made = (x if isinstance(x, tuple) else (x,) for x in made)
        on_torch = Ran(*(tuple(x.numpy() for x in part) for part in made))
        for have in (Form(placed(name), form, dtype="float32").run(operands), on_torch):
            for kind in ("outputs", "states"):
                parts = (getattr(x, kind) for x in (have, want, anchor))
                for x, y, z in zip(*parts, strict=True):
                    found = distance(x, y, z, "float32", f"{form}: {kind}")
                    assert found.ok, found


@pytest.mark.parametrize("name", CHUNKABLE)
def test_float32(name: str) -> None:
    check_float32(name, 65)


def test_float32_of_a_long_solve() -> None:
    """The delta rule forgets nothing, so that errors of all tokens would add up."""
    check_float32("deltanet", 130)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHUNKABLE)
def test_float32_of_long_rows(name: str) -> None:
    check_float32(name, 130)


@ar.recurrence("q:K k:K v:V a: -> o:V", domain={"a": "0.99999..1", "k": "100..100.1"})
def nearly_one(S: Any, q: Any, k: Any, v: Any, a: Any) -> Any:
    c = k - np.mean(k)
    S = a * S + (1 - a) * np.outer(c * np.sum(c * c), v)
    return S, q @ S


@ar.recurrence("h:V | v:V w:V a:V -> o:V", domain={"a": "0.99999..1", "v": "1e3..1001"})
def running_mean(h: Any, v: Any, w: Any, a: Any) -> Any:
    h = a * h + (1 - a) * (v - 1000 + w)
    return h, h


@pytest.mark.parametrize("rule", [nearly_one, running_mean], ids=lambda rule: rule.name)
def test_sums_of_operands_are_not_multiplied_out(rule: Any) -> None:
    """1 − a near zero, and a key less its mean, keep their digits in every form."""
    report = ar.check_recurrence(rule, (17, 65), dtype=("float64", "float32"), layouts=("dense",))
    assert report.ok, report


@ar.recurrence("q:K k:K v:V m: -> o:V")
def reset(S: Any, q: Any, k: Any, v: Any, m: Any) -> Any:
    S = np.where(m > 0, 1, 0) * S + np.outer(k, v)
    return S, q @ S


@ar.recurrence("q:K k:K v:V m:K -> o:V")
def masked(S: Any, q: Any, k: Any, v: Any, m: Any) -> Any:
    S = np.where(m > 0, 0.9, 0.5)[:, None] * S + np.outer(k * (m > 1), v)
    return S, q @ S


@pytest.mark.parametrize("rule", [reset, masked], ids=lambda rule: rule.name)
def test_masks_are_numbers(rule: Any) -> None:
    report = ar.check_recurrence(rule, (1, 17), layouts=("dense", "left"))
    assert report.ok and report.ran == ("recurrent", "chunk", "parallel"), report


@ar.recurrence("h:K | x:K q:K a:K -> o:K s:", domain={"a": "0..1"})
def itself(h: Any, x: Any, q: Any, a: Any) -> Any:
    h = a * h + x
    return h, h, q @ h


def test_an_output_may_be_the_state_itself() -> None:
    """A vector read whole, as it is, and summed beside."""
    report = ar.check_recurrence(itself, (1, 17), layouts=("dense", "left"))
    assert report.ok and report.ran == ("recurrent", "chunk", "parallel"), report


# ---- gradients


@dataclass(frozen=True)
class Case:
    """Operands by name and states before, and cotangents of the outputs and of the final states."""

    name: str
    operands: dict[str, np.ndarray]
    states: list[np.ndarray]
    cotangents: list[np.ndarray]
    lengths: tuple[int, ...] | None = None

    @property
    def labels(self) -> list[str]:
        return [*self.operands, *placed(self.name).rule.states]


def case(name: str, T: int, lengths: tuple[int, ...] | None = None) -> Case:
    """Two dense rows of T tokens, or rows of these lengths packed in one line."""
    rng = np.random.default_rng(T)
    rows = laid_out("dense" if lengths is None else "packed", lengths or ())
    batch, width, count = (2, T, 2) if rows is None else (1, rows.length, len(rows))
    operands, states = draw(name, batch, width, rng), start(placed(name), count, rng)
    made = literal(placed(name).rule, list(operands.values()), states, rows)
    cotangents = [rng.uniform(-1, 1, x.shape) for x in (*made.outputs, *made.states)]
    return Case(name, operands, states, cotangents, lengths)


def slopes(
    f: Callable[..., Any], given: Case, dtype: torch.dtype = torch.float64
) -> list[np.ndarray]:
    """Of every operand and of every state before, through every output and the final states."""
    xs = [torch.tensor(x, dtype=dtype, requires_grad=True) for x in given.operands.values()]
    states = [torch.tensor(x, dtype=dtype, requires_grad=True) for x in given.states]
    ends = None if given.lengths is None else [0, *np.cumsum(given.lengths).tolist()]
    initial = states[0] if len(states) == 1 else tuple(states)
    outputs, after = f(*xs, initial_state=initial, cu_seqlens=ends, return_state=True)
    made = [
        *(outputs if isinstance(outputs, tuple) else (outputs,)),
        *(after if isinstance(after, tuple) else (after,)),
    ]
    weights = [torch.tensor(x, dtype=dtype) for x in given.cotangents]
    found = torch.autograd.grad(made, [*xs, *states], weights, materialize_grads=True)
    return [x.numpy() for x in found]


@cache
def operator(name: str, form: str, chunk: int = 16) -> Any:
    """A rule as torch runs it; `chunks_of` must hold while it is called."""
    return ar.op(placed(name).rule, "eager", form=form)


def check_slopes(given: Case, forms: Sequence[tuple[str, int]]) -> list[np.ndarray]:
    """Each form's gradients are autograd's through the recurrent form, which are given back."""
    want = slopes(operator(given.name, "recurrent"), given)
    for form, chunk in forms:
        with chunks_of(chunk):
            have = slopes(operator(given.name, form, chunk), given)
        for label, x, y in zip(given.labels, have, want, strict=True):
            allowed = 1e-9 * np.max(np.abs(y), initial=1e-300)
            assert np.all(np.abs(x - y) <= allowed), (form, chunk, label)
    return want


@pytest.mark.parametrize("name", CHUNKABLE)
def test_gradients(name: str) -> None:
    """Of every operand, of the state before and through the state after: as through the recurrent
    form, and as central differences of the interpreter in chunks."""
    given = case(name, 19)
    found = check_slopes(given, [("chunk", 16), ("parallel", 16)])
    check_differences(given, found)


@pytest.mark.parametrize("name", ["kda", "delta_product", "cascade", "value_by_key"])
def test_gradients_of_packed_rows(name: str) -> None:
    check_slopes(case(name, 1, lengths=(0, 17, 3, 0, 1)), [("chunk", 16)])


@pytest.mark.slow
@pytest.mark.parametrize("name", CHUNKABLE)
def test_gradients_of_every_size(name: str) -> None:
    for T in (1, 16, 65, 130):
        check_slopes(case(name, T), FORMS[1:])
    check_slopes(case(name, 1, lengths=(0, 65, 16, 0, 1, 37)), FORMS[1:])


def check_differences(given: Case, found: Sequence[np.ndarray]) -> None:
    """Central differences along one direction of each operand and state."""
    form = form_of(given.name, "chunk", 16)
    start_of = [*given.operands.values(), *given.states]
    count = len(given.operands)

    def total(at: Sequence[np.ndarray]) -> float:
        made = form.run(dict(zip(given.operands, at)), at[count:])
        pairs = zip((*made.outputs, *made.states), given.cotangents, strict=True)
        return float(sum(np.sum(x * c) for x, c in pairs))

    rng = np.random.default_rng(2)
    for index, (label, slope) in enumerate(zip(given.labels, found, strict=True)):
        direction = rng.uniform(-1, 1, np.shape(slope))
        sides = [list(start_of), list(start_of)]
        for side, sign in zip(sides, (1, -1), strict=True):
            side[index] = start_of[index] + sign * STEP * direction
        want = (total(sides[0]) - total(sides[1])) / (2 * STEP)
        scale = np.sum(np.abs(slope * direction)) + 1
        assert abs(np.sum(slope * direction) - want) <= 1e-6 * scale, label
