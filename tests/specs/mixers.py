"""A small model of three recurrences, each with what the literature puts around it.

Stores: per layer and head a K×V matrix; linear attention also its normaliser, a K vector.
Updates: linear attention adds; Gated DeltaNet and KDA decay, then write what is new.
Retrieves: by a query; linear attention as a weighted mean.
"""

import archir as ar
from specs.blocks import bounded_gate, elu_plus_one, gated_rms_norm, softplus_gate
from tests.specs.kda import kda


@ar.config
class Mixers:
    vocab: int = 96
    width: int = 24
    heads: int = 2
    value_heads: int = 4
    key: int = 6
    value: int = 5


@ar.recurrence("S:K,V z:K | q:K k:K v:V -> o:V", domain={"q": ">= 0", "k": ">= 0"})
def weighted_mean(S, z, q, k, v):
    S, z = S + k[:, None] * v, z + k
    return S, z, (q @ S) / (q @ z)


@ar.recurrence("q:K k:K v:V g: beta: -> o:V", domain={"g": "<= 0", "beta": "0..1", "k": "unit"})
def gated_delta(S, q, k, v, g, beta):
    S = ar.exp(g) * S
    S = S + k[:, None] * (beta * (v - k @ S))
    return S, q @ S


def queries_keys_values(x, c):
    """[B, T, heads, key] twice and [B, T, value_heads, value]"""
    size = c.heads * c.key
    x = ar.linear(x, 2 * size + c.value_heads * c.value, bias=False, name="qkv")
    x = ar.short_conv(x, 4, activation=ar.silu, name="conv")
    q, k, v = ar.split(x, [size, size, c.value_heads * c.value])
    return ar.heads(q, 1, c.heads), ar.heads(k, 1, c.heads), ar.heads(v, 1, c.value_heads)


def linear_attention(x, c):
    q, k, v = queries_keys_values(x, c)
    return ar.merge(weighted_mean(elu_plus_one(q), elu_plus_one(k), v))


def gated_delta_net(x, c):
    q, k, v = queries_keys_values(x, c)
    g = softplus_gate(ar.linear(x, c.value_heads, bias=False, name="a"))
    beta = ar.sigmoid(ar.linear(x, c.value_heads, bias=False, name="b"))
    o = gated_delta(ar.l2_norm(q) * c.key**-0.5, ar.l2_norm(k), v, g, beta)
    z = ar.linear(x, c.value_heads * c.value, bias=False, name="z")
    return gated_rms_norm(o, z, name="norm", activation=ar.silu)


def kimi_delta_attention(x, c):
    q, k, v = queries_keys_values(x, c)
    g = bounded_gate(ar.heads(ar.linear(x, c.heads * c.key, bias=False, name="f"), 1, c.heads))
    beta = ar.sigmoid(ar.linear(x, c.value_heads, bias=False, name="b"))
    o = kda(ar.l2_norm(q) * c.key**-0.5, ar.l2_norm(k), v, g, beta)
    z = ar.linear(x, c.value_heads * c.value, bias=False, name="z")
    return gated_rms_norm(o, z, name="norm")


@ar.block
def layer(x, c, mixer):
    h = mixer(ar.rms_norm(x, name="norm_in"), c)
    return x + ar.linear(h, c.width, bias=False, name="out")


@ar.spec(Mixers, presets={"tiny": Mixers()})
def mixers_lm(tokens, c):
    table = ar.weight("embed.weight", [c.vocab, c.width])
    x = ar.embedding(tokens, table)
    for mixer in (linear_attention, gated_delta_net, kimi_delta_attention):
        x = layer(x, c, mixer, name=mixer.__name__)
    return ar.logits(ar.rms_norm(x, name="norm"), table)
