"""What padding and packing cost: attention meets only pairs of tokens of one row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import archir as ar

LENGTHS = (5, 0, 9, 1, 3)


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Queries times keys of every attention call, as they are made."""
    found: list[int] = []
    right = F.scaled_dot_product_attention

    def counted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
        mask = how.get("attn_mask")
        assert mask is None or mask.dtype == torch.bool
        found.append(q.shape[0] * q.shape[2] * k.shape[2])
        return right(q, k, v, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    return found


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("width", [9, 40])
def test_padding_costs_no_attention(pairs: list[int], padding: str, width: int) -> None:
    """Neither in the prompt nor afterwards, however wide the grid is."""
    model = ar.compile("gpt2", "tiny").init_weights(0)
    tokens = torch.zeros(len(LENGTHS), width, dtype=torch.int64)
    with torch.no_grad():
        model(tokens, lengths=LENGTHS, padding=padding)
        assert sum(pairs) == 2 * sum(n * n for n in LENGTHS)
        pairs.clear()
        _, state = model.prefill(tokens, lengths=LENGTHS, padding=padding)
        assert sum(pairs) == 2 * sum(n * n for n in LENGTHS)
        pairs.clear()
        model.decode(tokens[:, :1], state)
        assert sum(pairs) == 2 * len(LENGTHS) * (max(LENGTHS) + 1)


def test_packed_rows_do_not_meet(pairs: list[int]) -> None:
    model = ar.compile("gpt2", "tiny").init_weights(0)
    tokens = torch.zeros(1, sum(LENGTHS), dtype=torch.int64)
    with torch.no_grad():
        model.prefill(tokens, cu_seqlens=[0, 5, 5, 14, 15, 18])
    assert sum(pairs) == 2 * sum(n * n for n in LENGTHS)


def test_dense_rows_need_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a prompt nor decoding of rows of equal length materialises one."""
    masks = []
    right = F.scaled_dot_product_attention

    def seen(*given: Any, **how: Any) -> torch.Tensor:
        masks.append(how.get("attn_mask"))
        return right(*given, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seen)
    model = ar.compile("gpt2", "tiny").init_weights(0)
    with torch.no_grad():
        _, state = model.prefill([[1, 2, 3]] * 2)
        model.decode([[4]] * 2, state)
    assert masks == [None] * 4
