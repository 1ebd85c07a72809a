"""State: entries live in the nested dict `state`, one per field."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archir.ir import Module, Op
from archir.provide import provided_name
from backends.eager.names import RESERVED, free, function_names, quoted
from backends.eager.ops.base import Emitter, emits

if TYPE_CHECKING:
    from backends.eager.emit import Printer


@emits("append")
def append(p: Printer, op: Op) -> str:
    cache, x, seq = (p(v) for v in op.operands)
    return f"{cache}.append({x}, {seq})"


@emits("short_conv")
def short_conv(p: Printer, op: Op) -> str:
    """With a window there are two results, without one the first is taken."""
    x, w, *window, seq = (p(v) for v in op.operands)
    given = [x, w, seq, *window]
    if "activation" in op.attrs:
        given.append(f"activation={p.function_name(op.attrs['activation'])}")
    return f"ar.short_conv({', '.join(given)})" + ("" if window else "[0]")


@emits("store")
def store(p: Printer, op: Op) -> list[str]:
    path, value = op.attrs["path"], p(op.operands[0])
    if p.field_kind(path) == "tap":
        return [f"ar.tap(self, {quoted(path)}, {value})"]
    return [f"{p.state(path)} = {value}"]


def calls_provided(module: Module) -> tuple[Emitter, dict[str, str]]:
    """The emission of state updates that somebody provided (`archir.provide`), and the import that
    it needs, by the name it binds; none where a module calls nothing of the kind."""
    alias = free("provided", RESERVED.union(function_names(module).values()))

    def emitter(p: Printer, op: Op) -> str:
        name = provided_name(op, module)
        assert name is not None
        given = ", ".join(p(x) for x in op.operands)
        return f"{alias}[{quoted(name)}]({given}, dtype={p.dtype(p.type(op.results[0]).dtype)})"

    used = any(provided_name(op, module) for function in module.functions for op in function.ops)
    line = "from .provided import provided" + ("" if alias == "provided" else f" as {alias}")
    return emitter, {alias: line} if used else {}
