"""A small model in the manner of Kimi Linear: KDA layers beside attention layers.

Stores: per KDA layer and value head a K×V matrix; per attention layer keys and values.
Updates: a KDA state decays per key channel, then the delta rule writes what is new.
Retrieves: the state by a query (KDA), past values by similarity within a window (attention).
"""

import numpy as np

import archir as ar
from specs.blocks import gated_rms_norm, softplus_gate


@ar.config
class KDA:
    vocab: int = 96
    width: int = 32
    heads: int = 2  # of queries, keys and decays
    value_heads: int = 4
    key: int = 8
    value: int = 12
    window: int = 4
    mixers: tuple[str, ...] = ("kda", "attention")


@ar.recurrence("q:K k:K v:V g:K beta: -> o:V", domain={"g": "<= 0", "beta": "0..1", "k": "unit"})
def kda(S, q, k, v, g, beta):
    S = np.exp(g)[:, None] * S
    S = S + np.outer(k, beta * (v - k @ S))
    return S, q @ S


def kda_mixer(x, _positions, c):
    """Grouped: value head h reads the query, key and decay of head h // (value_heads / heads)."""
    q, k = ar.heads(ar.linear(x, 2 * c.heads * c.key, bias=False, name="qk"), 2, c.heads)
    v = ar.heads(ar.linear(x, c.value_heads * c.value, bias=False, name="v"), 1, c.value_heads)
    z = ar.heads(ar.linear(x, c.heads * c.key, bias=False, name="f"), 1, c.heads)
    g = softplus_gate(z)
    beta = ar.sigmoid(ar.linear(x, c.value_heads, bias=False, name="b"))
    o = kda(ar.l2_norm(q) * c.key**-0.5, ar.l2_norm(k), v, g, beta, name="kda")
    gate = ar.linear(x, c.value_heads * c.value, bias=False, name="gate")
    o = gated_rms_norm(o, gate, name="o_norm")
    return ar.linear(o, c.width, bias=False, name="o")


def attention_mixer(x, positions, c):
    """Grouped, rotary, over the last `window` tokens (over all of them where window is 0)."""
    q = ar.heads(ar.linear(x, c.value_heads * c.key, bias=False, name="q"), 1, c.value_heads)
    k = ar.heads(ar.linear(x, c.heads * c.key, bias=False, name="k"), 1, c.heads)
    v = ar.heads(ar.linear(x, c.heads * c.value, bias=False, name="v"), 1, c.heads)
    q, k = ar.rotary(q, positions), ar.rotary(k, positions)
    a = ar.attention(q, k, v, causal=True, window=c.window or None, name="kv")
    return ar.linear(ar.merge(a), c.width, bias=False, name="o")


@ar.block
def layer(x, positions, c, mixer):
    x = x + mixer(ar.rms_norm(x, name="norm_1"), positions, c)
    h = ar.rms_norm(x, name="norm_2")
    up = ar.silu(ar.linear(h, 2 * c.width, bias=False, name="mlp.gate"))
    up = up * ar.linear(h, 2 * c.width, bias=False, name="mlp.up")
    return x + ar.linear(up, c.width, bias=False, name="mlp.down")


@ar.spec(
    KDA,
    presets={
        "tiny": KDA(),
        "plain": KDA(value_heads=2, window=0, mixers=("kda", "kda")),
        "attention": KDA(window=0, mixers=("attention", "attention")),
        "full": KDA(
            vocab=512, width=128, heads=4, value_heads=8, key=16, value=32, window=64,
            mixers=("kda", "attention"),
        ),
    },
)  # fmt: skip
def kda_lm(tokens, c):
    table = ar.weight("embed.weight", [c.vocab, c.width])
    x, positions = ar.embedding(tokens, table), ar.positions(tokens)
    for i, kind in enumerate(c.mixers):
        mixer = {"kda": kda_mixer, "attention": attention_mixer}[kind]
        x = layer(x, positions, c, mixer, name=f"layers.{i}")
    return ar.logits(ar.rms_norm(x, name="norm"), table)
