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


@emits("store")
def store(p: Printer, op: Op) -> list[str]:
    path, value = op.attrs["path"], p(op.operands[0])
    if p.field_kind(path) == "tap":
        return [f"ar.tap(self, {quoted(path)}, {value})"]
    return [f"{p.state(path)} = {value}"]
