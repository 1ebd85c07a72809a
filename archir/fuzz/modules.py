"""Hypothesis strategies for well-typed modules.

A module grows function by function, a function op by op: a step picks values that are there, and an
op it may do to them. Whether it may is asked of the op's own shape rule, so no rule is told twice.

Kinds of modules:
    any       every op and number
    smooth    elementwise ops that do not blow up a rounding error, so results compare to 1e-12
    causal    smooth, and only attention and recurrence mix tokens: prefill and decode equal full
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from archir import types
from archir.diagnostics import ShapeError
from archir.dims import Poly, symbol
from archir.ir import Function, Init, Module, Op, Ref, Value, callees_first
from archir.ops import OPS, elementwise, infer_op
from archir.passes.rewrite import Rewriter
from archir.recurrence import Rule, recurrence
from archir.types import List, Tensor, Type

KINDS = ("any", "smooth", "causal")
_SMOOTH = (
    "abs", "add", "cos", "gelu_tanh", "maximum", "minimum", "mul", "neg", "relu", "sigmoid", "silu",
    "sin", "softplus", "sub", "tanh",
)  # fmt: skip

B, T = symbol("B"), symbol("T")
HEADS, WIDTH = 2, 8
_TEXT = st.text('ab.-_ é"\\\n#:,(x0', min_size=1, max_size=8)
_NUMBER = st.one_of(
    st.floats(-2, 2), st.integers(-3, 3), st.sampled_from([1e-300, -0.0, float("inf"), -1e22])
)
_INITS = (
    Init("zeros"), Init("ones"), Init("normal", (0.02,)), Init("uniform", (-1.0, 1.0)),
    Init("log_uniform", (1.0, 16.0)), Init("inverse_softplus", (0.001, 0.1)),
    Init("constant", (0.5,)),
)  # fmt: skip


@recurrence("q:K k:K v:V g:K beta: -> o:V", domain={"g": "<= 0", "beta": "0..1"})
def _delta(S: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
    S = np.exp(-np.abs(g))[:, None] * S
    S = S + np.outer(k, beta * (v - k @ S))
    return S, q @ S


@recurrence("S:K,V z:K | q:K k:K v:V -> o:V")
def _ratio(S: Any, z: Any, q: Any, k: Any, v: Any) -> Any:
    S, z = S + np.outer(np.exp(k), v), z + np.exp(k)
    return S, z, (np.exp(q) @ S) / (1 + np.exp(q) @ z)


RULES: tuple[Rule, ...] = (_delta, _ratio)


class _Grow(Rewriter):
    """One function while it grows."""

    def __init__(self, draw: Any, name: str, functions: dict[str, Function], kind: str) -> None:
        super().__init__(Function(name, (), (), (), ()), functions)
        self.draw, self.kind, self.causal = draw, kind, kind == "causal"
        self.available: list[Value] = []
        self.paths: set[str] = set()
        self.scopes = 0

    def take(self, name: str, type_: Type) -> Value:
        """A new input."""
        value = self.input(name, type_)
        self.available.append(value)
        return value

    def pick(self, fits: Callable[[Tensor], bool] = lambda _: True) -> Value | None:
        """A tensor that is there, one of the later ones more often; None where none fits."""
        found = [v for v in self.available if isinstance(v.type, Tensor) and fits(v.type)]
        if not found:
            return None
        return found[-1 - min(self.draw(st.integers(0, 2 * len(found))), len(found) - 1)]

    def try_emit(self, kind: str, *operands: Any, **attrs: Any) -> tuple[Value, ...]:
        """The results of an op, or () where its shape rule refuses it."""
        if any(x is None for x in operands):
            return ()
        draft = Op(kind, operands, (), attrs)
        try:
            infer_op(draft, self.functions)
        except ShapeError:
            return ()
        made = self.emit(kind, *operands, hint=self.draw(st.sampled_from("xyz")), **attrs)
        made = made if isinstance(made, tuple) else (made,)
        if kind != "dense":
            self.available += made
        return made

    def path(self) -> str:
        """A field path that this function does not have yet."""
        path = self.draw(_TEXT)
        while path in self.paths:
            path += "'"
        self.paths.add(path)
        return path

    def weight(self, *shape: int, dtype: str = "f") -> Value:
        """A new weight or buffer."""
        init = self.draw(st.sampled_from(_INITS))
        kind = self.draw(st.sampled_from(["weight", "buffer"]))
        attrs = {"decay": self.draw(st.booleans())} if kind == "weight" else {}
        return self.field(kind, self.path(), Tensor(dtype, shape), init=init, **attrs)

    def close(self, role: str, outputs: tuple[Value, ...], names: tuple[str, ...] = ()) -> str:
        """Ends the function and adds it to the module; its name."""
        function = Function(
            self.old.name, tuple(self.inputs), tuple(self.fields), tuple(self.ops), outputs, role,
            names,
        )  # fmt: skip
        self.functions[function.name] = function
        return function.name


def _is_float(type_: Tensor) -> bool:
    return types.is_float(type_.dtype)


def _by_token(rank: int) -> Callable[[Tensor], bool]:
    """Whether a type is f[B, T, …] of a rank."""
    return lambda t: t.dtype == "f" and t.rank == rank and t.shape[:2] == (B, T)


_COUNTS = {row.kind: row.operands for row in elementwise.TABLE}


def _elementwise(g: _Grow) -> None:
    kind = g.draw(st.sampled_from(sorted(_COUNTS) if g.kind == "any" else _SMOOTH))
    logical = kind.startswith("logical")
    first = g.pick(lambda t: (t.dtype == "bool") == (logical or kind == "where"))
    operands: list[Any] = [first]
    for _ in range(_COUNTS[kind] - 1):
        other = g.pick(lambda t: (t.dtype == "bool") == logical)
        number = not logical and g.draw(st.booleans())
        operands.append(
            g.draw(_NUMBER if g.kind == "any" else st.floats(-2, 2)) if number else other
        )
    g.try_emit(kind, *operands)


def _reduce(g: _Grow) -> None:
    x = g.pick(lambda t: _is_float(t) and t.rank > (2 if g.causal else 0))
    if x is None or not isinstance(x.type, Tensor):
        return
    least = 2 if g.causal else 0
    places = st.integers(least, x.type.rank - 1)
    axes = tuple(g.draw(st.lists(places, min_size=1, max_size=2, unique=True)))
    keep = {"keepdims": True} if g.draw(st.booleans()) or g.causal else {}
    kind = g.draw(st.sampled_from(["reduce_sum", "reduce_mean", "reduce_max"]))
    g.try_emit(kind, x, axes=axes, **keep)


def _move(g: _Grow) -> None:
    """Layout ops; without `causal` any axis may move."""
    x = g.pick(lambda t: t.rank > 2 or not g.causal)
    if x is None or not isinstance(x.type, Tensor):
        return
    rank, least = x.type.rank, 2 if g.causal else 0
    last = x.type.shape[-1] if rank else 1
    choice = g.draw(st.integers(0, 4))
    if choice == 0:
        axes = (*range(least), *g.draw(st.permutations(range(least, rank))))
        g.try_emit("transpose", x, axes=axes)
    elif choice == 1:
        g.try_emit("expand_dims", x, axes=(g.draw(st.integers(least, rank)),))
    elif choice == 2 and isinstance(last, int) and last % 2 == 0:
        g.try_emit("split", x, sizes=(last // 2, last // 2), axis=-1)
    elif choice == 3:
        g.try_emit("concat", x, g.pick(lambda t: t == x.type), axis=-1)
    elif isinstance(last, int) and last % 2 == 0:
        g.try_emit("reshape", x, shape=(*x.type.shape[:-1], last // 2, 2))


def _project(g: _Grow) -> None:
    x = g.pick(lambda t: t.dtype == "f" and t.rank > 0 and isinstance(t.shape[-1], int))
    if x is None or not isinstance(x.type, Tensor):
        return
    size = x.type.shape[-1]
    assert isinstance(size, int)
    choice = g.draw(st.integers(0, 3))
    if choice == 0:
        bias = (g.weight(WIDTH),) if g.draw(st.booleans()) else ()
        g.try_emit("linear", x, g.weight(WIDTH, size), *bias)
    elif choice == 1:
        wide = g.draw(st.sampled_from(["f", "F"]))
        g.try_emit("rms_norm", x, g.weight(size, dtype=wide), eps=g.draw(st.floats(1e-6, 0.1)))
    elif choice == 2:
        g.try_emit("layer_norm", x, g.weight(size), g.weight(size), eps=1e-5)
    else:
        g.try_emit("cast", x, dtype=g.draw(st.sampled_from(["F", "f32"])))


def _heads(g: _Grow) -> tuple[Value, ...]:
    x = g.pick(_by_token(3))
    made = g.try_emit("linear", x, g.weight(3 * WIDTH, WIDTH))
    return g.try_emit("heads", *made, parts=3, heads=HEADS) if made else ()


def _attention(g: _Grow) -> None:
    made = _heads(g)
    if not made:
        return
    attrs: dict[str, Any] = {"causal": g.causal or g.draw(st.booleans())}
    if g.draw(st.booleans()):
        attrs["window"] = g.draw(st.integers(1, 4))
    if g.draw(st.booleans()):
        attrs["dropout"] = g.draw(st.floats(0.1, 0.9))
    if g.draw(st.booleans()):
        attrs["scale"] = g.draw(st.floats(0.1, 1))
    if g.draw(st.booleans()):
        attrs["name"] = g.path()
    g.try_emit("attention", *made, **attrs)


def _recurrence(g: _Grow) -> None:
    made = _heads(g)
    rule = g.draw(st.sampled_from(RULES))
    if not made:
        return
    g.functions[rule.name] = rule.function
    named = {"name": g.path()} if g.draw(st.booleans()) else {}
    beta = (g.weight(HEADS),) if g.draw(st.booleans()) else (g.weight(),)
    operands = (*made, made[1], *beta) if rule is _delta else made
    g.try_emit("state_update", *operands, rule=Ref(rule.name), **named)


def _convolution(g: _Grow) -> None:
    taps = g.draw(st.integers(1, 3))
    named = {"name": g.path()} if g.draw(st.booleans()) else {}
    g.try_emit("short_conv", g.pick(_by_token(3)), g.weight(WIDTH, taps), **named)


def _dropout(g: _Grow) -> None:
    named = {"name": g.path()} if g.draw(st.booleans()) else {}
    g.try_emit("dropout", g.pick(_is_float), rate=g.draw(st.floats(0.1, 0.9)), **named)


def _pointwise(g: _Grow) -> None:
    name = f"scalar_{len(g.functions)}"
    inner = _Grow(g.draw, name, g.functions, g.kind)
    inner.take("a", Tensor("F"))
    inner.take("b", Tensor("F"))
    for _ in range(g.draw(st.integers(1, 3))):
        _elementwise(inner)
    output = inner.pick(_is_float)
    assert output is not None
    inner.close("pointwise", (output,))
    g.try_emit("pointwise", g.pick(_is_float), g.pick(_is_float), fn=Ref(name))


def _loop(g: _Grow) -> None:
    """A scan over the first axis, or a choice by length, with an elementwise body."""
    x = g.pick(lambda t: _is_float(t) and t.rank > 1)
    if g.causal or x is None or not isinstance(x.type, Tensor):
        return
    name = f"body_{len(g.functions)}"
    inner = _Grow(g.draw, name, g.functions, g.kind)
    row = Tensor(x.type.dtype, x.type.shape[1:])
    a, b = inner.take("a", row), inner.take("b", row)
    total = inner.emit("add", a, b, hint="total")
    for _ in range(g.draw(st.integers(0, 2))):
        _elementwise(inner)
    inner.close("body", (total, inner.pick(lambda t: t.rank > 0) or total))
    first = g.try_emit("reduce_sum", x, axes=(0,))
    if g.draw(st.booleans()):
        g.try_emit("scan", *first, x, body=Ref(name), carry=1, xs=1)
    else:
        both = {"short": Ref(name), "long": Ref(name)}
        g.try_emit("by_length", *first, *first, size=T + 1, below=4, **both)


def _call(g: _Grow) -> None:
    blocks = [f for f in g.functions.values() if f.role == "block"]
    if not blocks:
        return
    callee = g.draw(st.sampled_from(blocks))
    given: list[Value | None] = []
    for value in callee.inputs:
        if isinstance(value.type, List):
            lists = [v for v in g.available if isinstance(v.type, List)]
            given.append(lists[0] if lists else None)
        else:
            given.append(g.pick(lambda t, want=value.type: t == want))
    g.scopes += 1
    g.try_emit("call", *given, callee=Ref(callee.name), scope=f"s.{g.scopes}")


def _tap(g: _Grow) -> None:
    x = g.pick(_is_float)
    if x is None:
        return
    path = g.path()
    g.field("tap", path, x.type)
    g.emit("store", x, path=path)


def _sample(g: _Grow) -> None:
    """An op as its definition shows it, on new inputs."""
    kinds = [k for k, d in OPS.items() if d.samples and not d.effect and not _needs_sequence(k)]
    definition = OPS[g.draw(st.sampled_from(sorted(kinds)))]
    sample = g.draw(st.sampled_from(definition.samples))
    rename: dict[str, int | Poly] = {"R": B, "P": T, "S": T}
    operands = [g.take("sample", types.parse(text, rename)) for text in sample.operands]
    g.try_emit(definition.kind, *operands, **dict(sample.attrs or {}))


def _needs_sequence(kind: str) -> bool:
    return OPS[kind].family in ("sequence", "attention", "state", "head") or kind == "size"


STEPS = (
    _elementwise, _elementwise, _reduce, _move, _project, _attention, _recurrence, _convolution,
    _dropout, _pointwise, _loop, _call, _tap,
)  # fmt: skip


def _block(draw: Any, name: str, functions: dict[str, Function], kind: str) -> None:
    g = _Grow(draw, name, functions, kind)
    g.take("x", Tensor("f", (B, T, WIDTH)))
    if draw(st.booleans()):
        g.take("bank", List(symbol("N"), Tensor("f", (B, T, WIDTH))))
    for step in draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=5)):
        step(g)
    outputs = draw(st.lists(st.sampled_from(g.available), min_size=1, max_size=2))
    g.close("block", tuple(outputs))


@st.composite
def modules(draw: Any, kind: str = "any") -> Module:
    """A verified module with an entry `model(tokens, …)`; see the top of this file."""
    functions: dict[str, Function] = {}
    for ordinal in range(draw(st.sampled_from([1, 2, 0]))):
        _block(draw, f"block_{ordinal}", functions, kind)
    g = _Grow(draw, "model", functions, kind)
    tokens = g.take("tokens", Tensor("i64", (B, T)))
    table = g.weight(16, WIDTH)
    g.try_emit("embedding", tokens, table)
    g.take("bank", List(draw(st.sampled_from([3, symbol("N")])), Tensor("f", (B, T, WIDTH))))
    steps = STEPS if g.causal else (*STEPS, _sample, _sample)
    for step in draw(st.lists(st.sampled_from(steps), min_size=3, max_size=10)):
        step(g)
    tensors = [v for v in g.available if isinstance(v.type, Tensor)]
    outputs = draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=3, unique=True))
    named = draw(st.booleans())
    names = draw(st.lists(_TEXT, min_size=len(outputs), max_size=len(outputs), unique=True))
    g.close("entry", tuple(outputs), tuple(names) if named else ())
    return Module(callees_first(functions, "model"))


@st.composite
def mistyped(draw: Any, module: Module) -> Module | None:
    """The module with the type of one op's result changed; None where no op has one."""
    places = [
        (function, op, at)
        for function in module.functions
        for op in function.ops
        for at, value in enumerate(op.results)
        if isinstance(value.type, Tensor)
    ]
    if not places:
        return None
    function, op, at = draw(st.sampled_from(places))
    old = op.results[at]
    assert isinstance(old.type, Tensor)
    wrong = draw(
        st.sampled_from([
            Tensor(old.type.dtype, (*old.type.shape, 1)),
            Tensor("i32" if old.type.dtype != "i32" else "f", old.type.shape),
            *(Tensor(old.type.dtype, (n + 1, *old.type.shape[1:])) for n in old.type.shape[:1]),
        ])
    )  # fmt: skip
    new = replace(old, type=wrong)

    def value(v: Any) -> Any:
        return new if v is old else v

    ops = tuple(
        replace(o, operands=tuple(map(value, o.operands)), results=tuple(map(value, o.results)))
        for o in function.ops
    )
    changed = replace(function, ops=ops, outputs=tuple(map(value, function.outputs)))
    return Module(tuple(changed if f is function else f for f in module.functions))
