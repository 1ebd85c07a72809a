"""The interpreter: dtypes, states and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import archir as ar
from archir.diagnostics import MismatchError
from archir.inputs import random_inputs
from archir.interp import empty_state, interpret, round_bf16
from archir.passes.laws import compare_layouts, compare_phases
from archir.passes.specialize import specialize
from archir.text import parse
from tests.goldens import check_golden
from tests.specs.kda import KDA, kda_lm

PRESETS = [name for name in kda_lm.presets if name != "full"]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("length", [1, 9])
def test_decode_and_prefill_in_pieces_are_full(preset: str, length: int) -> None:
    """D17, over the window of attention too: 4 of 9 tokens."""
    compare_phases(ar.trace(kda_lm, preset), length)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("lengths", [(3, 0, 6, 1), (0, 0), (4,)])
def test_rows_laid_out_are_rows_alone(preset: str, lengths: tuple[int, ...]) -> None:
    for phase in ("full", "decode"):
        compare_layouts(ar.trace(kda_lm, preset), phase, lengths)


@pytest.mark.parametrize("preset", PRESETS)
def test_narrow_runs_stay_near_float64(preset: str) -> None:
    """The error is made of roundings, so it grows as their unit does: 2^15 times to bfloat16."""
    module = ar.trace(kda_lm, preset)
    inputs, weights, _ = random_inputs(module)
    (exact,) = interpret(module, inputs, weights)[0].values()
    (single,) = interpret(module, inputs, weights, dtype="float32")[0].values()
    (half,) = interpret(module, inputs, weights, dtype="bfloat16")[0].values()
    assert single.dtype == half.dtype == np.float32
    assert np.array_equal(half, round_bf16(half))
    ratio = np.max(np.abs(half - exact)) / np.max(np.abs(single - exact))
    assert 2**12 < ratio < 2**18


DTYPES = """\
@entry
def model(x: f[4], y: F[4], z: f32[4]) -> (f[4], F[4], f32[4], F[4], bool[4], i64[4]):
    a: f[4] = mul(x, x)
    b: F[4] = mul(x, y)
    c: f32[4] = mul(z, z)
    d: F[4] = cast(x, dtype="F")
    e: bool[4] = less(x, y)
    g: i64[4] = cast(z, dtype="i64")
    return a, b, c, d, e, g
"""


def test_every_result_is_rounded_to_its_type() -> None:
    x = np.array([1 / 3, -2.7, 1e-3, 5.5])
    module = parse(DTYPES)
    wide, _ = interpret(module, [x, x, x])
    assert [v.dtype for v in wide.values()] == [np.float64] * 4 + [bool, np.int64]
    assert np.array_equal(wide["a"], x * x)
    single, _ = interpret(module, [x, x, x], dtype="float32")
    s = np.float32(x)
    assert all(np.array_equal(single[k], s * s) for k in "abc")
    half, _ = interpret(module, [x, x, x], dtype="bfloat16")
    h = round_bf16(x)
    assert np.array_equal(half["a"], round_bf16(h * h))
    assert np.array_equal(half["b"], h * s)
    assert np.array_equal(half["c"], s * s)
    assert np.array_equal(half["d"], h)
    assert half["g"].tolist() == [0, -2, 0, 5]


def test_a_state_is_not_changed_by_the_run_that_reads_it() -> None:
    step = specialize(ar.trace(kda_lm, "tiny"), "decode")
    inputs, weights, state = random_inputs(step)
    assert state is not None
    before = {path: x.copy() for path, x in state.items()}
    first, _ = interpret(step, inputs, weights, state)
    again, _ = interpret(step, inputs, weights, state)
    assert all(np.array_equal(state[path], x) for path, x in before.items())
    assert np.array_equal(first["logits"], again["logits"])


def test_what_lies_beyond_the_past_of_a_row_is_never_read() -> None:
    """Rows of unequal length: NaN in the room that a shorter row does not use."""
    step = specialize(ar.trace(kda_lm, "tiny"), "decode")
    inputs, weights, state = random_inputs(step)
    assert state is not None
    state["length"] = np.array([3, 1])
    for path, cache in state.items():
        if path.startswith("layers.1.kv"):
            cache[1, 1:] = np.nan
    got, stored = interpret(step, inputs, weights, state)
    assert np.all(np.isfinite(got["logits"]))
    assert stored["length"].tolist() == [8, 6]
    alone = {
        path: x[1:] if not path.startswith("layers.1.kv") else x[1:, :1]
        for path, x in state.items()
    }
    one, _ = interpret(step, {"tokens": inputs["tokens"][1:]}, weights, alone)
    np.testing.assert_allclose(got["logits"][1:], one["logits"], rtol=1e-12)


def test_empty_state() -> None:
    state = empty_state(specialize(ar.trace(kda_lm, "tiny"), "decode"), 3)
    assert {path: x.shape for path, x in state.items()} == {
        "length": (3,),
        "layers.0.kda.S": (3, 4, 8, 12),
        "layers.1.kv.k": (3, 0, 2, 8),
        "layers.1.kv.v": (3, 0, 2, 12),
    }
    assert not any(x.any() for x in state.values())


LIMITED = """\
@entry
def model(tokens: i64[B, T]) -> i64[B, T]:
    seq: sequence[B] = dense(tokens)
    p: i64[B, T] = positions(tokens, seq, limit=4)
    return p
"""
LOOKUP = """\
@entry
def model(x: i64[B, T], *, w: f[4, 4] = weight("w", init=zeros(), decay=True)) -> f[B, T, 4]:
    y: f[B, T, 4] = embedding(x, w)
    return y
"""
TABLE = """\
@entry
def model(x: f[B, 4], *, w: f[4, 4] = weight("w", init=zeros(), decay=True)) -> f[B, 4]:
    y: f[B, 4] = linear(x, w)
    return y
"""


def _decode_rows(rows: int) -> Any:
    step = specialize(ar.trace(kda_lm, config=KDA()), "decode")
    inputs, weights, state = random_inputs(step)
    return interpret(step, {"tokens": inputs["tokens"][:rows]}, weights, state)


REFUSED: dict[str, Callable[[], Any]] = {
    "an input too few": lambda: interpret(parse(TABLE), [], {"w": np.eye(4)}),
    "an input of another name": lambda: interpret(
        parse(TABLE), {"y": np.ones((2, 4))}, {"w": np.eye(4)}
    ),
    "a weight missing": lambda: interpret(parse(TABLE), [np.ones((2, 4))], {"v": np.eye(4)}),
    "a weight of another shape": lambda: interpret(
        parse(TABLE), [np.ones((2, 4))], {"w": np.ones((4, 5))}
    ),
    "an input of another rank": lambda: interpret(parse(TABLE), [np.ones(4)], {"w": np.eye(4)}),
    "more tokens than the context": lambda: interpret(parse(LIMITED), [np.zeros((1, 5), int)]),
    "a token past the table": lambda: interpret(parse(LOOKUP), [[[1, 4]]], {"w": np.eye(4)}),
    "a token below zero": lambda: interpret(parse(LOOKUP), [[[-1, 0]]], {"w": np.eye(4)}),
    "fewer rows than the state": lambda: _decode_rows(1),
}


def test_refused() -> None:
    parts = []
    for name, run in REFUSED.items():
        with pytest.raises(MismatchError) as caught:
            run()
        parts.append(f"## {name}\n\n{caught.value}\n")
    check_golden("ir/interpret", "\n".join(parts))
