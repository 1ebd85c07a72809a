"""Floats in padding, NaN and infinity among them, are never seen: blocks given without a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import archir as ar
from specs.gpt2 import GPT2
from specs.gpt2 import layer as gpt2_layer
from tests.specs.conv import Conv


@ar.block
def conv_layer(x: "f[B, T, width]", c):
    h = ar.linear(ar.rms_norm(x, name="norm"), c.width, name="up")
    return x + ar.short_conv(h, 4, activation=ar.silu, name="conv")


BLOCKS: dict[str, tuple[Any, Any]] = {
    "gpt2": (gpt2_layer, GPT2(vocab=32, context=32, width=32, layers=1, heads=2)),
    "conv": (conv_layer, Conv()),
}
LENGTHS = (3, 0, 6)


@pytest.mark.parametrize("filler", [0.0, 1e300, float("inf"), float("nan")])
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", BLOCKS)
def test_anything_in_padding(name: str, padding: str, filler: float) -> None:
    block, config = BLOCKS[name]
    model = ar.compile(block, config=config, dtype="float64").init_weights(0)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, 32, dtype=torch.float64, generator=generator) for n in LENGTHS]
    x, places = torch.full((3, 8, 32), filler, dtype=torch.float64), []
    for row, line in enumerate(rows):
        n = len(line)
        places.append((row, slice(8 - n, 8) if padding == "left" else slice(0, n)))
        x[places[-1]] = line
    x.requires_grad_()
    y = model(x, lengths=LENGTHS, padding=padding)
    assert torch.isfinite(y).all()
    sum(y[place].square().sum() for place in places).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    seen = torch.zeros_like(x)
    for place, line in zip(places, rows, strict=True):
        alone = line[None].clone().requires_grad_()
        want = model(alone)
        torch.testing.assert_close(y[place], want[0], rtol=1e-12, atol=1e-13)
        want.square().sum().backward()
        torch.testing.assert_close(x.grad[place], alone.grad[0], rtol=1e-11, atol=1e-12)
        seen[place] = x.grad[place]
    assert torch.equal(x.grad, seen), "padding has a gradient of exactly zero"
    for have, p in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(have, p.grad, rtol=1e-11, atol=1e-12)
