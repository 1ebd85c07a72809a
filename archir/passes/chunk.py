"""A state update in chunks, or of whole rows at once, as tensor ops.

  o, S_1 = state_update(q, k, v, S, seq, rule=r, form="chunk")
→ q_1 = steps(q, seq, chunk=16); …                          [J, R, C, H, …]
  a, x, p, w, y, r = the parts of every token
  p_1, A, … = what chunks need of their tokens alone
  S_1, reads = scan(S, p_1, A, …, body=r_S_chunk)           over J
  o_1 = the rule's outputs, of reads and operands
  o = unsteps(o_1, q, seq, chunk=16)

Where a row has ended its last token is repeated, so that a rule never sees an invented number, and
its parts are made neutral: nothing is forgotten, erased or written.

The parallel form of a rule that erases is computed in float64. What a token erases is a sum over
all before it that nearly cancels, so that in float32 errors grow as √T: at T = 512 of DeltaNet to
1.1e-6 where the recurrent form has 1.8e-7. The scores, the solve and the sums all have their part
in it, and solving in blocks of 16 changes nothing.
"""

from __future__ import annotations

from dataclasses import replace

from archir import dims, types
from archir.dims import Poly
from archir.ir import Function, Op, Operand, Ref, Value
from archir.ops.state import placed, state_axes
from archir.passes.rewrite import Rewriter
from archir.recurrence.canonical import Record, Stage, canonical
from archir.recurrence.chunk import (
    chunk_functions,
    output_function,
    parts,
    read_names,
    token_function,
)
from archir.recurrence.lift import batch
from archir.types import Tensor

Size = int | Poly


def chunked(new: Rewriter, op: Op, chunk: int) -> None:
    """Writes a state update of form "chunk", of so many tokens each, or "parallel"."""
    rule = new.functions[op.attrs["rule"].name]
    record = canonical(rule)
    assert isinstance(record, Record)
    if op.attrs["form"] == "parallel" and any(stage.erases for stage in record.stages):
        rule = _in_float64(rule)
        record = canonical(rule)
        assert isinstance(record, Record)
    _Chunked(new, op, rule, record, chunk).run()


def _in_float64(rule: Function) -> Function:
    """A rule with float64 for its float type."""
    new = Rewriter(rule, {})
    first = rule.inputs[0].tensor.dtype
    new.keep_signature(lambda value: value.tensor.with_dtype("f64"))
    for op in rule.ops:
        given = {k: "f64" if k == "dtype" and v == first else v for k, v in op.attrs.items()}
        new.copy(op, attrs=given)
    return new.finish()


