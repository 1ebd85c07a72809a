"""The canonical record: found by algebra, the same however a rule is written, or a reason."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from archir.check.placed import Placed, draw
from archir.recurrence import Rule
from archir.recurrence.canonical import Reason, Record, canonical, show
from archir.recurrence.literal import literal
from tests.goldens import check_golden
from tests.recurrence.forms import BOUND, Form, difference, start
from tests.recurrence.library import (
    CHUNKABLE,
    GATED,
    KDA_REWRITTEN,
    RECURRENT_ONLY,
    kda,
    kda_renamed,
)

REWRITTEN: dict[str, Rule] = {rule.name: rule for rule in KDA_REWRITTEN}
KEPT: dict[str, Rule] = {}
REFUSED: dict[str, Rule] = {}

Body = Callable[..., Any]


def in_other_words(fn: Body) -> Body:
    """KDA once more."""
    REWRITTEN[fn.__name__] = Rule(fn, "q:K k:K v:V g:K beta: -> o:V", GATED)
    return fn


def kept(signature: str, **domain: str) -> Callable[[Body], Body]:
    """A rule whose meaning a careless simplification would change."""

    def add(fn: Body) -> Body:
        KEPT[fn.__name__] = Rule(fn, signature, domain)
        return fn

    return add


def refused(signature: str) -> Callable[[Body], Body]:
    """A rule without a chunked form."""

    def add(fn: Body) -> Body:
        REFUSED[fn.__name__] = Rule(fn, signature)
        return fn

    return add


def record_of(rule: Rule) -> Record:
    found = canonical(rule.function)
    assert isinstance(found, Record), found
    return found


@pytest.mark.parametrize("name", CHUNKABLE)
def test_record(name: str) -> None:
    record = record_of(CHUNKABLE[name][0])
    check_golden(f"recurrence/record_{name}", f"{show(record)}\n\n{record}")


@pytest.mark.parametrize("name", RECURRENT_ONLY)
def test_why_there_is_none(name: str) -> None:
    check_reason(name, RECURRENT_ONLY[name][0])


def check_reason(name: str, rule: Rule) -> None:
    """The reason, and the line that it names."""
    found = canonical(rule.function)
    assert isinstance(found, Reason) and found.loc is not None
    assert str(found) == f"{found.what} ({found.loc.short})"
    line = linecache.getline(found.loc.file, found.loc.line).strip()
    check_golden(f"recurrence/reason_{name}", f"{found.what}\n  {line}")


# ---- KDA in other words


@in_other_words
def log_of_exp(S, q, k, v, g, beta):
    a = np.exp(g)
    S = np.exp(np.log(a))[:, None] * S
    return S + np.outer(k, beta * (v - k @ S)), q @ (S + np.outer(k, beta * (v - k @ S)))


@in_other_words
def gate_in_parts(S, q, k, v, g, beta):
    S = np.exp(0.25 * g)[:, None] * S * np.exp(0.75 * g)[:, None]
    S = S + np.outer(k, beta * (v - k @ S))
    return S, q @ S


@in_other_words
def negations(S, q, k, v, g, beta):
    S = np.exp(g)[:, None] * S
    S = S - np.outer(-k, -beta * (-v + k @ S))
    return S, (-q) @ (-S)


@in_other_words
def another_order(S, q, k, v, g, beta):
    S = np.exp(g)[:, None] * S
    S = beta * np.outer(k, v) + S - beta * np.outer(k, k @ S)
    return S, q @ S


@in_other_words
def multiples(S, q, k, v, g, beta):
    S = np.exp(g)[:, None] * S
    half = 0.5 * k
    S = S + np.outer(half, 2 * beta * (v - 2 * half @ S))
    return S, q @ S


@in_other_words
def half_by_roots(S, q, k, v, g, beta):
    S = np.exp(g)[:, None] * S
    k = np.sqrt(beta) * k
    S = S + np.outer(k, np.sqrt(beta) * v - k @ S)
    return S, q @ S


@in_other_words
def half_by_powers(S, q, k, v, g, beta):
    S = np.exp(g)[:, None] * S
    S = S + np.outer(k * beta**0.5, beta**0.5 * (v - k @ S))
    return S, q @ S


@in_other_words
def square_of_a_root(S, q, k, v, g, beta):
    S = np.exp(g)[:, None] * S
    S = S + np.outer(k, np.sqrt(beta) ** 2 * (v - k @ S))
    return S, q @ S


@in_other_words
def divisions(S, q, k, v, g, beta):
    S = S / np.exp(-g)[:, None]
    S = S + np.outer(k, (v - k @ S) / (1 / beta))
    return S, q @ S


@in_other_words
def einsums(S, q, k, v, g, beta):
    S = np.einsum("k,kv->kv", np.exp(g), S)
    S = S + np.einsum(",k,v->kv", beta, k, v - np.einsum("k,kv->v", k, S))
    return S, np.einsum("k,kv->v", q, S)


@in_other_words
def transposes(S, q, k, v, g, beta):
    S = (S.T * np.exp(g)).T
    S = S + np.outer(beta * (v - S.T @ k), k).T
    return S, S.T @ q


@in_other_words
def one_matrix(S, q, k, v, g, beta):
    D = np.diag(np.exp(g))
    S = (D - beta * np.outer(k, k) @ D) @ S + beta * np.outer(k, v)
    return S, np.sum(S.T * q, axis=1)


@in_other_words
def what_cancels(S, q, k, v, g, beta):
    S = np.exp(g)[:, None] * S + S - S
    k = np.sum(q) * k / np.sum(q)
    S = S + np.outer(k, beta * (v - k @ S))
    return S, q @ S


@pytest.mark.parametrize("name", REWRITTEN)
def test_kda_in_other_words(name: str) -> None:
    """Same operands, same states: the same record, text for text."""
    assert str(record_of(REWRITTEN[name])) == str(record_of(kda))


def test_kda_renamed() -> None:
    renamed, record = record_of(kda_renamed), record_of(kda)
    assert str(renamed) == str(record)
    assert show(renamed) != show(record)
    assert list(renamed.names.values())[:4] == ["M", "r", "w", "u"]


# ---- what is not to be simplified


@kept("q:K k:K v:V a: -> o:V")
def root_of_a_square(S, q, k, v, a):
    """|a|, not a."""
    S = 0.5 * (a * a) ** 0.5 * S + np.outer(k, v)
    return S, q @ S


@kept("q:K k:K v:V a: b: -> o:V")
def root_of_a_product(S, q, k, v, a, b):
    """√(a² b²), where both may be negative."""
    S = 0.5 * S + (a * a * b * b) ** 0.5 * np.outer(k, v)
    return S, q @ S


@kept("q:K k:K v:V -> o:V")
def softmax_keys(S, q, k, v):
    """e^(k − max k), whose factors e^k and e^(−max k) would be ∞ · 0."""
    k = np.exp(900 * k - np.max(900 * k))
    S = 0.5 * S + np.outer(k / np.sum(k), v)
    return S, q @ S


@kept("q:K k:K v:V g:K -> o:V")
def gate_below_its_largest(S, q, k, v, g):
    S = np.exp(900 * g - np.max(900 * g))[:, None] * S + np.outer(k, v)
    return S, q @ S


@kept("q:K k:K v:V -> o:V")
def entries_of_the_identity(S, q, k, v):
    S = (np.eye(K) * (np.eye(K) - 0.1 * np.outer(k, k))) @ S * 0.5 + np.outer(k, v)
    return S, q @ S


@kept("q:K k:K v:V -> o:V")
def functions_of_numbers(S, q, k, v):
    S = np.maximum(np.zeros(K), 0.4)[:, None] * S + np.outer(np.tanh(np.ones(K) / 2) * k, v)
    return S, q @ S / np.sqrt(K)


@kept("q:K k:K v:V -> o:V")
def forgets_all(S, q, k, v):
    o = q @ S
    return np.outer(k, v), o


@kept("q:K v:V -> o:V")
def keeps_all(S, q, v):
    return S, q @ S + v


# states that feed others


@kept("z:K S:K,V | q:K k:K v:V g:K -> o:V", g="<= 0")
def gate_of_a_read(z, S, q, k, v, g):
    """A decay per key by what is read from the first state."""
    z = 0.5 * z + k
    S = np.exp(g * (q @ z) ** 2)[:, None] * S + np.outer(k, v)
    return z, S, q @ S


@kept("z:K S:K,V | q:K k:K v:V -> o:V", k="unit")
def strength_of_a_read(z, S, q, k, v):
    z = 0.5 * z + k
    beta = 1 / (1 + np.exp(-(q @ z)))
    S = 0.9 * S + np.outer(k, beta * (v - k @ S))
    return z, S, q @ S


@kept("S:K,V M:V,V | q:K k:K v:V -> o:V")
def keys_of_a_read(S, M, q, k, v):
    """What is read from the first memory is the key and the query of a second one."""
    S = 0.9 * S + np.outer(k, v)
    r = 0.3 * np.tanh(q @ S)
    M = 0.9 * M + np.outer(r, v - r @ M)
    return S, M, r @ M


@kept("m: S:K,V | q:K k:K v:V a: -> o:V", a="0..1")
def a_number_as_state(m, S, q, k, v, a):
    m, S = a * m + 1, a * S + np.outer(k, v)
    return m, S, (q @ S) / m


@kept("p:V S:K,V | q:K k:K v:V a: -> o:V", a="0..1")
def the_token_before(p, S, q, k, v, a):
    """A state that is the last value, as in a shift by one token."""
    S = a * S + np.outer(k, v + 0.5 * p)
    return v, S, q @ S


@kept("q:K k:K v:V m:K -> o:V")
def selected(S, q, k, v, m):
    S = np.where((m > 0)[:, None], S + np.outer(k, v), 0.5 * S)
    return S, q @ S


@kept("q:K k:K v:V m:K n: -> o:V")
def guarded_divisions(S, q, k, v, m, n):
    """Selections keep 1 / 0 out, of decays and of what is read."""
    m, n = np.maximum(m, 0), np.maximum(n, 0)
    S = np.where((m > 0)[:, None], S * (1 - np.exp(-m) / m)[:, None], S)
    S = np.where(n > 0, S + np.outer(k, v) / n, 0.5 * S)
    r = q @ S
    return S, np.where(n > 0, r / n, r)


@pytest.mark.parametrize("name", KEPT)
def test_a_rule_keeps_its_meaning(name: str) -> None:
    rule = KEPT[name]
    record_of(rule)
    placed = Placed(rule, {"K": 5, "V": 3}, 2, {})
    rng = np.random.default_rng(0)
    operands = draw(rule, placed.shapes(2, 19), rng)
    states = start(placed, 2, rng) if rule.name != "a_number_as_state" else None
    want = literal(rule, list(operands.values()), states)
    for form in ("recurrent", "chunk", "parallel"):
        assert difference(Form(placed, form).run(operands, states), want) <= BOUND, form


# ---- reasons


@refused("q:K k:K v:V -> o:V")
def multiplied_by_itself(S, q, k, v):
    S = 0.5 * S * S + np.outer(k, v)
    return S, q @ S


@refused("q:K k:K v:V -> o:V")
def mixes_its_values(S, q, k, v):
    S = S + np.outer(k, v) * np.sum(q @ S)
    return S, q @ S


@refused("q:K k:K v:K -> o:K")
def its_own_transpose(S, q, k, v):
    S = 0.5 * S + 0.3 * S.T + np.outer(k, v)
    return S, q @ S


@refused("q:K k:K v:K -> o:K")
def read_on_both_sides(S, q, k, v):
    S = S + np.outer(k, v)
    return S, q @ S + S @ q


@refused("S:K,V | k:K v:V -> o:V")
def output_of_the_whole(S, k, v):
    S = S + np.outer(k, v)
    return S, np.max(S, axis=0)


@refused("S:K,V M:K,V | q:K k:K v:V -> o:V")
def feed_each_other(S, M, q, k, v):
    S, M = 0.9 * S + np.outer(k, q @ M), 0.9 * M + np.outer(k, q @ S + v)
    return S, M, q @ S


@refused("q:K k:K v:V -> o:V")
def largest_read(S, q, k, v):
    S = S + np.outer(k, v)
    o = q @ S
    return S, o - np.max(o)


@pytest.mark.parametrize("name", REFUSED)
def test_reasons(name: str) -> None:
    check_reason(name, REFUSED[name])
