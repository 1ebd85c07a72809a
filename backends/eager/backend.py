"""The backend `eager`: readable PyTorch, and the reference for speed on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import archir.philox
import archir.sequence
from archir.compile import Request
from archir.ir import Module, Op
from archir.pipeline import Options
from archir.types import short_dtype
from backends.api import refuse_unsupported
from backends.eager import cache as growing
from backends.eager import support
from backends.eager.emit import emit_program, printed
from backends.eager.names import class_names, function_names
from backends.eager.ops import EMIT, UNSUPPORTED
from backends.eager.tree import emit_tree
from backends.runtime import cache, weights
from backends.runtime.model import Model, program_name
from backends.runtime.runner import Runner
from backends.runtime.state import DTYPES


class Eager:
    """Prints a lowered module as PyTorch, one line per op."""

    name = "eager"

    def supports(self, op: Op) -> str | None:
        """None, or why eager does not print this op."""
        if op.kind in EMIT:
            return None
        return UNSUPPORTED.get(op.kind, f"eager has no emission for {op.kind}")

    def target(self) -> str:
        """Eager code runs wherever torch does."""
        return "any"

    def emit_tree(self, module: Module, title: str) -> dict[str, str]:
        """`modules.py` and the files it imports."""
        return {
            "__init__.py": f'"""{title}, emitted by archir."""\n',
            "support.py": _source(support),
            "cache.py": _source(growing),
            "philox.py": _source(archir.philox),
            "sequence.py": _source(archir.sequence),
            "modules.py": emit_tree(module, title),
        }

    def emit_program(self, module: Module, traced: Module, title: str) -> str:
        """The source of a lowered module, all of whose ops are supported."""
        refuse_unsupported(self, printed(module))
        return emit_program(module, traced, title)

    def load(self, folder: Path, name: str) -> ModuleType:
        """An emitted file as a module."""
        return cache.load(folder, name)

    def build(self, request: Request) -> Model:
        """The module tree with meta parameters; programs come at first use."""
        options = tuple(str(x) for x in astuple(request.options))
        versions = (torch.__version__, self.target())
        folder = cache.folder(request.name, str(request.module), self.name, *options, *versions)
        cache.write(folder, self.emit_tree(request.module, request.name))
        entry = class_names(request.module)[request.module.entry.name]
        root = getattr(self.load(folder, "modules"), entry)
        made = type(root.__name__, (Model, root), {"__doc__": request.spec.doc})
        dtype = DTYPES[short_dtype(request.options.param_dtype or request.options.dtype)]
        model = made(device="meta", dtype=dtype)
        model._attach(request, self, folder)
        return model

    def runner(self, request: Request) -> Runner:
        """A model behind NumPy arrays, for `archir.check`."""
        return Runner(self.build(request))

    def program(
        self, model: Model, phase: str, head: str, layout: str, training: bool
    ) -> Callable[..., Any]:
        """Emits, writes and loads one phase of a model; its entry function."""
        request = model._request
        module = model.lowered(phase, head, layout, training)
        name = program_name(phase, head, layout, training)
        title = f"{request.name}: {phase}, {layout}, head {head}" + ", training" * training
        cache.write(model._folder, {f"{name}.py": self.emit_program(module, request.module, title)})
        return getattr(self.load(model._folder, name), function_names(module)[module.entry.name])

    def open_checkpoint(self, path: Path) -> weights.Checkpoint:
        """Published weights, not yet read: their names, shapes and config."""
        return weights.open_checkpoint(path)

    def load_tokenizer(self, path: Path) -> Any:
        """The tokenizer that lies with published weights."""
        from backends.runtime.tokenizer import load_tokenizer

        return load_tokenizer(path)

    def kernels(self) -> tuple[str, ...]:
        """None: every op is a torch call."""
        return ()


def _source(module: ModuleType) -> str:
    """A module's source as it lies beside emitted files, which import nothing but torch."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    for name in ("archir.philox", "archir.sequence", "backends.eager.cache"):
        text = text.replace(f"from {name} import", f"from .{name.rpartition('.')[2]} import")
    return text


EAGER = Eager()
__all__ = ["EAGER", "Eager", "Options"]
