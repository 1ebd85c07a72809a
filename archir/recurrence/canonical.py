"""The canonical record of a rule: what it does to its states, found by algebra.

    S_t = a ⊙ S_{t−1} + Σ_r x_r (e_r ⊙ (p_rᵀ S_{t−1})) + Σ_j w_j y_jᵀ      read_m = r_mᵀ S_{t−1}

a is 1, a number or a vector over keys; x, p, w, r are vectors over keys, y over values, e a number
or a vector over values. A vector of which nothing is summed has values alone, and a may be a vector
over them. Each state is a stage; one that is fed by reads of others comes after them
(a cascade). Outputs are functions of reads and operands. What is not of this form has a reason, and
runs token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from archir import dims
from archir.diagnostics import Loc
from archir.ir import Function, Op, Operand, Value
from archir.ops import lookup
from archir.recurrence import algebra
from archir.recurrence.algebra import (
    ONE,
    ZERO,
    Atom,
    Expr,
    call,
    collect,
    kept,
    largest,
    number,
    raised,
    replaced,
    single,
    total,
    written_out,
)
from archir.types import is_float

KEY, VALUE = "k", "v"  # the indices of a record


@dataclass(frozen=True)
class Erase:
    """x (e ⊙ (pᵀ S)): what is read along p goes back along x, scaled by e."""

    x: Expr
    e: Expr
    p: Expr


@dataclass(frozen=True)
class Write:
    """w yᵀ"""

    w: Expr
    y: Expr


@dataclass(frozen=True)
class Stage:
    """One state. key, value: its dims (None where it has no such axis).  place: of the key axis.

    decay: None where nothing is forgotten.  reads: the r of each.
    """

    state: str
    key: str | None
    value: str | None
    place: int
    decay: Expr | None
    erases: tuple[Erase, ...]
    writes: tuple[Write, ...]
    reads: tuple[Expr, ...]

    @property
    def decay_kind(self) -> str:
        """`none`, `scalar`, `key` or `value`."""
        if self.decay is None:
            return "none"
        if KEY in self.decay.free:
            return "key"
        return "value" if VALUE in self.decay.free else "scalar"

    @property
    def value_side(self) -> bool:
        """Whether an erase term is scaled per value."""
        return any(VALUE in erase.e.free for erase in self.erases)

    @property
    def shared(self) -> bool:
        """Whether what is erased and what is written go along the same keys, so that scores are
        shared."""
        return bool(self.erases) and [e.x for e in self.erases] == [w.w for w in self.writes]


@dataclass(frozen=True)
class Reason:
    """Why a rule has no canonical form, and the line."""

    what: str
    loc: Loc | None = None

    def __str__(self) -> str:
        return self.what + (f" ({self.loc.short})" if self.loc else "")


@dataclass(frozen=True)
class Record:
    """The canonical form of a rule: its stages in order, and its outputs over reads.

    Operands are x1, x2, … and states S1, S2, …, so that records of rules that differ in names are
    the same; `names` says what the rule calls them. In an output an atom `read` named `S1.m` is
    read m of S1, a function of the value index. values: other values of the rule that expressions
    name (u1, …), computed from operands alone.
    """

    rule: Function
    stages: tuple[Stage, ...]
    outputs: tuple[Expr, ...]
    values: dict[str, Value]
    names: dict[str, str]

    def __str__(self) -> str:
        """Its text, in which operands have numbers instead of names."""
        return show(self, {})


class _Refused(Exception):
    """Carries the reason out of the walk over a rule."""

    def __init__(self, what: str, loc: Loc | None) -> None:
        self.reason = Reason(what, loc)


@lru_cache(maxsize=256)
def canonical(rule: Function) -> Record | Reason:
    """The canonical record of a rule's function, or why it has none."""
    try:
        return _walked(rule).record()
    except _Refused as refused:
        return replace(refused.reason, loc=refused.reason.loc or rule.loc)


