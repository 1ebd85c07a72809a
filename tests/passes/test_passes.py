"""Each pass: text in, text out. A golden file shows both, and the interpreter finds them equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from archir import ir
from archir.diagnostics import ArchirError
from archir.inputs import random_inputs
from archir.interp import interpret
from archir.ir import Module
from archir.passes.canonicalize import canonicalize
from archir.passes.choose_form import CHUNK, choices, choose_form
from archir.passes.expand import expand
from archir.passes.fuse import fuse
from archir.passes.head import head
from archir.passes.laws import compare
from archir.passes.precision import precision
from archir.passes.specialize import drop_taps, is_specialized, specialize
from archir.pipeline import lower
from archir.text import parse
from archir.verify import verify
from tests.goldens import check_golden

RULE = """\
@rule(states=1, domain={"g": "<= 0", "beta": "0..1"})
def delta(S: F[K, V], k: F[K], v: F[V], g: F[K], beta: F) -> (F[K, V], F[V]):
    decay: F[K] = exp(g)
    column: F[K, 1] = expand_dims(decay, axes=(1,))
    S_1: F[K, V] = mul(column, S)
    read: F[V] = einsum(k, S_1, equation="i,ij->j")
    new: F[V] = sub(v, read)
    scaled: F[V] = mul(beta, new)
    write: F[K, V] = einsum(k, scaled, equation="i,j->ij")
    S_2: F[K, V] = add(S_1, write)
    o: F[V] = einsum(k, S_2, equation="i,ij->j")
    return S_2, o
"""

SQUASH = """    S_1: F[K, V] = mul(column, S)
    S_0: F[K, V] = tanh(S_1)
"""
MIXER = f"""\
{RULE}
def layer(x: f[B, T, 8], *,
    w_k: f[16, 8] = weight("k.weight", init=normal(0.02), decay=True),
    w_v: f[24, 8] = weight("v.weight", init=normal(0.02), decay=True),
    w_b: f[4, 8] = weight("b.weight", init=normal(0.02), decay=True),
    a_log: F[2] = weight("A_log", init=zeros(), decay=False, dtype="float32"),
    w_o: f[8, 24] = weight("o.weight", init=normal(0.02), decay=True),
) -> f[B, T, 8]:
    k: f[B, T, 16] = linear(x, w_k)
    k_1: f[B, T, 2, 8] = heads(k, parts=1, heads=2)
    v: f[B, T, 24] = linear(x, w_v)
    v_1: f[B, T, 4, 6] = heads(v, parts=1, heads=4)
    b: f[B, T, 4] = linear(x, w_b)
    beta: f[B, T, 4] = sigmoid(b)
    rate: F[2] = exp(a_log)
    rate_1: F[2, 1] = expand_dims(rate, axes=(1,))
    soft: f[B, T, 2, 8] = softplus(k_1)
    g: F[B, T, 2, 8] = mul(rate_1, soft)
    g_1: F[B, T, 2, 8] = neg(g)
    o: F[B, T, 4, 6] = state_update(k_1, v_1, g_1, beta, rule=delta, name="mix")
    o_1: f[B, T, 4, 6] = cast(o, dtype="f")
    y: f[B, T, 24] = merge(o_1)
    z: f[B, T, 8] = linear(y, w_o)
    return z

@entry
def model(tokens: i64[B, T], *,
    table: f[16, 8] = weight("table", init=normal(0.02), decay=True),
) -> f[B, T, 16]:
    x: f[B, T, 8] = embedding(tokens, table)
    x_1: f[B, T, 8] = call(layer, x, scope="h.0")
    x_2: f[B, T, 8] = call(layer, x_1, scope="h.1")
    z: f[B, T, 16] = logits(x_2, table)
    return z
"""

SQUASHED = MIXER.replace("    S_1: F[K, V] = mul(column, S)\n", SQUASH).replace(
    "einsum(k, S_1, equation", "einsum(k, S_0, equation"
)

ATTENTION = """\
def layer(x: f[B, T, 8], positions: i64[B, T], *,
    w: f[24, 8] = weight("qkv", init=normal(0.02), decay=True),
) -> f[B, T, 8]:
    x_1: f[B, T, 24] = linear(x, w)
    q, k, v = heads(x_1, parts=3, heads=2) @ (f[B, T, 2, 4], f[B, T, 2, 4], f[B, T, 2, 4])
    q_1: f[B, T, 2, 4] = rotary(q, positions, theta=100.0)
    a: f[B, T, 2, 4] = attention(q_1, k, v, causal=True, name="attn")
    b: f[B, T, 2, 4] = attention(a, k, v, causal=True, window=3, scale=0.5)
    y: f[B, T, 8] = merge(b)
    return y

