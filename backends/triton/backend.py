"""The backend `triton`: eager's PyTorch, with Triton kernels where one op is worth a kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from archir.compile import Request, RuleRequest
from archir.ir import Module, Op
from archir.pipeline import lower
from archir.provide import provided_name
from backends.api import KernelRecord, KernelRecords, refuse_unsupported
from backends.eager import provided as table
from backends.eager.backend import Eager, source_of
from backends.eager.emit import Printer, emit_program, printed
from backends.eager.names import RESERVED, free, function_names, quoted
from backends.eager.ops import EMIT
from backends.eager.ops.state import calls_provided
from backends.triton import launch
from backends.triton.kernel import Kernel, kernel_of, takes_rows
from backends.triton.ops import KERNELS, LEFT_TO_TORCH, skeleton_of


class Triton(Eager):
    """Prints kernels for recurrences, norms and fused elementwise ops; the rest as eager does."""

    name = "triton"

    def supports(self, op: Op, module: Module | None = None) -> str | None:
        """None, or why the op must be fused or expanded before it is printed."""
        if op.kind in LEFT_TO_TORCH:
            return None if op.kind in EMIT else f"eager has no emission for {op.kind}"
        if op.kind not in KERNELS:
            return f"triton has no kernel for {op.kind}, and does not leave it to torch"
        if op.kind in EMIT:  # torch runs it where there is no kernel
            return None
        if module is not None and provided_name(op, module):
            return None
        return KERNELS[op.kind].refusal(op, module) or None

    def emit_tree(self, module: Module, title: str) -> dict[str, str]:
        """Eager's files, and what kernel files call."""
        return super().emit_tree(module, title) | {"launch.py": source_of(launch)}

    def emit_program(self, module: Module, traced: Module, title: str, name: str) -> dict[str, str]:
        """A file per kernel, then the program that calls them."""
        refuse_unsupported(self, printed(module), module)
        found = Kernels(module)
        emit = {**EMIT, **dict.fromkeys(KERNELS, found.call)}
        imports = {"at": "from . import launch as at"} if found.aliases else {}
        imports |= found.provided
        imports |= {
            alias: f"from .{op_name} import call as {alias}"
            for op_name, alias in found.aliases.items()
        }
        files = {"provided.py": source_of(table)} if found.provided else {}
        files |= {f"{kernel.name}.py": kernel.file for kernel in found.kernels.values()}
        text = emit_program(module, traced, title, emit, imports) + _left_to_torch(module, traced)
        return files | {f"{name}.py": text}

    def kernels(self, folder: Path, programs: Iterable[str], device: Any) -> KernelRecords:
        """The kernels that programs import, the recurrences that they leave to torch, and what
        somebody provided."""
        programs = [*programs]
        texts = [(folder / f"{name}.py").read_text() for name in programs]
        names = dict.fromkeys(name for text in texts for name in _IMPORTED.findall(text))
        runs = "its torch version: there is no GPU here, and TRITON_INTERPRET is not set"
        if names and self.load(folder, "launch").INTERPRETED:
            runs = "the kernel, in Triton's interpreter"
        elif device.type == "cuda":
            runs = "the kernel, on the GPU"
        found = [
            KernelRecord(
                name=name,
                about=(self.load(folder, name).__doc__ or "").partition(".\n")[0],
                runs=runs,
                gradient="its torch version, run again",
            )
            for name in names
        ]
        for program in programs:
            left = getattr(self.load(folder, program), "LEFT_TO_TORCH", {})
            found += [
                KernelRecord(name, about, runs=f"torch: {reason}", gradient="torch's own")
                for name, (about, reason) in left.items()
            ]
        records = dict.fromkeys([*found, *super().kernels(folder, programs, device)])
        return KernelRecords(records, len(programs))

    def package(
        self,
        request: Request | RuleRequest,
        targets: Sequence[str],
        out: Path,
        report: Callable[[str], None],
    ) -> list[Path]:
        """A folder with the programs, and every kernel compiled for each target."""
        from backends.triton.ahead import write_package

        return write_package(self, request, targets, out, report)


class Kernels:
    """The kernels of a lowered module.

    kernels: by the name of their torch op.  aliases: what the program calls them.  provided: what
    it imports to call those that somebody provided.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._call_provided, self.provided = calls_provided(module)
        self.kernels: dict[str, Kernel] = {}
        self.aliases: dict[str, str] = {}
        self._of: dict[Op, str] = {}
        taken = {"at", *RESERVED, *function_names(module).values()}
        for function in printed(module):
            for op in function.ops:
                skeleton = None if provided_name(op, module) else skeleton_of(op, module)
                if skeleton is None:
                    continue
                kernel = kernel_of(skeleton)
                self._of[op] = kernel.name
                if kernel.name not in self.kernels:
                    self.kernels[kernel.name] = kernel
                    self.aliases[kernel.name] = free(skeleton.stem, taken)
                    taken.add(self.aliases[kernel.name])

    def call(self, p: Printer, op: Op) -> str | list[str]:
        """An emitter: the call of an op's kernel, or what eager prints."""
        if provided_name(op, self._module):
            return self._call_provided(p, op)
        if op not in self._of:
            return EMIT[op.kind](p, op)
        *tensors, last = op.values
        given = [p(x) for x in tensors]
        given.append(f"*at.rows({p(last)})" if takes_rows(op) else p(last))
        return f"{self.aliases[self._of[op]]}({', '.join(given)})"


def _left_to_torch(module: Module, traced: Module) -> str:
    """What ends a program in which a rule's recurrence was written as torch ops: the reason.

    LEFT_TO_TORCH = {
        "catty": ("a recurrence (rule at cc.py:5)",
            "concat of catty (cc.py:7) has no form on tiles"),
    }
    """
    ops = [op for function in module.functions for op in function.ops]
    kept = {op.attrs["rule"].name for op in ops if op.kind == "state_update"}
    scans = [op.attrs["body"].name for op in ops if op.kind == "scan"]
    chunks = {op.attrs.get("chunk") for op in ops if op.kind == "steps"} - {None}
    form = "parallel" if "whole" in chunks else "chunk" if chunks else "recurrent"
    rules = {op.attrs["rule"].name for f in traced.functions for op in f.ops if _updates(op)}
    left = {r for r in rules - kept if any(name.startswith(f"{r}_") for name in scans)}
    if not left:
        return ""
    lines = {}
    explicit = lower(traced, stage="form", form="recurrent")  # its states are operands
    for op in (op for function in explicit.functions for op in function.ops if _updates(op)):
        rule = explicit[op.attrs["rule"].name]
        if rule.name in left:
            refusal = KERNELS[op.kind].refusal
            formed = replace(op, attrs={**op.attrs, "form": form})
            reason = refusal(op, explicit) or refusal(formed, explicit)
            place = f" (rule at {rule.loc.short})" if rule.loc else ""
            lines[rule.name] = (
                f"    {quoted(rule.name)}: ({quoted('a recurrence' + place)},\n"
                f"        {quoted(reason)}),\n"
            )
    about = "# Recurrences that torch runs, and why they have no kernel."
    return f"\n\n{about}\nLEFT_TO_TORCH = {{\n{''.join(lines.values())}}}\n"


def _updates(op: Op) -> bool:
    return op.kind == "state_update"


# How programs import a kernel.
_IMPORTED = re.compile(r"^from \.(\w+) import call as ", re.M)
TRITON = Triton()


def kernels_of(module: Module) -> dict[str, Any]:
    """The kernels of a lowered module by name."""
    return Kernels(module).kernels
