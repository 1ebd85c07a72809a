"""Ops of chunked recurrences: running products, places, and forward substitution."""

from __future__ import annotations

from typing import Any

import numpy as np

from archir.ops.base import Sample, Site, constant, op
from archir.ops.tensor import made_of
from archir.types import Type


def _infer_cumprod(site: Site) -> tuple[Type, ...]:
    x, axis = site.tensor(0), site.attrs["axis"]
    if not 0 <= axis < x.rank:
        raise site.fail(f"there is no axis {axis}", "rank-mismatch", next="count axes from 0")
    return (x,)


@op(
    "tensor",
    infer=_infer_cumprod,
    samples=(Sample(("f[B, 8]",), {"axis": 0}), Sample(("f[4, 3, 2]",), {"axis": 1})),
    invalid=(Sample(("f[B, 8]",), {"axis": 2}, "there is no axis 2"),),
    vjp="the backend differentiates a chunked recurrence",
)
def cumprod(x: Any, *, axis: int) -> Any:
    """Running products along an axis: y_i = x_0 · … · x_i."""
    return np.cumprod(x, axis=axis)


@op(
    "tensor",
    infer=lambda site: made_of(site, site.attrs["dim"]),
    samples=(Sample((), {"dim": 5}), Sample((), {"dim": 5, "dtype": "f32"})),
    invalid=(Sample((), {"dim": -1}, "-1 is not a size"),),
    made=True,
    vjp=constant,
)
def iota(*, dim: int, dtype: str = "F") -> Any:
    """0, 1, …, dim − 1 as floats."""
    return np.arange(dim, dtype=np.float64)


def _infer_substitute(site: Site) -> tuple[Type, ...]:
    lower, b = site.tensor(0), site.tensor(1)
    if b.rank < 2 or lower.shape != (*b.shape[:-1], b.shape[-2]):
        raise site.fail("needs L: [*A, N, N] and b: [*A, N, V]", "rank-mismatch")
    if len(site.operands) > 2:
        e = site.tensor(2)
        if e.shape[:-1] != b.shape[:-1] or e.shape[-1] not in (1, b.shape[-1]):
            raise site.fail("e must be [*A, N, 1] or [*A, N, V]")
    return (b,)


@op(
    "tensor",
    infer=_infer_substitute,
    samples=(
        Sample(("f[B, 4, 4]", "f[B, 4, 3]")),
        Sample(("f[4, 4]", "f[4, 3]", "f[4, 1]")),
        Sample(("f[B, 4, 4]", "f[B, 4, 3]", "f[B, 4, 3]")),
    ),
    invalid=(
        Sample(("f[4, 5]", "f[4, 3]"), message="needs L: [*A, N, N]"),
        Sample(("f[4, 4]", "f[4, 3]", "f[4, 2]"), message="e must be"),
    ),
    vjp="the backend differentiates a chunked recurrence",
)
def substitute(lower: Any, b: Any, e: Any = None) -> Any:
    """u_i = e_i ⊙ (b_i + Σ_{j<i} L_ij u_j), row by row: a unit lower triangular system.

    Only what lies below the diagonal of L is read; e is 1 unless given.
    """
    u = np.zeros_like(b)
    for i in range(b.shape[-2]):
        row = b[..., i, :] + np.einsum("...j,...jv->...v", lower[..., i, :i], u[..., :i, :])
        u[..., i, :] = row if e is None else e[..., i, :] * row
    return u
