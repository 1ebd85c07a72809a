"""Bytes a kernel says it moves are the bytes that unmasked lanes touch in Triton's interpreter.

With the configuration that runs here, with a target's, and with a dim in several parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

import archir as ar
from archir import dims, types
from archir.ir import Module
from archir.pipeline import lower
from archir.trace import trace_entry
from archir.types import Tensor
from backends.runtime.state import DTYPES
from backends.triton import configurations
from backends.triton.kernel import Kernel
from backends.triton.recurrent import Recurrent, letters
from tests.recurrence.rules import RULES
from tests.recurrence.test_state_update import module_of
from tests.triton.kernels import kernel, loaded

SIZES = ({"B": 1, "T": 3}, {"B": 2, "T": 1})
GRID = {"B": 1, "T": 4}
RAGGED = (((0, 1), (3, 4)), ((1, 3), (3, 3), (3, 4)))


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes that the kernels of the block load and store, masked lanes left out."""
    builder, found = interpreter.interpreter_builder, {"read": 0, "written": 0}
    load, store = builder.create_masked_load, builder.create_masked_store

    def add(side: str, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8 or 1
        found[side] += int(mask.data.sum()) * size

    def masked_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        add("read", pointers, mask)
        return load(pointers, mask, *rest)

    def masked_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        add("written", pointers, mask)
        return store(pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    try:
        yield found
    finally:
        del builder.create_masked_load, builder.create_masked_store


def compare(
    made: Kernel, file: Any, run: Callable[[], Any], layout: str, size: Mapping[str, int]
) -> None:
    """What a launch moves is what `traffic` says of its configuration."""
    with counted() as found:
        run()
    said = made.skeleton.traffic(file.CONFIGS["interpreter"], layout)
    assert [dims.evaluate(side, size) for side in said] == [*found.values()]
    assert found["read"] > 0 and found["written"] > 0


def configs(file: Any, **parts: int) -> Iterator[None]:
    """Puts configurations in the place of the interpreter's, one after another; kernels store
    bfloat16 themselves, as on a GPU, which is cut off here and not rounded."""

    def interpret(kernel: Any, grid: Any, args: Any, made: Any, options: Any) -> None:
        with np.errstate(all="ignore"):
            kernel[grid](*args, **options)

    own, rounding = dict(file.CONFIGS), file.at._interpret
    mine = own.get("interpreter", own["any"])
    file.at._interpret = interpret
    try:
        for config in {str(c): c for c in (mine, own["any"], mine | parts)}.values():
            file.CONFIGS["interpreter"] = config
            yield
    finally:  # a torch op may be of this file from now on
        file.CONFIGS.clear()
        file.CONFIGS.update(own)
        file.at._interpret = rounding


def tensors(shapes: list[Tensor], size: Mapping[str, int]) -> list[torch.Tensor]:
    made = []
    for type_ in shapes:
        shape = [dims.evaluate(d, size) for d in type_.shape]
        x = torch.rand(shape, generator=torch.Generator().manual_seed(len(shape)))
        made.append(x > 0.5 if type_.dtype == "bool" else x.to(DTYPES[type_.dtype]))
    return made


KDA = {
    "q": "B, T, 2, 9", "k": "B, T, 2, 9", "v": "B, T, 2, 6", "g": "B, T, 2, 9", "beta": "B, T, 2",
}  # fmt: skip
QKV = {name: KDA[name] for name in "qkv"}
RECURRENT = {
    "every operand with all heads": ("kda", KDA),
    "grouped": ("kda", KDA | {"v": "B, T, 4, 6", "q": "B, T, 1, 9", "beta": "B, T, 1"}),
    "shared": ("kda", KDA | {"k": "B, T, 9", "beta": "B, T"}),
    "constants": ("kda", KDA | {"g": "2, 9", "v": "B, T, 4, 6", "beta": ""}),
    "two states, one without the split dim": ("ratio", QKV | {"v": "B, T, 4, 6"}),
    "a vector state": ("vector", {"x": "B, T, 3, 9", "a": "B, T, 3, 9"}),
    "everything": ("everything", QKV | {"v": "B, T, 4, 6"}),
}


@pytest.mark.parametrize("case", RECURRENT)
def test_a_recurrence(case: str, tmp_path: Path) -> None:
    name, operands = RECURRENT[case]
    module = lower(module_of(RULES[name], operands), backend="triton", dtype="bfloat16")
    (op,) = (op for op in module.entry.ops if op.kind == "state_update")
    made = kernel(op, module)
    skeleton, file = made.skeleton, loaded(made, tmp_path)
    assert isinstance(skeleton, Recurrent)
    split = skeleton.split
    states = [
        Tensor(skeleton.wide, (dims.symbol("R"), skeleton.heads, *map(skeleton.sizes.get, d)))  # type: ignore[arg-type]
        for d in map(letters, skeleton.states)
    ]
    shapes = [t for _, t, _ in skeleton.given] + states
    for _ in configs(file, **({f"BLOCK_{split}": 2} if split else {})):
        for size in SIZES:
            given = tensors(shapes, size | {"R": size["B"]})
            compare(made, file, lambda: file.run(*given, None, None), "dense", size)  # noqa: B023
        for bounds in RAGGED:
            start, stop = (list(ends) for ends in zip(*bounds))
            rows = {"R": len(bounds), "N": sum(stop) - sum(start)}
            given = tensors(shapes, GRID | rows)
            compare(made, file, lambda: file.run(*given, start, stop), "ragged", rows)  # noqa: B023


POINTWISE: dict[str, tuple[dict[str, str], Callable[..., Any]]] = {
    "two of one shape": (
        {"x": "f[B, T, 40]", "y": "f[B, T, 40]"}, lambda x, y: ar.silu(x) * y,
    ),
    "read again by each token": (
        {"x": "f[B, T, 3, 10]", "w": "F[3, 1]", "b": "F[10]"},
        lambda x, w, b: -ar.exp(w) * ar.softplus(x + b),
    ),
    "read again within a token": (
        {"x": "f[B, T, 3, 10]", "y": "f[B, T, 3, 1]", "z": "f[B, T, 1, 10]"},
        lambda x, y, z: ar.sigmoid(x + y) * z,
    ),
    "a number for all": ({"x": "f[B, T, 7]", "s": "F"}, lambda x, s: ar.exp(x * s) + s),
    "a condition": (
        {"x": "f[B, T, 7]", "y": "f[B, T, 7]"}, lambda x, y: ar.where(x < y, ar.exp(x), y),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", POINTWISE)
def test_a_pointwise_function(case: str, tmp_path: Path) -> None:
    inputs, fn = POINTWISE[case]
    made, shapes = _single(inputs, fn, "pointwise")
    file = loaded(made, tmp_path)
    for _ in configs(file, BLOCK=16):
        for size in SIZES:
            given = tensors(shapes, size)
            compare(made, file, lambda: file.run(*given), "dense", size)  # noqa: B023


@pytest.mark.parametrize("length", [10, 16, 40, 48])
@pytest.mark.parametrize("kind", ["rms_norm", "l2_norm", "layer_norm"])
def test_rows(kind: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that fit a tile of 16, and longer ones."""
    monkeypatch.setattr(configurations, "longest_row", lambda: 16)
    norm = getattr(ar, kind)
    named = {} if kind == "l2_norm" else {"name": "n"}
    fn = lambda x: norm(x, **named)  # noqa: E731
    made, shapes = _single({"x": f"f[B, T, 3, {length}]"}, fn, kind)
    file = loaded(made, tmp_path)
    assert ("for first in range" in made.file) == (length > 16)
    for _ in configs(file, BLOCK_R=4):
        for size in SIZES:
            given = tensors(shapes, size)
            compare(made, file, lambda: file.run(*given), "dense", size)  # noqa: B023


def _single(
    inputs: dict[str, str], fn: Callable[..., Any], kind: str
) -> tuple[Kernel, list[Tensor]]:
    """The kernel of the only op of a kind in a function, in bfloat16, and what it is given."""
    declared: Any = {name: types.parse(text) for name, text in inputs.items()}
    traced: Module = trace_entry(lambda **given: fn(*given.values()), "run", declared, {})
    module = lower(traced, backend="triton", dtype="bfloat16")
    (op,) = (op for op in module.entry.ops if op.kind == kind)
    return kernel(op, module), [v.type for v in op.values if isinstance(v.type, Tensor)]
