"""Dropout: NumPy and torch draw the same masks, from a call's seed and an op's place."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils.checkpoint import checkpoint

import archir as ar
from archir.diagnostics import ArchirError
from archir.ops.random import keep_mask
from archir.philox import LOW, philox
from backends.eager import support
from specs.gpt2 import GPT2
from tests.goldens import check_golden
from tests.specs.kda import KDA, kda_mixer


@ar.config
class Sizes(KDA):
    rate: float = 0.3


@ar.block
def layer(x: "f[B, T, width]", positions, c):
    """Every op that draws, beside a convolution and a recurrence."""
    h = ar.short_conv(ar.rms_norm(x, name="norm"), 3, activation=ar.silu, name="conv")
    x = x + ar.dropout(kda_mixer(h, positions, c), c.rate)
    q = ar.heads(ar.linear(x, 4 * c.key, name="q"), 1, 4)
    k, v = ar.heads(ar.linear(x, 4 * c.key, name="kv"), 2, 2)
    score = lambda s, i, j, h: s - 0.1 * (i - j)  # noqa: E731
    a = ar.attention(q, k, v, window=4, dropout=c.rate, score=score, name="a")
    a = a + ar.attention(q, k, v, dropout=c.rate, name="b")
    return x + ar.dropout(ar.linear(ar.merge(a), c.width, name="out"), c.rate, name="last")


@ar.spec(Sizes, presets={"tiny": Sizes()})
def dropping(tokens, c):
    table = ar.weight("embed.weight", [c.vocab, c.width])
    x, positions = ar.dropout(ar.embedding(tokens, table), c.rate), ar.positions(tokens)
    for i in range(2):
        x = layer(x, positions, c, name=f"layers.{i}")
    return ar.logits(x, table)


SPECS: dict[str, Any] = {"gpt2": "gpt2", "dropping": dropping}
TOKENS = torch.randint(0, 90, (2, 9), generator=torch.Generator().manual_seed(0))
LEFT = {"lengths": [4, 9], "padding": "left"}
BOUNDS = {"start": np.array([5, 9]), "stop": np.array([9, 18])}


@pytest.fixture(params=SPECS)
def model(request: pytest.FixtureRequest) -> Any:
    return ar.compile(SPECS[request.param], "tiny", dtype="float64").init_weights(0).train()


def arrays(model: Any) -> dict[str, np.ndarray]:
    return {name: x.detach().numpy() for name, x in model.tensors().items()}


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(
    "key, counter, want",
    [
        ((0, 0), (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((LOW, LOW), (LOW,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            words("a4093822 299f31d0"),
            words("243f6a88 85a308d3 13198a2e 03707344"),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(key: Any, counter: Any, want: str) -> None:
    """The published test vectors of Random123; on integers, arrays and tensors alike."""
    assert philox(key, counter) == words(want)
    array = philox(key, tuple(np.full(3, c) for c in counter))  # type: ignore[arg-type]
    assert [x.tolist() for x in array] == [[w] * 3 for w in words(want)]
    tensor = philox(key, tuple(torch.full((3,), c) for c in counter))  # type: ignore[arg-type]
    assert [x.tolist() for x in tensor] == [[w] * 3 for w in words(want)]


@pytest.mark.parametrize("count", [0, 1, 5, 4096, 600_001])
@pytest.mark.parametrize("rows", [(), (3,), (2, 0), (2, 3)])
def test_masks_are_equal_bit_for_bit(rows: tuple[int, ...], count: int) -> None:
    if count > 10_000 and rows:
        count = 131_073
    key, which = (123456789, 2**32 - 2), np.arange(7, 7 + int(np.prod(rows))).reshape(rows)
    want = keep_mask(key, which, count, 0.1)
    have = support.keep_mask(key, torch.from_numpy(which), count, 0.1)
    assert np.array_equal(have.numpy(), want)
    if want.size > 100_000:
        assert abs(want.mean() - 0.9) < 5 * (0.09 / want.size) ** 0.5


@pytest.mark.parametrize("where", [{}, LEFT], ids=["dense", "left"])
def test_training_is_the_interpreter_with_the_same_seed(model: Any, where: Any) -> None:
    """Forward, loss, prefill and decode, to 1e-12."""
    module, weights = model._request.module, arrays(model)
    layout, bounds = ("ragged", BOUNDS) if where else ("dense", {})
    real = [(0, slice(5 if where else 0, 9)), (1, slice(0, 9))]

    def run(phase: str, inputs: dict[str, Any], state: Any = None, head: str = "all") -> Any:
        low = ar.lower(module, phase, layout, dtype="float64", training=True, head=head)
        return ar.interpret(low, inputs | bounds, weights, state, seed=11)

    with torch.no_grad():
        given = {"tokens": TOKENS.numpy()}
        have, (want, _) = model(TOKENS, seed=11, **where), run("full", given)
        for row, part in real:
            np.testing.assert_allclose(have[row, part], want["logits"][row, part], 0, 1e-12)
        loss = model.loss(TOKENS, TOKENS, seed=11, **where)
        want, _ = run("full", given | {"targets": TOKENS.numpy()}, head="loss")
        np.testing.assert_allclose(loss, want["loss"], 0, 1e-12)
        have, state = model.prefill(TOKENS, logits="all", seed=11, **where)
        want, kept_state = run("prefill", given)
        for row, part in real:
            np.testing.assert_allclose(have[row, part], want["logits"][row, part], 0, 1e-12)
        layout, bounds = "dense", {}
        have, _ = model.decode(TOKENS[:, :2], state, seed=11)
        want, _ = run("decode", {"tokens": TOKENS[:, :2].numpy()}, kept_state)
        np.testing.assert_allclose(have, want["logits"], 0, 1e-12)


def test_a_traced_module_is_for_training_where_there_is_a_seed(model: Any) -> None:
    module, given, weights = model._request.module, [TOKENS.numpy()], arrays(model)
    plain, _ = ar.interpret(module, given, weights)
    drawn, _ = ar.interpret(module, given, weights, seed=3)
    with torch.no_grad():
        np.testing.assert_allclose(model(TOKENS, seed=3), drawn["logits"], 0, 1e-12)
        np.testing.assert_allclose(model.eval()(TOKENS), plain["logits"], 0, 1e-12)


def test_every_pass_keeps_the_draws() -> None:
    for layout in ("dense", "ragged"):
        module = ar.trace(dropping)
        ar.lower(module, "decode", "dense", dtype="bfloat16", training=True, check=2)
        low = ar.lower(module, "full", layout, training=True)
        again = ar.parse(str(low))
        assert again == low
        keys = [f.path for f in low["layer"].fields if f.kind == "key"]
        assert keys == ["dropout_0", "a.dropout", "b.dropout", "last"]
        plain = ar.lower(module, "full", layout)
        assert not [f for f in plain["layer"].fields if f.kind == "key"]


def test_places_and_seeds_draw_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two dropouts of a block, two scopes of one block, two seeds: no key twice."""
    model = ar.compile(dropping, dtype="float64").init_weights(0).train()
    seen: list[Any] = []
    true = model._support.key

    def key(*given: Any) -> Any:
        seen.append(true(*given))
        return seen[-1]

    monkeypatch.setattr(model._support, "key", key)
    model(TOKENS, seed=0)
    model(TOKENS, seed=1)
    assert len(seen) == len(set(seen)) == 2 * (1 + 2 * 4)
    model(TOKENS, seed=0)
    assert seen[:9] == seen[18:]


