"""Where rows lie, said by `lengths=` or `cu_seqlens=`. That it does not matter is a law of
`archir.check`, held in tests/check/test_laws.py."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

import archir as ar
from archir.check.batch import place
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


def laid_out(layout: str) -> tuple[torch.Tensor, dict[str, Any], list[slice]]:
    """Tokens, the arguments that say where rows lie, and each row's place on the flat grid."""
    lines = rows()
    if layout == "packed":
        ends = [0, *accumulate(LENGTHS)]
        places = [slice(a, b) for a, b in pairwise(ends)]
        return torch.cat(lines)[None], {"cu_seqlens": ends}, places
    tokens = torch.full((len(lines), WIDTH), 7)
    places = []
    for row, line in enumerate(lines):
        start = WIDTH - len(line) if layout == "left" else 0
        tokens[row, start : start + len(line)] = line
        places.append(slice(row * WIDTH + start, row * WIDTH + start + len(line)))
    return tokens, {"lengths": list(LENGTHS), "padding": layout}, places


@pytest.mark.parametrize("layout", ["left", "right", "packed"])
def test_arguments_say_where_rows_lie(layout: str) -> None:
    """As a check lays them out, and in every call."""
    tokens, where, places = laid_out(layout)
    found = bounds(*tokens.shape, **where)
    there = place(layout, LENGTHS, room=WIDTH - max(LENGTHS))
    assert found == (there.start, there.stop)
    assert [*zip(*found, strict=True)] == [(p.start, p.stop) for p in places]
    model, targets = made("conv"), tokens.roll(-1, 1)
    with torch.no_grad():
        assert torch.equal(model(tokens, **where), model(tokens, rows=found))
        assert torch.equal(
            model.loss(tokens, targets, **where), model.loss(tokens, targets, rows=found)
        )
        states = []
        for how in (where, {"rows": found}):
            _, state = model.prefill(tokens, **how)
            assert state.lengths == LENGTHS
            again, state = model.decode(tokens, state, **how)
            states.append([again, *(x for path, x in state.items() if path != "length")])
    for one, two in zip(*states, strict=True):
        assert torch.equal(one, two)


def test_rows_that_fill_the_grid_are_dense() -> None:
    assert bounds(2, 4) is None
    assert bounds(2, 4, [4, 4]) is None
    assert bounds(2, 4, [4, 4], "left") is None
    assert bounds(1, 4, cu_seqlens=[0, 4]) == ((0,), (4,))


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
