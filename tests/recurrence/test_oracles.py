"""Rules against what others wrote and what the literature tells.

`transformers` has KDA and Gated DeltaNet in plain torch, which it runs where flash-linear-attention
is not installed: a loop over tokens and a chunked form, both in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

import archir as ar
from archir.check.recurrence import FORMS
from archir.check.tolerance import distance
from archir.recurrence import Rule
from archir.recurrence.literal import literal
from tests.recurrence.library import (
    deltanet,
    gated_deltanet,
    kda,
    linear_attention,
    retnet,
)

B, T, H, K, V = 2, 70, 2, 16, 12


def inputs(heads: int, per_key: bool) -> dict[str, torch.Tensor]:
    """Of a layer: queries and keys of length 1, log decays from a softplus, strengths."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, H, K, generator=g), dim=-1)
            for _ in range(2))  # fmt: skip
    z = torch.randn(B, T, heads, *([K] if per_key else []), generator=g)
    return {
        "q": q, "k": k, "v": torch.randn(B, T, heads, V, generator=g),
        "g": -torch.nn.functional.softplus(z), "beta": torch.rand(B, T, heads, generator=g),
    }  # fmt: skip


# name → rule, heads of values, a decay per key, what transformers runs
THEIRS: dict[str, tuple[Rule, int, bool, Callable[..., Any]]] = {
    "KDA by token": (kda, 2, True, kimi.recurrent_kimi_delta_attention),
    "KDA in chunks": (kda, 2, True, kimi.chunk_kimi_delta_attention),
    "Gated DeltaNet by token": (gated_deltanet, 4, False, qwen.torch_recurrent_gated_delta_rule),
    "Gated DeltaNet in chunks": (gated_deltanet, 4, False, qwen.torch_chunk_gated_delta_rule),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", THEIRS)
def test_transformers(name: str, form: str) -> None:
    """From a state, outputs and final state: with their float32 as the anchor, ours lies as near to
    the literal loop in float64 as D16 asks; so both are equal up to the rounding of either."""
    rule, heads, per_key, theirs = THEIRS[name]
    x = inputs(heads, per_key)
    start = torch.randn(B, heads, K, V, generator=torch.Generator().manual_seed(1))
    want = theirs(
        *x.values(), initial_state=start, output_final_state=True, use_qk_l2norm_in_kernel=False
    )
    f = operator(rule, form)
    have = f(x["q"] * K**-0.5, *[*x.values()][1:], initial_state=start, return_state=True)
    wide = {k: a.double().numpy() for k, a in x.items()}
    loop = literal(rule, [wide.pop("q") * K**-0.5, *wide.values()], [start.double().numpy()])
    for ours, other, exact in zip(have, want, (*loop.outputs, *loop.states), strict=True):
        assert ours.dtype == other.dtype == torch.float32
        found = distance(ours.numpy(), exact, other.numpy(), "float32")
        assert found.ok, found


_OPERATORS: dict[tuple[str, str], Any] = {}


def operator(rule: Rule, form: str) -> Any:
    return _OPERATORS.setdefault((rule.name, form), ar.op(rule, "eager", form))


# ---- capacity: N pairs of random unit keys and values are written, then all are read


def recalled(rule: Rule, keys: np.ndarray, values: np.ndarray, **more: Any) -> np.ndarray:
    """What each key reads after all pairs were written: the final state, read by all keys."""
    tokens = {"q": keys, "k": keys, "v": values, "beta": np.ones(len(keys)), **more}
    given = [tokens[name] for name in rule.operands]
    xs = [x if x.ndim == 0 else x[None, :, None] for x in map(np.asarray, given)]
    (S,) = literal(rule, xs).states
    return keys @ S[0, 0]


def pairs(count: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    keys, values = rng.standard_normal((2, count, width))
    return keys / np.linalg.norm(keys, axis=1, keepdims=True), values


def off(have: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.mean((have - want) ** 2) / np.mean(want**2)))


def test_orthonormal_keys_are_recalled_by_both() -> None:
    _, values = pairs(8, 8)
    for rule in (linear_attention, deltanet):
        assert off(recalled(rule, np.eye(8), values), values) < 1e-14


def test_additive_memory_interferes_beyond_its_width() -> None:
    """Schlag et al. 2021, section 4: N > D keys cannot be orthogonal, and what is read of one pair
    has a part of every other: of variance (N − 1) / D for random keys."""
    D = 32
    for count in (2 * D, 4 * D):
        error = off(recalled(linear_attention, *pairs(count, D)), pairs(count, D)[1])
        assert 0.8 < error / np.sqrt((count - 1) / D) < 1.2
    few = [off(recalled(linear_attention, *pairs(n, D)), pairs(n, D)[1]) for n in (4, 16, 32, 64)]
    assert few == sorted(few)


def test_the_delta_rule_overwrites_exactly() -> None:
    """The last value of each key stands, whatever was written before; sums keep all of them."""
    rng = np.random.default_rng(0)
    keys = np.linalg.qr(rng.standard_normal((8, 8)))[0]
    first, second = rng.standard_normal((2, 8, 5))
    twice = np.concatenate([keys, keys]), np.concatenate([first, second])
    np.testing.assert_allclose(recalled(deltanet, *twice)[:8], second, atol=1e-14)
    np.testing.assert_allclose(recalled(linear_attention, *twice)[:8], first + second, atol=1e-14)


def test_the_delta_rule_keeps_the_last_pair_whatever_the_keys() -> None:
    """With N > D keys the last written is read exactly, the older ones with errors."""
    keys, values = pairs(64, 16)
    read = recalled(deltanet, keys, values)
    np.testing.assert_allclose(read[-1], values[-1], atol=1e-13)
    assert off(read[-1:], values[-1:]) < 1e-12 < 0.1 < off(read[:32], values[:32])
    assert off(read, values) < off(recalled(linear_attention, keys, values), values)


@pytest.mark.parametrize("form", FORMS)
def test_decay_0_clears_everything(form: str) -> None:
    """What follows a decay of 0 is what a new sequence gives, bit for bit where the numbers before
    it are finite; so is a log decay of −∞ for all that it rounds to."""
    rng = np.random.default_rng(0)
    q, k, v = (torch.tensor(rng.standard_normal((1, 40, 2, n))) for n in (5, 5, 3))
    a = torch.tensor(rng.uniform(0.5, 1, (1, 40, 2)))
    a[:, 21] = 0
    f = operator(retnet, form)
    whole = f(q, k, v, a, return_state=True)
    after = f(*(x[:, 21:] for x in (q, k, v, a)), return_state=True)
    torch.testing.assert_close(whole[0][:, 21:], after[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole[1], after[1], rtol=1e-12, atol=1e-12)
    g = torch.log(a)
    assert torch.isinf(g).any()
    beta = torch.tensor(rng.uniform(0, 1, (1, 40, 2)))
    unit = torch.nn.functional.normalize(k, dim=-1)
    gated = operator(gated_deltanet, form)
    for huge in (g, torch.clamp(g, min=-1e6)):
        whole = gated(q, unit, v, huge, beta, return_state=True)
        after = gated(*(x[:, 21:] for x in (q, unit, v, huge, beta)), return_state=True)
        torch.testing.assert_close(whole[0][:, 21:], after[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(whole[1], after[1], rtol=1e-12, atol=1e-12)
