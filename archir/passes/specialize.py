"""specialize(phase, layout): sequences, positions and state become explicit.

    a = attention(q, k, v, causal=True)
  → full:     a = attention(q, k, v, seq, causal=True)
  → decode:   k_1 = append(attn_k, k, seq);  v_1 = append(attn_v, v, seq)
              a = attention(q, k_1, v_1, seq, causal=True, keys="cache")
              store(k_1, path="attn.k");  store(v_1, path="attn.v")

    o = state_update(q, k, v, rule=r)
  → full:     S = fill(shape=(R, H, K, V), value=0.0)
              o, S_1 = state_update(q, k, v, S, seq, rule=r)
  → decode:   o, S_1 = state_update(q, k, v, attn_S, seq, rule=r);  store(S_1, path="attn.S")

    y = short_conv(x, w)
  → full:     y = short_conv(x, w, seq)
  → decode:   y, after = short_conv(x, w, conv_window, seq);  store(after, path="conv.window")

The entry makes the sequence once, `seq = dense(tokens, length)` or, with the layout "ragged",
`seq = ragged(tokens, start, stop, length)`; functions that need it take it as their last operand.
`prefill` and `decode` are one program here: forms tell them apart later. Both give what `full`
gives however tokens are cut into calls (D17), so they refuse attention that is not causal.
"""

from __future__ import annotations

from dataclasses import replace

from archir import dims, ir, types
from archir.diagnostics import UnsupportedError
from archir.dims import Poly
from archir.ir import Function, Module, Op, Ref, Value
from archir.ops import lookup
from archir.ops.state import conv_window, rule_heads, state_axes
from archir.passes.rewrite import Rewriter
from archir.types import Sequence, Tensor

PHASES = ("full", "prefill", "decode")
# ragged: left-padded, right-padded or packed; where rows lie is an input (D4)
LAYOUTS = ("dense", "ragged")
SOURCES = ("dense", "ragged")


def is_specialized(module: Module) -> bool:
    """Whether sequences are explicit: the entry makes one, or nothing needs one."""
    if any(op.kind in SOURCES for op in module.entry.ops):
        return True
    return not _ordered_functions(module)


def _ordered_functions(module: Module) -> set[str]:
    """Functions that must know which tokens follow which."""
    found: set[str] = set()
    for function in module.functions:
        for op in function.ops:
            if lookup(op.kind).ordered or (op.kind == "call" and op.attrs["callee"].name in found):
                found.add(function.name)
    return found


def specialize(module: Module, phase: str = "full", layout: str = "dense") -> Module:
    """Makes sequences and state explicit; see the module's docstring."""
    if phase not in PHASES or layout not in LAYOUTS:
        raise UnsupportedError(
            f"phase {phase!r} with layout {layout!r} is not built",
            code="phase-layout",
            next=f"phases: {', '.join(PHASES)}; layouts: {', '.join(LAYOUTS)}",
        )
    if phase != "full":
        _refuse_only_full(module, phase)
    ordered = _ordered_functions(module)
    functions: dict[str, Function] = {}
    for function in module.functions:
        if function.name in ordered or (function.role == "entry" and _tokens(function)):
            functions[function.name] = _function(
                function, functions, ordered, phase != "full", layout
            )
        else:
            functions[function.name] = function
    return Module(ir.callees_first(functions, module.entry.name))


def _function(
    function: Function,
    functions: dict[str, Function],
    ordered: set[str],
    stateful: bool,
    layout: str,
) -> Function:
    new = Rewriter(function, functions)
    new.keep_signature()
    if function.role == "entry":
        seq = _make_sequence(new, stateful, layout)
    else:
        seq = new.input("seq", Sequence(dims.symbol("R")))
    counts: dict[str, int] = {}
    for op in function.ops:
        operands = tuple(new[x] for x in op.operands)
        if op.kind in _STATEFUL:
            ordinal = counts.get(op.kind, 0)
            counts[op.kind] = ordinal + 1
            name = op.attrs.get("name", f"{op.kind}_{ordinal}")
            _STATEFUL[op.kind](new, op, name, seq, stateful)
        elif lookup(op.kind).ordered or (op.kind == "call" and op.attrs["callee"].name in ordered):
            new.copy(op, (*operands, seq))
        else:
            new.copy(op)
    return new.finish()


def _tokens(function: Function) -> Value | None:
    """The input whose first two axes are rows and tokens."""
    ranked = (v for v in function.inputs if isinstance(v.type, Tensor) and v.type.rank >= 2)
    return next(ranked, None)


def only_full(module: Module) -> Op | None:
    """The first op that lets a token see later ones, so that only the phase `full` has a meaning:
    attention that is not causal, or an op that mixes the axis of tokens itself."""
    tokens = _tokens(module.entry)
    axis = dims.bare(tokens.type.shape[1]) if tokens and isinstance(tokens.type, Tensor) else None
    for function in module.functions:
        for op in function.ops if function.role in ("entry", "block") else ():
            if op.kind == "attention" and not op.attrs.get("causal", True):
                return op
            definition = lookup(op.kind)
            plain = not definition.ordered and definition.family not in ("control", "head")
            if axis and plain and _mixes(op, axis):
                return op
    return None


def _mixes(op: Op, axis: str) -> bool:
    """Whether an op's tokens leave their place, or meet in a sum."""

    def holds(value: Value) -> bool:
        shape = value.type.shape if isinstance(value.type, Tensor) else ()
        return len(shape) > 1 and dims.bare(shape[1]) == axis

    if not any(holds(x) for x in op.values):
        return False
    if op.kind == "einsum":
        terms, _, kept = op.attrs["equation"].partition("->")
        named = zip(terms.split(","), op.values, strict=True)
        letters = {term[1] for term, x in named if holds(x)}
        return letters != {kept[1:2]}
    return not all(holds(x) for x in op.results)


