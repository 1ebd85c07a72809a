"""Elementwise ops: one table row each. Operands broadcast as in NumPy, and may be numbers.

The result has the widest dtype of the operands (`f` and `F` give `F`; the pass `precision` makes
that cast explicit). Comparisons give bool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


# kind, number of operands, formula, NumPy
TABLE: tuple[tuple[str, int, str, Callable[..., Any]], ...] = (
    ("add", 2, "x + y", np.add),
    ("sub", 2, "x − y", np.subtract),
    ("mul", 2, "x · y", np.multiply),
    ("div", 2, "x / y", np.divide),
    ("pow", 2, "xʸ", np.power),
    ("maximum", 2, "max(x, y)", np.maximum),
    ("minimum", 2, "min(x, y)", np.minimum),
    ("neg", 1, "−x", np.negative),
    ("abs", 1, "|x|", np.abs),
    ("exp", 1, "eˣ", np.exp),
    ("exp2", 1, "2ˣ", np.exp2),
    ("expm1", 1, "eˣ − 1", np.expm1),
    ("log", 1, "ln x", np.log),
    ("log1p", 1, "ln(1 + x)", np.log1p),
    ("sqrt", 1, "√x", np.sqrt),
    ("rsqrt", 1, "1 / √x", lambda x: 1 / np.sqrt(x)),
    ("sin", 1, "sin x", np.sin),
    ("cos", 1, "cos x", np.cos),
    ("tanh", 1, "tanh x", np.tanh),
    ("sigmoid", 1, "1 / (1 + e⁻ˣ)", sigmoid),
    ("silu", 1, "x / (1 + e⁻ˣ)", lambda x: x * sigmoid(x)),
    ("relu", 1, "max(x, 0)", lambda x: np.maximum(x, 0)),
    ("softplus", 1, "ln(1 + eˣ)", lambda x: np.logaddexp(0, x)),
    ("gelu_tanh", 1, "0.5 x (1 + tanh(√(2/π)(x + 0.044715 x³)))", gelu_tanh),
    ("less", 2, "x < y", np.less),
    ("less_equal", 2, "x ≤ y", np.less_equal),
    ("greater", 2, "x > y", np.greater),
    ("greater_equal", 2, "x ≥ y", np.greater_equal),
    ("equal", 2, "x = y", np.equal),
    ("not_equal", 2, "x ≠ y", np.not_equal),
    ("logical_and", 2, "x and y", np.logical_and),
    ("logical_or", 2, "x or y", np.logical_or),
    ("logical_not", 1, "not x", np.logical_not),
    ("where", 3, "y where x else z", np.where),
)

COMPARISONS = {
    "less",
    "less_equal",
    "greater",
    "greater_equal",
    "equal",
    "not_equal",
    "logical_and",
    "logical_or",
    "logical_not",
}
# Of these an integer operand gives a float; the others keep integers.
_TO_FLOAT = {
    *("div", "exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh"),
    *("sigmoid", "silu", "softplus", "gelu_tanh"),
}


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


def infer(site: Site) -> tuple[Type, ...]:
    """Broadcast shape, widest dtype (bool for comparisons)."""
    count = next(n for kind, n, _, _ in TABLE if kind == site.kind)
    if len(site.operands) != count:
        plural = "s" if count > 1 else ""
        raise site.fail(
            f"takes {count} operand{plural}, {len(site.operands)} given", "operand-count"
        )
    tensors = [
        site.tensor(i) for i, x in enumerate(site.operands) if not isinstance(x, int | float)
    ]
    if not tensors:
        raise site.fail("needs at least one value", "operand-type")
    shape = broadcast(site, [t.shape for t in tensors])
    if site.kind in COMPARISONS:
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
    if not types.is_float(dtype) and (site.kind in _TO_FLOAT or numbers_are_float):
        dtype = "F"
    return (Tensor(dtype, shape),)


def _refused(kind: str, count: int) -> tuple[Sample, ...]:
    wrong_count = Sample(("f[8]",) * (count + 1), message=f"{kind}: takes {count} operand")
    if kind == "where":
        return wrong_count, Sample(("f[8]", "f[8]", "f[8]"), message="the condition must be bool")
    if count == 1:
        return (wrong_count,)
    return wrong_count, Sample(("f[B, 8]", "f[4]"), message="axis -1 is 8 on one side and 4")


for _kind, _count, _formula, _numpy in TABLE:
    _float = ("f[B, T, 8]", "f[8]", "f[B, T, 8]")
    _operands = {
        "where": ("bool[B, T, 8]", "f[8]", "f[B, T, 8]"),
        "logical_and": ("bool[B, T]", "bool[T]"),
        "logical_or": ("bool[B, T]", "bool[T]"),
        "logical_not": ("bool[B, T]",),
    }.get(_kind, _float[:_count])
    register(
        OpDef(
            _kind,
            "elementwise",
            _formula,
            _numpy,
            infer,
            samples=(Sample(_operands),),
            invalid=_refused(_kind, _count),
        )
    )
