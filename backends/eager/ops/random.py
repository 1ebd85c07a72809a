"""Dropout: a call of the support file, which makes the interpreter's mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archir.ir import Op
from backends.eager.ops.base import emits, number

if TYPE_CHECKING:
    from backends.eager.emit import Printer


@emits("dropout")
def dropout(p: Printer, op: Op) -> str:
    x, *key = (p(v) for v in op.operands)
    return f"ar.dropout({x}, {key[0]}, {number(op.attrs['rate'])})" if key else x