def meanings(rule: Function) -> dict[Value, Expr]:
    """What every value of a rule that has a record is, over its own axes "0", "1", …"""
    return _walked(rule).env


def _walked(rule: Function) -> _Canonical:
    """The walk over a rule, again where it showed that a vector is read whole."""
    found = _Canonical(rule, frozenset())
    plain = found.read_whole()
    return _Canonical(rule, plain) if plain else found


class _Canonical:
    """A walk over a rule. plain: the numbers and vectors that are read whole: from the first, an
    atom of such a state is a read of it, and sums are of the read. They have no key axis."""

    def __init__(self, rule: Function, plain: frozenset[str]) -> None:
        self.rule, self.plain = rule, plain
        count = rule.attrs["states"]
        self.states = {f"S{i}": v for i, v in enumerate(rule.inputs[:count], 1)}
        operands = {f"x{i}": v for i, v in enumerate(rule.inputs[count:], 1)}
        self.names = {name: v.name for name, v in (self.states | operands).items()}
        self.env: dict[Value, Expr] = {}
        self.values: dict[str, Value] = {}
        self.products: list[tuple[frozenset[str], Loc | None]] = []
        for name, value in (self.states | operands).items():
            kind = "state" if name in self.states else "operand"
            atom = Atom(kind, name, _places(value), loc=value.loc)
            self.env[value] = _read_whole(atom) if name in plain else single(atom)
        for op in rule.ops:
            self.op(op)

    # ---- what an op computes

    def op(self, op: Op) -> None:
        result, *more = op.results
        made = None if more else self.expression(op)
        if made is None:
            made = self.opaque(op)
        self.env[result] = made

    def opaque(self, op: Op) -> Expr:
        """A value computed from operands alone by an op that the algebra does not look into."""
        states = frozenset().union(*(self.get(x).states for x in op.values))
        if states:
            names = self.called(states)
            said = f"{op.kind} of what is read from {names} is nothing that the algebra knows"
            raise _Refused(said, op.loc)
        name = f"u{len(self.values) + 1}"
        self.values[name] = op.result
        return single(Atom("value", name, _places(op.result)))

    def called(self, states: Iterable[str]) -> str:
        """What the rule calls some states."""
        return ", ".join(self.names[name] for name in sorted(states))

    def get(self, x: Operand) -> Expr:
        """An operand as an expression over its own axes."""
        return self.env[x] if isinstance(x, Value) else number(x)

    def aligned(self, x: Operand, rank: int) -> Expr:
        """An operand over the axes of a result of that rank, aligned at the last."""
        if not isinstance(x, Value):
            return number(x)
        shift = rank - _rank(x)
        return self.get(x).renamed({str(i): str(i + shift) for i in range(_rank(x))})

    def expression(self, op: Op) -> Expr | None:
        if lookup(op.kind).family == "elementwise":
            rank = _rank(op.result)
            return self.elementwise(op, [self.aligned(x, rank) for x in op.operands])
        handler = _HANDLERS.get(op.kind)
        return handler(self, op) if handler else None

    def elementwise(self, op: Op, xs: list[Expr]) -> Expr:
        if op.kind in ("add", "sub", "mul", "div", "neg", "pow"):  # True counts as 1
            pairs = zip(op.operands, xs, strict=True)
            xs = [call("indicator", x) if _is_bool(v) else x for v, x in pairs]
        match op.kind, xs:
            case "add", [a, b]:
                return a + b
            case "sub", [a, b]:
                return a - b
            case "neg", [a]:
                return a.scaled(-1)
            case "mul", [a, b]:
                return self.multiplied(a, b, op.loc)
            case "div", [a, b]:
                return self.multiplied(a, raised(b, -1), op.loc)
            case "pow", [a, b] if b.number is not None and not (a.states and b.number != 1):
                return raised(kept(a), b.number)
            case "rsqrt", [a]:
                return raised(call("sqrt", a), -1)
            case "where", [c, a, b] if a.number is not None and b.number is not None:
                return call("indicator", c).scaled(a.number - b.number) + b
            case "where", [c, a, b] if (a.states | b.states) and not c.states:
                chosen = call("indicator", c)
                return chosen * _where(c, a, True) + (ONE - chosen) * _where(c, b, False)
        return call(op.kind, *xs, loc=op.loc)

    def multiplied(self, a: Expr, b: Expr, loc: Loc | None) -> Expr:
        """A product; one of two state-dependent factors is remembered, for the message."""
        if a.states & b.states:
            self.products.append((a.states & b.states, loc))
        return kept(a) * kept(b)

    # ---- stages

    def read_whole(self) -> frozenset[str]:
        """The states without a key axis: numbers, and vectors of which no sum goes back into
        them, where another value is of the whole vector or nothing at all is summed."""
        outputs, found = self.rule.outputs, set()
        for at, (name, state) in enumerate(self.states.items()):
            own = self.reads_of(name, [outputs[at]])
            others = (*outputs[:at], *outputs[at + 1 :])  # which may be the new state itself
            whole = any(
                a.kind == "state" and a.name == name for v in others for a in self.env[v].atoms()
            )
            summed = self.reads_of(name, outputs)
            if _rank(state) == 0 or (_rank(state) == 1 and not own and (whole or not summed)):
                found.add(name)
        return frozenset(found)

    def reads_of(self, name: str, values: Iterable[Value]) -> list[Atom]:
        """The sums over a state that values are made of."""
        atoms = (a for value in values for a in self.env[value].atoms())
        return [a for a in atoms if a.kind == "read" and a.name == name]

    def record(self) -> Record:
        news = dict(zip(self.states, self.rule.outputs, strict=False))
        stages = [self.stage(name, self.states[name], new) for name, new in news.items()]
        stages = self.in_order(stages)
        reads: dict[str, list[Expr]] = {s.state: [] for s in stages}
        closed = [self.closed_stage(s, reads) for s in stages]
        outputs = [
            self.closed(self.output(value), reads)
            for value in self.rule.outputs[len(self.states) :]
        ]
        final = tuple(replace(s, reads=tuple(reads[s.state])) for s in closed)
        return Record(self.rule, final, tuple(outputs), self.values, self.names)

    def stage(self, name: str, state: Value, new: Value) -> Stage:
        """A stage without its reads: the new state, monomial by monomial."""
        expr, shape = self.env[new], [dims.bare(d) for d in state.tensor.shape]
        place = self.key_place(name)
        names = {str(i): VALUE for i in range(len(shape))}
        if place is not None:
            names[str(place)] = KEY
        whole = tuple(names[str(i)] for i in range(len(shape)))
        decay, erased, written = ZERO, [], []
        for product, n in expr.renamed(names).terms:
            mine = [(a, p) for a, p in product if name in a.states]
            rest = collect([(tuple(f for f in product if f not in mine), n)])
            if not mine:
                written.append(rest)
                continue
            atom, power = mine[0]
            plain = atom.kind in ("state", "read") and atom.name == name
            if len(mine) > 1 or power != 1 or not plain:
                raise self.nonlinear(name, mine, new)
            if atom.kind == "state" or name in self.plain:
                if atom.indices != whole:
                    raise _Refused(f"{self.names[name]} is fed by its own transpose", new.loc)
                decay = decay + rest
            else:
                erased.append((rest, _at_key(atom)))
        decay = written_out(decay)
        if VALUE in decay.free and place is not None:
            what = "per key and value (K×V)" if KEY in decay.free else "per value"
            said = f"{self.names[name]} decays {what}"
            raise _Refused(f"{said}: only a decay per key can be chunked", new.loc)
        for expr_ in (decay, *(rest for rest, _ in erased), *written):
            for other in expr_.states - {name}:
                if any(a.kind == "state" and a.name == other for a in expr_.atoms()):
                    said = f"{self.names[name]} is fed by the whole state {self.names[other]}"
                    raise _Refused(said, new.loc)
        return Stage(
            name,
            shape[place] if place is not None else None,
            next((d for i, d in enumerate(shape) if i != place), None),
            place or 0,
            None if decay == ONE else decay,
            _erases(erased, new.loc),
            _writes(written, new.loc),
            (),
        )

    def nonlinear(self, name: str, mine: list[tuple[Atom, float]], new: Value) -> _Refused:
        """What stands in the way: a function of the state, or a product of it with itself."""
        called = self.names[name]
        for atom, _ in mine:
            for inner in (atom, *(a for arg in atom.args for a in arg.atoms())):
                if inner.kind == "call" and name in inner.states:
                    through = "a division or a power" if inner.name == "group" else inner.name
                    said = f"{called} goes through {through}"
                    return _Refused(f"{said}, which is not linear", inner.loc or new.loc)
        for states, loc in self.products:
            if name in states:
                return _Refused(f"{called} is multiplied by itself", loc)
        if len(mine) == 1 and mine[0][0].kind == "sum":
            said = f"what is read from {called} is summed over values before it goes back"
            if KEY in mine[0][0].free:
                said = f"{called} is multiplied by a whole matrix over keys"
            elif VALUE in mine[0][0].free:
                said = f"{called} is summed with what is no vector over keys"
            return _Refused(said, new.loc)
        return _Refused(f"{called} is not linear in itself", new.loc)

    def key_place(self, name: str) -> int | None:
        """The axis of a state that reads sum over: 0 unless they say otherwise; None of one that is
        read whole."""
        if name in self.plain:
            return None
        places: dict[int, Value] = {}
        for value in self.rule.outputs:
            for atom in self.reads_of(name, [value]):
                places.setdefault(atom.place, value)
        if len(places) > 1:
            said = f"reads sum over both axes of {self.names[name]}"
            raise _Refused(said, [*places.values()][-1].loc)
        return next(iter(places), 0)

    def in_order(self, stages: list[Stage]) -> list[Stage]:
        """A state after those whose reads feed it."""
        needs = {s.state: frozenset().union(*(x.states for x in _expressions(s))) for s in stages}
        for expr in (self.env[value] for value in self.rule.outputs):
            for atom in expr.atoms():
                if atom.kind == "read":  # along what is read from another
                    needs[atom.name] |= atom.args[0].states
        needs = {name: found - {name} for name, found in needs.items()}
        done: list[Stage] = []
        while len(done) < len(stages):
            ready = [
                s for s in stages if s not in done and needs[s.state] <= {d.state for d in done}
            ]
            if not ready:
                left = [s.state for s in stages if s not in done]
                new = self.rule.outputs[[*self.states].index(left[0])]
                raise _Refused(f"{self.called(left)} feed each other", new.loc)
            done += ready
        return done

    def output(self, value: Value) -> Expr:
        """An output over reads."""
        found = self.env[value]
        for atom in found.atoms():
            if atom.kind == "sum" and any(a.kind == "state" for a in atom.args[0].atoms()):
                said = f"an output reads {self.called(atom.states)} along a whole matrix"
                raise _Refused(said, value.loc)
            if atom.kind == "state":
                said = f"an output is of the whole state {self.called(atom.states)}"
                raise _Refused(said, value.loc)
        return found

    # ---- reads

    def closed_stage(self, stage: Stage, reads: dict[str, list[Expr]]) -> Stage:
        """A stage whose parts name reads of earlier ones."""

        def close(x: Expr) -> Expr:
            return self.closed(x, reads)

        return replace(
            stage,
            decay=None if stage.decay is None else close(stage.decay),
            erases=tuple(Erase(close(e.x), close(e.e), close(e.p)) for e in stage.erases),
            writes=tuple(Write(close(w.w), close(w.y)) for w in stage.writes),
        )

    def closed(self, x: Expr, reads: dict[str, list[Expr]]) -> Expr:
        """An expression in which sums of reads of one state are one read, with a number."""
        groups: dict[tuple[str, tuple[str, ...], algebra.Product], Expr] = {}
        made = ZERO
        for product, n in x.terms:
            at = [(a, p) for a, p in product if a.kind == "read" and "." not in a.name]
            rest = tuple(f for f in product if f not in at)
            if len(at) == 1 and at[0][1] == 1:
                atom = at[0][0]
                scalars = tuple(f for f in rest if not f[0].free and not f[0].states)
                beside = tuple(f for f in rest if f not in scalars)
                key = (atom.name, atom.indices, beside)
                weight = _at_key(atom) * collect([(scalars, n)])
                groups[key] = groups.get(key, ZERO) + weight
                continue
            made = made + self.closed_product(product, n, reads)
        for (state, indices, beside), weight in groups.items():
            part = self.read(state, weight, indices, reads)
            made = made + part * self.closed_product(beside, 1.0, reads)
        return made

    def closed_product(
        self, product: algebra.Product, n: float, reads: dict[str, list[Expr]]
    ) -> Expr:
        part = ONE.scaled(n)
        for atom, power in product:
            if atom.kind == "read" and "." not in atom.name:
                new = self.read(atom.name, _at_key(atom), atom.indices, reads)
            elif atom.states and atom.args:
                args = tuple(self.closed(a, reads) for a in atom.args)
                new = single(replace(atom, args=args))
            else:
                new = single(atom)
            part = part * raised(new, power)
        return part

    def read(
        self, state: str, weight: Expr, indices: tuple[str, ...], reads: dict[str, list[Expr]]
    ) -> Expr:
        """Read m of a state; an equal one is made once, also a number of times."""
        if not weight.terms:
            return ZERO
        if weight.number not in (None, 1):
            return self.read(state, ONE, indices, reads).scaled(weight.number or 0.0)
        weight = written_out(self.closed(weight, reads))
        if weight not in reads[state]:
            reads[state].append(weight)
        return single(Atom("read", f"{state}.{reads[state].index(weight)}", indices))


