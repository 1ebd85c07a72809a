"""Random inputs, weights and states for a module: what differential checks run on."""

from __future__ import annotations

from typing import Any

import numpy as np

from archir import dims, types
from archir.dims import Poly
from archir.draw import draw
from archir.ir import Field, Init, Module, fields, scopes
from archir.types import List, Tensor, Type


def vocabulary(module: Module, default: int = 16) -> int:
    """The number of rows of the smallest table that inputs of the entry index; else `default`."""
    sizes = [
        op.values[1].type.shape[0]
        for _, function in scopes(module)
        for op in function.ops
        if op.kind == "embedding"
        and isinstance(op.values[1].type, Tensor)
        and op.values[0] in module.entry.inputs
    ]
    return min((s for s in sizes if isinstance(s, int)), default=default)


def context(module: Module) -> int | None:
    """The largest number of tokens of a row the module takes: the least limit of its positions."""
    limits = [op.attrs["limit"] for f in module.functions for op in f.ops if "limit" in op.attrs]
    return min(limits, default=None)


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


def _array(type_: Type) -> tuple[str, tuple[int | Poly, ...]]:
    """Dtype and sizes of the array that stands for a type: a list is stacked."""
    if isinstance(type_, List):
        return type_.element.dtype, (type_.count, *type_.element.shape)
    assert isinstance(type_, Tensor)
    return type_.dtype, type_.shape


def random_inputs(
    module: Module, seed: int = 0, sizes: dict[str, int] | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray] | None]:
    """Inputs of the entry, weights, and a state that has seen tokens (None where stateless)."""
    binding = {"B": 2, "T": 5, "R": 2, "P": 3, "N": 3, "H": 2, "K": 4, "V": 6, **(sizes or {})}
    rng = np.random.default_rng(seed)
    inputs: dict[str, Any] = {}
    top = vocabulary(module)
    for value in module.entry.inputs:
        dtype, axes = _array(value.type)
        shape = tuple(dims.evaluate(d, binding) for d in axes)
        if types.is_float(dtype):
            inputs[value.name] = rng.standard_normal(shape) * 0.5
        else:
            inputs[value.name] = rng.integers(0, 2 if dtype == "bool" else top, shape)
    for op in module.entry.ops:
        if op.kind == "ragged":
            start, stop = (value.name for value in op.values[1:3])
            row = np.arange(binding["R"])
            inputs[start] = row * binding["T"]
            inputs[stop] = inputs[start] + np.maximum(binding["T"] - 2 * row, 0)
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
