"""gradient: from a function, the function of its cotangents, by one reverse pass over its ops.

  def f(x: F[K], w: F) -> F[K]:
      exp: F[K] = exp(x)
      mul: F[K] = mul(w, exp)
      return mul
→ def f_gradient(x: F[K], w: F, d_mul: F[K]) -> (F[K], F):
      exp: F[K] = exp(x)
      mul: F[K] = mul(d_mul, exp)
      d_exp: F[K] = mul(d_mul, w)
      d_w: F = reduce_sum(mul, axes=(0,))
      d_x: F[K] = mul(d_exp, exp)
      return d_x, d_w

The cotangent of a value is the gradient, by that value, of Σ ⟨d, output⟩ over the outputs and the
cotangents d given for them. What the reverse pass needs of the forward is computed again inside;
each op's share is its `OpDef.vjp`. Its own result is a function like any other: the gradient of a
gradient is the second derivative.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from archir import types
from archir.diagnostics import PassError, UnsupportedError, nearest
from archir.ir import Function, Module, Op, Operand, Value, callees_first
from archir.ops import lookup
from archir.ops.terms import Term
from archir.passes.canonicalize import canonicalize
from archir.passes.rewrite import Rewriter
from archir.types import Tensor

_FIELDS = ("weight", "buffer")


def gradient(
    function: Function,
    functions: Mapping[str, Function] | None = None,
    wrt: Iterable[str] | None = None,
) -> Function:
    """The function `<name>_gradient` of the same role: cotangents from inputs and cotangents.

    Its inputs are the function's, then a cotangent for each float output. It returns one cotangent
    for each float tensor among the inputs, zeros where nothing flows, or for each name in `wrt`,
    of an input or a weight. functions: those of the module that its ops refer to.
    Raises UnsupportedError at an op that has no gradient in IR ops, or a field that is no weight.
    """
    table = dict(functions or {})
    for field in function.fields:
        if field.kind not in _FIELDS:
            raise UnsupportedError(
                f"{function.name} has the {field.kind} {field.path!r}, its gradient is not in IR",
                code="gradient-field",
                loc=function.loc,
                next="take the gradient of a rule, a norm or a function of scalars",
            )
    new = Rewriter(function, table)
    new.keep_signature()
    for op in function.ops:
        if op.kind == "pointwise":
            _write_out(new, op)
        else:
            new.copy(op)
    forward, wanted = tuple(new.ops), _wanted(function, wrt)
    flow = _Flow(new, _depending(forward, wanted))
    for value in function.outputs:
        if _is_float(value):
            flow.add(new.value(value), new.input(f"d_{value.name}", value.type))
    for op in reversed(forward):
        _reverse(new, flow, op)
    outputs = tuple(flow.total(value) or _zeros(new, value) for value in wanted)
    for value, output in zip(reversed(wanted), reversed(outputs), strict=True):
        flow.names[output.name] = f"d_{value.name}"
    draft = replace(
        new.finish(),
        name=f"{function.name}_gradient",
        ops=tuple(new.ops),
        outputs=outputs,
        names=(),
    )
    own = {value.name for op in forward for value in op.results}
    return _named(_canonical(draft, table), table, own, flow.names)


class _Flow:
    """What flows back to each value: its shares so far, then their sum.

    names: what the sums are to be called, by the names they have.
    """

    def __init__(self, new: Rewriter, depending: set[Value]) -> None:
        self.new, self.depending = new, depending
        self.shares: dict[Value, list[Value]] = {}
        self.names: dict[str, str] = {}

    def add(self, value: Operand, share: Value) -> None:
        """A share of a value's cotangent, of the value's type."""
        if isinstance(value, Value) and value in self.depending:
            self.shares.setdefault(value, []).append(share)

    def total(self, value: Value) -> Value | None:
        """The cotangent of a value whose readers are all done; None where nothing flows to it."""
        if value not in self.shares:
            return None
        total, *rest = self.shares[value]
        for share in rest:
            total = self.new.emit("add", total, share, loc=value.loc)
        self.shares[value] = [total]
        self.names.setdefault(total.name, f"d_{value.name}")
        return total


def _is_float(value: Value) -> bool:
    return isinstance(value.type, Tensor) and types.is_float(value.type.dtype)


def _wanted(function: Function, wrt: Iterable[str] | None) -> tuple[Value, ...]:
    """The values by which to differentiate."""
    if wrt is None:
        return tuple(v for v in function.inputs if _is_float(v))
    known = {v.name: v for v in (*function.inputs, *(f.value for f in function.fields))}
    floats = {name: v for name, v in known.items() if _is_float(v)}
    for name in (names := tuple(wrt)):
        if name not in floats:
            raise PassError(
                f"{name} is no float tensor among the inputs and weights of {function.name}",
                code="gradient-wrt",
                loc=function.loc,
                next=nearest(name, [*floats]),
            )
    return tuple(floats[name] for name in names)


def _depending(ops: tuple[Op, ...], wanted: tuple[Value, ...]) -> set[Value]:
    """The float values through which an output may depend on the wanted ones."""
    found = set(wanted)
    for op in ops:
        if not found.isdisjoint(op.values):
            found |= {value for value in op.results if _is_float(value)}
    return found


def _write_out(new: Rewriter, op: Op) -> None:
    """The ops of a pointwise function in its place."""
    function = new.functions[op.attrs["fn"].name]
    made = new.inline(function, tuple(new[x] for x in op.operands), op.loc)
    for result, output in zip(op.results, made, strict=True):
        assert isinstance(result.type, Tensor)
        value = new.to_dtype(output, result.type.dtype, op.loc)
        assert isinstance(value, Value)
        new.values[result] = _fit(Term(value, partial(new.emit, loc=op.loc)), result.type).value


def _reverse(new: Rewriter, flow: _Flow, op: Op) -> None:
    """Adds each operand's share of the cotangents of an op's results."""
    if flow.depending.isdisjoint(op.values):
        return
    found = [flow.total(value) for value in op.results]
    if not any(found):
        return
    vjp = lookup(op.kind).vjp
    if isinstance(vjp, str):
        raise UnsupportedError(
            f"{op.kind} has no gradient in IR ops{': ' if vjp else ''}{vjp}",
            code="gradient-op",
            loc=op.loc,
            next="take the gradient of a rule, a norm or a function of scalars",
        )
    emit = partial(new.emit, loc=op.loc)
    cotangents = tuple(Term(value, emit) if value else None for value in found)
    results = tuple(Term(value, emit) for value in op.results)
    operands = (Term(x, emit) if isinstance(x, Value) else x for x in op.operands)
    if len(results) == 1:
        shares = vjp(cotangents[0], results[0], *operands, **op.attrs)
    else:
        shares = vjp(cotangents, results, *operands, **op.attrs)
    shares = shares if isinstance(shares, tuple) else (shares,)
    for operand, share in zip(op.operands, shares, strict=True):
        if share is not None and operand in flow.depending:
            assert isinstance(operand, Value) and isinstance(operand.type, Tensor)
            flow.add(operand, _fit(share, operand.type).value)


def _fit(x: Term, type_: Tensor) -> Term:
    """A cotangent with the operand's dtype and shape: axes that the op stretched are summed, axes
    that it summed are stretched."""
    lead = x.rank - type_.rank
    pairs = zip(x.shape[max(lead, 0) :], type_.shape[max(-lead, 0) :], strict=True)
    once = tuple(i for i, (have, want) in enumerate(pairs, max(lead, 0)) if want == 1 and have != 1)
    if lead > 0:
        x = x.reduce_sum(axes=(*range(lead), *once))
        x = x.expand_dims(axes=tuple(i - lead for i in once)) if once else x
    elif once:
        x = x.reduce_sum(axes=once, keepdims=True)
    if x.shape != type_.shape:
        x = x.broadcast_to(shape=type_.shape)
    return x if x.dtype == type_.dtype else x.cast(dtype=type_.dtype)


def _zeros(new: Rewriter, value: Value) -> Value:
    """The cotangent of an input that no output depends on."""
    assert isinstance(value.type, Tensor)
    shape, dtype = value.type.shape, value.type.dtype
    return new.emit("fill", shape=shape, value=0.0, dtype=dtype)


def _canonical(draft: Function, functions: Mapping[str, Function]) -> Function:
    """Without ops that nothing reads; equal ones once."""
    alone = {**functions, draft.name: replace(draft, role="entry")}
    return replace(canonicalize(Module(callees_first(alone, draft.name))).entry, role=draft.role)


def _named(
    draft: Function, functions: dict[str, Function], own: set[str], sums: Mapping[str, str]
) -> Function:
    """Values of the forward keep their names, cotangents are `d_<value>`, what lies between is
    called by its op and numbered anew."""
    forward = tuple(op for op in draft.ops if {v.name for v in op.results} <= own)
    new = Rewriter(replace(draft, ops=forward), functions)
    new.keep_signature()
    for op in draft.ops:
        if op in forward:
            new.copy(op)
            continue
        named = [replace(v, name=new.fresh(sums.get(v.name, op.kind))) for v in op.results]
        made = new.copy(replace(op, results=tuple(named)))
        new.values.update(zip(op.results, made, strict=True))
    return new.finish()
