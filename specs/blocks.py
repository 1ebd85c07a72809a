"""What several architectures share: pieces around a recurrence, and of how they are published."""

import math

import numpy as np

import archir as ar
from archir.layout import Layout, alias, tensor


@ar.pointwise
def elu_plus_one(x):
    """The feature map elu(x) + 1, positive (Katharopoulos et al. 2020, arXiv 2006.16236)."""
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def softplus_gate(z):
    """The log decay −exp(A_log) softplus(z + dt_bias) ≤ 0 of Mamba-2 (Dao & Gu 2024, arXiv
    2405.21060), Gated DeltaNet (arXiv 2412.06464) and KDA (arXiv 2510.26692).

    z: f[B, T, H], for a decay per head, or f[B, T, H, K], for one per key channel; the result is as
    z, in float32 at least. Makes `A_log` [H] and `dt_bias` [H] or [H·K], as published.
    """
    rate, z = _rate_and_step(z, ar.log_uniform(1, 16))
    return -rate * ar.softplus(z)


def bounded_gate(z, bound=-5.0):
    """The log decay bound · sigmoid(exp(A_log) (z + dt_bias)) of Kimi K3, between `bound` and 0.

    z, result and weights: as of `softplus_gate`; A_log begins at zero, as fla and transformers do.
    """
    rate, z = _rate_and_step(z, ar.zeros())
    return bound * ar.sigmoid(rate * z)


def _rate_and_step(z, init):
    """exp(A_log), and z + dt_bias."""
    heads, *key = z.shape[2:]
    log = ar.weight("A_log", [heads], init=init, dtype="float32", decay=False)
    init, size = ar.inverse_softplus(0.001, 0.1), math.prod([heads, *key])
    bias = ar.weight("dt_bias", [size], init=init, dtype="float32", decay=False)
    rate = ar.exp(log)[:, None] if key else ar.exp(log)
    return rate, ar.cast(z, "float32") + (ar.heads(bias, 1, heads) if key else bias)


def gated_rms_norm(x, gate, *, name, eps=1e-6, activation=ar.sigmoid):
    """RMS norm of every head's values, then a gate: sigmoid (KDA) or ar.silu (Gated DeltaNet).

    x: f[B, T, H, V].  gate: f[B, T, H·V], before its activation. Returns f[B, T, H·V].
    """
    return ar.merge(ar.rms_norm(x, name=name, eps=eps)) * activation(gate)


# config.json: rotary embedding as it is, not scaled for longer contexts, of the whole head.
PLAIN_ROTARY = {
    "partial_rotary_factor": (1.0,),
    "rope_parameters.partial_rotary_factor": (1.0,),
    "rope_parameters.rope_type": ("default",),
    "rope_scaling.rope_type": ("default",),
    "rope_scaling.type": ("default",),
}


def head_names(tied: bool, table: str, published: Layout, head: str) -> dict[str, Layout]:
    """The embedding, and the head: a tensor of its own or, tied, at most a copy of the table."""
    if tied:
        return {table: alias(published, head)}
    return {table: published, "lm_head.weight": tensor(head)}
