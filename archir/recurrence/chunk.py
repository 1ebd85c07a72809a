"""From a canonical record to IR: what is computed per token, per chunk, and of what is read.

For n tokens entered with state S, E(i⁻, j) being the product of decays from token j + 1 to i − 1
(from the first token for j = 0), and ⟨u_i, v_j⟩ = Σ_d u_i[d] v_j[d] E(i⁻, j)[d] for j < i, else 0:

    L = ⟨p, x⟩    M = ⟨p, w⟩    A = ⟨r, x⟩    B = ⟨r, w⟩
    U_i = e_i ⊙ ((p_i ⊙ E(i⁻, 0))ᵀ S + Σ_j L_ij U_j + Σ_j M_ij y_j)
    read = (r ⊙ E(·⁻, 0)) S + A U + B y
    S'   = E(n + 1⁻, 0) ⊙ S + (x ⊙ E(n + 1⁻, ·))ᵀ U + (w ⊙ E(n + 1⁻, ·))ᵀ y

Of a vector that has values alone, each with its own decay, E is over values: it scales y and what
is read of S, and nothing is erased.

What needs no state is made for all chunks at once (`_Within`); one after another only a few
products with the state are left (`_Across`). Where x = w, as in every delta rule, M = L and A = B
are made once.
Decays are multiplied up between the two tokens, so that any decay is right: zero clears the state,
and nothing is divided. A token may have several x (its rank), w and r.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from archir import dims
from archir.dims import Poly
from archir.ir import Function, Operand, Value
from archir.passes.rewrite import Rewriter
from archir.recurrence.algebra import ONE, Atom, Expr, Product
from archir.recurrence.canonical import KEY, VALUE, Record, Stage
from archir.types import Tensor, is_float

Size = int | Poly
# What a stage needs of every token: name → whether it is there.
PARTS = ("a", "x", "e", "p", "w", "y", "r")


def parts(stage: Stage) -> tuple[str, ...]:
    """Which of `PARTS` a stage has, in their order."""
    erases, writes = bool(stage.erases), bool(stage.writes)
    has = {
        "a": stage.decay is not None,
        "x": erases,
        "e": any(t.e != ONE for t in stage.erases),
        "p": erases,
        "w": writes and not stage.shared,
        "y": writes,
        "r": bool(stage.reads),
    }
    return tuple(name for name in PARTS if has[name])


@dataclass(frozen=True)
class Emitted:
    """A value and the index of each of its axes."""

    value: Value
    axes: tuple[str, ...]


class Writer(Rewriter):
    """A function of one head and one token being written from expressions.

    reads: the inputs that hold reads, by `S.m`.
    """

    def __init__(self, record: Record, name: str, reads: Sequence[str]) -> None:
        super().__init__(Function(name, (), (), (), (), "rule"), {})
        self.record = record
        count = record.rule.attrs["states"]
        operands = record.rule.inputs[count:]
        first = record.rule.inputs[0].type
        assert isinstance(first, Tensor)
        self.dtype = first.dtype
        self.operands = {f"x{i}": self.input(v.name, v.type) for i, v in enumerate(operands, 1)}
        self.values |= zip(operands, self.operands.values(), strict=True)
        values = {s.state: s.value for s in record.stages}
        self.reads = {}
        for name in reads:
            state, _, m = name.partition(".")
            called = f"{record.names[state]}_read{m}"
            self.reads[name] = self.input(called, self.vector(values[state]))

    def vector(self, dim: str | None) -> Tensor:
        """A vector over a dim; a number where there is none."""
        return Tensor(self.dtype, (dims.symbol(dim),) if dim else ())

    # ---- expressions

    def tensor(self, x: Expr, order: tuple[str, ...], shape: tuple[Size, ...]) -> Value:
        """An expression as a tensor with these axes."""
        made = self.sum(x)
        value = self.spread(made, order)
        assert isinstance(value.type, Tensor)
        if value.type.shape == shape:
            return value
        if not value.type.shape:  # with axes, so that leading ones can stand before them
            axes = tuple(range(len(shape)))
            value = self.emit("expand_dims", value, axes=axes, hint=value.name)
        return self.emit("broadcast_to", value, shape=shape, hint=value.name)

    def sum(self, x: Expr) -> Emitted:
        """The sum of the terms, with the axes that any has."""
        terms = [self.term(product, n) for product, n in x.terms]
        if not terms:
            return self.constant(0.0)
        made = terms[0]
        for term in terms[1:]:
            made = self.joined("add", made, term)
        return made

    def constant(self, number: float) -> Emitted:
        """A number as a value."""
        return Emitted(self.emit("fill", shape=(), value=number, dtype=self.dtype), ())

    def term(self, product: Product, n: float) -> Emitted:
        """A product of powers, and its number."""
        over: list[Emitted] = []
        under: list[Emitted] = []
        for atom, power in product:
            found = self.atom(atom)
            if abs(power) != 1:
                found = Emitted(self.emit("pow", found.value, abs(power)), found.axes)
            (over if power > 0 else under).append(found)
        made = over[0] if over else self.constant(n)
        for factor in over[1:]:
            made = self.joined("mul", made, factor)
        for factor in under:
            made = self.joined("div", made, factor)
        if over and n == -1:
            return Emitted(self.emit("neg", made.value), made.axes)
        if over and n != 1:
            return Emitted(self.emit("mul", made.value, n), made.axes)
        return made

    def atom(self, a: Atom) -> Emitted:
        match a.kind:
            case "operand":
                return Emitted(self.operands[a.name], a.indices)
            case "read":
                return Emitted(self.reads[a.name], a.indices)
            case "value":
                return self.squeezed(self.copied(self.record.values[a.name]), a.indices)
            case "size":
                size = dims.parse(a.name, {})
                return Emitted(self.emit("size", dim=size, dtype=self.dtype), ())
            case "sum" | "max":
                inner = self.sum(a.args[0])
                axis = inner.axes.index(a.bound)
                kind = "reduce_sum" if a.kind == "sum" else "reduce_max"
                axes = tuple(i for i in inner.axes if i != a.bound)
                return Emitted(self.emit(kind, inner.value, axes=(axis,)), axes)
            case "call":
                return self.call(a)
        raise AssertionError(f"{a.kind} stands in no expression of a record")

    def call(self, a: Atom) -> Emitted:
        """An elementwise function of expressions, brought to the same axes."""
        numbers = [x.number for x in a.args]
        found = [self.sum(x) if n is None else None for x, n in zip(a.args, numbers, strict=True)]
        axes = tuple(dict.fromkeys(i for f in found if f is not None for i in f.axes))
        given: list[Operand] = []
        for f, n in zip(found, numbers, strict=True):
            if f is None:
                assert n is not None
                alone = given == [] and all(n is not None for n in numbers)
                given.append(self.constant(n).value if alone else n)
            else:
                given.append(self.spread(f, axes))
        match a.name:
            case "group":
                return Emitted(_value(given[0]), axes)
            case "indicator":
                return Emitted(self.emit("cast", given[0], dtype=self.dtype), axes)
        return Emitted(self.emit(a.name, *given, loc=a.loc), axes)

    def joined(self, kind: str, a: Emitted, b: Emitted) -> Emitted:
        """Two values over the axes of both."""
        axes = tuple(dict.fromkeys([*a.axes, *b.axes]))
        return Emitted(self.emit(kind, self.spread(a, axes), self.spread(b, axes)), axes)

    def spread(self, x: Emitted, axes: tuple[str, ...]) -> Value:
        """A value with an axis for each index, of size 1 where it has none."""
        value = x.value
        held = tuple(i for i in axes if i in x.axes)
        if held != x.axes:
            order = tuple(x.axes.index(i) for i in held)
            value = self.emit("transpose", value, axes=order, hint=value.name)
        new = tuple(at for at, i in enumerate(axes) if i not in x.axes)
        if not new or not held:  # a number meets any shape
            return value
        return self.emit("expand_dims", value, axes=new, hint=value.name)

    def copied(self, value: Value) -> Value:
        """A value of the rule that is computed from operands alone, by its own ops."""
        if value not in self.values:
            op = next(op for op in self.record.rule.ops if value in op.results)
            for operand in op.values:
                self.copied(operand)
            self.copy(op)
        return self.values[value]

    def squeezed(self, value: Value, indices: tuple[str, ...]) -> Emitted:
        """A value without its axes of size 1."""
        assert isinstance(value.type, Tensor)
        ones = tuple(i for i, size in enumerate(value.type.shape) if size == 1)
        if ones:
            value = self.emit("reduce_sum", value, axes=ones, hint=value.name)
        return Emitted(value, indices)


def _value(x: Operand) -> Value:
    assert isinstance(x, Value)
    return x


def token_function(record: Record, stage: Stage, reads: Sequence[str]) -> Function:
    """(operands, reads of earlier stages) of a token → its `parts`, [rank, K] or [rank, V]; the
    decay is [K], [V] or a number, e is [rank] or [rank, V]."""
    new = Writer(record, f"{record.rule.name}_{record.names[stage.state]}_terms", reads)
    key: Size = dims.symbol(stage.key) if stage.key else 1
    value: Size = dims.symbol(stage.value) if stage.value else 1

    def rows(xs: Sequence[Expr], index: str, size: Size) -> Value:
        made = [new.tensor(x, (index,), (size,)) for x in xs]
        lines = [new.emit("expand_dims", x, axes=(0,), hint=x.name) for x in made]
        return lines[0] if len(lines) == 1 else new.emit("concat", *lines, axis=0)

    found: dict[str, Value] = {}
    if stage.decay is not None:
        order, shape = {"key": ((KEY,), (key,)), "value": ((VALUE,), (value,))}.get(
            stage.decay_kind, ((), ())
        )
        found["a"] = new.tensor(stage.decay, order, shape)
    if stage.erases:
        found["x"] = rows([t.x for t in stage.erases], KEY, key)
        found["p"] = rows([t.p for t in stage.erases], KEY, key)
        if stage.value_side:
            found["e"] = rows([t.e for t in stage.erases], VALUE, value)
        else:
            found["e"] = rows([t.e for t in stage.erases], "", 1)
    if stage.writes:
        found["w"] = rows([t.w for t in stage.writes], KEY, key)
        found["y"] = rows([t.y for t in stage.writes], VALUE, value)
    if stage.reads:
        found["r"] = rows(stage.reads, KEY, key)
    outputs = tuple(found[name] for name in parts(stage))
    return new.finish(outputs=outputs, inputs=tuple(new.inputs), ops=tuple(new.ops))


def output_function(record: Record, reads: Sequence[str]) -> Function:
    """(operands, reads) of a token → the rule's outputs."""
    new = Writer(record, f"{record.rule.name}_outputs", reads)
    count = record.rule.attrs["states"]
    made = []
    wanted = record.rule.outputs[count:]
    for x, value in zip(record.outputs, wanted, strict=True):
        assert isinstance(value.type, Tensor)
        order = tuple(str(i) for i in range(value.type.rank))
        made.append(new.tensor(x, order, value.type.shape))
    return new.finish(outputs=tuple(made), inputs=tuple(new.inputs), ops=tuple(new.ops))