def _erases(found: list[tuple[Expr, Expr]], loc: Loc | None) -> tuple[Erase, ...]:
    """Terms (x · e · number, p) as few."""
    terms: list[tuple[Expr, Expr, Expr, Expr]] = []
    for rest, p in found:
        ((product, n),) = rest.terms
        x, e, scalars = _sides(product, loc)
        terms.append((x, e, p, scalars.scaled(n)))
    return tuple(Erase(x, e, p) for x, e, p in _as_few(terms))


def _writes(found: list[Expr], loc: Loc | None) -> tuple[Write, ...]:
    """Terms w · y · number as few."""
    terms: list[tuple[Expr, Expr, Expr, Expr]] = []
    for rest in found:
        ((product, n),) = rest.terms
        w, y, scalars = _sides(product, loc)
        terms.append((w, ONE, y, scalars.scaled(n)))
    return tuple(Write(w, y) for w, _, y in _as_few(terms))


def _as_few(terms: list[tuple[Expr, Expr, Expr, Expr]]) -> list[tuple[Expr, Expr, Expr]]:
    """Terms left · middle · right · number: those of one left together, or of one right."""
    by_left: dict[tuple[Expr, Expr], Expr] = {}
    by_right: dict[tuple[Expr, Expr], Expr] = {}
    for left, middle, right, n in terms:
        by_left[left, middle] = by_left.get((left, middle), ZERO) + right * n
        by_right[right, middle] = by_right.get((right, middle), ZERO) + left * n
    first: dict[tuple[Expr, Expr], Expr] = {}
    for (left, middle), right in by_left.items():
        first[right, middle] = first.get((right, middle), ZERO) + left
    second: dict[tuple[Expr, Expr], Expr] = {}
    for (right, middle), left in by_right.items():
        second[left, middle] = second.get((left, middle), ZERO) + right
    made = [(left, middle, right) for (right, middle), left in first.items()]
    if len(second) < len(first):
        made = [(left, middle, right) for (left, middle), right in second.items()]
    made = [t for t in made if t[0].terms and t[2].terms]
    return sorted(made, key=lambda t: tuple(map(str, t)))


