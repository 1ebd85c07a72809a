"""Random inputs, weights and states for a module: what differential checks run on."""

from __future__ import annotations

from typing import Any

import numpy as np

from archir import dims, types
from archir.ir import Field, Init, Module, fields, scopes
from archir.types import Tensor


def vocabulary(module: Module) -> int:
    """The number of rows of the smallest table that integer inputs of the entry may index."""
    sizes = [
        op.values[1].type.shape[0]
        for _, function in scopes(module)
        for op in function.ops
        if op.kind == "embedding"
        and isinstance(op.values[1].type, Tensor)
        and op.values[0] in module.entry.inputs
    ]
    return min((s for s in sizes if isinstance(s, int)), default=16)


def draw(name: str, seed: int, init: Init, shape: tuple[int, ...]) -> np.ndarray:
    """One tensor in float32 from (seed, name): whatever the device, rank or order (D18)."""
    import hashlib

    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    match init.kind, init.args:
        case "normal", (std,):
            return rng.standard_normal(shape, np.float32) * np.float32(std)
        case "uniform", (low, high):
            return rng.random(shape, np.float32) * np.float32(high - low) + np.float32(low)
        case "log_uniform", (low, high):
            return np.log(rng.uniform(low, high, shape)).astype(np.float32)
        case "constant", (value,):
            return np.full(shape, value, np.float32)
        case "zeros", ():
            return np.zeros(shape, np.float32)
        case "ones", ():
            return np.ones(shape, np.float32)
    raise ValueError(f"unknown init {init}")


def random_weights(module: Module, seed: int = 0, perturb: float = 0.1) -> dict[str, np.ndarray]:
    """Weights and buffers by path: their init plus noise, so that zeros and ones are tested too."""
    made = {}
    for path, field in {**fields(module, "weight"), **fields(module, "buffer")}.items():
        shape = _shape(field)
        base = draw(path, seed, field.attrs["init"], shape)
        noise = draw(path, seed + 1_000_003, Init("normal", (perturb,)), shape)
        made[path] = (base + noise).astype(np.float32)
    return made


def _shape(field: Field) -> tuple[int, ...]:
    assert isinstance(field.value.type, Tensor)
    return tuple(dims.evaluate(s, {}) for s in field.value.type.shape)


def random_inputs(
    module: Module, seed: int = 0, sizes: dict[str, int] | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray] | None]:
    """Inputs of the entry, weights, and a state that has seen some tokens (None where stateless)."""
    binding = {"B": 2, "T": 5, "R": 2, "P": 3, "H": 2, "K": 4, "V": 6, **(sizes or {})}
    rng = np.random.default_rng(seed)
    inputs: dict[str, Any] = {}
    top = vocabulary(module)
    for value in module.entry.inputs:
        assert isinstance(value.type, Tensor)
        shape = tuple(dims.evaluate(d, binding) for d in value.type.shape)
        if types.is_float(value.type.dtype):
            inputs[value.name] = rng.standard_normal(shape) * 0.5
        else:
            inputs[value.name] = rng.integers(0, top, shape)
    states = fields(module, "state")
    if not states:
        return inputs, random_weights(module, seed), None
    state = {}
    for path, field in states.items():
        assert isinstance(field.value.type, Tensor)
        shape = tuple(dims.evaluate(d, binding) for d in field.value.type.shape)
        if field.attrs.get("kind") == "length":
            state[path] = np.full(shape, binding["P"], np.int64)
        else:
            state[path] = rng.standard_normal(shape) * 0.5
    return inputs, random_weights(module, seed), state