class _Within(Rewriter):
    """What a chunk of one head needs of its tokens alone, before any state enters it.

    p, r: over the state that enters, [C, rank, K]; for a solve that is one for all values p is
    solved already, as is `given`.  L, e: of the solve where each value has its own.  given: what
    writes of the chunk add there, [C, rank, V].  A: scores of reads with what is erased.  seen: of
    reads with what is written, times it, [C, m, V].  x: [C, rank, K] and new: [K, V], what goes
    into the state that leaves.  whole: the decay of the chunk. Where values decay, r is
    [C, m, V], decays included.
    """

    def __init__(self, record: Record, stage: Stage, size: Size) -> None:
        name = f"{record.rule.name}_{record.names[stage.state]}_within"
        super().__init__(Function(name, (), (), (), (), "rule"), {})
        self.stage, self.size = stage, size
        self.dtype = _dtype(record)
        self.K, self.V = _sizes(stage)
        own = {"key": (self.K,), "value": (self.V,)}
        self.decaying: tuple[Size, ...] = own.get(stage.decay_kind, ())

    def run(self) -> tuple[Function, tuple[str, ...]]:
        """The function of parts, and the names of its results."""
        stage, C, K, V = self.stage, self.size, self.K, self.V
        ranks = {"x": len(stage.erases), "p": len(stage.erases), "e": len(stage.erases)}
        ranks |= {"w": len(stage.writes), "y": len(stage.writes), "r": len(stage.reads)}
        last = {"x": K, "p": K, "w": K, "r": K, "y": V, "e": V if stage.value_side else 1}
        part: dict[str, Value] = {}
        for name in parts(stage):
            shape = (C, ranks[name], last[name]) if name != "a" else (C, *self.decaying)
            part[name] = self.input(name, Tensor(self.dtype, shape))
        self.masks(part.get("a"))
        found: dict[str, Value] = {}
        if stage.erases:
            found |= self.erased(part)
        along = part.get("w", part["x"] if stage.shared else None)  # the keys of writes
        if stage.reads:
            found["r"] = self.entered(part["r"])
            if stage.erases:
                found["A"] = self.scores(part["r"], part["x"], "A")
            if along is not None and stage.decay_kind == "value":
                found["seen"] = self.each_value(part["r"], along, part["y"])
            elif along is not None:
                scores = found["A"] if stage.shared else self.scores(part["r"], along, "B")
                found["seen"] = self.applied(scores, part["y"])
        if stage.erases:
            found["x"] = self.leaving(part["x"])
        if along is not None:
            keys, y = found["x"] if stage.shared else along, part["y"]
            if stage.decay_kind == "value":
                y = self.leaving(y)
            elif not stage.shared:
                keys = self.leaving(keys)
            found["new"] = self.emit("einsum", keys, y, equation="jbk,jbv->kv", hint="new")
        if self.whole is not None:
            found["whole"] = self.whole
        outputs = tuple(found.values())
        made = self.finish(outputs=outputs, inputs=tuple(self.inputs), ops=tuple(self.ops))
        return made, tuple(found)

    def masks(self, a: Value | None) -> None:
        """j < i for tokens j and places i = 0 … C, and the products of decays between them."""
        C = self.size
        place = self.emit("iota", dim=C + 1, dtype=self.dtype, hint="place")
        token = self.emit("iota", dim=C, dtype=self.dtype, hint="token")
        i = self.emit("expand_dims", place, axes=(1,), hint="i")
        j = self.emit("expand_dims", token, axes=(0,), hint="j")
        self.before, _ = self.rows(self.emit("less", j, i, hint="earlier"))
        self.first = self.between = self.whole = self.end = None
        if a is None:
            return
        own = self.decaying
        one = self.emit("fill", shape=(1, *own), value=1.0, dtype=self.dtype)
        shifted = self.emit("concat", one, a, axis=0, hint="a")  # the decay of the token before
        self.first, whole = self.rows(self.emit("cumprod", shifted, axis=0, hint="decay"))
        later = self.emit("less", self.emit("add", j, 1.0), i, hint="later")
        each = self.emit("expand_dims", shifted, axes=(1,), hint="a")
        later = self.emit("expand_dims", later, axes=(2,), hint="later") if own else later
        steps = self.emit("where", later, each, 1.0, hint="steps")
        self.between, end = self.rows(self.emit("cumprod", steps, axis=0, hint="between"))
        self.end = self.emit("reshape", end, shape=(C, 1, *(own or (1,))), hint="end")
        shape = (self.K, 1) if self.stage.decay_kind == "key" else (1, *(own or (1,)))
        self.whole = self.emit("reshape", whole, shape=shape, hint="whole")

    def rows(self, x: Value) -> tuple[Value, Value]:
        """[C + 1, …] → its first C rows and its last one."""
        return self.emit("split", x, sizes=(self.size, 1), axis=0, hint=x.name)

    def entered(self, u: Value) -> Value:
        """u ⊙ E(·⁻, 0), [C, rank, K]; [C, rank, V] where values decay"""
        if self.first is None:
            return u
        axes = (1,) if self.decaying else (1, 2)
        return self.emit("mul", u, self.emit("expand_dims", self.first, axes=axes), hint=u.name)

    def leaving(self, u: Value) -> Value:
        """u ⊙ E(n + 1⁻, ·), [C, rank, K]"""
        return u if self.end is None else self.emit("mul", u, self.end, hint=u.name)

    def scores(self, u: Value, v: Value, hint: str) -> Value:
        """⟨u, v⟩, [C, rank of u, C, rank of v]"""
        kind = self.stage.decay_kind
        if kind == "key":
            assert self.between is not None
            made = self.emit("einsum", u, v, self.between, equation="iak,jbk,ijk->iajb", hint=hint)
        else:
            made = self.emit("einsum", u, v, equation="iak,jbk->iajb", hint=hint)
        if kind == "scalar":
            assert self.between is not None
            made = self.emit("mul", made, self.emit("expand_dims", self.between, axes=(1, 3)))
        earlier = self.emit("expand_dims", self.before, axes=(1, 3), hint="earlier")
        return self.emit("where", earlier, made, 0.0, hint=hint)

    def erased(self, part: Mapping[str, Value]) -> dict[str, Value]:
        """p, given, and L and e unless both are solved here: by substitution over (token, rank)."""
        C, rank = self.size, len(self.stage.erases)
        n = C * rank
        scores = self.scores(part["p"], part["x"], "L")
        found = {"p": self.entered(part["p"])}
        if "y" in part:
            seen = scores if self.stage.shared else self.scores(part["p"], part["w"], "M")
            found["given"] = self.applied(seen, part["y"])
        lower = self.emit("reshape", scores, shape=(n, n), hint="L")
        e = part.get("e")
        if e is not None:
            e = self.emit("reshape", e, shape=(n, self.V if self.stage.value_side else 1), hint="e")
        if self.stage.value_side:
            assert e is not None
            return found | {"L": lower, "e": e}
        for name, size in (("p", self.K), ("given", self.V)):
            if name in found:
                flat = self.emit("reshape", found[name], shape=(n, size), hint=name)
                made = self.emit("substitute", lower, flat, *((e,) if e else ()), hint=name)
                found[name] = self.emit("reshape", made, shape=(C, rank, size), hint=name)
        return found

    def each_value(self, r: Value, w: Value, y: Value) -> Value:
        """Σ_j ⟨r_i, w_j⟩ E(i⁻, j) ⊙ y_j where values decay, each by its own, [C, rank, V]"""
        assert self.between is not None
        earlier = self.emit("expand_dims", self.before, axes=(2,), hint="earlier")
        between = self.emit("where", earlier, self.between, 0.0, hint="between")
        return self.emit("einsum", r, w, between, y, equation="iak,jbk,ijv,jbv->iav", hint="seen")

    def applied(self, scores: Value, y: Value) -> Value:
        """Σ_j scores_ij y_j, [C, rank, V]"""
        return self.emit("einsum", scores, y, equation="iajb,jbv->iav", hint="seen")