def plain(x: f[B, T, 8]) -> f[B, T, 8]:
    y: f[B, T, 8] = silu(x)
    return y

@entry
def model(tokens: i64[B, T], *,
    table: f[16, 8] = weight("table", init=normal(0.02), decay=True),
    seen: f[B, T, 8] = tap("inner.seen"),
) -> f[B, T, 16]:
    x: f[B, T, 8] = embedding(tokens, table)
    places: i64[B, T] = positions(tokens, limit=32)
    x_1: f[B, T, 8] = call(layer, x, places, scope="h.0")
    store(x_1, path="inner.seen")
    x_2: f[B, T, 8] = call(plain, x_1, scope="act")
    z: f[B, T, 16] = logits(x_2, table)
    y: f[B, T, 16] = mul(z, 0.5)
    return y
"""

CANONICAL = """\
def twice(x: f[B, 8], *,
    unread: f[8] = weight("unread", init=zeros(), decay=False),
    seen: f[B, 8] = tap("seen"),
) -> f[B, 8]:
    y: f[B, 8] = add(x, x)
    dead: f[B, 8] = exp(y)
    deader: f[B, 8] = log(dead)
    store(y, path="seen")
    return y

def pure(x: f[B, 8]) -> f[B, 8]:
    y: f[B, 8] = neg(x)
    return y

@entry
def model(x: f[B, 8], *,
    lost: f[8] = weight("lost", init=zeros(), decay=False),
) -> (f[B, 8], f[B, 8]):
    a: f[B, 8] = exp(x)
    b: f[B, 8] = exp(x)
    c: f[B, 8] = mul(b, 2)
    d: f[B, 8] = mul(a, 2)
    e: f[B, 8] = mul(a, 2.0)
    kept: f[B, 8] = call(twice, x, scope="kept")
    also: f[B, 8] = call(twice, x, scope="also")
    gone: f[B, 8] = call(pure, x, scope="gone")
    g: f[B, 8] = call(pure, x, scope="one")
    h: f[B, 8] = call(pure, x, scope="two")
    u: f[B, 8] = add(c, d)
    u_1: f[B, 8] = add(u, e)
    w: f[B, 8] = add(g, h)
    return u_1, w
"""

POINTWISE = """\
@pointwise
def gated(gate: F, up: F) -> (F, bool):
    a: F = silu(gate)
    b: F = mul(a, up)
    c: bool = less(b, 0.5)
    return b, c

@entry
def model(gate: f[B, T, 8], up: f[8]) -> (f[B, T, 8], bool[B, T, 8]):
    y, low = pointwise(gate, up, fn=gated) @ (f[B, T, 8], bool[B, T, 8])
    return y, low
"""

TAIL = """\
@entry
def model(tokens: i64[B, T], *,
    table: f[16, 8] = weight("table", init=normal(0.02), decay=True),
    scale: f[16] = weight("scale", init=ones(), decay=False),
) -> f[B, T, 16]:
    x: f[B, T, 8] = embedding(tokens, table)
    scores: f[B, T, 16] = logits(x, table)
    a: f[B, T, 16] = div(scores, 30.0)
    b: f[B, T, 16] = tanh(a)
    z: f[B, T, 16] = mul(b, 30.0)
    high: bool[B, T, 16] = greater(z, 20.0)
    y: f[B, T, 16] = where(high, 20.0, z)
    return y
"""


SOFT_CAP = """\
@pointwise
def cap(z: F) -> (F, bool):
    a: F = div(z, 30.0)
    b: F = tanh(a)
    c: F = mul(b, 30.0)
    high: bool = greater(c, 20.0)
    return c, high