def _sides(product: algebra.Product, loc: Loc | None) -> tuple[Expr, Expr, Expr]:
    """A product apart: what depends on the key index, on the value index, on neither."""
    both = [a for a, _ in product if {KEY, VALUE} <= a.free]
    if both:
        raise _Refused("what is written or erased is a whole matrix of keys and values", loc)

    def part(wanted: Callable[[Atom], bool]) -> Expr:
        return collect([(tuple(f for f in product if wanted(f[0])), 1.0)])

    return (
        part(lambda a: KEY in a.free),
        part(lambda a: VALUE in a.free),
        part(lambda a: not a.free & {KEY, VALUE}),
    )


def _read_whole(state: Atom) -> Expr:
    """A state that has no key axis, as what is read of it."""
    return single(replace(state, kind="read", args=(ONE,)))


def _at_key(read: Atom) -> Expr:
    """What a read sums with, over the key index."""
    return read.args[0].renamed({read.bound: KEY})


def _expressions(stage: Stage) -> Iterable[Expr]:
    if stage.decay is not None:
        yield stage.decay
    for erase in stage.erases:
        yield from (erase.x, erase.e, erase.p)
    for write in stage.writes:
        yield from (write.w, write.y)


def _finite(product: algebra.Product) -> bool:
    """Whether a product of finite numbers is surely finite."""
    plain = ("operand", "state", "size", "delta", "value")
    return all(
        power > 0
        and (
            atom.kind in plain
            or atom.name == "indicator"
            or (atom.kind in ("sum", "max") and all(_finite(p) for p, _ in atom.args[0].terms))
        )
        for atom, power in product
    )


