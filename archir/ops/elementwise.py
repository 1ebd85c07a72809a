"""Elementwise ops: one table row each. Operands broadcast as in NumPy, and may be numbers.

The result has the widest dtype of the operands (`f` and `F` give `F`; the pass `precision` makes
that cast explicit). Comparisons give bool, and logical ops take nothing else.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from archir import types
from archir.dims import Poly
from archir.ops.base import OpDef, Sample, Site, Vjp, constant, register
from archir.ops.interval import Bounds, Interval, corners, monotone, valley, within
from archir.ops.terms import apply
from archir.types import Tensor, Type


def sigmoid(x: Any) -> Any:
    """1 / (1 + e⁻ˣ), without overflow at either end."""
    return np.exp(-np.logaddexp(0, -x))


def rsqrt(x: Any) -> Any:
    """1 / √x."""
    return 1 / np.sqrt(x)


def silu(x: Any) -> Any:
    """x / (1 + e⁻ˣ)."""
    return x * sigmoid(x)


def relu(x: Any) -> Any:
    """max(x, 0)."""
    return np.maximum(x, 0)


def softplus(x: Any) -> Any:
    """ln(1 + eˣ), without overflow."""
    return np.logaddexp(0, x)


def gelu_tanh(x: Any) -> Any:
    """0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))  (Hendrycks & Gimpel 2016, the tanh form)."""
    return 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def _gelu_tanh_vjp(c: Any, y: Any, x: Any) -> Any:
    """With u the argument and t its tanh: c (0.5 (1 + t) + 0.5 x (1 − t²) u′)."""
    square = x * x
    t = (0.7978845608028654 * (x + 0.044715 * square * x)).tanh()
    inner = 0.7978845608028654 * (1 + 0.134145 * square)
    return c * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner)


def _silu_vjp(c: Any, y: Any, x: Any) -> Any:
    """c σ (1 + x (1 − σ))."""
    s = x.sigmoid()
    return c * (s * (1 + x * (1 - s)))


def _pow_vjp(c: Any, z: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """c y xʸ⁻¹, zero where y = 0; c xʸ ln x, zero where x = 0 and y ≥ 0 (as torch has it)."""
    if isinstance(y, int | float):
        powers = {0: None, 1: c, 2: c * (2 * x)}
        return powers[y] if y in powers else c * (y * x.pow(y - 1)), None
    base = y.made("fill", shape=(), value=float(x)) if isinstance(x, int | float) else x
    by_base = y.equal(0).where(0.0, c * (y * base.pow(y - 1)))
    still = base.equal(0).logical_and(y >= 0)
    return by_base, still.where(0.0, c * (z * base.log()))


def _extreme_vjp(ahead: str, c: Any, z: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """All to the operand that is ahead. A tie gives half to each of two values, and all to a value
    beside a number (as torch's maximum and clamp have it)."""
    if isinstance(x, int | float) or isinstance(y, int | float):
        value, bound = (y, x) if isinstance(x, int | float) else (x, y)
        kept = apply(f"{ahead}_equal", value, bound).where(c, 0.0)
        return kept, kept
    tied = x.equal(y).where(0.5 * c, 0.0)
    return apply(ahead, x, y).where(c, tied), apply(ahead, y, x).where(c, tied)


def _mod_bounds(x: Interval, y: Interval) -> Interval:
    """Between 0 and y, as x is not needed to tell."""
    return Interval(min(0.0, y.low), max(0.0, y.high))


class Row(NamedTuple):
    """One elementwise op.

    operands: how many.  gives: "widest" is the widest dtype of the operands, "float" the same but
    for integers, which give a float, "bool", or "logical", a bool of bools.
    vjp: cotangents of the operands from that of the result.  bounds: the interval of the result
    from those of the operands; see `OpDef` for both.
    """

    kind: str
    operands: int
    formula: str
    numpy: Callable[..., Any]
    gives: str = "widest"
    vjp: Vjp = constant
    bounds: Bounds | None = None


_TRUTH = within(0.0, 1.0)

TABLE = (
    Row("add", 2, "x + y", np.add, "widest", lambda c, z, x, y: (c, c), operator.add),
    Row("sub", 2, "x − y", np.subtract, "widest", lambda c, z, x, y: (c, -c), operator.sub),
    Row("mul", 2, "x · y", np.multiply, "widest", lambda c, z, x, y: (c * y, c * x), operator.mul),
    Row("div", 2, "x / y", np.divide, "float", lambda c, z, x, y: (c / y, -(c / y * z)),
        operator.truediv),
    Row("floor_divide", 2, "⌊x / y⌋", np.floor_divide,
        bounds=lambda x, y: x / y - Interval(0.0, 1.0)),  # NumPy's is not the floor of its x / y
    Row("mod", 2, "x − ⌊x / y⌋ · y", np.remainder, "widest",
        lambda c, z, x, y: (c, -(c * apply("floor_divide", x, y))), _mod_bounds),
    Row("pow", 2, "xʸ", np.power, "widest", _pow_vjp, operator.pow),
    Row("maximum", 2, "max(x, y)", np.maximum, "widest", partial(_extreme_vjp, "greater"),
        partial(corners, np.maximum)),
    Row("minimum", 2, "min(x, y)", np.minimum, "widest", partial(_extreme_vjp, "less"),
        partial(corners, np.minimum)),
    Row("neg", 1, "−x", np.negative, "widest", lambda c, y, x: -c, operator.neg),
    Row("abs", 1, "|x|", np.abs, "widest",
        lambda c, y, x: (x > 0).where(c, (x < 0).where(-c, 0.0)), abs),
    Row("floor", 1, "⌊x⌋", np.floor,
        bounds=lambda x: Interval(float(np.floor(x.low)), float(np.floor(x.high)))),  # and gaps
    Row("exp", 1, "eˣ", np.exp, "float", lambda c, y, x: c * y, monotone(np.exp)),
    Row("exp2", 1, "2ˣ", np.exp2, "float", lambda c, y, x: c * (y * math.log(2)),
        monotone(np.exp2)),
    Row("expm1", 1, "eˣ − 1", np.expm1, "float", lambda c, y, x: c * (y + 1), monotone(np.expm1)),
    Row("log", 1, "ln x", np.log, "float", lambda c, y, x: c / x, monotone(np.log, 0.0)),
    Row("log1p", 1, "ln(1 + x)", np.log1p, "float", lambda c, y, x: c / (1 + x),
        monotone(np.log1p, -1.0)),
    Row("sqrt", 1, "√x", np.sqrt, "float", lambda c, y, x: c / (2 * y), monotone(np.sqrt, 0.0)),
    Row("rsqrt", 1, "1 / √x", rsqrt, "float", lambda c, y, x: c * (-0.5 * y * y * y),
        monotone(rsqrt, 0.0)),
    Row("sin", 1, "sin x", np.sin, "float", lambda c, y, x: c * x.cos(), within(-1.0, 1.0)),
    Row("cos", 1, "cos x", np.cos, "float", lambda c, y, x: -(c * x.sin()), within(-1.0, 1.0)),
    Row("tanh", 1, "tanh x", np.tanh, "float", lambda c, y, x: c * (1 - y * y), monotone(np.tanh)),
    Row("sigmoid", 1, "1 / (1 + e⁻ˣ)", sigmoid, "float", lambda c, y, x: c * (y * (1 - y)),
        monotone(sigmoid)),
    Row("silu", 1, "x / (1 + e⁻ˣ)", silu, "float", _silu_vjp, valley(silu, -1.2784645427610738)),
    Row("relu", 1, "max(x, 0)", relu, "widest", lambda c, y, x: (x > 0).where(c, 0.0),
        monotone(relu)),
    Row("softplus", 1, "ln(1 + eˣ)", softplus, "float", lambda c, y, x: c * x.sigmoid(),
        monotone(softplus)),
    Row("gelu_tanh", 1, "0.5 x (1 + tanh(√(2/π)(x + 0.044715 x³)))", gelu_tanh, "float",
        _gelu_tanh_vjp, valley(gelu_tanh, -0.7524614221)),
    Row("less", 2, "x < y", np.less, "bool", bounds=_TRUTH),
    Row("less_equal", 2, "x ≤ y", np.less_equal, "bool", bounds=_TRUTH),
    Row("greater", 2, "x > y", np.greater, "bool", bounds=_TRUTH),
    Row("greater_equal", 2, "x ≥ y", np.greater_equal, "bool", bounds=_TRUTH),
    Row("equal", 2, "x = y", np.equal, "bool", bounds=_TRUTH),
    Row("not_equal", 2, "x ≠ y", np.not_equal, "bool", bounds=_TRUTH),
    Row("logical_and", 2, "x and y", np.logical_and, "logical", bounds=_TRUTH),
    Row("logical_or", 2, "x or y", np.logical_or, "logical", bounds=_TRUTH),
    Row("logical_not", 1, "not x", np.logical_not, "logical", bounds=_TRUTH),
    Row("where", 3, "y where x else z", np.where, "widest",
        lambda c, w, x, y, z: (None, x.where(c, 0.0), x.where(0.0, c)), lambda x, y, z: y | z),
)  # fmt: skip


def broadcast(site: Site, shapes: list[tuple[int | Poly, ...]]) -> tuple[int | Poly, ...]:
    """The common shape of several, aligned at the last axis; an axis of 1 stretches."""
    rank = max((len(s) for s in shapes), default=0)
    result: list[int | Poly] = []
    for axis in range(rank):
        size: int | Poly = 1
        for shape in shapes:
            at = axis - (rank - len(shape))
            have = shape[at] if at >= 0 else 1
            if have == 1 or have == size:
                continue
            if size != 1:
                step = "sizes must be equal or 1; ar.expand_dims adds an axis of 1"
                vector, *matrix = sorted(shapes, key=len)
                if len(vector) == 1 and [s[:1] for s in matrix if len(s) == 2] == [vector]:
                    step = "to scale the rows of a matrix by a vector x write x[:, None]"
                raise site.fail(
                    f"axis {axis - rank} is {size} on one side and {have} on the other", next=step
                )
            size = have
        result.append(size)
    return tuple(result)


def _infer(row: Row, site: Site) -> tuple[Type, ...]:
    """Broadcast shape; dtype as the row says."""
    if len(site.operands) != row.operands:
        plural = "s" if row.operands > 1 else ""
        raise site.fail(
            f"takes {row.operands} operand{plural}, {len(site.operands)} given", "operand-count"
        )
    tensors = [
        site.tensor(i) for i, x in enumerate(site.operands) if not isinstance(x, int | float)
    ]
    if not tensors:
        raise site.fail("needs at least one value", "operand-type")
    shape = broadcast(site, [t.shape for t in tensors])
    if row.gives == "logical":
        _require_bools(site)
    if row.gives in ("bool", "logical"):
        return (Tensor("bool", shape),)
    carriers = tensors
    if site.kind == "where":
        first = site.operands[0]
        if not isinstance(first, Tensor) or first.dtype != "bool":
            raise site.fail(
                "the condition must be bool",
                "dtype-mismatch",
                next="compare first, as in ar.where(x > 0, a, b)",
            )
        carriers = tensors[1:]
    if not carriers:
        raise site.fail("one of the two branches must be a value", "operand-type")
    dtype = types.promote(*(t.dtype for t in carriers))
    numbers_are_float = any(isinstance(x, float) for x in site.operands)
    if not types.is_float(dtype) and (row.gives == "float" or numbers_are_float):
        dtype = "F"
    return (Tensor(dtype, shape),)


def _require_bools(site: Site) -> None:
    """NumPy's `&`, `|` and `~` work on the bits of integers; here they take truth values only."""
    for index, x in enumerate(site.operands):
        if not isinstance(x, bool) and not (isinstance(x, Tensor) and x.dtype == "bool"):
            sign = {"logical_and": "&", "logical_or": "|", "logical_not": "~"}[site.kind]
            raise site.fail(
                f"`{sign}` takes bools, operand {index + 1} is {site.show(index)}",
                "dtype-mismatch",
                next="compare first, as in (i > 0) & (j > 0); the last bit of i is i % 2",
            )


def _refused(row: Row) -> tuple[Sample, ...]:
    count = row.operands
    wrong_count = Sample(("f[8]",) * (count + 1), message=f"{row.kind}: takes {count} operand")
    if row.kind == "where":
        return wrong_count, Sample(("f[8]", "f[8]", "f[8]"), message="the condition must be bool")
    if row.gives == "logical":
        return wrong_count, Sample(("bool[8]", "i64[8]")[-count:], message="takes bools, operand")
    if count == 1:
        return (wrong_count,)
    return wrong_count, Sample(("f[B, 8]", "f[4]"), message="axis -1 is 8 on one side and 4")


def _samples(row: Row) -> tuple[Sample, ...]:
    if row.gives == "logical":
        return (Sample(("bool[B, T]", "bool[T]")[: row.operands]),)
    first = "bool[B, T, 8]" if row.kind == "where" else "f[B, T, 8]"
    return (Sample((first, "f[8]", "f[B, T, 8]")[: row.operands]),)


for _row in TABLE:
    register(
        OpDef(
            _row.kind,
            "elementwise",
            _row.formula,
            _row.numpy,
            partial(_infer, _row),
            samples=_samples(_row),
            invalid=_refused(_row),
            vjp=_row.vjp,
            bounds=_row.bounds,
        )
    )
