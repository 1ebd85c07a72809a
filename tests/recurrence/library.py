"""Published recurrences as rules: what each stores, in the plainest NumPy, and how it is tested.

Every rule is one function of one head and one token, of at most six lines. `EXAMPLES` says for each
which sizes, heads and leading axes its operands are tested with (the arguments of
`check_recurrence`): grouped and shared operands, constants of a head, K ≠ V, K no power of two.
Operands are drawn inside the domain, where every rule contracts or grows slowly.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import archir as ar
from archir.check.placed import Placed
from archir.check.placed import draw as drawn
from archir.recurrence import Rule
from tests.specs.kda import kda

DELTA = {"beta": "0..1", "k": "unit"}
GATED = {"g": "<= 0", **DELTA}


@ar.recurrence("q:K k:K v:V -> o:V")
def linear_attention(S, q, k, v):
    """Katharopoulos et al. 2020, arXiv 2006.16236, without the normaliser."""
    S = S + np.outer(k, v)
    return S, q @ S


@ar.recurrence("S:K,V z:K | q:K k:K v:V -> o:V")
def normalised_attention(S, z, q, k, v):
    """Katharopoulos et al. 2020, arXiv 2006.16236: the feature map is elu + 1."""
    q, k = np.where(q > 0, q + 1, np.exp(q)), np.where(k > 0, k + 1, np.exp(k))
    S, z = S + np.outer(k, v), z + k
    return S, z, (q @ S) / (q @ z)


@ar.recurrence("q:K k:K v:V a: -> o:V", domain={"a": "0..1"})
def retnet(S, q, k, v, a):
    """Sun et al. 2023, arXiv 2307.08621: one constant decay per head."""
    S = a * S + np.outer(k, v)
    return S, q @ S


@ar.recurrence("q:K k:K v:V g:K -> o:V", domain={"g": "<= 0"})
def gla(S, q, k, v, g):
    """Yang et al. 2023, gated linear attention, arXiv 2312.06635."""
    S = np.exp(g)[:, None] * S + np.outer(k, v)
    return S, q @ S


@ar.recurrence("c:K b:K x:V dt: a: -> y:V", domain={"dt": ">= 0", "a": "<= 0"})
def mamba2(S, c, b, x, dt, a):
    """Dao & Gu 2024, arXiv 2405.21060: B and C are shared by all heads."""
    S = np.exp(dt * a) * S + np.outer(b, dt * x)
    return S, c @ S


@ar.recurrence("q:K k:K v:V beta: -> o:V", domain=DELTA)
def deltanet(S, q, k, v, beta):
    """Schlag et al. 2021, arXiv 2102.11174; Yang et al. 2024, arXiv 2406.06484."""
    S = S + np.outer(k, beta * (v - k @ S))
    return S, q @ S


@ar.recurrence("q:K k:K v:V g: beta: -> o:V", domain=GATED)
def gated_deltanet(S, q, k, v, g, beta):
    """Yang et al. 2024, arXiv 2412.06464."""
    S = np.exp(g) * S
    S = S + np.outer(k, beta * (v - k @ S))
    return S, q @ S


@ar.recurrence(
    "q:K k:K v:V g:K b:K w:V -> o:V", domain={"g": "<= 0", "b": "0..1", "w": "0..1", "k": "unit"}
)
def gated_deltanet_2(S, q, k, v, g, b, w):
    """fla/ops/gdn2: an erase strength per key channel, a write strength per value channel."""
    S = np.exp(g)[:, None] * S
    S = S + np.outer(k, w * v - (b * k) @ S)
    return S, q @ S


@ar.recurrence(
    "r:K w:K k:K v:V kappa:K a:K u:K -> o:V", domain={"w": "<= 0", "a": "0..1", "kappa": "unit"}
)
def rwkv7(S, r, w, k, v, kappa, a, u):
    """Peng et al. 2025, arXiv 2503.14456: erases at a ⊙ κ what it reads at κ, and has a bonus u."""
    S = np.exp(w)[:, None] * S - np.outer(a * kappa, kappa @ S) + np.outer(k, v)
    return S, r @ S + (r @ (u * k)) * v


@ar.recurrence(
    "q:K k:K v:V b: l:K w:V c: g: -> o:V",
    domain={"g": "<= 0", "b": "0..1", "c": "0..1", "k": "unit", "l": "unit"},
)
def delta_product(S, q, k, v, b, l, w, c, g):  # noqa: E741
    """Siems et al. 2025, gated DeltaProduct, arXiv 2502.10297: two delta steps per token."""
    S = np.exp(g) * S
    S = S + np.outer(k, b * (v - k @ S))
    S = S + np.outer(l, c * (w - l @ S))
    return S, q @ S


@ar.recurrence("q:K k:K v:V p:K x:K e:V -> o:V", domain={"e": "0..0.5", "p": "unit", "x": "unit"})
def two_sided(S, q, k, v, p, x, e):
    """Ours: erases at x what it reads at p, by another part in each value channel."""
    S = 0.5 * S - np.outer(x, e * (p @ S)) + np.outer(k, v)
    return S, q @ S


@ar.recurrence("S:K,V M:K,V | q:K k:K v:V -> o:V")
def cascade(S, M, q, k, v):
    """Ours: a second state is written with what is read from the first."""
    S = 0.9 * S + np.outer(k, v)
    M = 0.8 * M + np.outer(k, q @ S)
    return S, M, q @ M


@ar.recurrence("S:V,K | q:K k:K v:V a: -> o:V", domain={"a": "0..1", "k": "unit"})
def value_by_key(S, q, k, v, a):
    """Gated DeltaNet as its paper writes it, arXiv 2412.06464: the state is value × key."""
    S = a * S @ (np.eye(K) - 0.5 * np.outer(k, k)) + np.outer(v, k)
    return S, S @ q


@ar.recurrence("q:K k:K v:V a:K -> o:V", domain={"a": "0..1"})
def read_first(S, q, k, v, a):
    """GLA whose tokens read before they write (RWKV-6 without its bonus, arXiv 2404.05892)."""
    o = q @ S
    return a[:, None] * S + np.outer(k, v), o


@ar.recurrence("b: f:K q:K v:V -> o:V", domain={"b": "0..1", "f": "0..1"})
def hgrn2(S, b, f, q, v):
    """Qin et al. 2024, HGRN2, arXiv 2404.07904: gates have a lower bound b, keys are 1 − gate."""
    a = b + (1 - b) * f
    S = a[:, None] * S + np.outer(1 - a, v)
    return S, q @ S


@ar.recurrence("S:K,V p:K | q:K k:K v:V a:K -> o:V", domain={"a": "0..1"})
def token_shift(S, p, q, k, v, a):
    """Ours: keys are mixed with the token before, queries with a running mean (as in RWKV)."""
    S = 0.9 * S + np.outer(0.5 * k + 0.5 * p, v)
    p = a * p + (1 - a) * k
    return S, p, q @ S + np.tanh(p) @ S


@ar.recurrence("x:V a:V i: -> o:V", domain={"a": "0..0.9", "i": "0..1"})
def rg_lru(h, x, a, i):
    """De et al. 2024, Griffin, arXiv 2402.19427: values of a vector decay at their own rates."""
    h = a * h + np.sqrt(1 - a**2) * (i * x)
    return h, h


# ---- rules that run token by token only


@ar.recurrence("q:K k:K v:V -> o:V")
def squashed(S, q, k, v):
    """Ours: the state through a nonlinearity, as in an LSTM or TTT-MLP."""
    S = np.tanh(S + np.outer(k, v))
    return S, q @ S


@ar.recurrence("q:K k:K v:V g:V -> o:V", domain={"g": "<= 0"})
def value_decay(S, q, k, v, g):
    """Yang et al. 2023, arXiv 2312.06635, its general form: a decay per value channel."""
    S = S * np.exp(g) + np.outer(k, v)
    return S, q @ S


@ar.recurrence("c:K b:K x:V dt:V a:K -> y:V", domain={"dt": ">= 0", "a": "<= 0"})
def mamba(S, c, b, x, dt, a):
    """Gu & Dao 2023, arXiv 2312.00752: every entry of the state decays at its own rate."""
    S = np.exp(np.outer(a, dt)) * S + np.outer(b, dt * x)
    return S, c @ S


@ar.recurrence("S:K,V M:K,V | q:K k:K v:V -> o:V")
def coupled(S, M, q, k, v):
    """Ours: two states that turn into each other."""
    S, M = 0.8 * S - 0.5 * M + np.outer(k, v), 0.5 * S + 0.8 * M
    return S, M, q @ S


@ar.recurrence("C:K,V n:K m: | q:K k:K v:V i: f: -> h:V", domain={"f": "<= 0"})
def mlstm(C, n, m, q, k, v, i, f):
    """Beck et al. 2024, xLSTM, arXiv 2405.04517: exponential gates, stabilised by a maximum m."""
    top = np.maximum(f + m, i)
    f, i = np.exp(f + m - top), np.exp(i - top)
    C, n = f * C + i * np.outer(k, v), f * n + i * k
    return C, n, top, (q @ C) / np.maximum(np.abs(q @ n), np.exp(-top))


@ar.recurrence("q:K k:K v:V -> o:V")
def normed(S, q, k, v):
    """Ours: the state is kept at a norm of 1 at most."""
    S = S + np.outer(k, v)
    S = S / np.maximum(1, np.sqrt(np.sum(S * S)))
    return S, q @ S


# ---- KDA in other words


@ar.recurrence("q:K k:K v:V g:K beta: -> o:V", domain=GATED)
def kda_by_matrix(S, q, k, v, g, beta):
    """(I − β k kᵀ) diag(eᵍ) S + β k vᵀ, as the paper prints it."""
    S = (np.eye(K) - beta * np.outer(k, k)) @ (np.diag(np.exp(g)) @ S) + beta * np.outer(k, v)
    return S, q @ S


@ar.recurrence("q:K k:K v:V g:K beta: -> o:V", domain=GATED)
def kda_erase_and_write(S, q, k, v, g, beta):
    """The erased and the written apart, the read of the decayed state through the key."""
    a = np.exp(g)
    S = a[:, None] * S - np.outer(beta * k, (a * k) @ S) + np.outer(k, beta * v)
    return S, np.einsum("k,kv->v", q, S)


@ar.recurrence("q:K k:K v:V g:K beta: -> o:V", domain=GATED)
def kda_by_sums(S, q, k, v, g, beta):
    """Broadcasts and sums in place of products of matrices; the strength on the key."""
    S = S / np.exp(-g)[:, None]
    S = S - (beta * k)[:, None] * (np.sum(k[:, None] * S, axis=0) - v)[None, :]
    return S, np.sum(q[:, None] * S, axis=0)


@ar.recurrence("r:K w:K u:V f:K s: -> y:V", domain={"f": "<= 0", "s": "0..1", "w": "unit"})
def kda_renamed(M, r, w, u, f, s):
    """KDA under other names."""
    M = np.exp(f)[:, None] * M
    M = M + np.outer(w, s * (u - w @ M))
    return M, r @ M


KDA_REWRITTEN = (kda_by_matrix, kda_erase_and_write, kda_by_sums)

TWO_GROUPS = {"q": 2, "k": 2, "v": 4}

# rule, then what `check_recurrence` is told about its operands
CHUNKABLE: dict[str, tuple[Rule, dict[str, Any]]] = {
    rule.name: (rule, given)
    for rule, given in (
        (linear_attention, {"heads": TWO_GROUPS}),
        (normalised_attention, {"heads": TWO_GROUPS, "K": 6}),
        (retnet, {"heads": 3, "axes": {"a": "H"}}),
        (gla, {"heads": 3, "K": 7, "V": 4}),
        (mamba2, {"heads": 3, "axes": {"b": "BT", "c": "BT", "a": "H"}}),
        (deltanet, {"heads": {**TWO_GROUPS, "beta": 4}}),
        (gated_deltanet, {"heads": {**TWO_GROUPS, "g": 4, "beta": 4}, "K": 6, "V": 3}),
        (kda, {"heads": {**TWO_GROUPS, "g": 2, "beta": 4}}),
        (gated_deltanet_2, {"heads": {**TWO_GROUPS, "g": 2, "b": 2, "w": 4}}),
        (rwkv7, {"heads": 2, "axes": {"u": "H"}, "K": 6, "V": 6}),
        (delta_product, {"heads": {"q": 1, "g": 1, "v": 3}, "axes": {"c": "BT"}}),
        (two_sided, {"heads": 2, "axes": {"e": "H"}}),
        (cascade, {"heads": {**TWO_GROUPS, "v": 2}}),
        (value_by_key, {"heads": {**TWO_GROUPS, "a": 2}, "axes": {"a": "H"}}),
        (read_first, {"heads": 2, "axes": {"a": ""}}),
        (rg_lru, {"heads": 2, "axes": {"i": "BT"}}),
        (hgrn2, {"heads": {"b": 3, "f": 3, "q": 3, "v": 3}, "axes": {"b": "H"}}),
        (token_shift, {"heads": {**TWO_GROUPS, "a": 2}}),
    )
}
RECURRENT_ONLY: dict[str, tuple[Rule, dict[str, Any]]] = {
    rule.name: (rule, given)
    for rule, given in (
        (squashed, {"heads": TWO_GROUPS}),
        (value_decay, {"heads": 2}),
        (mamba, {"heads": 3, "axes": {"b": "BT", "c": "BT", "a": "H"}}),
        (coupled, {"heads": 2}),
        (mlstm, {"heads": TWO_GROUPS | {"i": 4, "f": 4}}),
        (normed, {"heads": 2}),
    )
}
EXAMPLES = CHUNKABLE | RECURRENT_ONLY


def placed(name: str) -> Placed:
    """A rule of `EXAMPLES` on operands of its sizes, heads and leading axes."""
    rule, given = EXAMPLES[name]
    sizes = {"K": given.get("K", 5), "V": given.get("V", 7)}
    return Placed(rule, sizes, given.get("heads", 2), given.get("axes", {}))


def shapes(name: str, batch: int, length: int) -> dict[str, tuple[int, ...]]:
    """The shape of every operand on a grid [B, T]."""
    return placed(name).shapes(batch, length)


def draw(
    name: str, batch: int, length: int, rng: np.random.Generator | int = 0
) -> dict[str, np.ndarray]:
    """Operands of a rule on a grid [B, T], inside its domain."""
    return drawn(EXAMPLES[name][0], shapes(name, batch, length), np.random.default_rng(rng))