def _where(c: Expr, x: Expr, holds: bool) -> Expr:
    """An expression that is used where `c` holds, or where not: elsewhere its factors that might
    not be finite there, as 1 / m where m > 0 was asked, are 1."""

    def safe(atom: Atom, power: float) -> Expr:
        if power > 0 and atom.kind == "read" and c.free:
            return raised(single(atom), power)  # what it sums with does not know this index
        if power > 0 and atom.kind == "read":
            return raised(single(replace(atom, args=(_where(c, atom.args[0], holds),))), power)
        found = raised(single(atom), power)
        if _finite(((atom, power),)):
            return found
        return call("where", c, found, ONE) if holds else call("where", c, ONE, found)

    made = ZERO
    for product, n in x.terms:
        part = number(n)
        for atom, power in product:
            part = part * safe(atom, power)
        made = made + part
    return made


# ---- ops that move axes


def _places(value: Value) -> tuple[str, ...]:
    """The index of every axis of a value that is longer than 1."""
    return tuple(str(i) for i, size in enumerate(value.tensor.shape) if size != 1)


def _is_bool(x: Operand) -> bool:
    return isinstance(x, Value) and x.tensor.dtype == "bool"


def _rank(x: Operand) -> int:
    return x.tensor.rank if isinstance(x, Value) else 0


