"""specialize(phase, layout, training): sequences, state and random keys become explicit.

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

    y = dropout(x, rate=0.1)
  → without training:  x
  → with training:     y = dropout(x, key, rate=0.1),  key: i64[2] = key("dropout_0")

The entry makes the sequence once, `seq = dense(tokens, length)` or, with the layout "ragged",
`seq = ragged(tokens, start, stop, length)`; functions that need it take it as their last operand.
`prefill` and `decode` are one program here: forms tell them apart later. Both give what `full`
gives however tokens are cut into calls (D17), so they refuse attention that is not causal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from archir import dims, ir, types
from archir.diagnostics import UnsupportedError
from archir.dims import Poly
from archir.ir import Function, Module, Op, Ref, Value
from archir.ops import lookup
from archir.ops.state import conv_window, rule_heads, state_axes
from archir.passes.rewrite import Rewriter, rewrite
from archir.types import Sequence, Tensor

PHASES = ("full", "prefill", "decode")
# ragged: left-padded, right-padded or packed; where rows lie is an input (D4)
LAYOUTS = ("dense", "ragged")
SOURCES = ("dense", "ragged")


def is_specialized(module: Module) -> bool:
    """Whether sequences and keys are explicit: the entry makes one, or nothing needs any."""
    if any(op.kind in SOURCES for op in module.entry.ops):
        return True
    return not _ordered_functions(module) and (not drops(module) or bool(ir.fields(module, "key")))


def drops(module: Module) -> bool:
    """Whether training draws random numbers."""
    return any(_draws(op) for function in module.functions for op in function.ops)


def _draws(op: Op) -> bool:
    return op.kind == "dropout" or "dropout" in op.attrs


def _ordered_functions(module: Module) -> set[str]:
    """Functions that must know which tokens follow which."""
    found: set[str] = set()
    for function in module.functions:
        for op in function.ops:
            if lookup(op.kind).ordered or (op.kind == "call" and op.attrs["callee"].name in found):
                found.add(function.name)
    return found


def inference(module: Module) -> Module:
    """A traced module without what it does in training only."""

    def visit(new: Rewriter, op: Op) -> bool:
        if op.kind == "dropout":
            new.values[op.result] = new.value(op.values[0])
        elif _draws(op):
            new.copy(op, attrs={k: v for k, v in op.attrs.items() if k != "dropout"})
        return _draws(op)

    return rewrite(module, visit) if drops(module) else module


def specialize(
    module: Module, phase: str = "full", layout: str = "dense", training: bool = False
) -> Module:
    """Makes sequences, state and the keys of random ops explicit; see the module's docstring."""
    if phase not in PHASES or layout not in LAYOUTS:
        raise UnsupportedError(
            f"phase {phase!r} with layout {layout!r} is not built",
            code="phase-layout",
            next=f"phases: {', '.join(PHASES)}; layouts: {', '.join(LAYOUTS)}",
        )
    if phase != "full":
        _refuse_only_full(module, phase)
    if layout == "ragged":
        _refuse_mixing(module)
    module = module if training else inference(module)
    ordered = _ordered_functions(module)
    functions: dict[str, Function] = {}
    for function in module.functions:
        new = _Specialized(function, functions, phase != "full")
        if function.name in ordered or (function.role == "entry" and _tokens(function)):
            new.make_sequence(layout)
        functions[function.name] = new.run(ordered)
    return Module(ir.callees_first(functions, module.entry.name))


class _Specialized(Rewriter):
    """One function being specialised."""

    def __init__(self, old: Function, functions: dict[str, Function], stateful: bool) -> None:
        super().__init__(old, functions)
        self.stateful = stateful
        self._sequence: Value | None = None
        self.keep_signature()

    def make_sequence(self, layout: str) -> None:
        """The entry makes the sequence, with the length of the state; others are given it."""
        if self.old.role != "entry":
            self._sequence = self.input("seq", Sequence(dims.symbol("R")))
            return
        tokens = _tokens(self.old)
        if tokens is None:
            raise UnsupportedError(
                f"{self.old.name} orders tokens, but none of its inputs is [B, T, …]",
                code="tokens-input",
                loc=self.old.loc,
                next='give it an input with tokens, for example x: "f[B, T, width]"',
            )
        per_row = Tensor("i64", (dims.symbol("R"),))
        places = []
        if layout == "ragged":
            places = [self.input("start", per_row), self.input("stop", per_row)]
        if not self.stateful:
            self._sequence = self.emit(layout, tokens, *places, hint="seq")
            return
        length = self.field("state", "length", per_row, kind="length")
        seq = self._sequence = self.emit(layout, tokens, *places, length, hint="seq")
        self.emit("store", self.emit("advance", seq, hint="length"), path="length")

    def run(self, ordered: set[str]) -> Function:
        """The function with what its ops left unsaid; `ordered` functions take the sequence."""
        counts: dict[str, int] = {}
        for op in self.old.ops:
            if op.kind in _EXPLICIT:
                ordinal = counts.get(op.kind, 0)
                counts[op.kind] = ordinal + 1
                name = op.attrs.get("name", f"{op.kind}_{ordinal}")
                plain = replace(op, attrs={k: v for k, v in op.attrs.items() if k != "name"})
                _EXPLICIT[op.kind](self, plain, name)
            elif self._takes_sequence(op, ordered):
                self.copy(op, (*(self[x] for x in op.operands), self.sequence))
            else:
                self.copy(op)
        return self.finish()

    @staticmethod
    def _takes_sequence(op: Op, ordered: set[str]) -> bool:
        calls = op.kind == "call" and op.attrs["callee"].name in ordered
        return lookup(op.kind).ordered or calls

    @property
    def sequence(self) -> Value:
        """The sequence of a function that orders tokens."""
        assert self._sequence is not None
        return self._sequence

    @property
    def rows(self) -> int | Poly:
        """The rows of its sequence."""
        assert isinstance(self.sequence.type, Sequence)
        return self.sequence.type.rows

    def state_entry(self, path: str, type_: Tensor, kind: str) -> Value:
        """The entry of the state at a path."""
        return self.field("state", path, type_, kind=kind)

    def key(self, name: str) -> Value:
        """The key of a random op."""
        return self.field("key", name, Tensor("i64", (2,)))


