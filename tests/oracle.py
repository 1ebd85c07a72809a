"""`transformers` models of random weights as oracles, and our weights from theirs.

    model, weights = twin("llama", NAMED["llama"]["grouped"])
    expected = logits(model, tokens)                     # [B, T, vocab]
    expected = gradients("llama", config, model, tokens, targets)   # by our weights' names

A twin is made in float64 from numbers that `dtype` holds exactly, so `model.to(torch.float32)` (or
bfloat16) rounds no weight. Its weights have no structure: norms, biases and embeddings are random.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm

from archir.spec import Spec, resolve
from specs.gpt2 import GPT2
from specs.llama import Llama

NAMED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "plain": GPT2(vocab=96, context=192, width=32, layers=2, heads=4),
        "one_head": GPT2(vocab=64, context=192, width=20, layers=1, heads=1),
        "untied": GPT2(vocab=61, context=192, width=48, layers=2, heads=3, tied=False),
        "narrow_inner": GPT2(vocab=101, context=160, width=32, layers=3, heads=8, inner=40),
        "deep": GPT2(vocab=50, context=192, width=24, layers=6, heads=2, eps=1e-3),
    },
    "llama": {
        "plain": Llama(96, 192, 32, 88, 2, heads=4),
        "grouped": Llama(96, 192, 64, 80, 2, heads=8, kv_heads=2, theta=500000.0, eps=1e-5),
        "one_kv_head": Llama(61, 192, 40, 56, 3, heads=5, kv_heads=1, tied=True),
        "wide_head": Llama(101, 192, 32, 48, 2, heads=4, kv_heads=2, head_dim=14, theta=1000.0),
        "deep": Llama(50, 192, 24, 36, 6, heads=2, tied=True, eps=1e-3),
        "window": Llama(96, 192, 32, 88, 2, heads=4, kv_heads=2, window=9),
    },
}

LENGTHS = (1, 7, 64, 129)


def twin(
    family: str, config: Any, seed: int = 0, dtype: str = "float32", attention: str = "sdpa"
) -> tuple[Any, dict[str, np.ndarray]]:
    """The `transformers` model of a config of ours in float64, and its weights by our names.

    family: gpt2 or llama.  dtype: what every weight can be held in.  attention: transformers' own
    implementation: sdpa, or eager, whose softmax is float32 in a float64 Llama.
    """
    make = {"gpt2": gpt2_twin, "llama": llama_twin}[family]
    return make(config, seed, dtype, attention)


def gpt2_twin(
    config: GPT2, seed: int = 0, dtype: str = "float32", attention: str = "sdpa"
) -> tuple[Any, dict[str, np.ndarray]]:
    """`GPT2LMHeadModel`; see `twin`. Dropout is off, as in our spec."""
    published = _spec("gpt2").from_hf.publish(config)
    published |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    found = transformers.GPT2Config(**published, bos_token_id=0, eos_token_id=0)
    return _twin("gpt2", config, found, seed, dtype, attention)


def llama_twin(
    config: Llama, seed: int = 0, dtype: str = "float32", attention: str = "sdpa"
) -> tuple[Any, dict[str, np.ndarray]]:
    """`LlamaForCausalLM`, with a window `MistralForCausalLM`: Llama with one; see `twin`."""
    published = _spec("llama").from_hf.publish(replace(config, window=None))
    published |= {"num_key_value_heads": config.kv_heads or config.heads}
    kind = transformers.LlamaConfig
    if config.window is not None:
        kind = transformers.MistralConfig
        published |= {"model_type": "mistral", "sliding_window": config.window}
    found = kind(**published, bos_token_id=0, eos_token_id=0)
    model, weights = _twin("llama", config, found, seed, dtype, attention)
    _keep_float64(model, config)
    return model, weights


def weights_of(family: str, config: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by published name (a state dict, its gradients) by our names, shaped as ours."""
    names = _spec(family).names["hf"](config)
    return {n: layout.resolve(tensors).load(tensors.__getitem__) for n, layout in names.items()}


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, vocab] of a full forward, in the model's dtype, as float64."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens), use_cache=False).logits.double().numpy()


def loss(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy; targets are shifted already, −100 is ignored (D14)."""
    scores = model(tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def gradients(
    family: str, config: Any, model: Any, tokens: np.ndarray, targets: np.ndarray
) -> dict[str, np.ndarray]:
    """Gradients of `loss` by our names, in the model's dtype, as float64."""
    model.zero_grad(set_to_none=True)
    loss(model, torch.from_numpy(tokens), torch.from_numpy(targets)).backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.double().numpy() for n, g in weights_of(family, config, found).items()}


def tokens_and_targets(
    config: Any, length: int, batch: int = 2, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens [batch, length] and targets: the next tokens, one of them ignored."""
    drawn = np.random.default_rng(seed).integers(0, config.vocab, (batch, length + 1))
    tokens, targets = drawn[:, :-1], drawn[:, 1:].copy()
    targets[0, -1] = -100
    return tokens, targets


def _spec(family: str) -> Any:
    found = resolve(family)
    assert isinstance(found, Spec) and found.from_hf is not None
    return found


def _twin(
    family: str, config: Any, found: Any, seed: int, dtype: str, attention: str
) -> tuple[Any, dict[str, np.ndarray]]:
    model = transformers.AutoModelForCausalLM.from_config(found, attn_implementation=attention)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = _draw(name, parameter.shape, generator)
            parameter.copy_(drawn.to(getattr(torch, dtype)))
    model = model.double().eval()
    weights = weights_of(family, config, model.state_dict())
    return model, {name: value.numpy().copy() for name, value in weights.items()}


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Matrices that keep a vector's length about; norms around one; biases around zero."""
    drawn = torch.randn(shape, generator=generator)
    if len(shape) == 2:
        return drawn * shape.numel() ** -0.25
    return 0.1 * drawn + (0.0 if name.endswith("bias") else 1.0)


class _Rotary(torch.nn.Module):
    """Tables in float64, rounded once. transformers has them in float32 whatever the model's dtype:
    good to 1e-7 times the position, while the float64 law asks for 1e-10."""

    def __init__(self, size: int, theta: float) -> None:
        super().__init__()
        self.size, self.theta = size, theta

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        i = torch.arange(0, self.size, 2, dtype=torch.float64)
        angles = position_ids[..., None].double() * self.theta ** (-i / self.size)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class _Norm(LlamaRMSNorm):
    """In float64 where x is; transformers' rounds x to float32 first. Other dtypes are its own."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dtype != torch.float64:
            return super().forward(hidden_states)
        variance = hidden_states.square().mean(-1, keepdim=True)
        return self.weight * hidden_states / torch.sqrt(variance + self.variance_epsilon)


def _keep_float64(model: Any, config: Llama) -> None:
    """Takes out the two places where a float64 Llama of transformers computes in float32."""
    model.model.rotary_emb = _Rotary(config.head_dim or config.width // config.heads, config.theta)
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm | MistralRMSNorm):
            module.__class__ = _Norm  # type: ignore[assignment]
