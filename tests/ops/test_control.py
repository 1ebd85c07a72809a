"""Ops that carry functions, each in a module of its own: what they do, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from archir.diagnostics import ArchirError
from archir.interp import interpret
from archir.text import parse

SCAN = """
@body
def step(total: f[B, 4], x: f[B, 4], w: f[4]) -> (f[B, 4], f[B]):
    y: f[B, 4] = mul(x, w)
    next: f[B, 4] = add(total, y)
    s: f[B] = reduce_sum(next, axes=(1,))
    return next, s

@entry
def model(start: f[B, 4], xs: f[T, B, 4], w: f[4]) -> (f[B, 4], f[T, B]):
    last, sums = scan(start, xs, w, body=step, carry=1, xs=1) @ (f[B, 4], f[T, B])
    return last, sums
"""

BY_LENGTH = """
@body
def short(x: f[B, T]) -> f[B, T]:
    y: f[B, T] = neg(x)
    return y

@body
def long(x: f[B, T]) -> f[B, T]:
    y: f[B, T] = add(x, 1)
    return y

@entry
def model(x: f[B, T]) -> f[B, T]:
    y: f[B, T] = by_length(x, size=2*T, below=8, short=short, long=long)
    return y
"""

POINTWISE = """
@pointwise
def clipped(gate: F, up: F) -> F:
    a: F = silu(gate)
    b: F = minimum(a, 0.5)
    c: F = mul(b, up)
    return c

@entry
def model(gate: f[B, 1, 4], up: f[3, 4]) -> f[B, 3, 4]:
    y: f[B, 3, 4] = pointwise(gate, up, fn=clipped)
    return y
"""

CALL = """
def double(x: f[M, 4], rest: list[N, f[M, 4]], *,
    w: f[4] = weight("w", init=ones(), decay=False),
) -> f[M, 4]:
    y: f[M, 4] = mul(x, w)
    return y

@entry
def model(x: f[B, 4], bank: list[3, f[B, 4]]) -> f[B, 4]:
    y: f[B, 4] = call(double, x, bank, scope="a")
    z: f[B, 4] = call(double, y, bank, scope="b.c")
    return z
"""


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def test_scan_is_a_loop() -> None:
    start, xs, w = draw(2, 4), draw(5, 2, 4, seed=1), draw(4, seed=2)
    out, _ = interpret(parse(SCAN), [start, xs, w])
    totals = start + np.cumsum(xs * w, axis=0)
    np.testing.assert_allclose(out["last"], totals[-1], rtol=1e-13)
    np.testing.assert_allclose(out["sums"], totals.sum(-1), rtol=1e-12)


@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_by_length_looks_at_sizes_only(length: int) -> None:
    x = draw(2, length)
    out, _ = interpret(parse(BY_LENGTH), [x])
    assert np.array_equal(out["y"], -x if 2 * length < 8 else x + 1)


def test_pointwise_is_computed_wide_and_rounded_once() -> None:
    gate, up = draw(2, 1, 4), draw(3, 4, seed=1)
    module = parse(POINTWISE)
    out, _ = interpret(module, [gate, up])
    want = np.minimum(gate / (1 + np.exp(-gate)), 0.5) * up
    np.testing.assert_allclose(out["y"], want, rtol=1e-14)
    gate, up = (np.float32(x).view(np.uint32) & 0xFFFF0000 for x in (gate, up))
    gate, up = gate.view(np.float32), up.view(np.float32)
    narrow, _ = interpret(module, [gate, up], dtype="bfloat16")
    wide, _ = interpret(module, [gate, up], dtype="float32")
    assert np.max(np.abs(narrow["y"] - wide["y"]) / np.abs(wide["y"])) <= 2**-8


def test_call_resolves_fields_by_scope() -> None:
    x, bank = draw(2, 4), draw(3, 2, 4)
    weights = {"a.w": np.array([1.0, 2, 3, 4]), "b.c.w": np.array([10.0, 10, 1, 1])}
    out, _ = interpret(parse(CALL), [x, bank], weights)
    np.testing.assert_allclose(out["z"], x * [10, 20, 3, 4], rtol=1e-15)


REFUSED = {
    "a scan over nothing": (SCAN, "carry=1, xs=1", "carry=1, xs=0", "scanned operands have []"),
    "a carry that changes": (
        SCAN, "return next, s", "return s, next", "but returns (f[B], f[B, 4])",
    ),
    "a scanned operand of another size": (
        SCAN, "xs: f[T, B, 4]", "xs: f[T, B, 5]", "x: f[B, 4] of step: 4 expected, 5 given",
    ),
    "branches that differ": (
        BY_LENGTH, "def long(x: f[B, T]) -> f[B, T]:\n    y: f[B, T] = add(x, 1)",
        "def long(x: f[B, T]) -> bool[B, T]:\n    y: bool[B, T] = less(x, 1)",
        "short gives f[B, T], long gives bool[B, T]",
    ),
    "too few operands": (
        POINTWISE, "pointwise(gate, up, fn", "pointwise(gate, fn", "clipped takes 2 operands",
    ),
    "shapes that do not stretch": (
        POINTWISE, "up: f[3, 4]", "up: f[3, 5]", "axis -1 is 4 on one side and 5 on the other",
    ),
    "a call with another dtype": (
        CALL, "x: f[B, 4], bank: list[3, f[B, 4]]", "x: F[B, 4], bank: list[3, f[B, 4]]",
        "input x: f[M, 4] of double: dtype f expected, F given",
    ),
    "a call that binds a symbol twice": (
        CALL, "bank: list[3, f[B, 4]]", "bank: list[3, f[D, 4]]", "M = B expected, D given",
    ),
    "a call with too many operands": (
        CALL, "call(double, x, bank", "call(double, x, x, bank", "double takes 2 inputs, 3 given",
    ),
    "an entry that nothing binds": (
        CALL, "(x: f[B, 4], bank: list[3, f[B, 4]])", "(x: f[B + 1, 4], bank: list[3, f[2*B, 4]])",
        "B stands bare in no input of model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    text, old, new, message = REFUSED[case]
    assert text.count(old) == 1
    parse(text)
    with pytest.raises(ArchirError) as caught:
        parse(text.replace(old, new))
    assert message in str(caught.value)
