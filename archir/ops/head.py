"""The ends of a language model: logits and the loss that never holds them all (D14)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from archir import types
from archir.ops.base import Sample, Site, infer_by, op
from archir.ops.tensor import linear_vjp, matmul
from archir.types import Tensor, Type


@op(
    "head",
    "x: f[*A, D], w: f[V, D] -> f[*A, V]",
    samples=(Sample(("f[B, T, 8]", "f[16, 8]")),),
    invalid=(Sample(("f[B, T, 8]", "f[16, 4]"), message="D = 8 and D = 4 disagree"),),
    vjp=linear_vjp,
)
def logits(x: Any, w: Any) -> Any:
    """x wᵀ: one score per word."""
    return matmul(x, w)


_by_signature = infer_by("x: f[B, T, D], w: f[V, D], targets: i[B, T] -> f")


def _infer_cross_entropy(site: Site) -> tuple[Type, ...]:
    (loss,) = _by_signature(site)
    assert isinstance(loss, Tensor)
    return (Tensor(types.widen(loss.dtype)),)


@op(
    "head",
    infer=_infer_cross_entropy,
    samples=(Sample(("f[B, T, 8]", "f[16, 8]", "i64[B, T]")),),
    invalid=(Sample(("f[B, T, 8]", "f[16, 8]", "i64[B, 4]"), message="T = T and T = 4"),),
    vjp="a loss is differentiated by the backend, which never holds all logits",
)
def cross_entropy(x: Any, w: Any, targets: Any, *, tail: Callable[..., Any] | None = None) -> Any:
    """mean over targets ≠ −100 of logsumexp(z) − z[target], z = tail(x wᵀ).

    `targets` are aligned with x: the caller has shifted them. No target at all gives 0.
    """
    keep = targets != -100
    z = x[keep] @ w.T
    z = z if tail is None else tail(z)
    top = np.max(z, axis=-1, keepdims=True, initial=-np.inf)
    lse = np.log(np.sum(np.exp(z - top), axis=-1)) + top[:, 0]
    losses = lse - z[np.arange(z.shape[0]), targets[keep]]
    return np.sum(losses) / np.maximum(losses.size, 1)
