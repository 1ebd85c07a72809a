"""Rules as users write them, one per way of writing."""

import numpy as np

import archir as ar
from tests.specs.kda import kda

__all__ = ["RULES", "kda"]


@ar.recurrence("S:K,V z:K | q:K k:K v:V -> o:V")
def ratio(S, z, q, k, v):
    """Two states and a division: linear attention."""
    k = np.exp(k)
    S, z = S + np.outer(k, v), z + k
    return S, z, (q @ S) / (2 + np.exp(q) @ z)


@ar.recurrence("S:V,K | q:K k:K v:V a: -> o:V")
def transposed(S, q, k, v, a):
    """The state as value × key."""
    S = np.tanh(a) * S + np.outer(v, k)
    return S, S @ q


@ar.recurrence("x:K a:K -> y:K", domain={"a": "0..1"})
def vector(s, x, a):
    """A vector state, found by trial."""
    s = a * s + np.sqrt(1 - a * a) * x
    return s, s


@ar.recurrence("q:K k:K v:K -> o:K")
def square(S, q, k, v):
    """Keys and values of one size: a K×K state, found by trial."""
    S = 0.5 * S + np.outer(k, v)
    return S, q @ S


@ar.recurrence("q:K k:K v:V a:K beta: -> o:V")
def matrices(S, q, k, v, a, beta):
    """DeltaNet in the matrix form of its paper, with a decay; dims as names."""
    S = np.diag(np.exp(-a * a)) @ S
    S = (np.eye(K) - beta * np.outer(k, k)) @ S + beta * np.outer(k, v)
    return S, (q * K**-0.5) @ S


@ar.recurrence("q:K k:K v:V -> o:V norm: top:K")
def everything(S, q, k, v):
    """Three outputs, reductions, transposes, selections, constants."""
    gate = np.where(k > 0, np.ones(K), 0.5 * np.ones(K))
    S = gate[:, None] * S + np.einsum("k,v->kv", np.maximum(k, -1), v) + np.zeros((K, V))
    centred = S - np.mean(S, axis=0, keepdims=True)
    top = np.max(S, axis=1) - np.sum(S.T, axis=0) / V
    return S, np.transpose(centred) @ q, np.sum(S * S), top


@ar.pointwise
def squash(z, limit):
    """A function of scalars; in a rule it is part of the rule."""
    return limit * np.tanh(z / limit) + (z % 1.5)


@ar.recurrence("q:K k:K v:V -> o:V")
def capped(S, q, k, v):
    """Functions of scalars on a vector, a matrix and a number."""
    S = squash(S, 2.0) + np.outer(k, squash(v, np.sum(k) ** 2 + 1))
    return S, q @ S


_ALL = (kda, ratio, transposed, vector, square, matrices, everything, capped)
RULES = {rule.name: rule for rule in _ALL}
