"""Norms in torch: float32 statistics inside, one rounding at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archir.ir import Op
from backends.eager.ops.base import emits

if TYPE_CHECKING:
    from backends.eager.emit import Printer


@emits("layer_norm")
def layer_norm(p: Printer, op: Op) -> str:
    return _norm(p, op, "layer_norm")


@emits("rms_norm")
def rms_norm(p: Printer, op: Op) -> str:
    return _norm(p, op, "rms_norm")


def _norm(p: Printer, op: Op, name: str) -> str:
    x, *rest = op.operands
    width = p.dim(p.type(x).shape[-1])
    given = [p(r) for r in rest]
    mixed = any(p.type(r).dtype != p.type(x).dtype for r in rest)
    if mixed:
        wide = p.dtype(p.type(rest[0]).dtype)
        made = f"F.{name}({p(x)}.to({wide}), ({width},), {', '.join(given)}, eps={op.attrs['eps']})"
        return f"{made}.to({p.dtype(p.type(x).dtype)})"
    return f"F.{name}({', '.join([p(x), f'({width},)', *given])}, eps={op.attrs['eps']})"


@emits("l2_norm")
def l2_norm(p: Printer, op: Op) -> str:
    return f"ar.l2_norm({p(op.operands[0])}, eps={op.attrs['eps']})"
