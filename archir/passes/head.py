"""head("last" | "loss"): what a model gives at its end (D14).

    z = logits(x, w);  y = mul(z, 0.5)       (only elementwise, pointwise and cast may follow)
  → last:   x_1 = last(x, seq);  z = logits(x_1, w);  y = mul(z, 0.5)            [R, 1, vocab]
  → loss:   loss = cross_entropy(x, w, targets, tail=head_tail)                  a scalar
            (targets outside of a ragged row are masked first)

"loss" adds the input `targets: i64[B, T]` and returns nothing else.
"""

from __future__ import annotations

from dataclasses import replace

from archir import ir, types
from archir.diagnostics import PassError, UnsupportedError, nearest
from archir.ir import Function, Module, Op, Ref, Value
from archir.ops import lookup
from archir.passes.rewrite import Rewriter
from archir.passes.specialize import SOURCES
from archir.types import Tensor

HEADS = ("all", "last", "loss")


def head(module: Module, kind: str = "all") -> Module:
    """Rewrites the entry's `logits`; see the module's docstring."""
    if kind == "all":
        return module
    if kind not in HEADS:
        raise UnsupportedError(f"there is no head {kind!r}", code="head", next=nearest(kind, HEADS))
    entry = module.entry
    found = [op for op in entry.ops if op.kind == "logits"]
    if len(found) != 1:
        raise PassError(
            f"head={kind!r} needs one logits op in {entry.name}, there are {len(found)}",
            code="head-logits",
            loc=entry.loc,
            next="end the spec with ar.logits(x, table)",
        )
    tail, scores = _tail(entry, found[0])
    functions = {f.name: f for f in module.functions}
    if kind == "last":
        functions[entry.name] = _last(entry, found[0], functions)
    else:
        functions |= _loss(entry, found[0], tail, scores, functions)
    return Module(ir.callees_first(functions, entry.name))


def _tail(entry: Function, logits: Op) -> tuple[list[Op], Value]:
    """The elementwise ops between the logits and the output they end in, and that output."""
    inside = {logits.result}
    tail = []
    for op in entry.ops:
        if op is logits or not inside & set(op.values):
            continue
        by_score = lookup(op.kind).family == "elementwise" or op.kind in ("pointwise", "cast")
        if not by_score or not set(op.values) <= inside:
            others = [v for v in op.values if v not in inside]
            raise PassError(
                f"{op.kind} follows logits, but only elementwise ops of the scores may",
                code="head-tail",
                loc=op.loc or logits.loc,
                facts=[f"{v} is not made of them" for v in others],
                next="move it before ar.logits, or ask for head='all'",
            )
        tail.append(op)
        inside |= set(op.results)
    scores = [v for v in entry.outputs if v in inside]
    if len(scores) != 1:
        raise PassError(
            f"{entry.name} returns {len(scores)} values made from its logits, a head needs one",
            code="head-logits",
            loc=logits.loc,
            next="return the scores once, or ask for head='all'",
        )
    return tail, scores[0]


def _last(entry: Function, logits: Op, functions: dict[str, Function]) -> Function:
    new = Rewriter(entry, functions)
    new.keep_signature()
    made = next((op.result for op in entry.ops if op.kind in SOURCES), None)
    for op in entry.ops:
        if op is logits:
            x, w = (new.value(v) for v in op.values)
            seq = new.value(made) if made else new.emit("dense", x, hint="seq", loc=op.loc)
            new.copy(op, (new.emit("last", x, seq, loc=op.loc), w))
        else:
            new.copy(op)
    return new.finish()


def _loss(
    entry: Function, logits: Op, tail: list[Op], scores: Value, functions: dict[str, Function]
) -> dict[str, Function]:
    made = dict(functions)
    attrs = {}
    if tail:
        name = "head_tail"
        while name in made:
            name += "_"
        made[name] = replace(_scalars(logits, tail, scores, functions), name=name)
        attrs["tail"] = Ref(name)
    new = Rewriter(entry, made)
    new.keep_signature()
    shape = logits.values[0].type
    assert isinstance(shape, Tensor)
    targets = new.input("targets", Tensor("i64", shape.shape[:2]))
    seq = next((op.result for op in entry.ops if op.kind == "ragged"), None)
    outputs: tuple[Value, ...] = ()
    for op in entry.ops:
        if op is logits:
            x, w = (new[v] for v in op.operands)
            if seq is not None:
                targets = new.emit("mask_targets", targets, new.value(seq), hint="targets")
            loss = new.emit("cross_entropy", x, w, targets, hint="loss", loc=op.loc, **attrs)
            outputs = (loss,)
        elif op not in tail:
            new.copy(op)
    made[entry.name] = replace(
        entry,
        inputs=tuple(new.inputs),
        fields=tuple(new.fields),
        ops=tuple(new.ops),
        outputs=outputs,
        names=("loss",),
    )
    return made


def _scalars(logits: Op, tail: list[Op], scores: Value, functions: dict[str, Function]) -> Function:
    """The tail as a function of one score, in F: between floats it rounds nothing."""
    new = Rewriter(Function("head_tail", (), (), (), (scores,), "pointwise"), functions)
    new.values[logits.result] = new.input(logits.result.name, Tensor("F"))
    for op in tail:
        operands = tuple(new[x] for x in op.operands)
        if op.kind == "pointwise":
            made = new.inline(functions[op.attrs["fn"].name], operands, op.loc)
        elif op.kind == "cast" and types.is_float(op.attrs["dtype"]):
            made = [new.to_dtype(operands[0], "F", op.loc)]
        else:
            made = [new.emit(op.kind, *operands, hint=op.result.name, loc=op.loc, **op.attrs)]
        for result, value in zip(op.results, made, strict=True):
            assert isinstance(value, Value)
            new.values[result] = value
    return new.finish()
