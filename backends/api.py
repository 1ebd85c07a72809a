"""What a backend offers, and what it is given.

A backend is an object under the entry point `archir.backends`. It turns lowered modules into source
files for people, loads them, and builds the `nn.Module` tree they run on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from archir.compile import Request
from archir.diagnostics import UnsupportedError
from archir.ir import Function, Module, Op


class Backend(Protocol):
    """The interface of a backend."""

    name: str

    def supports(self, op: Op) -> str | None:
        """None where the backend has an emission for the op, else the reason."""
        ...

    def emit_tree(self, module: Module, title: str) -> dict[str, str]:
        """File name → source of the module tree of a traced module, and what it imports."""
        ...

    def emit_program(self, module: Module, traced: Module, title: str) -> str:
        """The source of one lowered module: plain functions on the tree."""
        ...

    def load(self, folder: Path, name: str) -> ModuleType:
        """Imports one emitted file as a real module."""
        ...

    def target(self) -> str:
        """What the emitted code runs on, as part of the cache key: `cpu`, `sm_90`, …"""
        ...

    def build(self, request: Request) -> Any:
        """An `nn.Module` with meta parameters that runs every phase."""
        ...

    def program(
        self, model: Any, phase: str, head: str, layout: str, training: bool
    ) -> Callable[..., Any]:
        """The entry function of one phase of a built model: lowered, emitted and loaded."""
        ...

    def kernels(self) -> tuple[str, ...]:
        """What runs beyond torch calls."""
        ...

    def runner(self, request: Request) -> Any:
        """The same model behind NumPy arrays: an `archir.check.machines.Machine`."""
        ...

    def open_checkpoint(self, path: Path) -> Any:
        """Published weights, not yet read: `config`, `convention`, `tensors` by name."""
        ...

    def load_tokenizer(self, path: Path) -> Any:
        """The tokenizer that lies with published weights: `encode`, `stream`, `eos_ids`."""
        ...


def refuse_unsupported(backend: Backend, functions: Iterable[Function]) -> None:
    """Raises UnsupportedError at the first op that a backend has no emission for."""
    for function in functions:
        for op in function.ops:
            reason = backend.supports(op)
            if reason is not None:
                raise UnsupportedError(
                    f"{backend.name} cannot emit {op.kind} in {function.name}: {reason}",
                    code="op-unsupported",
                    loc=op.loc,
                    next="write it with other ops, or compile for another backend",
                )