def _size(size: Any) -> Expr:
    if isinstance(size, int):
        return number(size)
    return single(Atom("size", str(size)))


def _cast(c: _Canonical, op: Op) -> Expr | None:
    (x,) = op.values
    floats = is_float(x.tensor.dtype) and is_float(op.attrs["dtype"])
    return c.get(x) if floats else None


def _expand_dims(c: _Canonical, op: Op) -> Expr:
    (x,) = op.values
    kept = [i for i in range(_rank(op.result)) if i not in op.attrs["axes"]]
    return c.get(x).renamed({str(i): str(at) for i, at in enumerate(kept)})


def _transpose(c: _Canonical, op: Op) -> Expr:
    (x,) = op.values
    return c.get(x).renamed({str(old): str(at) for at, old in enumerate(op.attrs["axes"])})


def _broadcast_to(c: _Canonical, op: Op) -> Expr:
    return c.aligned(op.values[0], _rank(op.result))


def _reduce(c: _Canonical, op: Op) -> Expr | None:
    (x,) = op.values
    found, shape = c.get(x), x.tensor.shape
    axes = op.attrs["axes"]
    for axis in axes:
        if op.kind == "reduce_max":
            if found.states:
                return None
            found = largest(found, str(axis))
            continue
        found = total(found, str(axis), _size(shape[axis]))
        if op.kind == "reduce_mean":
            found = found * raised(_size(shape[axis]), -1)
    if op.attrs.get("keepdims"):
        return found
    kept = [i for i in range(len(shape)) if i not in axes]
    return found.renamed({str(i): str(at) for at, i in enumerate(kept)})


