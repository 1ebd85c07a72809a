"""The backend `eager`: readable PyTorch, and the reference for speed on a CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import archir.philox
import archir.sequence
from archir import source
from archir.compile import Request, RuleRequest
from archir.diagnostics import UnsupportedError
from archir.ir import Module, Op
from archir.pipeline import Options
from archir.provide import active, mark, named, provided_name
from archir.recurrence import Rule
from archir.types import short_dtype
from backends.api import KernelRecord, KernelRecords, refuse_unsupported
from backends.eager import cache as growing
from backends.eager import provided as table
from backends.eager import support
from backends.eager.emit import emit_program, printed
from backends.eager.names import class_names
from backends.eager.ops import EMIT, UNSUPPORTED
from backends.eager.ops.state import calls_provided
from backends.eager.tree import emit_tree
from backends.runtime import cache, provided, weights
from backends.runtime.model import Model, program_name
from backends.runtime.operator import Operator
from backends.runtime.runner import Runner
from backends.runtime.state import DTYPES


class Eager:
    """Prints a lowered module as PyTorch, one line per op."""

    name = "eager"

    def supports(self, op: Op, module: Module | None = None) -> str | None:
        """None, or why eager does not print this op."""
        if op.kind in EMIT or (module is not None and provided_name(op, module)):
            return None
        return UNSUPPORTED.get(op.kind, f"eager has no emission for {op.kind}")

    def target(self) -> str:
        """Eager code runs wherever torch does."""
        return "any"

    def emit_tree(self, module: Module, title: str) -> dict[str, str]:
        """`modules.py` and the files it imports."""
        return {
            "__init__.py": f'"""{title}, emitted by archir."""\n',
            "support.py": source_of(support),
            "cache.py": source_of(growing),
            "philox.py": source_of(archir.philox),
            "sequence.py": source_of(archir.sequence),
            "modules.py": emit_tree(module, title),
        }

    def emit_program(self, module: Module, traced: Module, title: str, name: str) -> dict[str, str]:
        """`name.py`, the source of a lowered module, all of whose ops are supported."""
        refuse_unsupported(self, printed(module), module)
        call, imports = calls_provided(module)
        emit = {**EMIT, "state_update": call}
        files = {"provided.py": source_of(table)} if imports else {}
        return files | {f"{name}.py": emit_program(module, traced, title, emit, imports)}

    def load(self, folder: Path, name: str) -> ModuleType:
        """An emitted file as a module; what was provided is filled in."""
        if (folder / "provided.py").is_file():
            cache.load(folder, "provided").provided.update(provided.calls())
        return cache.load(folder, name)

    def build(self, request: Request) -> Model:
        """The module tree with meta parameters; programs come at first use."""
        marked = mark(request.module, active(self.name), request.options.dtype)
        options = tuple(str(x) for x in astuple(request.options))
        versions = (torch.__version__, self.target())
        folder = cache.folder(request.name, str(marked), self.name, *options, *versions)
        if not cache.intact(folder / "modules.py"):
            files = self.emit_tree(request.module, request.name)
            cache.write(folder, files | {"modules.py": files.pop("modules.py")})  # says it is whole
        entry = class_names(request.module)[request.module.entry.name]
        root = getattr(self.load(folder, "modules"), entry)
        made = type(root.__name__, (Model, root), {"__doc__": request.spec.doc})
        dtype = DTYPES[short_dtype(request.options.param_dtype or request.options.dtype)]
        model = made(device="meta", dtype=dtype)
        model._attach(request, marked, self, folder)
        return model

    def runner(self, request: Request) -> Runner:
        """A model behind NumPy arrays, for `archir.check`."""
        return Runner(self.build(request))

    def program(
        self, model: Model, phase: str, head: str, layout: str, training: bool
    ) -> Callable[..., Any]:
        """Emits, writes and loads one phase of a model; its entry function."""
        request = model._request
        name = program_name(phase, head, layout, training)
        if not cache.intact(model._folder / f"{name}.py"):
            module = model.lowered(phase, head, layout, training)
            title = f"{request.name}: {phase}, {layout}, head {head}" + ", training" * training
            files = self.emit_program(module, request.module, title, name)
            cache.write(model._folder, files)
        file = self.load(model._folder, name)
        (entry,) = file.__all__
        return getattr(file, entry)

    def open_checkpoint(self, path: Path) -> weights.Checkpoint:
        """Published weights, not yet read: their names, shapes and config."""
        return weights.open_checkpoint(path)

    def load_tokenizer(self, path: Path) -> Any:
        """The tokenizer that lies with published weights."""
        from backends.runtime.tokenizer import load_tokenizer

        return load_tokenizer(path)

    def operator(self, rule: Rule, form: str) -> Operator:
        """A rule as a torch function."""
        return Operator(rule, self, form)

    def package(
        self,
        request: Request | RuleRequest,
        targets: Sequence[str],
        out: Path,
        report: Callable[[str], None],
    ) -> list[Path]:
        """Raises: every op is a torch call, for which nothing is compiled ahead of time."""
        raise UnsupportedError(
            f"{self.name} prints torch calls, and has no kernels to compile for "
            f"{', '.join(targets)}",
            code="target-backend",
            next="add --backend triton, or leave --target out",
        )

    def kernels(self, folder: Path, programs: Iterable[str], device: torch.device) -> KernelRecords:
        """What somebody provided; every other op is a torch call."""
        texts = [(folder / f"{name}.py").read_text() for name in programs]
        names = dict.fromkeys(name for text in texts for name in _CALLED.findall(text))
        found = [
            KernelRecord(
                name=p.name,
                about=f"{p.rule.name}, provided for the rule{_place(p.rule.fn)}",
                runs=f"a function of your own{_place(p.fn)}",
                gradient="its own",
            )
            for p in map(named().__getitem__, names)
        ]
        return KernelRecords(found, len(texts))


def _place(fn: Any) -> str:
    """Where a function is written, in brackets; nothing of what has no code of its own."""
    loc = source.definition(fn)
    return f" ({loc.short})" if loc else ""


# How programs call what somebody provided.
_CALLED = re.compile(r'provided(?:_\d+)?\["([^"]+)"\]\(')


def source_of(module: ModuleType) -> str:
    """A module's source as it lies beside emitted files, which import nothing but torch."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    for name in ("archir.philox", "archir.sequence", "backends.eager.cache"):
        text = text.replace(f"from {name} import", f"from .{name.rpartition('.')[2]} import")
    return text


EAGER = Eager()
__all__ = ["EAGER", "Eager", "Options"]
