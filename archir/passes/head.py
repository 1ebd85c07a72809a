"""head("last" | "loss"): what a model gives at its end (D14).

    z = logits(x, w);  y = mul(z, 0.5)          (only elementwise ops may follow)
  → last:   x_1 = last(x, seq);  z = logits(x_1, w);  y = mul(z, 0.5)            [R, 1, vocab]
  → loss:   loss = cross_entropy(x, w, targets, tail=head_tail)                  a scalar

"loss" adds the input `targets: i64[B, T]` and returns nothing else.
"""

from __future__ import annotations

from dataclasses import replace

from archir import ir
from archir.diagnostics import PassError, UnsupportedError
from archir.ir import Function, Module, Op, Ref, Value
from archir.ops import lookup
from archir.passes.rewrite import Rewriter
from archir.types import Tensor

HEADS = ("all", "last", "loss")


def head(module: Module, kind: str = "all") -> Module:
    """Rewrites the entry's `logits`; see the module's docstring."""
    if kind == "all":
        return module
    if kind not in HEADS:
        raise UnsupportedError(f"head {kind!r} is not one of {', '.join(HEADS)}", code="head")
    entry = module.entry
    found = [op for op in entry.ops if op.kind == "logits"]
    if len(found) != 1:
        raise PassError(
            f"head={kind!r} needs one logits op in {entry.name}, there are {len(found)}",
            code="head-logits",
            loc=entry.loc,
            next="end the spec with ar.logits(x, table)",
        )
    tail = _tail(entry, found[0])
    functions = {f.name: f for f in module.functions}
    if kind == "last":
        functions[entry.name] = _last(entry, found[0], functions)
    else:
        functions |= _loss(entry, found[0], tail, functions)
    return Module(ir.callees_first(functions, entry.name))


def _tail(entry: Function, logits: Op) -> list[Op]:
    """The elementwise ops between the logits and the outputs."""
    inside = {logits.result}
    tail = []
    for op in entry.ops:
        if op is logits or not inside & set(op.values):
            continue
        if lookup(op.kind).family != "elementwise" or not set(op.values) <= inside:
            raise PassError(
                f"{op.kind} follows logits, but only elementwise ops of the scores may",
                code="head-tail",
                loc=op.loc or logits.loc,
                next="move it before ar.logits, or ask for head='all'",
            )
        tail.append(op)
        inside |= set(op.results)
    return tail


def _last(entry: Function, logits: Op, functions: dict[str, Function]) -> Function:
    new = Rewriter(entry, functions)
    new.keep_signature()
    seq = next((op.result for op in entry.ops if op.kind == "dense"), None)
    for op in entry.ops:
        if op is logits:
            x, w = (new[v] for v in op.operands)
            rest = (new.value(seq),) if seq else ()
            new.copy(op, (new.emit("last", x, *rest, loc=op.loc), w))
        else:
            new.copy(op)
    return new.finish()


def _loss(
    entry: Function, logits: Op, tail: list[Op], functions: dict[str, Function]
) -> dict[str, Function]:
    made = dict(functions)
    attrs = {}
    if tail:
        scalar = {logits.result: Value("z", Tensor("F"))}
        ops = []
        for op in tail:
            scalar[op.result] = Value(op.result.name, Tensor("F"), op.loc)
            operands = tuple(scalar[x] if isinstance(x, Value) else x for x in op.operands)
            ops.append(replace(op, operands=operands, results=(scalar[op.result],)))
        outputs = (scalar[tail[-1].result],)
        fn = Function("head_tail", (scalar[logits.result],), (), tuple(ops), outputs, "pointwise")
        made["head_tail"] = fn
        attrs["tail"] = Ref("head_tail")
    new = Rewriter(entry, made)
    new.keep_signature()
    shape = logits.values[0].type
    assert isinstance(shape, Tensor)
    targets = new.input("targets", Tensor("i64", shape.shape[:2]))
    for op in entry.ops:
        if op is logits:
            x, w = (new[v] for v in op.operands)
            loss = new.emit("cross_entropy", x, w, targets, hint="loss", loc=op.loc, **attrs)
        elif op not in tail:
            new.copy(op)
    made[entry.name] = replace(
        entry,
        inputs=tuple(new.inputs),
        fields=tuple(new.fields),
        ops=tuple(new.ops),
        outputs=(loss,),
        names=("loss",),
    )
    return made
