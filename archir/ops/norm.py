"""Norms over the last axis. Statistics are float32 at least; the result is rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np

from archir.ops.base import Sample, op

_BAD = (Sample(("f[B, T, 8]", "f[4]"), {"eps": 1e-5}, "D = 8 and D = 4 disagree"),)


@op(
    "norm",
    "x: f[*A, D], w?: g[D], b?: g[D] -> f[*A, D]",
    samples=(
        Sample(("f[B, T, 8]", "f[8]", "f[8]"), {"eps": 1e-5}),
        Sample(("f[B, T, 8]",), {"eps": 1e-5}),
    ),
    invalid=_BAD,
)
def layer_norm(x: Any, w: Any = None, b: Any = None, *, eps: float) -> Any:
    """(x − mean x) / √(var x + ε) · w + b, population variance (Ba et al. 2016)."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    y = centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps)
    y = y if w is None else y * w
    return y if b is None else y + b


@op(
    "norm",
    "x: f[*A, D], w?: g[D] -> f[*A, D]",
    samples=(
        Sample(("f[B, T, 8]", "f[8]"), {"eps": 1e-5}),
        Sample(("f[B, T, 8]", "F[8]"), {"eps": 1e-5}),
        Sample(("f[8]",), {"eps": 1e-5}),
    ),
    invalid=_BAD,
)
def rms_norm(x: Any, w: Any = None, *, eps: float) -> Any:
    """x / √(mean x² + ε) · w (Zhang & Sennrich 2019)."""
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return y if w is None else y * w


@op(
    "norm",
    "x: f[*A, D] -> f[*A, D]",
    samples=(Sample(("f[B, T, 2, 8]",), {"eps": 1e-6}),),
    invalid=(Sample(("i64[B, T]",), {"eps": 1e-6}, "x must be a float, i64 given"),),
)
def l2_norm(x: Any, *, eps: float) -> Any:
    """x / √(Σ x² + ε): ε inside the root, on the sum."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps)
