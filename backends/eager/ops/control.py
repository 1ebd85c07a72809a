"""Calls, scans and guards in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archir.ir import Op
from backends.eager.ops.base import emits

if TYPE_CHECKING:
    from backends.eager.emit import Printer


@emits("call")
def call(p: Printer, op: Op) -> str:
    callee, scope = op.attrs["callee"], op.attrs["scope"]
    given = [p.function_name(callee), *(p(x) for x in op.operands)]
    if p.draws(callee):
        given.append("seed")
    if p.has_state(callee):
        given.append(p.state(scope))
    return f"{p.member(scope)}({', '.join(given)})"


@emits("scan")
def scan(p: Printer, op: Op) -> list[str]:
    """A `for` over the first axis of the scanned operands."""
    carry, xs = op.attrs["carry"], op.attrs["xs"]
    scanned = [p(x) for x in op.operands[carry : carry + xs]]
    consts = [p(x) for x in op.operands[carry + xs :]]
    starts = [p(x) for x in op.operands[:carry]]
    carried = [p.define(v, reuse=False) for v in op.results[:carry]]
    stacked = [p.define(v, reuse=False) for v in op.results[carry:]]
    step = p.fresh("t")
    each = [p.fresh(f"{s}_{step}") for s in stacked]
    inner = [*carried, *(f"{x}[{step}]" for x in scanned), *consts]
    lines = [f"{c} = {s}" for c, s in zip(carried, starts, strict=True) if c != s]
    lines += [f"{s} = []" for s in stacked]
    lines.append(f"for {step} in range({scanned[0]}.shape[0]):")
    body = p.function_name(op.attrs["body"])
    lines.append(f"    {', '.join([*carried, *each])} = {body}({', '.join(inner)})")
    lines += [f"    {s}.append({e})" for s, e in zip(stacked, each, strict=True)]
    lines += [
        f"{s} = ar.stack({s}, {p.shape(p.type(v).shape[1:])}, {p.factory(v)})"
        for s, v in zip(stacked, op.results[carry:], strict=True)
    ]
    return lines


@emits("by_length")
def by_length(p: Printer, op: Op) -> str:
    given = ", ".join(p(x) for x in op.operands)
    short, long = (p.function_name(op.attrs[k]) for k in ("short", "long"))
    size = p.dim(op.attrs["size"])
    return f"({short} if {size} < {op.attrs['below']} else {long})({given})"
