"""Dense, left-padded, right-padded and packed are one computation: outputs, states, gradients."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

import archir as ar
from archir.diagnostics import MismatchError
from backends.runtime.layout import bounds
from specs.llama import Llama
from tests.goldens import check_golden
from tests.specs.conv import conv_lm
from tests.specs.kda import kda_lm

LENGTHS = (5, 0, 9, 1, 3)
WIDTH = 11
SPECS: dict[str, dict[str, Any]] = {
    "gpt2": {"spec": "gpt2", "preset": "tiny"},
    "llama": {"spec": "llama", "config": Llama(96, 192, 32, 88, 2, heads=4, kv_heads=2, window=5)},
    "kda": {"spec": kda_lm, "preset": "tiny"},
    "conv": {"spec": conv_lm, "preset": "tiny"},
}


def made(name: str) -> Any:
    return ar.compile(**SPECS[name], dtype="float64").init_weights(0)


def rows(seed: int = 0) -> list[torch.Tensor]:
    """One line of tokens per row."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 90, (n,), generator=generator) for n in LENGTHS]


def laid_out(layout: str, filler: int = 7) -> tuple[torch.Tensor, dict[str, Any], list[slice]]:
    """Tokens, the arguments that say where rows lie, and each row's place on the flat grid."""
    lines = rows()
    if layout == "packed":
        ends = [0, *accumulate(LENGTHS)]
        places = [slice(a, b) for a, b in pairwise(ends)]
        return torch.cat(lines)[None], {"cu_seqlens": ends}, places
    tokens = torch.full((len(lines), WIDTH), filler)
    places = []
    for row, line in enumerate(lines):
        start = WIDTH - len(line) if layout == "left" else 0
        tokens[row, start : start + len(line)] = line
        places.append(slice(row * WIDTH + start, row * WIDTH + start + len(line)))
    return tokens, {"lengths": list(LENGTHS), "padding": layout}, places


@pytest.mark.parametrize("layout", ["left", "right", "packed"])
@pytest.mark.parametrize("name", SPECS)
def test_rows_are_as_alone(name: str, layout: str) -> None:
    """Outputs, the state after them, what is decoded next, and every gradient."""
    model = made(name)
    tokens, where, places = laid_out(layout)
    flat = model(tokens, **where).flatten(0, 1)
    assert torch.isfinite(flat).all()
    loss = sum(flat[place].square().sum() for place in places)
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with torch.no_grad():
        _, state = model.prefill(tokens, **where)
        assert state.lengths == LENGTHS
        again, state = model.decode([[3, 4]] * len(LENGTHS), state)
    for row, line in enumerate(rows()):
        whole = model(torch.cat([line, torch.tensor([3, 4])])[None])[0]
        torch.testing.assert_close(flat[places[row]], whole[: len(line)], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(again[row], whole[len(line) :], rtol=1e-12, atol=1e-13)
        if len(line):
            model(line[None]).square().sum().backward()
    for have, p in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(have, p.grad, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("layout", ["left", "right"])
@pytest.mark.parametrize("name", SPECS)
def test_padding_says_nothing(name: str, layout: str) -> None:
    """What stands in the padding changes no real output, no loss and no gradient, bit for bit."""
    model = made(name)
    found = []
    for filler in (7, 61):
        tokens, where, places = laid_out(layout, filler)
        targets = tokens.roll(-1, 1)
        model.zero_grad()
        loss = model.loss(tokens, targets * 0 + 5, **where)
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        with torch.no_grad():
            flat = model(tokens, **where).flatten(0, 1)
        found.append([loss.detach(), *grads, *(flat[place] for place in places)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", SPECS)
def test_a_batch_of_empty_rows(name: str) -> None:
    model = made(name)
    with torch.no_grad():
        _, state = model.prefill([[1, 2], [3, 4]])
        _, state = model.prefill([[0, 0], [0, 0]], state, lengths=[0, 0])
        assert state.lengths == (2, 2)
        have, _ = model.decode([[5], [6]], state)
        want = model([[1, 2, 5], [3, 4, 6]])[:, -1:]
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-13)


MALFORMED: dict[str, dict[str, Any]] = {
    "both": {"lengths": [1, 2], "cu_seqlens": [0, 4]},
    "side": {"lengths": [1, 2], "padding": "middle"},
    "lengths_beyond": {"lengths": [1, 5]},
    "lengths_count": {"lengths": [1]},
    "lengths_floats": {"lengths": [1.0, 2.0]},
    "packed_lines": {"cu_seqlens": [0, 4]},
    "packed_start": {"batch": 1, "cu_seqlens": [1, 4]},
    "packed_decreasing": {"batch": 1, "cu_seqlens": [0, 3, 2, 4]},
    "packed_end": {"batch": 1, "cu_seqlens": [0, 3]},
}


def test_malformed_layouts() -> None:
    parts = []
    for name, arguments in MALFORMED.items():
        given = {"batch": 2, "length": 4, **arguments}
        with pytest.raises(MismatchError) as caught:
            bounds(**given)
        parts.append(f"## {name}\n\n{caught.value}\n")
    check_golden("layouts/malformed", "\n".join(parts))