@entry
def model(tokens: i64[B, T], *,
    table: f[16, 8] = weight("table", init=normal(0.02), decay=True),
) -> f[B, T, 16]:
    x: f[B, T, 8] = embedding(tokens, table)
    scores: f[B, T, 16] = logits(x, table)
    wide: F[B, T, 16] = cast(scores, dtype="F")
    a, high = pointwise(wide, fn=cap) @ (F[B, T, 16], bool[B, T, 16])
    b: f[B, T, 16] = cast(a, dtype="f")
    one: i64[B, T, 16] = cast(high, dtype="i64")
    c: f[B, T, 16] = mul(b, one)
    y: f[B, T, 16] = add(b, c)
    return y
"""

THRICE = (
    MIXER.replace("(k_1, v_1, g_1, beta, rule", "(k_1, k_1, g_1, beta, rule")
    .replace(
        """    v: f[B, T, 24] = linear(x, w_v)
    v_1: f[B, T, 4, 6] = heads(v, parts=1, heads=4)
    b: f[B, T, 4]""",
        "    b: f[B, T, 2]",
    )
    .replace("f[4, 8] = weight", "f[2, 8] = weight")
    .replace('    w_v: f[24, 8] = weight("v.weight", init=normal(0.02), decay=True),\n', "")
    .replace("beta: f[B, T, 4]", "beta: f[B, T, 2]")
    .replace("B, T, 4, 6]", "B, T, 2, 8]")
    .replace("f[8, 24]", "f[8, 16]")
    .replace("y: f[B, T, 24]", "y: f[B, T, 16]")
)


GATES = """\
@pointwise
def swish(gate: F, up: F) -> F:
    a: F = silu(gate)
    b: F = mul(a, up)
    return b

@entry
def model(x: f[B, T, 8], y: f[B, T, 8], *,
    scale: F[8] = weight("scale", init=zeros(), decay=False, dtype="float32"),
) -> (f[B, T, 8], f[B, T, 8], f[B, T, 8], f[B, T, 8]):
    a: f[B, T, 8] = sigmoid(x)
    b: f[B, T, 8] = mul(a, y)
    rate: F[8] = exp(scale)
    low: f[B, T, 8] = softplus(x)
    wide: F[B, T, 8] = mul(rate, low)
    c: f[B, T, 8] = cast(wide, dtype="f")
    u: f[B, T, 8] = pointwise(b, c, fn=swish)
    v: f[B, T, 8] = tanh(u)
    read: f[B, T, 8] = silu(b)
    twice: f[B, T, 8] = mul(read, read)
    same: f[B, T, 8] = sigmoid(y)
    again: f[B, T, 8] = mul(same, x)
    alone: f[B, T, 8] = add(x, y)
    n: i64[B, T, 8] = cast(x, dtype="i64")
    n_1: i64[B, T, 8] = add(n, 1)
    z: f[B, T, 8] = cast(n_1, dtype="f")
    z_1: f[B, T, 8] = add(z, alone)
    return v, twice, again, z_1
