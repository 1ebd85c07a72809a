"""canonicalize: dead ops go, equal ops become one. Fields stay (D11).

    a = exp(x);  b = exp(x);  c = log(x);  y = add(a, b)
  → a = exp(x);  y = add(a, a)

Ops that write and calls that reach one are never dropped or merged.
"""

from __future__ import annotations

from dataclasses import replace

from archir.ir import Function, Module, Op, Value, rebuild
from archir.ops import lookup
from archir.passes.rewrite import Rewriter, rewrite
from archir.text import print_op


def canonicalize(module: Module) -> Module:
    """Removes what no output, store or tap can see, and merges equal pure ops."""
    return merge(drop_dead(module))


def writers(module: Module) -> set[str]:
    """Functions that store something, themselves or through a call."""
    found: set[str] = set()
    for function in module.functions:
        if any(lookup(op.kind).effect or set(op.refs()) & found for op in function.ops):
            found.add(function.name)
    return found


def drop_dead(module: Module) -> Module:
    """Removes pure ops whose results nothing reads."""
    writing = writers(module)

    def change(function: Function) -> Function:
        needed = set(function.outputs)
        kept: list[Op] = []
        for op in reversed(function.ops):
            writes = lookup(op.kind).effect or bool(set(op.refs()) & writing)
            if writes or needed & set(op.results):
                needed |= set(op.values)
                kept.append(op)
        return replace(function, ops=tuple(reversed(kept)))

    return rebuild(module, change)


def merge(module: Module) -> Module:
    """One op for all that compute the same in a function, calls and writes aside."""
    seen: dict[tuple[str, str], tuple[Value, ...]] = {}

    def visit(new: Rewriter, op: Op) -> bool:
        if op.kind == "call" or lookup(op.kind).effect or not op.results:
            return False
        operands = ", ".join(str(getattr(new[x], "name", x)) for x in op.operands)
        # results' names are left out of the key: two ops are equal when they compute the same
        right = print_op(Op(op.kind, (), (), op.attrs))
        key = (new.old.name, f"{right}({operands})")
        if key in seen:
            new.values.update(zip(op.results, seen[key], strict=True))
            return True
        seen[key] = new.copy(op)
        return True

    return rewrite(module, visit)
