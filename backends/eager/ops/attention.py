"""Sequences and attention: calls of the support file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archir.ir import Op, Ref
from backends.eager.names import quoted
from backends.eager.ops.base import emits, number

if TYPE_CHECKING:
    from backends.eager.emit import Printer


@emits("dense", "ragged", "last", "mask_targets")
def sequence(p: Printer, op: Op) -> str:
    return f"ar.{op.kind}({', '.join(p(x) for x in op.operands)})"


@emits("steps", "unsteps")
def steps(p: Printer, op: Op) -> str:
    return f"ar.{op.kind}({', '.join(p(x) for x in op.operands)}{_chunk(op)})"


@emits("valid")
def valid(p: Printer, op: Op) -> str:
    return f"ar.valid({p(op.operands[0])}, {p.device()}{_chunk(op)})"


def _chunk(op: Op) -> str:
    chunk = op.attrs.get("chunk", 0)
    said = quoted(chunk) if isinstance(chunk, str) else chunk
    return f", chunk={said}" if chunk else ""


@emits("advance")
def advance(p: Printer, op: Op) -> str:
    return f"{p(op.operands[0])}.lengths"


@emits("positions")
def positions(p: Printer, op: Op) -> str:
    limit = f", limit={number(op.attrs['limit'])}" if "limit" in op.attrs else ""
    return f"ar.positions({', '.join(p(x) for x in op.operands)}{limit})"


@emits("rotary")
def rotary(p: Printer, op: Op) -> str:
    theta = number(op.attrs["theta"])
    return f"ar.rotary({', '.join(p(x) for x in op.operands)}, theta={theta})"


@emits("attention")
def attention(p: Printer, op: Op) -> str:
    named = {k: v for k, v in op.attrs.items() if k != "form"}
    said = ", ".join(f"{k}={_said(p, v)}" for k, v in named.items())
    return f"ar.attention({', '.join(p(x) for x in op.operands)}, {said})"


def _said(p: Printer, value: object) -> str:
    if isinstance(value, Ref):
        return p.function_name(value)
    return quoted(value) if isinstance(value, str) else number(value)
