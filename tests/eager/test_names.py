"""Odd specs: names that emitted code or torch has uses for, numbers that have no literal, weights
pinned in odd places, recurrences anywhere. Each is checked in every phase, or refused clearly."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import archir as ar
from archir.diagnostics import ArchirError
from backends.eager.names import class_names, function_names
from backends.eager.ops import EMIT
from tests.goldens import check_golden


@ar.config
class Tiny:
    vocab: int = 16
    width: int = 8


@ar.recurrence("q:K k:K v:V g:K -> o:V", domain={"g": "<= 0"})
def fade(S: Any, q: Any, k: Any, v: Any, g: Any) -> Any:
    S = np.exp(g)[:, None] * S + np.outer(k, v)
    return S, q @ S


@ar.recurrence("n: | x: -> o:")
def count(n: Any, x: Any) -> Any:
    n = n + x + np.zeros(())
    return n, n * np.sum(x)


def spec_of(body: Callable[[Any, Tiny], Any], name: str = "model") -> Any:
    """A spec whose body works on embedded tokens."""

    def fn(tokens: Any, c: Tiny) -> Any:
        x = ar.embedding(tokens, c.vocab, c.width, name="table", init=ar.normal(1.0))
        made = body(x, c)
        y, *rest = made if isinstance(made, tuple) else (made,)
        logits = ar.logits(y, c.vocab, name="head")
        return {"logits": logits, **{f"more {i}\n": x for i, x in enumerate(rest)}}

    fn.__name__ = name
    return ar.spec(Tiny, presets={"tiny": Tiny()})(fn)


def pinned(name: str = "a") -> Any:
    return ar.weight(name, [8], dtype="float32", init=ar.normal(1.0))


def model_dtype(x: Any) -> Any:
    return ar.cast(x, "model")


def heads(x: Any) -> Any:
    q, k, v = ar.heads(ar.linear(x, 24, name="qkv"), 3, 2)
    return q, k, v


def values_named_like_symbols(x: Any, c: Tiny) -> Any:
    T = ar.linear(x, 8, name="l")
    B = T.reshape(*T.shape[:2], 2, 4)
    R = fade(B, B, B, -ar.softplus(B))
    J = ar.merge(R) + T
    device = ar.sigmoid(J)
    return device * T


def values_named_like_python(x: Any, c: Tiny) -> Any:
    torch = ar.linear(x, 8, name="l")
    F = torch * 2.0
    len = ar.silu(F) + torch
    range = ar.heads(len, 1, 2)
    self = fade(range, range, range, -ar.softplus(range))
    state = ar.merge(self)
    return state + F


def value_named_w_beside_a_pinned_weight(x: Any, c: Tiny) -> Any:
    w = ar.sigmoid(x)
    return model_dtype(w * pinned())


def block_named(name: str) -> Callable[[Any, Tiny], Any]:
    def body(x: Any, c: Tiny) -> Any:
        q, k, v = heads(x)
        y = ar.merge(fade(q, k, v, -ar.softplus(q)))
        return ar.softplus(y.reshape(*y.shape))

    body.__name__ = name
    block = ar.block(body)
    return lambda x, c: block(block(x, c, name="a"), c, name="b")


def blocks_with_one_class_name(x: Any, c: Tiny) -> Any:
    @ar.block
    def layer(x: Any, n: float, c: Tiny) -> Any:
        return ar.linear(x, 8, name="p") * n

    @ar.block
    def layer1(x: Any, c: Tiny) -> Any:
        return ar.linear(ar.linear(x, 16, name="u"), 8, name="d")

    x = layer(layer(x, 1.5, c, name="a"), 2.5, c, name="b")
    return layer1(x, c, name="c")


@ar.block
def plain(x: Any, c: Tiny) -> Any:
    return ar.linear(x, 8, name="p")


def a_weight_beside_numbered_scopes(x: Any, c: Tiny) -> Any:
    gain = ar.weight("h.gain", [8], init=ar.normal(1.0))
    return plain(plain(x, c, name="h.0"), c, name="h.1") * gain


def a_named_scope_beside_numbered_ones(x: Any, c: Tiny) -> Any:
    return plain(plain(x, c, name="h.0"), c, name="h.last")


def numbered_scopes_in_numbered_scopes(x: Any, c: Tiny) -> Any:
    for name in ("h.0.0", "h.0.1", "h.1.0", "h.1.norm"):
        x = plain(x, c, name=name)
    return x


def a_scope_inside_a_block(x: Any, c: Tiny) -> Any:
    return plain(plain(x, c, name="a"), c, name="a.z")


def pinned_weights_inside_a_block_and_out(x: Any, c: Tiny) -> Any:
    @ar.block
    def scaled(x: Any, c: Tiny) -> Any:
        return model_dtype(x * pinned("gain"))

    return model_dtype(scaled(x, c, name="a") * pinned("a.more"))


def powers_of_a_negative_number(x: Any, c: Tiny) -> Any:
    sign = (-1.0) ** ar.positions(x)
    return x * model_dtype(sign)[..., None]


def infinities(x: Any, c: Tiny) -> Any:
    q, k, v = heads(x)
    a = ar.attention(q, k, v, score=lambda s, i, j, h: np.where(j > i - 2, s, -np.inf))
    return np.minimum(np.maximum(ar.merge(a), -np.inf), np.inf)


def a_window_wider_than_the_tokens(x: Any, c: Tiny) -> Any:
    q, k, v = heads(x)
    return ar.merge(ar.attention(q, k, v, window=5) + ar.attention(q, k, v, window=100, name="b"))


def a_tap_of_a_pinned_weight(x: Any, c: Tiny) -> Any:
    return model_dtype(x * ar.tap("seen", pinned()))


def a_pinned_output(x: Any, c: Tiny) -> Any:
    a = pinned()
    return model_dtype(x * a), x * 2.0


def a_pinned_weight_given_to_a_block(x: Any, c: Tiny) -> Any:
    @ar.block
    def scaled(x: Any, a: Any, c: Tiny) -> Any:
        return model_dtype(ar.linear(x, 8, name="p") * a)

    return scaled(x, pinned(), c, name="s")


def a_pinned_weight_per_head(x: Any, c: Tiny) -> Any:
    q, k, v = heads(x)
    g = ar.weight("g", [2, 4], dtype="float32", init=ar.uniform(-1.0, 0.0))
    return ar.merge(fade(q, k, v, g))


def a_pinned_buffer(x: Any, c: Tiny) -> Any:
    return model_dtype(x + ar.buffer("r.bias", [8], dtype="float32", init=ar.ones()))


def a_recurrence_in_the_entry(x: Any, c: Tiny) -> Any:
    q, k, v = heads(x)
    return ar.merge(fade(q, k, v, -ar.softplus(q)))


def a_scalar_state(x: Any, c: Tiny) -> Any:
    return ar.linear(count(ar.linear(x, 2, name="b")), 8, name="u")


def two_recurrences_and_a_dead_input(x: Any, c: Tiny) -> Any:
    for i in range(2):
        q, k, v = ar.heads(ar.linear(x, 24, name=f"qkv_{i}"), 3, 2)
        x = ar.linear(ar.merge(fade(q, k, v, -ar.softplus(q), name=f"r_{i}")), 8, name=f"o_{i}")
    return x


SPECS: dict[str, Callable[[Any, Tiny], Any]] = {
    fn.__name__: fn
    for fn in (
        values_named_like_symbols, values_named_like_python, value_named_w_beside_a_pinned_weight,
        blocks_with_one_class_name, a_weight_beside_numbered_scopes,
        a_named_scope_beside_numbered_ones, numbered_scopes_in_numbered_scopes,
        a_scope_inside_a_block, pinned_weights_inside_a_block_and_out, powers_of_a_negative_number,
        infinities, a_window_wider_than_the_tokens, a_tap_of_a_pinned_weight, a_pinned_output,
        a_pinned_weight_given_to_a_block, a_pinned_weight_per_head, a_pinned_buffer,
        a_recurrence_in_the_entry, a_scalar_state, two_recurrences_and_a_dead_input,
    )
}  # fmt: skip
TAKEN = ("torch", "F", "ar", "nn", "len", "range", "self", "state", "w", "f", "Block", "none", "T")
SPECS |= {f"block_{name}": block_named(name) for name in TAKEN}


@pytest.mark.parametrize("name", SPECS)
def test_every_phase(name: str) -> None:
    report = ar.check(spec_of(SPECS[name]), dtypes=("float64",), lengths=(1, 7))
    assert report.ok, report.failures


@pytest.mark.parametrize("name", TAKEN)
def test_entries_of_any_name(name: str) -> None:
    spec = spec_of(a_recurrence_in_the_entry, name)
    assert ar.check(spec, dtypes=("float64",), phases=("full", "decode"), lengths=(3,)).ok


@pytest.mark.parametrize("name", ["a_recurrence_in_the_entry", "a_scalar_state", "block_T"])
def test_ragged_rows(name: str) -> None:
    """Sizes are read from lengths too: rows alone are the rows of a padded batch."""
    model = ar.compile(spec_of(SPECS[name]), preset="tiny", dtype="float64").init_weights(0)
    tokens = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        (padded, state), whole = model.prefill(tokens, logits="all", lengths=[3, 5]), model(tokens)
        more, _ = model.decode(tokens[:, 3:4], state)
    torch.testing.assert_close(padded[0, :3], whole[0, :3], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(padded[1], whole[1], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(more[0, 0], whole[0, 3], rtol=1e-12, atol=1e-13)


def test_python_names_are_one_to_one() -> None:
    text = "\n".join(
        f"def {name}(x: f[8]) -> f[8]:\n    return x\n"
        for name in ("layer_1", "layer1", "len", "len_1", "_", "_1", "none", "w", "state")
    )
    module = ar.parse(f"{text}\n@entry\ndef model(x: f[8]) -> f[8]:\n    return x\n")
    functions, classes = function_names(module), class_names(module)
    assert list(functions.values()) == [
        "layer_1", "layer1", "len_1", "len_1_1", "_", "_1", "none", "w", "state_1", "model",
    ]  # fmt: skip
    assert list(classes.values()) == [
        "Layer1", "Layer1_1", "Len", "Len1", "Block", "Block1", "None_1", "W", "State", "Model",
    ]  # fmt: skip


def linear_at(*names: str) -> Callable[[Any, Tiny], Any]:
    def body(x: Any, c: Tiny) -> Any:
        for name in names:
            x = ar.linear(x, 8, name=name)
        return x

    return body


def weight_at(*names: str) -> Callable[[Any, Tiny], Any]:
    def body(x: Any, c: Tiny) -> Any:
        for name in names:
            x = x * ar.weight(name, [8], init=ar.normal(1.0))
        return x

    return body


def _block_and_outside(x: Any, c: Tiny) -> Any:
    y = plain(x, c, name="a")
    return y * ar.weight("a.p.gain", [8])


REFUSED: dict[str, Callable[[Any, Tiny], Any]] = {
    "model_attribute": linear_at("loss"),
    "model_attribute_above": linear_at("config.x"),
    "weight_training": weight_at("training"),
    "weight_forward": weight_at("a.forward"),
    "list_attribute": linear_at("h.0", "h.append"),
    "float32": linear_at("a.float32"),
    "underscore": weight_at("_parameters"),
    "number_at_the_root": linear_at("0"),
    "number_in_a_linear": linear_at("h", "h.0"),
    "number_missing": linear_at("h.0", "h.2"),
    "weight_and_scope": weight_at("a", "a.b"),
    "weight_and_linear": lambda x, c: ar.linear(x, 8, name="a") * ar.weight("a", [8]),
    "block_and_outside": _block_and_outside,
}


@pytest.mark.parametrize("name", REFUSED)
def test_names_are_refused(name: str) -> None:
    with pytest.raises(ArchirError) as caught:
        ar.compile(spec_of(REFUSED[name]), preset="tiny")
    message = re.sub(r"\.py:\d+", ".py:LINE", str(caught.value))
    check_golden(f"eager/messages/names_{name}", message)


def test_an_adapter_sees_every_product_whatever_the_parameters_dtype() -> None:
    """A linear kept in float32 and computed in bfloat16 is still called as a module."""

    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.seen = base, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            assert x.dtype == torch.bfloat16
            return self.base(x)

    spec = spec_of(linear_at("p"))
    for options in ({}, {"param_dtype": "float32"}):
        model = ar.compile(spec, preset="tiny", dtype="bfloat16", **options).init_weights(0)
        model.p, model.head = Adapter(model.p), Adapter(model.head)
        out = model(torch.zeros(1, 3, dtype=torch.int64))
        assert (model.p.seen, model.head.seen, out.dtype) == (1, 1, torch.bfloat16)
        program = next(p for p in model.files if p.name == "full_dense_all.py").read_text()
        assert "self.p.weight" not in program and "self.p(" in program


def test_a_penalty_on_gradients_of_the_loss_is_refused() -> None:
    model = ar.compile(spec_of(linear_at("p")), preset="tiny").init_weights(0)
    tokens = torch.arange(5)[None]
    loss = model.loss(tokens, tokens)
    with pytest.raises(RuntimeError, match="have no graph of their own"):
        torch.autograd.grad(loss, model.p.weight, create_graph=True)


def test_a_wide_window_needs_no_mask() -> None:
    model = ar.compile(spec_of(linear_at("p")), preset="tiny")
    support = model._backend.load(model._folder, "support")
    q = torch.randn(1, 4, 2, 8)
    seq = support.Rows.dense(1, 4)
    wide = support.attention(q, q, q, seq, causal=True, window=4)
    assert not [key for key in seq.memo if key[0] == "seen"]
    assert torch.equal(wide, support.attention(q, q, q, seq, causal=True))
    support.attention(q, q, q, seq, causal=True, window=3)
    assert [key for key in seq.memo if key[0] == "seen"]


def test_another_registry_of_emitters() -> None:
    """A backend prints with additions of its own through the same printer."""
    from backends.eager.emit import emit_program

    module = ar.lower(ar.trace(spec_of(linear_at("p")), preset="tiny"))
    mine = {**EMIT, "linear": lambda p, op: f"mine({p(op.operands[0])})"}
    assert "mine(" in emit_program(module, module, "mine", mine)
    assert "mine(" not in emit_program(module, module, "eager")