class _Across(Rewriter):
    """One chunk of one head: the state that enters and what `_Within` made → the state that leaves,
    and reads [C, m, V]."""

    def __init__(self, record: Record, stage: Stage, size: Size) -> None:
        name = f"{record.rule.name}_{record.names[stage.state]}_chunk"
        super().__init__(Function(name, (), (), (), (), "rule"), {})
        self.stage, self.size = stage, size
        self.state = Tensor(_dtype(record), _sizes(stage))

    def run(self, inputs: Mapping[str, Tensor]) -> Function:
        S = self.input("S", self.state)
        x = {name: self.input(name, type_) for name, type_ in inputs.items()}
        u = None
        if self.stage.erases:
            u = self.entered(x["p"], S, x.get("given"))
            if self.stage.value_side:
                u = self.solved(u, x["L"], x["e"])
        reads = []
        if self.stage.reads:
            read = self.entered(x["r"], S, x.get("seen"))
            if u is not None:
                read = self.emit(
                    "add", read, self.emit("einsum", x["A"], u, equation="iajb,jbv->iav"), hint="o"
                )
            reads = [read]
        after = self.emit("mul", x["whole"], S, hint="kept") if "whole" in x else S
        if u is not None:
            back = self.emit("einsum", x["x"], u, equation="jbk,jbv->kv", hint="back")
            after = self.emit("add", after, back, hint="kept")
        if "new" in x:
            after = self.emit("add", after, x["new"], hint="kept")
        return self.finish(outputs=(after, *reads), inputs=tuple(self.inputs), ops=tuple(self.ops))

    def entered(self, u: Value, S: Value, more: Value | None) -> Value:
        """uᵀ S, and what is added to it"""
        if self.stage.decay_kind == "value":  # u is over values, by which what is read decays
            made = self.emit("mul", u, S, hint="U")
        else:
            made = self.emit("einsum", u, S, equation="iak,kv->iav", hint="U")
        return made if more is None else self.emit("add", made, more, hint="U")

    def solved(self, u: Value, lower: Value, e: Value) -> Value:
        """U by substitution, every value with its own e."""
        assert isinstance(u.type, Tensor)
        n = self.size * len(self.stage.erases)
        flat = self.emit("reshape", u, shape=(n, u.type.shape[2]), hint="U")
        made = self.emit("substitute", lower, flat, e, hint="U")
        return self.emit("reshape", made, shape=u.type.shape, hint="U")


def _dtype(record: Record) -> str:
    first = record.rule.inputs[0].type
    assert isinstance(first, Tensor) and is_float(first.dtype)
    return first.dtype


def _sizes(stage: Stage) -> tuple[Size, Size]:
    """K and V as dims; 1 where a state has no such axis."""
    return tuple(dims.symbol(d) if d else 1 for d in (stage.key, stage.value))  # type: ignore[return-value]


def chunk_functions(record: Record, stage: Stage, size: int | Poly) -> tuple[Function, Function]:
    """For `size` tokens of one head: parts → what needs no state; (S [K, V], that) → (S after them,
    reads [size, m, V])."""
    within, names = _Within(record, stage, size).run()
    made = {}
    for name, value in zip(names, within.outputs, strict=True):
        assert isinstance(value.type, Tensor)
        made[name] = value.type
    return within, _Across(record, stage, size).run(made)


def read_names(stages: Sequence[Stage]) -> tuple[str, ...]:
    """`S.m` of every read of some stages."""
    return tuple(f"{s.state}.{m}" for s in stages for m in range(len(s.reads)))
