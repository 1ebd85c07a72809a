"""The chunked loss; logits print as any linear op (`tensor.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archir.ir import Op
from backends.eager.ops.base import emits

if TYPE_CHECKING:
    from backends.eager.emit import Printer


@emits("cross_entropy")
def cross_entropy(p: Printer, op: Op) -> str:
    tail = f", tail={p.function_name(op.attrs['tail'])}" if "tail" in op.attrs else ""
    return f"ar.cross_entropy({', '.join(p(x) for x in op.operands)}{tail})"