class _Chunked:
    def __init__(self, new: Rewriter, op: Op, rule: Function, record: Record, chunk: int) -> None:
        self.new, self.op, self.rule, self.record = new, op, rule, record
        states, count = state_axes(rule)
        operands = [new.value(x) for x in op.values]
        xs, before, self.seq = operands[:count], operands[count:-1], operands[-1]
        self.wide = rule.inputs[0].tensor.dtype
        before = [self.as_dtype(x, self.wide) for x in before]
        self.before = {f"S{i}": x for i, x in enumerate(before, 1)}
        rows, self.heads = before[0].tensor.shape[:2]
        whole = op.attrs["form"] == "parallel"
        self.chunk: int | str = "whole" if whole else chunk
        step = dims.symbol("J")
        self.lead: tuple[Size, ...] = (
            (1, rows, step, self.heads) if whole else (step, rows, chunk, self.heads)
        )
        self.binding: dict[str, Size] = {}
        ranks = [v.tensor.rank for v in rule.inputs[states:]]
        leads = [placed(x.tensor, rank) for x, rank in zip(xs, ranks, strict=True)]
        made: dict[int, Value] = {}
        for at in sorted(range(count), key=lambda i: "T" not in leads[i]):  # steps bind J
            have, declared = xs[at].tensor, rule.inputs[states + at].tensor
            inner = have.shape[have.rank - declared.rank :]
            types.match(declared, Tensor(declared.dtype, inner), self.binding)
            made[at] = self.placed(xs[at], leads[at], inner)
        self.operands = [made[at] for at in range(count)]
        self.like = [x for x, lead in zip(xs, leads, strict=True) if "T" in lead][-1]

    def placed(self, x: Value, leading: str, inner: tuple[Size, ...]) -> Value:
        """An operand by step and for every head, in the dtype of the rule."""
        x = self.as_dtype(x, self.wide)
        if "T" in leading:
            x = self.emit("steps", x, self.seq, chunk=self.chunk)
            leading = leading.replace("BT", "JRC")
        if "H" in leading:
            axis = leading.index("H")
            own = x.tensor.shape[axis]
            if own != self.heads:
                x = self.emit("repeat", x, axis=axis, times=dims.divide(self.heads, own))
        elif leading:
            x = self.emit("expand_dims", x, axes=(len(leading),))
        return self.emit("broadcast_to", x, shape=(*self.lead, *inner))

    def as_dtype(self, x: Value, dtype: str) -> Value:
        made = self.new.to_dtype(x, dtype, self.op.loc)
        assert isinstance(made, Value)
        return made

    def emit(self, kind: str, *xs: Operand, hint: str = "", **attrs: object) -> Value:
        first = xs[0] if xs else None
        hint = hint or (first.name if isinstance(first, Value) else kind)
        return self.new.emit(kind, *xs, hint=hint, loc=self.op.loc, **attrs)

    def run(self) -> None:
        op, stages = self.op, self.record.stages
        self.valid = self.emit("valid", self.seq, chunk=self.chunk)
        reads: dict[str, Value] = {}
        after: dict[str, Value] = {}
        for at, stage in enumerate(stages):
            names = read_names(stages[:at])
            made = self.each_token(token_function(self.record, stage, names), reads)
            found = dict(zip(parts(stage), made, strict=True))
            after[stage.state], more = self.scanned(stage, found)
            reads |= more
        made = self.each_token(output_function(self.record, read_names(stages)), reads)
        results = [result.tensor.dtype for result in op.results]
        outputs = []
        for y, dtype in zip(made, results, strict=False):
            y = self.as_dtype(y, dtype)
            outputs.append(self.emit("unsteps", y, self.like, self.seq, chunk=self.chunk))
        states = zip(self.before, results[len(made) :], strict=True)
        kept = [self.as_dtype(after[name], dtype) for name, dtype in states]
        self.new.values.update(zip(op.results, (*outputs, *kept), strict=True))

    def each_token(self, function: Function, reads: dict[str, Value]) -> list[Value]:
        """What a function of one token and head makes of all."""
        lifted = batch(function, self.lead, self.binding, function.name)
        made = self.new.inline(lifted, (*self.operands, *reads.values()), self.op.loc)
        return [v for v in made if isinstance(v, Value)]

    def scanned(self, stage: Stage, found: dict[str, Value]) -> tuple[Value, dict[str, Value]]:
        """The state after all chunks, and each of its reads for every token."""
        xs = []
        for name, x in found.items():
            axes = tuple(range(3, x.tensor.rank))
            each = self.emit("expand_dims", self.valid, axes=axes)
            x = self.emit("where", each, x, 1.0 if name == "a" else 0.0, hint=name)
            order = (0, 1, 3, 2, *range(4, x.tensor.rank))  # [J, R, H, C, …]
            xs.append(self.emit("transpose", x, axes=order, hint=name))
        within, across = chunk_functions(self.record, stage, self.lead[2])
        lead = (self.lead[0], self.lead[1], self.heads)
        lifted = batch(within, lead, self.binding, within.name)
        xs = [v for v in self.new.inline(lifted, tuple(xs), self.op.loc) if isinstance(v, Value)]
        lifted = batch(across, lead[1:], self.binding, across.name)
        name = self.new.add_function(replace(lifted, role="body"))
        made = self.new.emit(
            "scan", self.matrix(stage), *xs, body=Ref(name), carry=1, xs=len(xs),
            hint=self.record.names[stage.state], loc=self.op.loc,
        )  # fmt: skip
        state, *stacked = made if isinstance(made, tuple) else (made,)
        return self.natural(stage, state), self.tokens(stage, stacked)

    def matrix(self, stage: Stage) -> Value:
        """A state as [R, H, keys, values]."""
        state = self.before[stage.state]
        if stage.key and stage.value:
            return self.emit("transpose", state, axes=(0, 1, 3, 2)) if stage.place else state
        axes = tuple(at for at, d in ((2, stage.key), (3, stage.value)) if not d)
        return self.emit("expand_dims", state, axes=axes)

    def natural(self, stage: Stage, state: Value) -> Value:
        """The inverse of `matrix`."""
        if stage.key and stage.value:
            return self.emit("transpose", state, axes=(0, 1, 3, 2)) if stage.place else state
        return self.emit("reshape", state, shape=self.before[stage.state].tensor.shape)

    def tokens(self, stage: Stage, stacked: list[Value]) -> dict[str, Value]:
        """Reads [J, R, H, C, m, V] as one [J, R, C, H, V] each."""
        if not stacked:
            return {}
        y = self.emit("transpose", stacked[0], axes=(0, 1, 3, 2, 4, 5), hint="read")
        each = self.new.emit(
            "split", y, sizes=(1,) * len(stage.reads), axis=4, hint="read", loc=self.op.loc
        )
        each = each if isinstance(each, tuple) else (each,)
        size = (self.binding[stage.value],) if stage.value else ()
        return {
            f"{stage.state}.{m}": self.emit("reshape", x, shape=(*self.lead, *size))
            for m, x in enumerate(each)
        }