def test_seeds_come_from_torchs_generator_unless_given(model: Any) -> None:
    with torch.no_grad():
        torch.manual_seed(5)
        one, two = model(TOKENS), model(TOKENS)
        torch.manual_seed(5)
        again = model(TOKENS)
        assert torch.equal(one, again) and not torch.equal(one, two)
        model.eval()
        assert torch.equal(model(TOKENS), model(TOKENS))
    assert not ar.compile("gpt2", "tiny").training, "nothing drops before train() is called"


def gradients(model: Any, *seeds: int) -> list[torch.Tensor]:
    """Of the sum of the losses, all forward passes before the backward pass."""
    model.zero_grad()
    torch.stack([model.loss(TOKENS, TOKENS, seed=seed) for seed in seeds]).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("how", ["function", "wrapper"])
def test_gradients_under_checkpointing_are_the_plain_ones(model: Any, how: str) -> None:
    """What is computed again in the backward pass draws what the forward pass of its call drew."""
    want = gradients(model, 1, 2)
    blocks = [
        m for name, m in model.named_modules() if name in ("h.0", "h.1", "layers.0", "layers.1")
    ]
    runs: list[int] = []
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: runs.append(1))
    if how == "function":
        for block in blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    else:
        apply_activation_checkpointing(model, check_fn=lambda m: m in blocks)
    have = gradients(model, 1, 2)
    assert len(blocks) == 2 and len(runs) == (8 if how == "wrapper" else 4)
    for a, b in zip(have, want, strict=True):
        assert torch.equal(a, b)


def test_gradients_are_those_of_the_interpreter(model: Any) -> None:
    """In a random direction of all weights, by central differences, at one seed."""
    module, rng, step = model._request.module, np.random.default_rng(0), 2e-7
    low = ar.lower(module, "full", dtype="float64", training=True, head="loss")
    given = {"tokens": TOKENS.numpy(), "targets": TOKENS.numpy()}
    weights = arrays(model)
    towards = {name: rng.standard_normal(x.shape) for name, x in weights.items()}
    ends = []
    for sign in (1, -1):
        moved = {name: x + sign * step * towards[name] for name, x in weights.items()}
        ends.append(float(ar.interpret(low, given, moved, seed=2)[0]["loss"]))
    model.loss(TOKENS, TOKENS, seed=2).backward()
    have = sum(float((x.grad.numpy() * towards[n]).sum()) for n, x in model.tensors().items())
    np.testing.assert_allclose(have, (ends[0] - ends[1]) / (2 * step), rtol=1e-6)


