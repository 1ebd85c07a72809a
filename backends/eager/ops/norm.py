"""Norms in torch: float32 statistics inside, one rounding at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archir import types
from archir.ir import Op
from backends.eager.ops.base import emits, number

if TYPE_CHECKING:
    from backends.eager.emit import Printer


@emits("layer_norm")
def layer_norm(p: Printer, op: Op) -> str:
    return _norm(p, op, "layer_norm")


@emits("rms_norm")
def rms_norm(p: Printer, op: Op) -> str:
    return _norm(p, op, "rms_norm")


def _norm(p: Printer, op: Op, name: str) -> str:
    own = p.type(op.operands[0]).dtype
    wide = types.promote(*(p.type(x).dtype for x in op.operands))
    x, *rest = (p(x) + _cast(p, p.type(x).dtype, wide) for x in op.operands)
    size = p.shape(p.type(op.operands[0]).shape[-1:])
    made = f"F.{name}({', '.join([x, size, *rest])}, eps={number(op.attrs['eps'])})"
    return made + _cast(p, wide, own)


def _cast(p: Printer, have: str, want: str) -> str:
    return "" if have == want else f".to({p.dtype(want)})"


@emits("l2_norm")
def l2_norm(p: Printer, op: Op) -> str:
    return f"ar.l2_norm({p(op.operands[0])}, eps={number(op.attrs['eps'])})"