def _einsum(c: _Canonical, op: Op) -> Expr:
    left, _, right = op.attrs["equation"].partition("->")
    made, sizes = ONE, {}
    for x, term in zip(op.values, left.split(","), strict=True):
        names = {str(i): f"e{letter}" for i, letter in enumerate(term)}
        sizes |= dict(zip(term, x.tensor.shape, strict=True))
        made = c.multiplied(made, c.get(x).renamed(names), op.loc)
    for letter in dict.fromkeys(left.replace(",", "")):
        if letter not in right:
            made = total(made, f"e{letter}", _size(sizes[letter]))
    return made.renamed({f"e{letter}": str(i) for i, letter in enumerate(right)})


def _eye(c: _Canonical, op: Op) -> Expr:
    return single(Atom("delta", "", ("0", "1")))


_HANDLERS: dict[str, Callable[[_Canonical, Op], Expr | None]] = {
    "cast": _cast,
    "expand_dims": _expand_dims,
    "transpose": _transpose,
    "broadcast_to": _broadcast_to,
    "reduce_sum": _reduce,
    "reduce_mean": _reduce,
    "reduce_max": _reduce,
    "einsum": _einsum,
    "eye": _eye,
    "fill": lambda c, op: number(op.attrs["value"]),
    "size": lambda c, op: _size(op.attrs["dim"]),
}


# ---- text


def show(record: Record, names: Mapping[str, str] | None = None) -> str:
    """The record, a line per part; names: of operands and states, those of the rule by default."""
    names = record.names if names is None else names

    def change(atom: Atom) -> Expr | None:
        own, dot, m = atom.name.partition(".")
        if atom.kind in ("operand", "state", "read") and own in names and own != names[own]:
            new = replace(atom, name=names[own] + dot + m, loc=None)
            return single(replace(new, args=tuple(replaced(a, change) for a in atom.args)))
        return None

    def text(x: Expr) -> str:
        return str(replaced(x, change))

    lines = []
    for stage in record.stages:
        called = names.get(stage.state, stage.state)
        axes = [d for d in ((stage.key, KEY), (stage.value, VALUE)) if d[0]]
        turned = ", transposed" if stage.place == 1 else ""
        shown = ", ".join(f"{i}: {d}" for d, i in axes)
        lines.append(f"{called}[{shown}]{turned}")
        decay = "1" if stage.decay is None else text(stage.decay)
        lines.append(f"  decay  {stage.decay_kind}: {decay}")
        for e in stage.erases:
            lines.append(f"  erase  x {text(e.x)} | e {text(e.e)} | p {text(e.p)}")
        for w in stage.writes:
            lines.append(f"  write  w {text(w.w)} | y {text(w.y)}")
        for m, r in enumerate(stage.reads):
            lines.append(f"  read   {called}.{m}: {text(r)}")
        if stage.shared:
            lines.append("  erased and written along the same keys")
    for i, output in enumerate(record.outputs):
        lines.append(f"output {i}: {text(output)}")
    return "\n".join(lines)
