"""Running products, places and substitution in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archir.ir import Op
from backends.eager.ops.base import emits

if TYPE_CHECKING:
    from backends.eager.emit import Printer


@emits("cumprod")
def cumprod(p: Printer, op: Op) -> str:
    x, axis = op.values[0], op.attrs["axis"]
    short = isinstance(p.type(x).shape[axis], int)
    return f"ar.{'cumprod' if short else 'long_cumprod'}({p(x)}, {axis})"


@emits("iota")
def iota(p: Printer, op: Op) -> str:
    return f"torch.arange({p.dim(op.attrs['dim'])}, {p.factory(op.result)})"


@emits("substitute")
def substitute(p: Printer, op: Op) -> str:
    return f"ar.substitute({', '.join(p(x) for x in op.operands)})"
