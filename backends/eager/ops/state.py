"""State: entries live in the nested dict `state`, one per field."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archir.ir import Op
from backends.eager.names import quoted
from backends.eager.ops.base import emits

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
