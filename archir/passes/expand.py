"""expand: chosen forms become tensor ops, for NumPy and eager.

  y = pointwise(a, b, fn=situ)
→ the ops of `situ` on whole tensors, in max(float32, dtype), then one cast

  o, S_1 = state_update(q, k, v, S, seq, rule=r, form="recurrent")
→ q_1 = steps(q, seq); …                                       [J, R, H, ·]
  S_1, o_1 = scan(S, q_1, k_1, v_1, body=r_step, carry=1, xs=3)
  o = unsteps(o_1, q, seq)
  (in a ragged layout the body also takes `valid` and keeps the state of rows that have ended)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from archir import dims, ir, types
from archir.dims import Poly
from archir.ir import Function, Module, Op, Ref, Value
from archir.ops.state import placed, state_axes
from archir.passes.canonicalize import merge
from archir.passes.chunk import chunked
from archir.passes.fuse import Keeps
from archir.passes.rewrite import Rewriter
from archir.recurrence.lift import batch
from archir.types import Tensor


def expand(module: Module, chunk: int, keeps: Keeps = lambda op, module: False) -> Module:
    """Writes pointwise functions and state updates, by chunks of so many tokens, as tensor ops,
    equal ones once; what the backend `keeps` stays."""
    functions: dict[str, Function] = {}
    ragged = any(op.kind == "ragged" for op in module.entry.ops)

    def run(function: Function) -> Function:
        new = Rewriter(function, functions)
        new.keep_signature()
        for op in function.ops:
            if keeps(op, module):
                new.copy(op)
            elif op.kind == "pointwise":
                _pointwise(new, op)
            elif op.kind != "state_update":
                new.copy(op)
            elif "below" in op.attrs:
                _guarded(new, op, run)
            elif op.attrs.get("form") in ("chunk", "parallel"):
                chunked(new, op, chunk)
            else:
                _recurrent(new, op, ragged)
        return new.finish()

    for function in module.functions:
        functions[function.name] = run(function)
    return merge(Module(ir.callees_first(functions, module.entry.name)))


def _guarded(new: Rewriter, op: Op, run: Callable[[Function], Function]) -> None:
    """A state update whose form depends on the length: both as functions, and the choice."""
    attrs = {k: v for k, v in op.attrs.items() if k != "below"}
    forms = []
    for form in ("recurrent", attrs["form"]):
        name = f"{op.attrs['rule'].name}_{form}"
        alone = Rewriter(Function(name, (), (), (), (), "body", loc=op.loc), new.functions)
        given = tuple(alone.input(x.name, new.value(x).type) for x in op.values)
        results = alone.copy(
            replace(op, results=tuple(replace(x, name=alone.fresh(x.name)) for x in op.results)),
            given,
            {**attrs, "form": form},
        )
        made = replace(alone.old, inputs=tuple(alone.inputs), ops=tuple(alone.ops), outputs=results)
        forms.append(new.add_function(run(made)))
    like = next(x for x in op.values if isinstance(x.type, Tensor) and _has_tokens(x))
    assert isinstance(like.type, Tensor)
    made = new.emit(
        "by_length", *(new.value(x) for x in op.values), size=like.type.shape[1],
        below=op.attrs["below"], short=Ref(forms[0]), long=Ref(forms[1]),
        hint=op.results[0].name, loc=op.loc,
    )  # fmt: skip
    new.values.update(zip(op.results, made if isinstance(made, tuple) else (made,), strict=True))


def _has_tokens(x: Value) -> bool:
    """Whether the first axes of an operand are rows and tokens."""
    assert isinstance(x.type, Tensor)
    shape = x.type.shape[:2]
    return len(shape) == 2 and all(isinstance(size, Poly) for size in shape)


def _pointwise(new: Rewriter, op: Op) -> None:
    fn = new.functions[op.attrs["fn"].name]
    outputs = new.inline(fn, tuple(new[x] for x in op.operands), op.loc)
    for result, output in zip(op.results, outputs, strict=True):
        assert isinstance(result.type, Tensor)
        made = new.to_dtype(output, result.type.dtype, op.loc)
        assert isinstance(made, Value)
        if isinstance(made.type, Tensor) and made.type.shape != result.type.shape:
            made = new.emit("broadcast_to", made, shape=result.type.shape, hint=result.name)
        new.values[result] = made


def _recurrent(new: Rewriter, op: Op, ragged: bool) -> None:
    rule = new.functions[op.attrs["rule"].name]
    states, count = state_axes(rule)
    operands = [new.value(x) for x in op.values]
    xs, carried, seq = operands[:count], operands[count:-1], operands[-1]
    first = carried[0].type
    assert isinstance(first, Tensor)
    lead, wide = first.shape[:2], first.dtype
    binding: dict[str, int | Poly] = {}
    scanned: list[Value] = []
    constant: list[bool] = []
    for x, declared in zip(xs, rule.inputs[states:], strict=True):
        assert isinstance(x.type, Tensor) and isinstance(declared.type, Tensor)
        inner = x.type.shape[x.type.rank - declared.type.rank :]
        types.match(declared.type, Tensor(declared.type.dtype, inner), binding)
        leading = placed(x.type, declared.type.rank)
        x = new.to_dtype(x, wide, op.loc)
        assert isinstance(x, Value)
        scanned.append(_by_step(new, op, x, leading, lead, inner, seq))
        constant.append("T" not in leading)
    order = [x for x, c in zip(scanned, constant, strict=True) if not c]
    consts = [x for x, c in zip(scanned, constant, strict=True) if c]
    body = _consts_last(batch(rule, lead, binding, f"{rule.name}_step"), states, constant)
    if ragged:
        order.append(new.emit("valid", seq, loc=op.loc))
        body = _keep_ended(body, states, len(order) - 1 + states)
    name = new.add_function(body)
    made = new.emit(
        "scan", *carried, *order, *consts, body=Ref(name), carry=states, xs=len(order),
        hint=op.results[0].name, loc=op.loc,
    )  # fmt: skip
    made = made if isinstance(made, tuple) else (made,)
    like = next(x for x, c in zip(xs, constant, strict=True) if not c)
    outputs = []
    for y, result in zip(made[states:], op.results, strict=False):
        assert isinstance(result.type, Tensor)
        y = new.to_dtype(y, result.type.dtype, op.loc)
        outputs.append(new.emit("unsteps", y, like, seq, hint=result.name, loc=op.loc))
    new.values.update(zip(op.results, (*outputs, *made[:states]), strict=True))


def _by_step(
    new: Rewriter,
    op: Op,
    x: Value,
    leading: str,
    lead: tuple[int | Poly, ...],
    inner: tuple[int | Poly, ...],
    seq: Value,
) -> Value:
    """An operand as [T, R, H, …], or [R, H, …] where it has no time axis."""
    heads = lead[1]
    if leading == "BTH":
        assert isinstance(x.type, Tensor)
        own = x.type.shape[2]
        x = new.emit("steps", x, seq, hint=x.name, loc=op.loc)
        if own != heads:
            times = dims.divide(heads, own)
            x = new.emit("repeat", x, axis=2, times=times, hint=x.name, loc=op.loc)
        return x
    if leading == "BT":
        x = new.emit("steps", x, seq, hint=x.name, loc=op.loc)
        assert isinstance(x.type, Tensor)
        shape = (x.type.shape[0], *lead, *inner)
        x = new.emit("expand_dims", x, axes=(2,), hint=x.name, loc=op.loc)
        return new.emit("broadcast_to", x, shape=shape, hint=x.name, loc=op.loc)
    if leading == "H":
        assert isinstance(x.type, Tensor)
        if x.type.shape[0] != heads:
            times = dims.divide(heads, x.type.shape[0])
            x = new.emit("repeat", x, axis=0, times=times, hint=x.name, loc=op.loc)
    return new.emit("broadcast_to", x, shape=(*lead, *inner), hint=x.name, loc=op.loc)


def _keep_ended(body: Function, states: int, place: int) -> Function:
    """The body with one more scanned input, whether each row still has a token: where it has none,
    the states stay as they were."""
    new = Rewriter(body, {})
    new.keep_signature()
    first = body.inputs[0].type
    assert isinstance(first, Tensor)
    going = new.input("valid", Tensor("bool", first.shape[:1]))
    new.inputs.insert(place, new.inputs.pop())
    for op in body.ops:
        new.copy(op)
    outputs = [new.value(v) for v in body.outputs]
    for index in range(states):
        old, made = new.inputs[index], outputs[index]
        assert isinstance(old.type, Tensor)
        axes = tuple(range(1, old.type.rank))
        each = new.emit("expand_dims", going, axes=axes, hint="going") if axes else going
        outputs[index] = new.emit("where", each, made, old, hint=made.name)
    return new.finish(outputs=tuple(outputs))


def _consts_last(body: Function, states: int, constant: list[bool]) -> Function:
    carried, rest = body.inputs[:states], body.inputs[states:]
    scanned = tuple(v for v, c in zip(rest, constant, strict=True) if not c)
    consts = tuple(v for v, c in zip(rest, constant, strict=True) if c)
    return replace(body, inputs=(*carried, *scanned, *consts))