def _refuse_only_full(module: Module, phase: str) -> None:
    op = only_full(module)
    if op is None:
        return
    mask = op.attrs.get("mask")
    what = "attention with causal=False" if op.kind == "attention" else f"{op.kind} over tokens"
    raise UnsupportedError(
        f"{what} lets a token see later ones, and {phase} has only earlier ones",
        code="phase-causal",
        loc=op.loc,
        facts=[f"mask {mask.name} may hide them, which is not proven"]
        if isinstance(mask, Ref)
        else [],
        next="use the phase full, or write causal=True; a mask then hides still more"
        if op.kind == "attention"
        else "use the phase full, or say it with causal attention or a recurrence",
    )


def _make_sequence(new: Rewriter, stateful: bool, layout: str) -> Value:
    tokens = _tokens(new.old)
    if tokens is None:
        raise UnsupportedError(
            f"{new.old.name} orders tokens, but none of its inputs is [B, T, …]",
            code="tokens-input",
            loc=new.old.loc,
            next='give it an input with tokens, for example x: "f[B, T, width]"',
        )
    per_row = Tensor("i64", (dims.symbol("R"),))
    places = []
    if layout == "ragged":
        places = [new.input("start", per_row), new.input("stop", per_row)]
    if not stateful:
        return new.emit(layout, tokens, *places, hint="seq")
    length = new.field("state", "length", per_row, kind="length")
    seq = new.emit(layout, tokens, *places, length, hint="seq")
    new.emit("store", new.emit("advance", seq, hint="length"), path="length")
    return seq


def _without_name(op: Op) -> dict[str, object]:
    return {k: v for k, v in op.attrs.items() if k != "name"}


def _attention(new: Rewriter, op: Op, name: str, seq: Value, stateful: bool) -> None:
    q, k, v = (new[x] for x in op.operands)
    attrs = _without_name(op)
    if not stateful:
        new.copy(op, (q, k, v, seq), attrs)
        return
    assert isinstance(seq.type, Sequence)
    caches = []
    for part, value in (("k", k), ("v", v)):
        assert isinstance(value, Value) and isinstance(value.type, Tensor)
        shape = (seq.type.rows, dims.symbol("P"), *value.type.shape[2:])
        path = f"{name}.{part}"
        old = new.field("state", path, Tensor(value.type.dtype, shape), kind="kv")
        cache = new.emit("append", old, value, seq, hint=f"{part}_all", loc=op.loc)
        new.emit("store", cache, path=path, loc=op.loc)
        caches.append(cache)
    new.copy(op, (q, *caches, seq), {**attrs, "keys": "cache"})


def _state_update(new: Rewriter, op: Op, name: str, seq: Value, stateful: bool) -> None:
    rule = new.functions[op.attrs["rule"].name]
    operands = [new.value(x) for x in op.values]
    states = []
    assert isinstance(seq.type, Sequence)
    for label, shape in state_shapes(rule, operands, seq.type.rows):
        if stateful:
            path = f"{name}.{label}"
            states.append(new.field("state", path, Tensor("F", shape), kind="matrix"))
        else:
            states.append(new.emit("fill", shape=shape, value=0.0, hint=label, loc=op.loc))
    made = new.copy(op, (*operands, *states, seq), _without_name(op))
    if stateful:
        for (label, _), value in zip(
            state_shapes(rule, operands, seq.type.rows), made[len(op.results) :], strict=True
        ):
            new.emit("store", value, path=f"{name}.{label}", loc=op.loc)


def _short_conv(new: Rewriter, op: Op, name: str, seq: Value, stateful: bool) -> None:
    x, w = (new.value(v) for v in op.values)
    attrs = _without_name(op)
    if not stateful:
        new.copy(op, (x, w, seq), attrs)
        return
    assert isinstance(x.type, Tensor) and isinstance(w.type, Tensor)
    assert isinstance(seq.type, Sequence)
    path = f"{name}.window"
    window = new.field("state", path, conv_window(x.type, w.type, seq.type.rows), kind="conv")
    _, after = new.copy(op, (x, w, window, seq), attrs)
    new.emit("store", after, path=path, loc=op.loc)


# Ops that keep something between calls: how each gets its state.
_STATEFUL = {"attention": _attention, "state_update": _state_update, "short_conv": _short_conv}


def state_shapes(
    rule: Function, operands: list[Value], rows: int | Poly
) -> list[tuple[str, tuple[int | Poly, ...]]]:
    """Name and shape [R, H, …] of each state of a rule, given its operands."""
    states, _ = state_axes(rule)
    binding: dict[str, int | Poly] = {}
    found = []
    for value, declared in zip(operands, rule.inputs[states:], strict=True):
        assert isinstance(value.type, Tensor) and isinstance(declared.type, Tensor)
        found.append(value.type)
        inner = value.type.shape[value.type.rank - declared.type.rank :]
        types.match(declared.type, Tensor(declared.type.dtype, inner), binding)
    heads = rule_heads(found, rule)
    shapes = []
    for state in rule.inputs[:states]:
        inner = types.substitute(state.type, binding)
        assert isinstance(inner, Tensor)
        shapes.append((state.name, (rows, heads, *inner.shape)))
    return shapes


def drop_taps(module: Module) -> Module:
    """Removes taps: their stores and their fields."""

    def change(function: Function) -> Function:
        taps = {f.path for f in function.fields if f.kind == "tap"}
        ops = tuple(
            op for op in function.ops if not (op.kind == "store" and op.attrs["path"] in taps)
        )
        fields = tuple(f for f in function.fields if f.kind != "tap")
        return replace(function, ops=ops, fields=fields)

    return ir.rebuild(module, change)
