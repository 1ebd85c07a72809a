"""What a backend offers, and what it is given.

A backend is an object under the entry point `archir.backends`. It turns lowered modules into source
files for people, loads them, and builds the `nn.Module` tree they run on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, Self

from archir.compile import Request, RuleRequest
from archir.diagnostics import UnsupportedError
from archir.ir import Function, Module, Op
from archir.recurrence import Rule


@dataclass(frozen=True)
class KernelRecord:
    """What runs beyond torch calls, or is a recurrence without a kernel: its name, what it
    computes, what runs it, and what gives its gradient."""

    name: str
    about: str
    runs: str
    gradient: str

    def __str__(self) -> str:
        return f"{self.name}: {self.about}\n  runs: {self.runs}\n  gradient: {self.gradient}"


class KernelRecords(tuple[KernelRecord, ...]):
    """Kernels of some programs, which print one below the other; without programs, that they come
    at first use."""

    programs: int

    def __new__(cls, records: Iterable[KernelRecord], programs: int) -> Self:
        """programs: how many the records are of."""
        made = super().__new__(cls, records)
        made.programs = programs
        return made

    def __str__(self) -> str:
        if not self.programs:
            return "nothing has run yet: programs, and their kernels, are made at the first call"
        return "\n".join(map(str, self)) or "every op is a torch call"

    __repr__ = __str__


class Backend(Protocol):
    """The interface of a backend."""

    name: str

    def supports(self, op: Op, module: Module | None = None) -> str | None:
        """None where the backend has an emission for the op, else the reason. The module has the
        functions that the op carries."""
        ...

    def emit_tree(self, module: Module, title: str) -> dict[str, str]:
        """File name → source of the module tree of a traced module, and what it imports."""
        ...

    def emit_program(self, module: Module, traced: Module, title: str, name: str) -> dict[str, str]:
        """File name → source of one lowered module: `name.py` has plain functions on the tree, and
        offers the entry (`__all__`); files that it imports stand before it."""
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

    def operator(self, rule: Rule, form: str) -> Any:
        """A rule as a torch function: what `archir.op` returns."""
        ...

    def kernels(self, folder: Path, programs: Iterable[str], device: Any) -> KernelRecords:
        """What runs beyond torch calls in programs of a folder, on a device, and each recurrence
        that was left to torch, with the reason."""
        ...

    def package(
        self,
        request: Request | RuleRequest,
        targets: Sequence[str],
        out: Path,
        report: Callable[[str], None],
    ) -> list[Path]:
        """Writes what is asked for into a folder, its kernels compiled for targets that need not be
        there; the files. The folder needs archir no more. `report` is told each step."""
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


def refuse_unsupported(backend: Backend, functions: Iterable[Function], module: Module) -> None:
    """Raises UnsupportedError at the first op of a module's functions that a backend has no
    emission for."""
    for function in functions:
        for op in function.ops:
            reason = backend.supports(op, module)
            if reason is not None:
                raise UnsupportedError(
                    f"{backend.name} cannot emit {op.kind} in {function.name}: {reason}",
                    code="op-unsupported",
                    loc=op.loc,
                    next="write it with other ops, or compile for another backend",
                )