def _dropout(new: _Specialized, op: Op, name: str) -> None:
    new.copy(op, (new.value(op.values[0]), new.key(name)))


def _attention(new: _Specialized, op: Op, name: str) -> None:
    q, k, v = (new.value(x) for x in op.values)
    key = (new.key(f"{name}.dropout"),) if "dropout" in op.attrs else ()
    if not new.stateful:
        new.copy(op, (q, k, v, new.sequence, *key))
        return
    caches = []
    for part, value in (("k", k), ("v", v)):
        assert isinstance(value.type, Tensor)
        shape = (new.rows, dims.symbol("P"), *value.type.shape[2:])
        path = f"{name}.{part}"
        old = new.state_entry(path, Tensor(value.type.dtype, shape), "kv")
        cache = new.emit("append", old, value, new.sequence, hint=f"{part}_all", loc=op.loc)
        new.emit("store", cache, path=path, loc=op.loc)
        caches.append(cache)
    new.copy(op, (q, *caches, new.sequence, *key), {**op.attrs, "keys": "cache"})


def _state_update(new: _Specialized, op: Op, name: str) -> None:
    rule = new.functions[op.attrs["rule"].name]
    operands = [new.value(x) for x in op.values]
    shapes, states = state_shapes(rule, operands, new.rows), []
    for label, shape in shapes:
        if new.stateful:
            states.append(new.state_entry(f"{name}.{label}", Tensor("F", shape), "matrix"))
        else:
            states.append(new.emit("fill", shape=shape, value=0.0, hint=label, loc=op.loc))
    made = new.copy(op, (*operands, *states, new.sequence))
    if new.stateful:
        for (label, _), value in zip(shapes, made[len(op.results) :], strict=True):
            new.emit("store", value, path=f"{name}.{label}", loc=op.loc)


def _short_conv(new: _Specialized, op: Op, name: str) -> None:
    x, w = (new.value(v) for v in op.values)
    if not new.stateful:
        new.copy(op, (x, w, new.sequence))
        return
    assert isinstance(x.type, Tensor) and isinstance(w.type, Tensor)
    path = f"{name}.window"
    window = new.state_entry(path, conv_window(x.type, w.type, new.rows), "conv")
    _, after = new.copy(op, (x, w, window, new.sequence))
    new.emit("store", after, path=path, loc=op.loc)


# Ops that keep something between calls, or draw: how each says so.
_EXPLICIT = {
    "attention": _attention,
    "state_update": _state_update,
    "short_conv": _short_conv,
    "dropout": _dropout,
}


def _tokens(function: Function) -> Value | None:
    """The input whose first two axes are rows and tokens."""
    ranked = (v for v in function.inputs if isinstance(v.type, Tensor) and v.type.rank >= 2)
    return next(ranked, None)


def only_full(module: Module) -> Op | None:
    """The first op that lets a token see later ones, so that only the phase `full` has a meaning:
    attention that is not causal, or an op that mixes the axis of tokens itself."""
    return next(_looking_ahead(module), None)


def only_dense(module: Module) -> Op | None:
    """The first op that mixes the axis of tokens itself, so that rows must be of one length."""
    return next((op for op in _looking_ahead(module) if op.kind != "attention"), None)


def _looking_ahead(module: Module) -> Iterator[Op]:
    tokens = _tokens(module.entry)
    axis = dims.bare(tokens.type.shape[1]) if tokens and isinstance(tokens.type, Tensor) else None
    for function in module.functions:
        for op in function.ops if function.role in ("entry", "block") else ():
            ahead = op.kind == "attention" and not op.attrs.get("causal", True)
            if ahead or (axis and _mixes(op, axis)):
                yield op


def _refuse_mixing(module: Module) -> None:
    """Raises where an op would take in padding, or the tokens of other rows."""
    op = only_dense(module)
    if op is not None:
        raise UnsupportedError(
            f"{op.kind} over tokens does not know where rows of unlike length end",
            code="layout-mixing",
            loc=op.loc,
            next="give dense rows of one length, or say it with attention or a recurrence",
        )


def _mixes(op: Op, axis: str) -> bool:
    """Whether an op without an order of tokens moves them, or sums over them."""
    definition = lookup(op.kind)
    if definition.ordered or definition.family in ("control", "head"):
        return False

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
