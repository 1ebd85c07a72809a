"""Dropout: random, and the same in NumPy and in every backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from archir.ops.base import Sample, op
from archir.ops.interval import Interval, around
from archir.philox import philox, threshold


def _dropout_bounds(x: Interval, *key: Interval, rate: float, **attrs: Any) -> Interval:
    """Zero, x as it is, or what stays while training."""
    return x | x * around(1 / (1 - rate)) | around(0.0)


@op(
    "random",
    "x: g[*A], key?: i[2] -> g[*A]",
    samples=(
        Sample(("f[B, T, 8]", "i64[2]"), {"rate": 0.25}),
        Sample(("F[B, T, 8]",), {"rate": 0.25}),
    ),
    invalid=(
        Sample(("i64[B, T]", "i64[2]"), {"rate": 0.25}, "x must be a float"),
        Sample(("f[B, T]", "i64[3]"), {"rate": 0.25}, "2 = 2 and 2 = 3 disagree"),
    ),
    vjp="no rule, norm or function of scalars draws",
    bounds=_dropout_bounds,
)
def dropout(x: Any, key: Any = None, *, rate: float) -> Any:
    """x / (1 − rate) with each element zero at this rate; without a key, x itself.

    Element i of the flattened x is kept as `keep_mask` says for row 0 (D12).
    """
    if key is None:
        return x
    keep = keep_mask(key, np.array(0), x.size, rate).reshape(x.shape)
    return np.where(keep, x / (1 - rate), 0).astype(x.dtype)


def keep_mask(key: Any, rows: np.ndarray, count: int, rate: float) -> np.ndarray:
    """Which of `count` elements of each row stay, bool[*rows, count].

    Element i of row r is kept where word i mod 4 of counter (i // 4, r) reaches rate · 2³².
    """
    block = np.arange(-(-count // 4))
    zero = np.zeros_like(rows)[..., None]
    words = philox((int(key[0]), int(key[1])), (block, rows[..., None], zero, zero))
    each = np.stack(np.broadcast_arrays(*words), -1).reshape(*rows.shape, 4 * block.size)
    return each[..., :count] >= threshold(rate)
