"""Elementwise ops: one table row each. Operands broadcast as in NumPy, and may be numbers.

The result has the widest dtype of the operands (`f` and `F` give `F`; the pass `precision` makes
that cast explicit). Comparisons give bool, and logical ops take nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from archir import types
from archir.dims import Poly
from archir.ops.base import OpDef, Sample, Site, register
from archir.types import Tensor, Type


def sigmoid(x: Any) -> Any:
    """1 / (1 + e⁻ˣ), without overflow at either end."""
    return np.exp(-np.logaddexp(0, -x))


def gelu_tanh(x: Any) -> Any:
    """0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))  (Hendrycks & Gimpel 2016, the tanh form)."""
    return 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


class Row(NamedTuple):
    """One elementwise op.

    operands: how many.  gives: "widest" is the widest dtype of the operands, "float" the same but
    for integers, which give a float, "bool", or "logical", a bool of bools.
    """

    kind: str
    operands: int
    formula: str
    numpy: Callable[..., Any]
    gives: str = "widest"


TABLE = (
    Row("add", 2, "x + y", np.add),
    Row("sub", 2, "x − y", np.subtract),
    Row("mul", 2, "x · y", np.multiply),
    Row("div", 2, "x / y", np.divide, "float"),
    Row("floor_divide", 2, "⌊x / y⌋", np.floor_divide),
    Row("mod", 2, "x − ⌊x / y⌋ · y", np.remainder),
    Row("pow", 2, "xʸ", np.power),
    Row("maximum", 2, "max(x, y)", np.maximum),
    Row("minimum", 2, "min(x, y)", np.minimum),
    Row("neg", 1, "−x", np.negative),
    Row("abs", 1, "|x|", np.abs),
    Row("floor", 1, "⌊x⌋", np.floor),
    Row("exp", 1, "eˣ", np.exp, "float"),
    Row("exp2", 1, "2ˣ", np.exp2, "float"),
    Row("expm1", 1, "eˣ − 1", np.expm1, "float"),
    Row("log", 1, "ln x", np.log, "float"),
    Row("log1p", 1, "ln(1 + x)", np.log1p, "float"),
    Row("sqrt", 1, "√x", np.sqrt, "float"),
    Row("rsqrt", 1, "1 / √x", lambda x: 1 / np.sqrt(x), "float"),
    Row("sin", 1, "sin x", np.sin, "float"),
    Row("cos", 1, "cos x", np.cos, "float"),
    Row("tanh", 1, "tanh x", np.tanh, "float"),
    Row("sigmoid", 1, "1 / (1 + e⁻ˣ)", sigmoid, "float"),
    Row("silu", 1, "x / (1 + e⁻ˣ)", lambda x: x * sigmoid(x), "float"),
    Row("relu", 1, "max(x, 0)", lambda x: np.maximum(x, 0)),
    Row("softplus", 1, "ln(1 + eˣ)", lambda x: np.logaddexp(0, x), "float"),
    Row("gelu_tanh", 1, "0.5 x (1 + tanh(√(2/π)(x + 0.044715 x³)))", gelu_tanh, "float"),
    Row("less", 2, "x < y", np.less, "bool"),
    Row("less_equal", 2, "x ≤ y", np.less_equal, "bool"),
    Row("greater", 2, "x > y", np.greater, "bool"),
    Row("greater_equal", 2, "x ≥ y", np.greater_equal, "bool"),
    Row("equal", 2, "x = y", np.equal, "bool"),
    Row("not_equal", 2, "x ≠ y", np.not_equal, "bool"),
    Row("logical_and", 2, "x and y", np.logical_and, "logical"),
    Row("logical_or", 2, "x or y", np.logical_or, "logical"),
    Row("logical_not", 1, "not x", np.logical_not, "logical"),
    Row("where", 3, "y where x else z", np.where),
)


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
                raise site.fail(
                    f"axis {axis - rank} is {size} on one side and {have} on the other",
                    next="sizes must be equal or 1; ar.expand_dims adds an axis of 1",
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
        )
    )
