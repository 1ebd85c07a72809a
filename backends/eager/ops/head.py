"""Logits and the chunked loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archir.ir import Op
from backends.eager.ops.base import emits

if TYPE_CHECKING:
    from backends.eager.emit import Printer


@emits("logits")
def logits(p: Printer, op: Op) -> str:
    owner = p.linear_owner(op)
    if owner:
        return f"{owner}({p(op.operands[0])})"
    return f"ar.linear({', '.join(p(x) for x in op.operands)})"


@emits("cross_entropy")
def cross_entropy(p: Printer, op: Op) -> str:
    tail = f", tail={p.function_name(op.attrs['tail'])}" if "tail" in op.attrs else ""
    return f"ar.cross_entropy({', '.join(p(x) for x in op.operands)}{tail})"