def test_weights_and_states_do_not_depend_on_a_rate(tmp_path: Any) -> None:
    """Published weights serve a model that drops less; a state goes on under another rate."""
    model = ar.compile("gpt2", "tiny").init_weights(0)
    model.save_weights(tmp_path)
    other = GPT2(vocab=256, context=256, width=64, layers=2, heads=4, residual_dropout=0.0)
    calm = ar.compile("gpt2", config=other).load_weights(tmp_path)
    with torch.no_grad():
        _, state = model.prefill(TOKENS)
        have, _ = calm.decode(TOKENS[:, :1], state.clone())
        assert torch.equal(have, model.decode(TOKENS[:, :1], state)[0])


@ar.block
def side(x: "f[B, T, width]", c):
    return ar.dropout(x, c.rate)


@ar.spec(Sizes, presets={"tiny": Sizes()})
def aside(tokens, c):
    """Drops only in what a head leaves out."""
    table = ar.weight("embed.weight", [c.vocab, c.width])
    x = ar.embedding(tokens, table)
    return {"logits": ar.logits(x, table), "extra": side(x, c, name="side")}


def test_a_program_without_draws_takes_no_seed() -> None:
    model = ar.compile(aside).init_weights(0).train()
    assert not torch.equal(model(TOKENS)["extra"], model(TOKENS)["extra"])
    assert torch.equal(model.loss(TOKENS, TOKENS), model.loss(TOKENS, TOKENS))


@pytest.mark.parametrize("where", [{}, {"lengths": [0, 0]}])
def test_no_tokens(model: Any, where: Any) -> None:
    tokens = torch.zeros(2, 0 if not where else 3, dtype=torch.int64)
    assert model(tokens, **where).shape[:2] == tokens.shape
    assert model.loss(tokens, tokens, **where) == 0
    assert model.prefill(tokens, **where)[1].lengths == (0, 0)


def test_pieces_of_a_prompt_draw_by_its_seed(model: Any) -> None:
    with torch.no_grad():
        one, two, other = (
            model.prefill(TOKENS, snapshot_every=4, seed=seed)[0] for seed in (1, 1, 2)
        )
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_nothing_drops_in_generation_and_in_drafts(model: Any) -> None:
    wanted = model.eval().generate(TOKENS, 4)
    with torch.no_grad():
        _, state = model.decode(TOKENS[:, :3], model.prefill(TOKENS)[1])
        _, known = model.decode(TOKENS[:, :1], model.prefill(TOKENS)[1])
    model.train()
    assert torch.equal(model.generate(TOKENS, 4), wanted)
    with torch.no_grad():
        state = state.accept(1)
    for (path, have), (_, want) in zip(state.items(), known.items(), strict=True):
        if path != "length":
            torch.testing.assert_close(have, want, rtol=0, atol=1e-12)


def refused(apply: Any) -> Any:
    """A spec that uses dropout where it cannot stand."""

    @ar.spec(Sizes, presets={"tiny": Sizes()})
    def spec(tokens, c):
        table = ar.weight("embed.weight", [c.vocab, c.width])
        return ar.logits(apply(ar.embedding(tokens, table)), table)

    return lambda: ar.trace(spec)


@ar.pointwise
def inside(u):
    return ar.dropout(u, 0.1)


ERRORS: dict[str, Any] = {
    "rate": lambda: ar.trace(dropping, config=Sizes(rate=1.0)),
    "seed_eval": lambda: ar.compile("gpt2", "tiny").init_weights(0)(TOKENS, seed=1),
    "seed_missing": lambda: ar.interpret(
        ar.lower(ar.trace("gpt2", "tiny"), training=True), [TOKENS.numpy()],
        arrays(ar.compile("gpt2", "tiny").init_weights(0)),
    ),
    "draft": lambda: drafted().accept(1),
    "seed_text": lambda: ar.compile("gpt2", "tiny").init_weights(0).train()(TOKENS, seed="1"),
    "in_pointwise": refused(inside),
    "in_activation": refused(lambda x: ar.short_conv(x, 2, activation=inside, name="c")),
    "name": refused(lambda x: ar.dropout(x, 0.1, name=3)),
    "name_twice": refused(lambda x: ar.dropout(ar.dropout(x, 0.1), 0.1, name="dropout_0")),
    "activation_text": refused(lambda x: ar.short_conv(x, 2, activation="silu", name="c")),
    "weight_and_init": refused(
        lambda x: ar.short_conv(x, ar.weight("w", [32, 2]), init=ar.ones(), name="c")
    ),
}  # fmt: skip


def drafted() -> Any:
    model = ar.compile(dropping).init_weights(0).train()
    return model.decode([[1, 2]], model.prefill([[3]])[1])[1]


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    with pytest.raises(ArchirError) as caught:
        ERRORS[name]()
    check_golden(f"dropout/{name}", str(caught.value))
