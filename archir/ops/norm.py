"""Norms over the last axis. Statistics are float32 at least; the result is rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np

from archir import types
from archir.ops.base import Sample, op
from archir.ops.interval import within

_BAD = (Sample(("f[B, T, 8]", "f[4]"), {"eps": 1e-5}, "D = 8 and D = 4 disagree"),)


def _wide(x: Any, *more: Any) -> list[Any]:
    """Terms in float32 at least, as the statistics of a norm are; None stays."""
    dtype = types.widen(x.dtype)
    return [y if y is None or y.dtype == dtype else y.cast(dtype=dtype) for y in (x, *more)]


def _mean(x: Any) -> Any:
    return x.reduce_mean(axes=(x.rank - 1,), keepdims=True)


def _layer_norm_vjp(c: Any, y: Any, x: Any, w: Any = None, b: Any = None, *, eps: float) -> Any:
    """n (g − mean g − u mean(g u)), c u, c; u = (x − mean x) n, n = 1 / √(var x + ε), g = c w."""
    x, c, w = _wide(x, c, w)
    centred = x - _mean(x)
    n = (_mean(centred * centred) + eps).rsqrt()
    u = centred * n
    g = c if w is None else c * w
    by_x = n * (g - _mean(g) - u * _mean(g * u))
    return by_x, *(() if w is None else (c * u,)), *(() if b is None else (c,))


@op(
    "norm",
    "x: f[*A, D], w?: g[D], b?: g[D] -> f[*A, D]",
    samples=(
        Sample(("f[B, T, 8]", "f[8]", "f[8]"), {"eps": 1e-5}),
        Sample(("f[B, T, 8]",), {"eps": 1e-5}),
    ),
    invalid=_BAD,
    vjp=_layer_norm_vjp,
)
def layer_norm(x: Any, w: Any = None, b: Any = None, *, eps: float) -> Any:
    """(x − mean x) / √(var x + ε) · w + b, population variance (Ba et al. 2016)."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    y = centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps)
    y = y if w is None else y * w
    return y if b is None else y + b


def _rms_norm_vjp(c: Any, y: Any, x: Any, w: Any = None, *, eps: float) -> Any:
    """n (g − u mean(g u)), c u; u = x n, n = 1 / √(mean x² + ε), g = c w."""
    x, c, w = _wide(x, c, w)
    n = (_mean(x * x) + eps).rsqrt()
    u = x * n
    g = c if w is None else c * w
    return n * (g - u * _mean(g * u)), *(() if w is None else (c * u,))


@op(
    "norm",
    "x: f[*A, D], w?: g[D] -> f[*A, D]",
    samples=(
        Sample(("f[B, T, 8]", "f[8]"), {"eps": 1e-5}),
        Sample(("f[B, T, 8]", "F[8]"), {"eps": 1e-5}),
        Sample(("f[8]",), {"eps": 1e-5}),
    ),
    invalid=_BAD,
    vjp=_rms_norm_vjp,
)
def rms_norm(x: Any, w: Any = None, *, eps: float) -> Any:
    """x / √(mean x² + ε) · w (Zhang & Sennrich 2019)."""
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return y if w is None else y * w


def _l2_norm_vjp(c: Any, y: Any, x: Any, *, eps: float) -> Any:
    """n (c − u Σ c u); u = x n, n = 1 / √(Σ x² + ε)."""
    x, c = _wide(x, c)
    last = {"axes": (x.rank - 1,), "keepdims": True}
    n = ((x * x).reduce_sum(**last) + eps).rsqrt()
    u = x * n
    return n * (c - u * (c * u).reduce_sum(**last))


@op(
    "norm",
    "x: f[*A, D] -> f[*A, D]",
    samples=(Sample(("f[B, T, 2, 8]",), {"eps": 1e-6}),),
    invalid=(Sample(("i64[B, T]",), {"eps": 1e-6}, "x must be a float, i64 given"),),
    vjp=_l2_norm_vjp,
    bounds=within(-1.0, 1.0),
)
def l2_norm(x: Any, *, eps: float) -> Any:
    """x / √(Σ x² + ε): ε inside the root, on the sum."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps)
