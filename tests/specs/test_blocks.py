"""What stands around a recurrence, against transformers' modules and published numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.glm5_next import modeling_glm5_next as glm
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

import archir as ar
from archir.draw import draw
from archir.ir import fields
from specs.blocks import bounded_gate, elu_plus_one, gated_rms_norm, softplus_gate
from tests.specs.mixers import mixers_lm

H, K, T = 3, 5, 7
X = np.random.default_rng(0).standard_normal((2, T, H * K)) * 3
GATE = np.random.default_rng(1).standard_normal((2, T, H * K))
CONFIG = SimpleNamespace(
    hidden_size=H * K, linear_head_dim=K, linear_num_heads=H, linear_lower_bound=-5.0
)


@ar.block
def per_key(x: "f[B, T, 15]"):
    return softplus_gate(ar.heads(x, 1, H))


@ar.block
def per_head(x: "f[B, T, 3]"):
    return softplus_gate(x)


@ar.block
def bounded(x: "f[B, T, 15]"):
    return bounded_gate(ar.heads(x, 1, H))


@ar.block
def normed(x: "f[B, T, 15]", gate: "f[B, T, 15]"):
    return gated_rms_norm(ar.heads(x, 1, H), gate, name="norm", eps=1e-5)


@ar.block
def normed_by_silu(x: "f[B, T, 15]", gate: "f[B, T, 15]"):
    x = ar.heads(x, 1, H)
    return gated_rms_norm(x, gate, name="norm", eps=1e-5, activation=ar.silu)


@ar.block
def mapped(x: "f[B, T, 15]"):
    return elu_plus_one(x)


@ar.block
def of_length_one(x: "f[B, T, 15]"):
    return ar.l2_norm(ar.heads(x, 1, H))


def run(block: Any, *inputs: np.ndarray, **weights: np.ndarray) -> np.ndarray:
    outputs, _ = ar.interpret(ar.trace(block), list(inputs), weights)
    return next(iter(outputs.values()))


def gate_of(module: Callable[[Any], nn.Module]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Of X itself, as the projections before it are left out, and its weights as ours."""
    gate = module(CONFIG)
    gate.f_a_proj = gate.f_b_proj = nn.Identity()
    rng = np.random.default_rng(2)
    ours = {"A_log": np.log(rng.uniform(1, 16, H)), "dt_bias": rng.uniform(-7, -2, H * K)}
    for name, x in ours.items():
        gate.get_parameter(name).data = (
            torch.tensor(x).float().reshape(gate.get_parameter(name).shape)
        )
    return gate(torch.tensor(X)).detach().numpy(), ours


def test_the_softplus_gate_is_that_of_kimi_linear() -> None:
    want, weights = gate_of(kimi.KimiLinearForgetGate)
    have = run(per_key, X, **weights)
    assert have.shape == want.shape == (2, T, H, K) and np.all(have <= 0)
    np.testing.assert_allclose(have, want, rtol=2e-5, atol=1e-5)


def test_the_bounded_gate_is_that_of_glm() -> None:
    want, weights = gate_of(glm.Glm5NextTextForgetGate)
    np.testing.assert_allclose(run(bounded, X, **weights), want, rtol=2e-5, atol=1e-5)


def test_the_gate_of_a_head() -> None:
    """As in Gated DeltaNet: transformers has it inline, as −exp(A_log) softplus(a + dt_bias)."""
    a, rng = X[..., :H], np.random.default_rng(3)
    weights = {"A_log": rng.standard_normal(H), "dt_bias": rng.standard_normal(H)}
    want = -np.exp(weights["A_log"]) * np.logaddexp(0, a + weights["dt_bias"])
    np.testing.assert_allclose(run(per_head, a, **weights), want, rtol=1e-14)


@pytest.mark.parametrize(
    ("z", "log", "want"), [(0, 0, -2.5), (1, 0, -3.6552928932), (1, 1, -4.6904841629)]
)
def test_numbers_of_kimi_k3(z: float, log: float, want: float) -> None:
    x, weights = np.full((1, 1, H * K), z), {"A_log": np.full(H, log), "dt_bias": np.zeros(H * K)}
    assert np.all(np.abs(run(bounded, x, **weights) - want) < 1e-10)


@pytest.mark.parametrize(
    ("block", "module"),
    [(normed, kimi.KimiLinearRMSNormGated), (normed_by_silu, qwen.Qwen3NextRMSNormGated)],
)
def test_the_gated_norm(block: Any, module: Any) -> None:
    """Norm first, then the gate; Mamba-2's is the other way round."""
    norm, mamba = module(K, eps=1e-5), MambaRMSNormGated(K, K)
    weight = np.random.default_rng(4).uniform(0.5, 2, K)
    norm.weight.data = torch.tensor(weight).float()
    x, gate = (torch.tensor(a.reshape(2, T, H, K)).float() for a in (X, GATE))
    want = norm(x, gate).detach().numpy().reshape(2, T, H * K)
    weights = {"norm.weight": weight}
    np.testing.assert_allclose(run(block, X, GATE, **weights), want, rtol=2e-5, atol=1e-6)
    assert not np.allclose(want, mamba(x, gate).detach().numpy().reshape(want.shape))


def test_feature_map_and_length_one() -> None:
    x = torch.tensor(X)
    np.testing.assert_allclose(run(mapped, X), nn.functional.elu(x) + 1, rtol=1e-13)
    want = qwen.l2norm(x.reshape(2, T, H, K), eps=1e-6)
    np.testing.assert_allclose(run(of_length_one, X), want, rtol=1e-13)
    small = np.full((1, 1, H * K), 1e-5)  # ε is added to the sum, not to the mean
    np.testing.assert_allclose(run(of_length_one, small), 1e-5 / math.sqrt(K * 1e-10 + 1e-6))


def test_the_feature_map_has_finite_gradients_far_out() -> None:
    x = torch.tensor([-1e4, -1.0, 0.0, 1.0, 1e4], dtype=torch.float64)
    module = ar.compile(mapped, dtype="float64")
    given = torch.zeros(1, 1, 15, dtype=torch.float64)
    given[0, 0, :5] = x
    (slope,) = torch.autograd.grad(module(given.requires_grad_()).sum(), given)
    np.testing.assert_allclose(slope[0, 0, :5], [0, math.exp(-1), 1, 1, 1])


def test_how_gates_begin() -> None:
    """A uniform in [1, 16); a step softplus(dt_bias) log-uniform in [0.001, 0.1)."""
    found = {path: f.attrs["init"] for path, f in fields(ar.trace(per_key), "weight").items()}
    rate = np.exp(draw("A_log", 0, found["A_log"], (4000,)))
    step = np.logaddexp(0, draw("dt_bias", 0, found["dt_bias"], (4000,)).astype(np.float64))
    assert rate.min() >= 1 and rate.max() < 16 and abs(rate.mean() - 8.5) < 0.3
    assert step.min() >= 0.001 * (1 - 1e-6) and step.max() < 0.1 * (1 + 1e-6)
    assert abs(np.log(step).mean() - np.log(0.01)) < 0.1
    bounded_fields = fields(ar.trace(bounded), "weight")
    assert not np.any(draw("A_log", 0, bounded_fields["A_log"].attrs["init"], (4,)))


def test_a_model_of_all_of_them_holds() -> None:
    """Every phase, layout and dtype; KDA, Gated DeltaNet and linear attention in chunks."""
    report = ar.check(mixers_lm, preset="tiny", lengths=(17,))
    assert report.ok, report.failures