"""


def all_of_it(module: Module) -> Module:
    """For a backend that has kernels for everything."""
    return fuse(module, lambda op, _: True)


def narrow(module: Module) -> Module:
    return precision(module, "bfloat16")


def full(module: Module) -> Module:
    return specialize(module, "full")


def decode(module: Module) -> Module:
    return specialize(module, "decode")


def formed(module: Module, form: str = "auto") -> Module:
    return choose_form(module, CHUNK, form)


def expanded(module: Module) -> Module:
    return expand(module, CHUNK)


# golden file → text in, what makes the module before, the pass
CASES: dict[str, tuple[str, tuple[Callable[[Module], Module], ...], Callable[[Module], Module]]] = {
    "specialize_full": (ATTENTION, (), full),
    "specialize_decode": (ATTENTION, (), decode),
    "specialize_recurrence_full": (MIXER, (), full),
    "specialize_recurrence_decode": (MIXER, (), decode),
    "drop_taps": (ATTENTION, (), drop_taps),
    "canonicalize": (CANONICAL, (), canonicalize),
    "choose_form": (ATTENTION, (decode,), formed),
    "choose_form_recurrence": (MIXER, (full,), formed),
    "precision_bfloat16": (MIXER, (full,), narrow),
    "precision_params_float32": (
        TAIL, (), lambda m: precision(m, "bfloat16", param_dtype="float32"),
    ),
    "precision_state_bfloat16": (
        MIXER, (decode,), lambda m: precision(m, "float32", state_dtype="bfloat16"),
    ),
    "precision_cache_float32": (
        ATTENTION, (decode,), lambda m: precision(m, "bfloat16", state_dtype="float32"),
    ),
    "precision_float64": (MIXER, (full,), lambda m: precision(m, "float64")),
    "expand_pointwise": (POINTWISE, (narrow,), expanded),
    "expand_recurrent": (MIXER, (decode, narrow), expanded),
    "expand_equal_operands": (THRICE, (full, narrow), expanded),
    "fuse": (GATES, (narrow,), all_of_it),
    "fuse_recurrence": (MIXER, (full, narrow), all_of_it),
    "fuse_nothing": (GATES, (narrow,), lambda m: fuse(m, lambda op, _: False)),
    "head_last_pointwise": (SOFT_CAP, (), lambda m: head(m, "last")),
    "head_loss_pointwise": (SOFT_CAP, (), lambda m: head(m, "loss")),
    "head_last": (TAIL, (), lambda m: head(m, "last")),
    "head_last_attention": (ATTENTION, (drop_taps, full), lambda m: head(m, "last")),
    "head_loss": (ATTENTION, (drop_taps, full), lambda m: head(m, "loss")),
    "head_loss_tail": (TAIL, (), lambda m: head(m, "loss")),
}  # fmt: skip

# Passes that change what the entry takes, gives or stores, so nothing compares.
NEW_SIGNATURE = ("specialize", "head", "drop_taps")


@pytest.mark.parametrize("name", CASES)
def test_pass(name: str) -> None:
    text, earlier, run = CASES[name]
    before = parse(text)
    for change in earlier:
        before = change(before)
    after = run(before)
    verify(after)
    assert parse(str(after)) == after
    assert str(run(before)) == str(after)
    if not name.startswith(NEW_SIGNATURE):
        compare(before, after, name)
    check_golden(f"passes/{name}", f"{_changed(before, after)}")


def _changed(before: Module, after: Module) -> str:
    """Before and after of the functions that changed, and what the others are."""
    lines = []
    for function in after.functions:
        old = str(before[function.name]) if function.name in before else "(nothing)"
        if old == str(function):
            lines.append(f"# {function.name}: as before\n")
        else:
            lines.append(f"# before\n{old}\n\n# after\n{function}\n")
    lines += [f"# {f.name}: gone\n" for f in before.functions if f.name not in after]
    return "\n".join(lines)


def test_a_second_run_changes_nothing() -> None:
    for text in (CANONICAL, TAIL):
        once = canonicalize(parse(text))
        assert canonicalize(once) == once
    module = narrow(full(parse(MIXER)))
    assert narrow(module) == module
    assert expanded(expanded(module)) == expanded(module)
    once = formed(full(parse(ATTENTION)))
    assert formed(once) == once


def test_fields_outlive_dead_ops() -> None:
    """D11: a dead weight stays in the tree and the checkpoint."""
    before = parse(CANONICAL)
    after = canonicalize(before)
    assert list(ir.fields(after, "weight")) == list(ir.fields(before, "weight"))[:3]
    assert "lost" in ir.fields(after, "weight")
    assert "kept.unread" in ir.fields(after, "weight")


def test_is_specialized() -> None:
    for text in (ATTENTION, MIXER):
        module = parse(text)
        assert not is_specialized(module)
        assert is_specialized(full(module)) and is_specialized(decode(module))
    assert is_specialized(parse(TAIL))


def test_state_shapes_and_names() -> None:
    states = {
        path: str(f.value.type) for path, f in ir.fields(decode(parse(MIXER)), "state").items()
    }
    assert states == {
        "length": "i64[R]",
        "h.0.mix.S": "F[R, 4, 8, 6]",
        "h.1.mix.S": "F[R, 4, 8, 6]",
    }
    caches = ir.fields(decode(parse(ATTENTION)), "state")
    assert list(caches) == [
        "length", "h.0.attn.k", "h.0.attn.v", "h.0.attention_1.k", "h.0.attention_1.v",
    ]  # fmt: skip


def test_choices_are_a_record() -> None:
    (first, second) = choices(decode(parse(ATTENTION)))
    assert (first.function, first.op, first.form) == ("layer", "a", "cached")
    assert [c.form for c in second.candidates] == ["cached"]
    (rule,) = choices(full(parse(MIXER)))
    assert rule.form == "chunk"
    assert [c.form for c in rule.candidates] == ["chunk", "recurrent", "parallel"]
    (rule,) = choices(full(parse(SQUASHED)))
    assert rule.form == "recurrent"
    assert [c.form for c in rule.candidates if c.reason] == ["chunk", "parallel"]


@pytest.mark.parametrize(
    "text", [TAIL, ATTENTION, SOFT_CAP], ids=["tail", "attention", "pointwise"]
)
def test_heads_agree(text: str) -> None:
    """last = the last of all; loss = the mean over targets of their negative log probability."""
    module = drop_taps(parse(text))
    targets = np.array([[3, -100, 15, 0, 1], [-100, 2, 2, -100, 9]])
    inputs, weights, _ = random_inputs(full(module))
    (scores,) = interpret(full(module), inputs, weights)[0].values()
    (last,) = interpret(head(full(module), "last"), inputs, weights)[0].values()
    np.testing.assert_allclose(last, scores[:, -1:], rtol=1e-13)
    loss = head(full(module), "loss")
    got, _ = interpret(loss, {**inputs, "targets": targets}, weights)
    log_p = scores - np.log(np.sum(np.exp(scores), axis=-1, keepdims=True))
    kept = targets != -100
    want = -np.mean(log_p[kept][np.arange(kept.sum()), targets[kept]])
    np.testing.assert_allclose(got["loss"], want, rtol=1e-13)
    for form in ("float32", "bfloat16"):
        verify(expanded(precision(loss, form)), "expand")


def _with_scale(text: str) -> str:
    text = text.replace("cap(z: F)", "cap(z: F, w: F)").replace("(wide, fn", "(wide, scale, fn")
    end = ") -> f[B, T, 16]:"
    return text.replace(end, f'    scale: f[16] = weight("scale", init=ones()),\n{end}')


MEAN = """
@entry
def model(x: f[B, T, 4]) -> f[B, T, 4]:
    m: f[B, 1, 4] = reduce_mean(x, axes=(1,), keepdims=True)
    y: f[B, T, 4] = sub(x, m)
    return y
