"""Compiled GPT-2 and Llama against `transformers` models of random weights: phases and dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import archir as ar
from archir.check.tolerance import distance
from archir.interp import interpret, to_dtype
from archir.ir import fields
from archir.types import resolve, short_dtype
from tests import oracle

CONFIGS = [(family, name) for family, named in oracle.NAMED.items() for name in named]
DTYPES = ("float64", "float32", "bfloat16")


def compiled(family: str, config: Any, weights: dict[str, np.ndarray], dtype: str) -> Any:
    """Our model with given weights."""
    return ar.compile(family, config=config, dtype=dtype).set_weights(weights)


def interpreted(
    family: str, config: Any, weights: Any, tokens: np.ndarray, dtype: str
) -> np.ndarray:
    """Logits of the interpreter run in a dtype: the anchor of the tolerance (D16)."""
    module = ar.lower(ar.trace(family, config=config), stage="precision", dtype=dtype)
    kinds, short = fields(module, "weight"), short_dtype(dtype)
    rounded = {
        k: to_dtype(v, resolve(kinds[k].value.type.dtype, short)) for k, v in weights.items()
    }
    (anchor,) = interpret(module, [tokens], rounded, dtype=dtype)[0].values()
    return anchor


@pytest.mark.parametrize(("family", "name"), CONFIGS)
def test_logits_of_every_phase_and_dtype(family: str, name: str) -> None:
    config = oracle.NAMED[family][name]
    twin, weights = oracle.twin(family, config, dtype="bfloat16")
    for dtype in DTYPES:
        model = compiled(family, config, weights, dtype)
        for length in oracle.LENGTHS:
            tokens, _ = oracle.tokens_and_targets(config, length)
            want = oracle.logits(twin, tokens)
            anchor = want
            if dtype != "float64":
                anchor = interpreted(family, config, weights, tokens, dtype)
            for phase, have in phases(model, tokens).items():
                part = slice(length - have.shape[1], None)
                found = distance(have, want[:, part], anchor[:, part], dtype)
                assert found.ok, f"{dtype} {phase} T={length}: {found}"


def phases(model: Any, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Logits of the full forward, of decode after prefill, and of prefill in pieces."""
    with torch.no_grad():
        found = {"full": model(tokens)}
        found["last"], _ = model.prefill(tokens)
        cut = max(1, tokens.shape[1] - 3)
        made, state = model.prefill(tokens[:, :cut], logits="all")
        parts = [made]
        for at in range(cut, tokens.shape[1]):
            made, state = model.decode(tokens[:, at : at + 1], state)
            parts.append(made)
        found["decode"] = torch.cat(parts, 1)
        state, parts = None, []
        for piece in np.array_split(tokens, 4, axis=1):
            if piece.shape[1]:
                made, state = model.prefill(piece, state, logits="all")
                parts.append(made)
        found["pieces"] = torch.cat(parts, 1)
    return {k: v.double().numpy() for k, v in found.items()}


@pytest.mark.parametrize(("family", "name"), CONFIGS)
def test_loss_and_every_gradient(family: str, name: str) -> None:
    config = oracle.NAMED[family][name]
    twin, weights = oracle.twin(family, config)
    for length in oracle.LENGTHS:
        tokens, targets = oracle.tokens_and_targets(config, length)
        want = oracle.gradients(family, config, twin, tokens, targets)
        model = compiled(family, config, weights, "float32")
        loss = model.loss(tokens, targets)
        loss.backward()
        reference = oracle.loss(twin, torch.from_numpy(tokens), torch.from_numpy(targets))
        assert loss.item() == pytest.approx(reference.item(), rel=1e-5)
        largest = max(np.linalg.norm(g) for g in want.values())
        for path, tensor in model.tensors().items():
            assert tensor.grad is not None, path
            difference = np.linalg.norm(tensor.grad.double().numpy() - want[path])
            size = np.linalg.norm(want[path])
            # with one token, softmax has one key: queries and keys have gradient zero
            bound = 1e-4 * size if size > 1e-12 * largest else 1e-6 * largest
            assert difference <= bound, path


def test_loss_ignores_and_chunks() -> None:
    """Ignored targets do not count, no target gives 0, and chunks change nothing."""
    model = ar.compile("gpt2", preset="tiny", dtype="float64").init_weights(1)
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 256, (9, 150)), rng.integers(0, 256, (9, 150))
    targets[rng.random(targets.shape) < 0.3] = -100
    loss = model.loss(tokens, targets)
    scores = model(tokens)
    want = torch.nn.functional.cross_entropy(
        scores.flatten(0, 1), torch.from_numpy(targets).flatten()
    )
    assert loss.item() == pytest.approx(want.item(), rel=1e-12)
    one, two = (torch.autograd.grad(x, list(model.parameters())) for x in (loss, want))
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert model.loss(tokens, np.full_like(targets, -100)).item() == 0.0


def test_one_hundred_steps_beside_transformers() -> None:
    """Same weights, data and AdamW: losses within 1e-3 of each other at every step."""
    config = oracle.GPT2(vocab=96, context=64, width=48, layers=2, heads=4)
    twin, weights = oracle.twin("gpt2", config)
    twin = twin.float()
    model = compiled("gpt2", config, weights, "float32")
    ours = torch.optim.AdamW(model.parameters(), lr=3e-3)
    theirs = torch.optim.AdamW(twin.parameters(), lr=3e-3)
    rng = np.random.default_rng(0)
    book = rng.integers(0, 96, 400)
    first = last = 0.0
    for step in range(100):
        starts = rng.integers(0, 400 - 33, 4)
        rows = np.stack([book[s : s + 33] for s in starts])
        tokens, targets = rows[:, :-1], rows[:, 1:]
        a = model.loss(tokens, targets)
        b = oracle.loss(twin, torch.from_numpy(tokens), torch.from_numpy(targets))
        assert abs(a.item() - b.item()) <= 1e-3, f"step {step}: {a.item()} and {b.item()}"
        for loss, optimizer in ((a, ours), (b, theirs)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        first, last = (a.item() if step == 0 else first), a.item()
    assert last < 0.7 * first, "the run must learn something for the comparison to mean something"
