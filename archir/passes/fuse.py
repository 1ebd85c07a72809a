"""fuse: what one kernel can compute becomes one op, where the backend has such a kernel.

    a = silu(gate);  y = mul(a, up)                   → y = pointwise(gate, up, fn=silu_mul)
    q_1 = cast(q, dtype="f32");  o, S_1 = state_update(q_1, …, rule=r)
    o_1 = cast(o, dtype="bf16")                       → o_1, S_1 = state_update(q, …, dtype="bf16")

A group of elementwise ops and casts is computed in float32 at least and rounded once; its function
stays in the module, so that the interpreter can run it. An op joins the group of its readers when
all of them are in one, so no cycle can arise; what is smaller than the result is computed again for
each element that it meets.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from archir import types
from archir.ir import Function, Module, Op, Operand, Ref, Value, callees_first
from archir.ops import lookup
from archir.ops.state import state_axes
from archir.passes.canonicalize import drop_dead
from archir.passes.rewrite import Rewriter
from archir.types import Tensor

Keeps = Callable[[Op, Module], bool]


def fuse(module: Module, keeps: Keeps) -> Module:
    """keeps: whether the backend takes an op of a module as it is."""
    functions: dict[str, Function] = {}
    known: dict[str, str] = {}
    for function in module.functions:
        if function.role in ("entry", "block"):
            function = _absorb_casts(function, functions, module, keeps)
            function = _fuse_elementwise(function, functions, known, keeps)
        functions[function.name] = function
    return drop_dead(Module(callees_first(functions, module.entry.name)))


# ---- elementwise ops


def _fuse_elementwise(
    function: Function, functions: dict[str, Function], known: dict[str, str], keeps: Keeps
) -> Function:
    """known: fused functions so far, by their text without names."""
    new = Rewriter(function, functions)
    new.keep_signature()
    fused: dict[Op, Function] = {}
    inside: set[Op] = set()
    groups = _groups(function)
    for root, group in groups.items():
        body = _scalars(group, functions)
        if keeps(_pointwise(root, group, body.name), Module((*functions.values(), body))):
            fused[root] = body
            inside |= {*group} - {root}
    for op in function.ops:
        if op in fused:
            body = fused[op]
            name = known[_anonymous(body)] = known.get(_anonymous(body)) or new.add_function(body)
            new.copy(_pointwise(op, groups[op], name))
        elif op not in inside:
            new.copy(op)
    return new.finish()


def _pointwise(root: Op, group: list[Op], name: str) -> Op:
    """The op that stands for a group."""
    operands = _entering(group)
    attrs: dict[str, object] = {"fn": Ref(name)}
    have = types.promote(*(x.type.dtype for x in operands if isinstance(x.type, Tensor)))
    assert isinstance(root.result.type, Tensor)
    if have != root.result.type.dtype:
        attrs["dtype"] = root.result.type.dtype
    return Op("pointwise", operands, root.results, attrs, root.loc)


def _groups(function: Function) -> dict[Op, list[Op]]:
    """The last op of each group of two ops or more → its ops in order. Casts alone are no group."""
    readers: dict[Value, list[Op | None]] = {v: [None] for v in function.outputs}
    for op in function.ops:
        for value in op.values:
            readers.setdefault(value, []).append(op)
    root_of: dict[Op, Op] = {}
    for op in reversed(function.ops):
        if not _fusible(op):
            continue
        (result,) = op.results
        roots = {root_of.get(reader) if reader else None for reader in readers.get(result, [None])}
        (root,) = roots if len(roots) == 1 else (None,)
        assert isinstance(result.type, Tensor)
        if root is not None:
            root_of[op] = root
        elif types.is_float(result.type.dtype):
            root_of[op] = op
    groups: dict[Op, list[Op]] = {}
    for op in function.ops:
        if op in root_of:
            groups.setdefault(root_of[op], []).append(op)
    return {
        root: ops
        for root, ops in groups.items()
        if len(ops) > 1 and any(op.kind != "cast" for op in ops)
    }


def _fusible(op: Op) -> bool:
    """Elementwise, of floats and truth values."""
    kinds = op.kind in ("cast", "pointwise") or lookup(op.kind).family == "elementwise"
    if not kinds or len(op.results) != 1:
        return False
    found = [v.type for v in (*op.values, *op.results)]
    return all(
        isinstance(t, Tensor) and (types.is_float(t.dtype) or t.dtype == "bool") for t in found
    )


def _entering(group: list[Op]) -> tuple[Value, ...]:
    """The values that a group reads from outside, in order of first use."""
    made = {op.result for op in group}
    return tuple(dict.fromkeys(x for op in group for x in op.values if x not in made))


def _scalars(group: list[Op], functions: dict[str, Function]) -> Function:
    """A group as a function of scalars: floats in float32 at least, nothing rounded between."""
    dtypes = [v.type.dtype for op in group for v in (*op.values, *op.results)]  # type: ignore[union-attr]
    wide = types.promote("f32", *filter(types.is_float, dtypes))

    def scalar(value: Value) -> Tensor:
        assert isinstance(value.type, Tensor)
        return Tensor(wide if types.is_float(value.type.dtype) else value.type.dtype)

    kinds = [op.attrs["fn"].name if op.kind == "pointwise" else op.kind for op in group]
    name = "_".join(kind for kind in kinds if kind != "cast")
    name = name if len(name) <= 32 else "_".join(name[:32].split("_")[:-1])
    new = Rewriter(Function(name, (), (), (), (), "pointwise", loc=group[-1].loc), functions)
    for value in _entering(group):
        new.values[value] = new.input(_stem(value), scalar(value))
    made: Operand
    for op in group:
        given = tuple(new[x] for x in op.operands)
        if op.kind == "cast":
            (x,) = op.values
            value, dtype = new.value(x), scalar(op.result).dtype
            if scalar(x).dtype != dtype:  # from truth values, or to them
                value = new.emit("cast", value, dtype=dtype, hint=_stem(op.result))
            new.values[op.result] = value
            continue
        if op.kind == "pointwise":
            (made,) = new.inline(functions[op.attrs["fn"].name], given, op.loc)
        else:
            made = new.emit(op.kind, *given, hint=_stem(op.result), loc=op.loc, **op.attrs)
        assert isinstance(made, Value)
        new.values[op.result] = made
    return new.finish(outputs=(new.value(group[-1].result),))


def _stem(value: Value) -> str:
    """A value's name without the number that told it from others: in a function of its own it is
    alone."""
    return re.sub(r"(_\d+)+$", "", value.name) or value.name


def _anonymous(function: Function) -> str:
    """What a function of scalars computes, whatever its values are called."""
    numbers: dict[Value, str] = {}

    def name(x: Operand) -> str:
        return numbers.setdefault(x, f"%{len(numbers)}") if isinstance(x, Value) else repr(x)

    lines = [f"{name(v)}: {v.type}" for v in function.inputs]
    for op in function.ops:
        given = [name(x) for x in op.operands]
        lines.append(f"{name(op.result)} = {op.kind}({given}, {dict(op.attrs)})")
    return "\n".join([*lines, *map(name, function.outputs)])


# ---- casts beside a state update


def _absorb_casts(
    function: Function, functions: dict[str, Function], module: Module, keeps: Keeps
) -> Function:
    """A kernel reads its operands in the dtype they have, and rounds its outputs itself."""
    widened = {op.result: op.values[0] for op in function.ops if op.kind == "cast"}
    narrowed: dict[Op, list[Op]] = {}
    for op in function.ops:
        if op.kind == "state_update" and keeps(op, module):
            states, _ = state_axes(functions[op.attrs["rule"].name])
            narrowed[op] = _narrowed(op.results[: len(op.results) - states], function)
    gone = {cast for casts in narrowed.values() for cast in casts}
    new = Rewriter(function, functions)
    new.keep_signature()
    for op in function.ops:
        if op in gone:
            continue
        if op not in narrowed:
            new.copy(op)
            continue
        _, count = state_axes(functions[op.attrs["rule"].name])
        given = [_narrower(x, widened) if i < count else x for i, x in enumerate(op.values)]
        casts, attrs = narrowed[op], dict(op.attrs)
        if casts:
            attrs["dtype"] = casts[0].attrs["dtype"]
            results = (*(cast.result for cast in casts), *op.results[len(casts) :])
            op = replace(op, results=results)
        new.copy(op, tuple(new.value(x) for x in given), attrs)
    return new.finish()


def _narrower(value: Value, widened: dict[Value, Value]) -> Value:
    """What a float was before it was cast to the dtype that a kernel computes in."""
    before = widened.get(value, value)
    assert isinstance(before.type, Tensor) and isinstance(value.type, Tensor)
    same = types.is_float(before.type.dtype) and value.type.dtype == types.widen(before.type.dtype)
    return before if same else value


def _narrowed(outputs: tuple[Value, ...], function: Function) -> list[Op]:
    """The casts that are all that reads some values, where they are to one dtype; else none."""
    casts: list[Op] = []
    for output in outputs:
        readers = [op for op in function.ops if output in op.values]
        if len(readers) != 1 or readers[0].kind != "cast" or output in function.outputs:
            return []
        casts += readers
    dtypes = {cast.attrs["dtype"] for cast in casts}
    return casts if len(dtypes) == 1 and types.is_float(*dtypes) else []
