"""Tensor ops in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archir.ir import Op
from backends.eager.ops.base import emits, number

if TYPE_CHECKING:
    from backends.eager.emit import Printer


@emits("embedding")
def embedding(p: Printer, op: Op) -> str:
    return f"F.embedding({p(op.operands[0])}, {p(op.operands[1])})"


@emits("linear", "logits")
def linear(p: Printer, op: Op) -> str:
    owner = p.linear_owner(op)
    if owner:
        return f"{owner}({p(op.operands[0])})"
    return f"ar.linear({', '.join(p(x) for x in op.operands)})"


@emits("heads")
def heads(p: Printer, op: Op) -> str:
    x, parts, count = p(op.operands[0]), op.attrs["parts"], op.attrs["heads"]
    if parts == 1:
        return f"{x}.unflatten(-1, ({count}, -1))"
    return f"{x}.unflatten(-1, ({parts}, {count}, -1)).unbind(-3)"


@emits("merge")
def merge(p: Printer, op: Op) -> str:
    return f"{p(op.operands[0])}.flatten(-2)"


@emits("split")
def split(p: Printer, op: Op) -> str:
    sizes = [p.dim(s) for s in op.attrs["sizes"]]
    found = f"{p(op.operands[0])}.split([{', '.join(sizes)}], {op.attrs['axis']})"
    return found if len(sizes) > 1 else f"{found}[0]"


@emits("concat")
def concat(p: Printer, op: Op) -> str:
    return f"torch.cat([{', '.join(p(x) for x in op.operands)}], {op.attrs['axis']})"


@emits("reshape")
def reshape(p: Printer, op: Op) -> str:
    return f"{p(op.operands[0])}.reshape({p.shape(op.attrs['shape'])})"


@emits("broadcast_to")
def broadcast_to(p: Printer, op: Op) -> str:
    return f"{p(op.operands[0])}.expand({p.shape(op.attrs['shape'])})"


@emits("repeat")
def repeat(p: Printer, op: Op) -> str:
    times, axis = p.dim(op.attrs["times"]), op.attrs["axis"]
    return f"{p(op.operands[0])}.repeat_interleave({times}, {axis})"


@emits("transpose")
def transpose(p: Printer, op: Op) -> str:
    return f"{p(op.operands[0])}.permute({p.shape(op.attrs['axes'])})"


@emits("expand_dims")
def expand_dims(p: Printer, op: Op) -> str:
    return p(op.operands[0]) + "".join(f".unsqueeze({a})" for a in sorted(op.attrs["axes"]))


@emits("reduce_sum", "reduce_mean", "reduce_max")
def reduce(p: Printer, op: Op) -> str:
    name = {"reduce_sum": "sum", "reduce_mean": "mean", "reduce_max": "amax"}[op.kind]
    keep = ", keepdim=True" if op.attrs.get("keepdims") else ""
    if not op.attrs["axes"]:  # torch would reduce all
        return p(op.operands[0])
    return f"{p(op.operands[0])}.{name}({p.shape(op.attrs['axes'])}{keep})"


@emits("einsum")
def einsum(p: Printer, op: Op) -> str:
    return f'torch.einsum("{op.attrs["equation"]}", {", ".join(p(x) for x in op.operands)})'


@emits("cast")
def cast(p: Printer, op: Op) -> str:
    return f"{p(op.operands[0])}.to({p.dtype(op.attrs['dtype'])})"


@emits("size")
def size(p: Printer, op: Op) -> str:
    return f"torch.tensor({p.dim(op.attrs['dim'])}, {p.factory(op.result)})"


@emits("eye")
def eye(p: Printer, op: Op) -> str:
    return f"torch.eye({p.dim(op.attrs['dim'])}, {p.factory(op.result)})"


@emits("fill")
def fill(p: Printer, op: Op) -> str:
    shape, value = p.shape(op.attrs["shape"]), number(op.attrs["value"])
    return f"torch.full({shape}, {value}, {p.factory(op.result)})"