"""

REFUSED: dict[str, Callable[[], Any]] = {
    "a phase that is none": lambda: specialize(parse(MIXER), "training"),
    "a layout that is not built": lambda: specialize(parse(MIXER), "full", "packed"),
    "a form that is none": lambda: formed(full(parse(MIXER)), "fast"),
    "a form that is not legal": lambda: formed(full(parse(SQUASHED)), "chunk"),
    "a stage that is none": lambda: lower(parse(MIXER), stage="expnd"),
    "a backend that is none": lambda: lower(parse(MIXER), backend="eagr"),
    "a pointwise tail of a weight too": lambda: head(parse(_with_scale(SOFT_CAP)), "loss"),
    "rows of unlike length and a mean over tokens": lambda: specialize(
        parse(MEAN), "full", "ragged"
    ),
    "decoding that looks ahead": lambda: decode(
        parse(ATTENTION.replace("causal=True, window=3", "causal=False, window=3"))
    ),
    "decoding with a mask alone": lambda: decode(
        parse(
            "@pointwise\ndef earlier(i: i64, j: i64) -> bool:\n"
            "    y: bool = less_equal(j, i)\n    return y\n\n"
            + ATTENTION.replace("causal=True, window=3", "causal=False, mask=earlier")
        )
    ),
    "a head that is none": lambda: head(parse(TAIL), "first"),
    "a head without logits": lambda: head(parse(POINTWISE), "last"),
    "a reduction after the logits": lambda: head(
        parse(TAIL.replace("    ret", "    m: f[B, T] = reduce_max(y, axes=(2,))\n    ret")), "last"
    ),
    "a weight in the tail": lambda: head(
        parse(TAIL.replace("mul(b, 30.0)", "mul(b, scale)")), "loss"
    ),
    "scores returned twice": lambda: head(
        parse(TAIL.replace("return y", 'return {"y": y, "z": z}').replace(
            ") -> f[B, T, 16]:", ") -> (f[B, T, 16], f[B, T, 16]):"
        )),
        "loss",
    ),
}  # fmt: skip


def test_refused() -> None:
    parts = []
    for name, run in REFUSED.items():
        with pytest.raises(ArchirError) as caught:
            run()
        text = str(caught.value)
        assert "\nnext: " in text, f"{name} names no next step:\n{text}"
        parts.append(f"## {name}\n\n{text}\n")
    check_golden("passes/refused", "\n".join(parts))
