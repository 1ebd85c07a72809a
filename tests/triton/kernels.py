"""Kernels of single ops, as files that can be called."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from archir.ir import Function, Module, Op
from archir.pipeline import lower
from backends.runtime import cache
from backends.triton.backend import TRITON
from backends.triton.kernel import Kernel, kernel_of
from backends.triton.ops import skeleton_of

EMPTY = Module((Function("nothing", (), (), (), (), "entry"),))


def kernel(op: Op, module: Module) -> Kernel:
    """The kernel of an op, which must have one."""
    skeleton = skeleton_of(op, module)
    assert skeleton is not None, TRITON.supports(op, module)
    return kernel_of(skeleton)


def lowered(module: Module, kind: str) -> tuple[Op, Module]:
    """The only op of a kind in a traced module, lowered for Triton in float32."""
    low = lower(module, "full", backend="triton")
    (op,) = (op for op in low.entry.ops if op.kind == kind)
    return op, low


def loaded(made: Kernel, folder: Path) -> ModuleType:
    """The file of a kernel, with what it imports beside it."""
    cache.write(folder, TRITON.emit_tree(EMPTY, "a kernel"))
    cache.write(folder, {f"{made.name}.py": made.file})
    return TRITON.load(folder, made.name)


def surrounded(x: torch.Tensor, stride: int = 0) -> torch.Tensor:
    """The same values amid NaN: before and after, and between tokens where a stride is given.

    stride: elements from token to token, of a tensor [B, T, …]."""
    if not x.is_floating_point():
        return x
    pad, lead = 37, x.shape[:2] if stride else ()
    inner = x.shape[len(lead) :]
    width = max(stride, inner.numel()) if stride else x.numel()
    room = torch.full((2 * pad + width * max(lead.numel() if stride else 1, 1),), torch.nan)
    room = room.to(x.dtype)
    strides = torch.empty(inner, device="meta").stride()
    if stride:
        strides = (lead[1] * width, width, *strides)
    made = room.as_strided(x.shape, strides, pad)
    return made.copy_(x)


class Surroundings:
    """Stands for `empty` of a kernel file: memory amid NaN, which must still be NaN afterwards."""

    def __init__(self, empty: Any) -> None:
        self.empty, self.rooms = empty, []

    def __call__(self, *args: Any) -> Any:
        made = self.empty(*args)
        found = made if isinstance(made, tuple) else (made,)
        placed = []
        for x in found:
            room = torch.full((x.numel() + 256,), torch.nan, dtype=x.dtype)
            view = room[128 : 128 + x.numel()].view(x.shape)
            if self.zeros(args):
                view.zero_()
            self.rooms.append(room)
            placed.append(view)
        return tuple(placed) if isinstance(made, tuple) else placed[0]

    @staticmethod
    def zeros(args: tuple[Any, ...]) -> bool:
        """Whether the file asks for zeros: where rows are given, at tokens that none owns."""
        return isinstance(args[-1], list)

    def check(self) -> None:
        """Everything inside was written, nothing outside."""
        for room in self.rooms:
            assert room[:128].isnan().all() and room[-128:].isnan().all(), "written outside"
            assert not room[128:-128].isnan().any(), "not written"
