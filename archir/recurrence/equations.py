"""The equations of one rule as text and as LaTeX, written from its canonical record.

    E_ij = Π_{j<t<i} a_t        L_ij = ⟨p_i, E_ij ⊙ k_j⟩
    U_i = y_i + S_0ᵀ (D_i ⊙ p_i) + Σ_{j<i} L_ij · U_j

Vectors are columns. `·` scales, `⊙` goes element by element, `⟨u, v⟩` sums their products, and what
stands side by side is a product of matrices, which binds closest. Σ and Π reach to the next + or −.
A number is added to every component of a vector.
An expression that is no vector of one index has its indices in brackets: `x_i[d] = W_i[d, c] · …`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from archir.ir import Function, Op, Operand, Value, plain_name
from archir.recurrence.algebra import ONE, ZERO, Atom, Expr, Product, single
from archir.recurrence.canonical import KEY, VALUE, Record, Stage, meanings
from archir.recurrence.notation import (
    ATOM,
    COMPARISONS,
    GREEK,
    POWER,
    PRODUCT,
    SUM,
    Latex,
    Piece,
    Symbol,
    Text,
    closed,
)  # fmt: skip
from archir.types import Tensor

Section = Literal["terms", "recurrent", "chunk", "outputs"]
SECTIONS: tuple[Section, ...] = ("terms", "recurrent", "chunk", "outputs")
NONE, SCALAR, PER_KEY, PER_VALUE = "none", "scalar", "key", "value"  # kinds of decay

# Letters by what they mean; the first that the rule does not use itself is taken, or a′, a″, …
LETTERS = {
    "decay": "aα", "x": "xξ", "e": "eε", "p": "pπ", "w": "wω", "y": "yη", "r": "rρ",
    "before": "DΔ", "between": "EΓ", "after": "FΦ",
    "px": "LΛ", "pw": "MN", "rx": "AG", "rw": "BH", "solved": "UZ",
    "chunk": "CNTQGP", "function": "φψχ",
}  # fmt: skip
INDICES = "ijtmndclhsubzogfqvxykwrpea"  # of tokens 3, of terms 2, then of components of vectors


@dataclass(frozen=True)
class Equation:
    """One quantity: where it belongs, what it is in a word or two, and its equation twice."""

    section: Section
    label: str
    text: str
    latex: str


@dataclass(frozen=True)
class Equations:
    """All of a rule's: terms of a token, token by token, by chunks, outputs.

    facts: of each state by its name, in words.  i, j, t, m, n, C: the letters that were taken for
    tokens, terms and the tokens of a chunk.
    """

    all: tuple[Equation, ...]
    facts: Mapping[str, Sequence[tuple[str, str]]]
    letters: Mapping[str, str]


def equations(record: Record) -> Equations:
    """The equations of a record."""
    writer = _Writer(record, Text())
    text, latex = writer.run(), _Writer(record, Latex()).run()
    found = [
        Equation(section, label, shown, tex)
        for (section, label, shown), (_, _, tex) in zip(text, latex, strict=True)
    ]
    names = {"i": writer.i, "j": writer.j, "t": writer.t, "m": writer.m, "n": writer.u}
    ordered = sorted(found, key=lambda e: SECTIONS.index(e.section))
    return Equations(tuple(ordered), writer.facts, names | {"C": writer.C})


@dataclass(frozen=True)
class _Part:
    """One vector (or number) of a token for each term; `one`: it is the number 1, left out."""

    symbol: Symbol | None
    count: int = 1
    ones: str = ""  # the dim of a vector of ones

    @property
    def one(self) -> bool:
        return self.symbol is None and not self.ones


@dataclass
class _Taken:
    """Names in use, from which new ones keep away."""

    names: set[str] = field(default_factory=set)

    def symbol(self, meaning: str, state: str = "") -> Symbol:
        letters = LETTERS.get(meaning, meaning)
        options = [Symbol(x) for x in ([meaning] if letters is meaning else letters)]
        options += [replace(options[0], mark="′" * n) for n in range(1, 9)]
        found = next(s for s in options if s.base + s.mark not in self.names)
        return replace(found, state=state)


class _Writer:
    """Writes the equations of a record in one notation."""

    def __init__(self, record: Record, notation: Text) -> None:
        self.record, self.n = record, notation
        self.found: list[tuple[Section, str, str]] = []
        rule = record.rule
        self.outputs = rule.output_names[rule.attrs["states"] :]
        self.names = {name: plain_name(v, rule) for name, v in _inputs(rule).items()}
        names = {*self.names.values()} | {*self.outputs}
        names |= {str(d) for v in rule.inputs for d in _shape(v)}
        self.taken = _Taken(names | {GREEK[name] for name in names & GREEK.keys()})
        free = [i for i in INDICES if i not in names]
        self.i, self.j, self.t, self.m, self.u, *self.letters = free
        self.C = self.taken.symbol("chunk").base
        self.taken.names.add(self.C)
        self.many = len(record.stages) > 1
        self.inputs = {v: Symbol(self.names[name]) for name, v in _inputs(rule).items()}
        self.named: dict[Expr, Symbol] = {}
        self.scored: dict[str, str] = {}  # a score by its text: two states may share it
        self.decayed: dict[tuple[str, str], Symbol] = {}  # products of decays by theirs
        self.parts: dict[tuple[str, tuple[Expr, ...], str], _Part] = {}
        self.facts: dict[str, list[tuple[str, str]]] = {}

    def symbol(self, meaning: str, state: str = "") -> Symbol:
        """The letter of a quantity; of a state, where there are several, with its name."""
        return self.taken.symbol(meaning, state if self.many else "")

    def run(self) -> list[tuple[Section, str, str]]:
        for op in _chain(self.record):
            right = self.op(op)
            self.inputs[op.result] = self.called(op.result)
            self.add("terms", "value", self.name(op.result), right)
        for stage in self.record.stages:
            if stage.decay is not None:
                self.name_decay(stage)
        for atom in _repeated(self.record):
            symbol = self.helper(atom)
            self.define("terms", "function", symbol, "", single(atom), _over(atom))
            self.named[_anywhere(atom)] = symbol
        for stage in self.record.stages:
            self.stage(stage)
        for name, x in zip(self.outputs, self.record.outputs, strict=True):
            indices = tuple(sorted(x.free))
            self.define("outputs", "output", Symbol(name), "", x, indices)
        return self.found

    def add(self, section: Section, label: str, left: str, right: str) -> None:
        self.found.append((section, label, self.n.equation(left, right)))

    # ---- names

    def name_decay(self, stage: Stage) -> None:
        """A decay that is one function is called by its letter wherever it stands."""
        decay = stage.decay
        assert decay is not None
        atom = _only(decay)
        if atom is not None and atom.kind not in ("operand", "read"):
            key = _anywhere(atom)
            if key not in self.named:
                symbol = self.symbol("decay", self.names[stage.state])
                self.define("terms", "decay", symbol, "", decay, _over(atom))
                self.named[key] = symbol

    def helper(self, atom: Atom) -> Symbol:
        """A name for a function that stands in several places."""
        values = meanings(self.record.rule).items()
        own = (v for v, x in values for a in [_only(x)] if a and _anywhere(a) == _anywhere(atom))
        return self.called(next(own, None))

    def called(self, value: Value | None) -> Symbol:
        """The rule's own name of a value, `k′` for `k_1`, or a letter where it has none."""
        made = self.taken.symbol("function")
        if value is not None and not _is_automatic(value, self.record):
            base, _, number = value.name.rpartition("_")
            again = bool(base) and number.isdigit()
            own = Symbol(base, "′" * int(number)) if again else Symbol(value.name)
            made = own if own.base + own.mark not in self.taken.names else made
        self.taken.names.add(made.base + made.mark)
        return made

    def name(self, value: Value) -> str:
        return self.n.symbol(self.inputs[value], self.i)

    def op(self, op: Op) -> str:
        """An op on operands of the rule, as the IR calls it."""

        def operand(x: Operand) -> str:
            return self.name(x) if isinstance(x, Value) else self.n.number(x)

        attrs = [self.n.note(f"{k}={v}") for k, v in op.attrs.items()]
        return self.n.call(op.kind, [*map(operand, op.operands), *attrs])

    # ---- expressions

    def define(
        self, section: Section, label: str, symbol: Symbol, row: str, x: Expr,
        indices: tuple[str, ...], dim: str = "",
    ) -> None:  # fmt: skip
        """symbol_i = x, in components where it is no vector of one index.

        dim: of the vector to be made, where x itself may be a number.
        """
        left = self.n.symbol(symbol, self.i + row)
        shown = dict.fromkeys(indices, "")
        if len(indices) > 1 or not _plain(x, indices):
            letters = self.letters[: len(indices)]
            shown = dict(zip(indices, letters, strict=True))
            left = self.n.component(left, letters) if letters else left
        right = self.sum(x, shown)
        if dim and not x.free & {*indices}:
            ones = self.n.ones(dim)
            right = Piece(ones) if x == ONE else self.product([right, Piece(ones)])
        self.add(section, label, left, right.text)

    def product(self, pieces: Sequence[Piece], sign: str = "") -> Piece:
        sign = sign or self.n.times
        if len(pieces) == 1:
            return pieces[0]
        return Piece(sign.join(closed(self.n, p, POWER) for p in pieces), PRODUCT)

    def sum(self, x: Expr, shown: Mapping[str, str]) -> Piece:
        """A sum, terms of one divisor together."""
        groups: dict[Product, list[tuple[Product, float]]] = {}
        for product, n in x.terms:
            under = tuple((a, -p) for a, p in product if p < 0)
            over = tuple(f for f in product if f[1] > 0)
            groups.setdefault(under, []).append((over, n))
        parts: list[tuple[bool, Piece]] = []
        for under, terms in groups.items():
            if not under:
                parts += [(n < 0, self.term(p, abs(n), shown)) for p, n in terms]
                continue
            negative = all(n < 0 for _, n in terms)
            over = self.joined(
                [(n < 0 and not negative, self.term(p, abs(n), shown)) for p, n in terms]
            )
            parts.append((negative, self.n.ratio(over, self.term(under, 1.0, shown))))
        return self.joined(parts)

    def joined(self, parts: Sequence[tuple[bool, Piece]]) -> Piece:
        """Signed pieces as a sum, one without a minus first."""
        if not parts:
            return Piece("0")
        (negative, first), *rest = sorted(parts, key=lambda part: part[0])
        if not rest and not negative:
            return first
        made = (self.n.minus if negative else "") + first.text
        for minus, piece in rest:
            made += f" {self.n.minus if minus else '+'} {piece.text}"
        return Piece(made, SUM)

    def term(self, product: Product, n: float, shown: Mapping[str, str]) -> Piece:
        """A number, then numbers of a token, then vectors element by element."""
        vector = {index for index, letter in shown.items() if not letter}
        scalars = [] if n == 1 and product else [Piece(self.n.number(n))]
        vectors: list[Piece] = []
        for atom, power in product:
            piece = self.raised(self.atom(atom, shown), power)
            (vectors if atom.free & vector else scalars).append(piece)
        if vectors:
            scalars.append(self.product(vectors, self.n.each))
        if len(scalars) == 1:
            return scalars[0]
        inner = [p if p.level < PRODUCT else self.looser(p, vectors) for p in scalars]
        return Piece(self.n.times.join(p.text for p in inner), PRODUCT)

    def looser(self, piece: Piece, vectors: Sequence[Piece]) -> Piece:
        """A product inside a product stands as it is where its factors are vectors."""
        kept = piece.level == PRODUCT and len(vectors) > 1
        return piece if kept else Piece(self.n.group(piece.text))

    def raised(self, x: Piece, power: float) -> Piece:
        if power == 1:
            return x
        if power == 0.5:
            return Piece(self.n.root(x.text), ATOM)
        return Piece(self.n.power(closed(self.n, x, ATOM), self.n.number(power)), POWER)

    def atom(self, a: Atom, shown: Mapping[str, str]) -> Piece:
        own = self.named.get(_anywhere(a))
        if own is not None:
            return Piece(self.at(self.n.symbol(own, self.i), _over(a), shown))
        match a.kind:
            case "operand":
                made = self.n.symbol(Symbol(self.names[a.name]), self.i)
                return Piece(self.at(made, a.indices, shown))
            case "read":
                return Piece(self.at(self.read(a.name), a.indices, shown))
            case "value":
                value = self.record.values[a.name]
                made = self.name(value)
                if 1 in _shape(value):
                    made = self.n.call("squeeze", [made])
                return Piece(self.at(made, a.indices, shown))
            case "size":
                return Piece(a.name, ATOM if a.name.isalnum() else SUM)
            case "delta":
                return Piece(self.at("δ", a.indices, shown))
            case "sum" | "max":
                return self.reduced(a, shown)
            case "call" if a.name == "group":
                return self.sum(a.args[0], shown)
        power = a.args[1].number if a.name == "pow" else None
        if power is not None:
            return self.raised(self.sum(a.args[0], shown), power)
        args = [self.sum(x, shown).text for x in a.args]
        if a.name == "sqrt":
            return Piece(self.n.root(args[0]))
        return Piece(self.n.call(a.name, args), SUM if a.name in COMPARISONS else ATOM)

    def at(self, made: str, indices: Sequence[str], shown: Mapping[str, str]) -> str:
        """With its components, where they are shown."""
        letters = [shown[i] for i in indices]
        return self.n.component(made, letters) if any(letters) else made

    def reduced(self, a: Atom, shown: Mapping[str, str]) -> Piece:
        body, bound = a.args[0], a.bound
        if body.free <= {bound} and _plain(body, (bound,)):
            if a.kind == "max":
                return Piece(self.n.call("max", [self.sum(body, {bound: ""}).text]))
            return Piece(self.inner(body, bound))
        used = {*shown.values()}
        letter = next(x for x in self.letters if x not in used)
        inner = self.sum(body, {**shown, bound: letter})
        sign = self.n.over("Σ" if a.kind == "sum" else "max", letter)
        return Piece(sign + closed(self.n, inner, PRODUCT), PRODUCT)

    def inner(self, body: Expr, bound: str) -> str:
        """Σ over all components: of a product of two ⟨u, v⟩, of more ⟨u, v ⊙ w⟩."""
        shown = {bound: ""}
        factors: list[Piece] = []
        product, n = body.terms[0]
        simple = len(body.terms) == 1 and n == 1
        for atom, power in product if simple else ():
            simple = simple and power in (1, 2) and bound in atom.free
            factors += [self.atom(atom, shown)] * int(power)
        if not simple or len(factors) == 1:
            return self.n.call("sum", [self.sum(body, shown).text])
        first, *rest = factors
        return self.n.inner(first.text, self.product(rest, self.n.each).text)

    def read(self, name: str) -> str:
        state, _, number = name.partition(".")
        stage = next(s for s in self.record.stages if s.state == state)
        symbol = self.symbol("read", self.names[state])
        return self.n.symbol(symbol, self.i + self.row(len(stage.reads), int(number)))

    # ---- the parts of a token

    @staticmethod
    def row(count: int, number: int) -> str:
        """The number of a term, where there are several."""
        return str(number + 1) if count > 1 else ""

    def part(self, meaning: str, label: str, stage: Stage, xs: Sequence[Expr], index: str) -> _Part:
        """Defines one quantity of each term, unless it has a name already."""
        dim = {KEY: stage.key, VALUE: stage.value}.get(index) or ""
        if len(xs) == 1:
            (x,) = xs
            if x == ONE:
                return _Part(None, ones=dim)
            own = self.own(x, index if dim else "")
            if own is not None:
                return _Part(own)
        same = (label, (*xs,), dim)
        if same in self.parts:
            return self.parts[same]
        symbol = self.symbol(meaning, self.names[stage.state])
        self.parts[same] = _Part(symbol, len(xs))
        for number, x in enumerate(xs):
            indices = (index,) if dim else ()
            row = self.row(len(xs), number)
            self.define("terms", label, symbol, row, x, indices, dim)
        return self.parts[same]

    def own(self, x: Expr, index: str) -> Symbol | None:
        """The symbol of a vector that has one: an operand, or what was named before."""
        atom = _only(x)
        if atom is None or atom.free != ({index} if index else set()):
            return None
        if atom.kind == "operand":
            return Symbol(self.names[atom.name])
        if atom.kind == "value" and 1 not in _shape(self.record.values[atom.name]):
            return self.inputs[self.record.values[atom.name]]
        return self.named.get(_anywhere(atom))

    def put(self, part: _Part, token: str, row: str = "") -> str:
        """A part at a token, for one of its terms."""
        if part.symbol is None:
            return self.n.ones(part.ones)
        return self.n.symbol(part.symbol, token + (row if part.count > 1 else ""))

    # ---- a stage

    def stage(self, stage: Stage) -> None:
        _Stage(self, stage).run()


class _Stage:
    """The equations of one state."""

    def __init__(self, writer: _Writer, stage: Stage) -> None:
        self.w, self.n, self.stage = writer, writer.n, stage
        self.name = writer.names[stage.state]
        self.kind = stage.decay_kind
        self.rank, self.count = len(stage.erases), len(stage.reads)

    def symbol(self, meaning: str) -> Symbol:
        return self.w.symbol(meaning, self.name)

    def run(self) -> None:
        w, stage = self.w, self.stage
        self.decay = _Part(None)
        if stage.decay is not None and stage.decay.number is None:
            index = {PER_KEY: KEY, PER_VALUE: VALUE}.get(self.kind, "")
            self.decay = w.part("decay", "decay", stage, [stage.decay], index)
        self.x = self.p = self.e = self.v = self.y = self.r = _Part(None)
        if stage.erases:
            self.x = w.part("x", "erase along", stage, [t.x for t in stage.erases], KEY)
            self.p = w.part("p", "erase at", stage, [t.p for t in stage.erases], KEY)
            if stage.value_side:
                self.e = w.part("e", "erase by", stage, [t.e for t in stage.erases], VALUE)
        if stage.writes:
            xs = [t.w for t in stage.writes]
            self.v = self.x if stage.shared else w.part("w", "write along", stage, xs, KEY)
            self.y = w.part("y", "write", stage, [t.y for t in stage.writes], VALUE)
        if stage.reads:
            self.r = w.part("r", "read at", stage, stage.reads, KEY)
        w.facts[self.name] = list(self.facts())
        self.recurrent()
        self.chunk()

    def facts(self) -> Iterator[tuple[str, str]]:
        """What is worth knowing of the state, in words."""
        w, stage = self.w, self.stage
        axes = [d for d in (stage.key, stage.value) if d]
        axes = axes[::-1] if stage.place else axes
        shape = " × ".join(axes) + ("" if len(axes) > 1 else " numbers" if axes else "one number")
        yield "shape", shape + (", keys are its second axis" if stage.place else "")
        decay = "" if self.kind == NONE else self.token_decay(w.i)
        each = {PER_KEY: "a number per key", PER_VALUE: "a number per value"}
        says = {NONE: "none", SCALAR: "a number", **each}[self.kind]
        yield "decay", says + (f": {decay}" if decay else "")
        if stage.erases:
            x, p = w.put(self.x, w.i, w.m), w.put(self.p, w.i, w.m)
            text = f"rank {self.rank}: what is read at {p} goes back along {x}"
            yield (
                "erases",
                text + (f", per value by {w.put(self.e, w.i, w.m)}" if stage.value_side else ""),
            )
        else:
            yield "erases", "nothing"
        if stage.writes:
            y = "1" if self.y.one else w.put(self.y, w.i, w.m)
            along = "" if self.v.one else f" along {w.put(self.v, w.i, w.m)}"
            yield "writes", f"rank {len(stage.writes)}: {y}{along}"
        else:
            yield "writes", "nothing"
        if stage.shared:
            yield "shared", "what is erased and what is written go along the same keys"
        if stage.reads:
            r = "" if self.r.one else f": at {w.put(self.r, w.i, w.m)}"
            yield "reads", f"{self.count} per token{r}"
        others = {w.names[s] for s in fed_by(stage)}
        if others:
            yield "fed by", f"what is read of {', '.join(sorted(others))}: a cascade"

    @property
    def constant(self) -> float | None:
        """A decay that is a number is written as such."""
        return None if self.stage.decay is None else self.stage.decay.number

    # ---- what equations are made of

    def state(self, at: str) -> str:
        return self.n.symbol(Symbol(self.name), at)

    def scaled(self, by: str, x: str) -> Piece:
        """What decays, times decays."""
        if self.kind == NONE or not by:
            return Piece(x)
        if not x:
            return Piece(by)
        return Piece(by + (self.n.times if self.kind == SCALAR else self.n.each) + x, PRODUCT)

    def times(self, *factors: str) -> Piece:
        """A product of what is there."""
        kept = [f for f in factors if f]
        if not kept:
            return Piece("1")
        return Piece(self.n.times.join(kept), PRODUCT if len(kept) > 1 else ATOM)

    def entered(self, part: _Part, row: str, by: str, S: str) -> Piece:
        """What is read of a state along the keys of a token, decayed by `by`."""
        i, stage, n = self.w.i, self.stage, self.n
        keys = "" if part.one else self.w.put(part, i, row)
        if stage.key is None:
            return self.times(keys, self.scaled(by, S).text)
        outside = by if self.kind == SCALAR else ""
        inside = Piece(keys) if self.kind == SCALAR else self.scaled(by, keys)
        if stage.value is None:
            return self.times(outside, n.inner(S, inside.text))
        S = S if stage.place else n.transposed(S)
        return self.times(outside, S + n.side + closed(n, inside, POWER))

    def score(self, left: _Part, right: _Part, meaning: str, label: str) -> str:
        """Defines ⟨u_i, v_j⟩ with the decays between the tokens; its symbol, "" where it is 1."""
        w, n, i, j = self.w, self.n, self.w.i, self.w.j
        rows = i + (w.m if left.count > 1 else ""), j + (w.u if right.count > 1 else "")
        u = "" if left.one else w.put(left, i, w.m)
        v = "" if right.one else w.put(right, j, w.u)
        between = "" if self.kind == NONE else self.between()
        if self.stage.key is None and not u and not v:
            return between
        if self.stage.key is None:
            made = self.times(between, u, v)
        elif self.kind == PER_KEY:
            made = Piece(n.inner(u, self.scaled(between, v).text))
        else:
            made = self.times(between, n.inner(u, v))
        if made.text == "1":
            return ""
        own = n.symbol(self.symbol(meaning), "".join(rows) if rows == (i, j) else ",".join(rows))
        if made.text in w.scored:
            return w.scored[made.text]
        w.scored[made.text] = own
        w.add("chunk", label, own, made.text)
        return own

    def applied(self, score: str, part: _Part) -> Piece:
        """Σ over earlier tokens of scores times what stands there."""
        w, n = self.w, self.n
        sign = n.over("Σ", f"{w.j}<{w.i}")
        sign += n.over("Σ", f"{w.u}<={part.count}") if part.count > 1 else ""
        y = "" if part.one else w.put(part, w.j, w.u)
        made = self.scaled(score, y) if self.kind == PER_VALUE else self.times(score, y)
        return Piece(sign + made.text, PRODUCT)

    def written(self, keys: _Part, y: _Part, token: str, row: str, by: str) -> Piece:
        """What one term of a token leaves in the state, decayed by `by`."""
        w, n, stage = self.w, self.n, self.stage
        x = "" if keys.one else w.put(keys, token, row)
        v = "" if y.one else w.put(y, token, row)
        if stage.key is None:
            return self.times(x, self.scaled(by, v).text)
        if stage.value is None:
            return self.times(v, self.scaled(by, x).text)
        outside = by if self.kind == SCALAR else ""
        inside = Piece(x) if self.kind == SCALAR else self.scaled(by, x)
        x = closed(n, inside, POWER)
        made = v + n.side + n.transposed(x) if stage.place else x + n.side + n.transposed(v)
        return self.times(outside, made)

    def kept(self, by: str, S: str) -> str:
        """What is left of a state."""
        n = self.n
        if self.kind == NONE:
            return S
        if self.kind == SCALAR:
            return self.times(by, S).text
        if self.stage.value is None or self.kind == PER_VALUE:
            return self.scaled(by, S).text
        by = n.diagonal(by)
        return S + n.side + by if self.stage.place else by + n.side + S

    def total(self, *pieces: Piece | None) -> Piece:
        found = [p for p in pieces if p is not None]
        return Piece(" + ".join(p.text for p in found), SUM if len(found) > 1 else found[0].level)

    def change(self, given: Piece, row: str) -> str:
        """U_i: what is erased, by its part per value, and with what is written where they go along
        the same keys."""
        w, n = self.w, self.n
        if self.stage.value_side:
            e = w.put(self.e, w.i, row)
            sign = n.each if self.stage.value else n.times
            given = Piece(e + sign + closed(n, given, ATOM if given.level else POWER), PRODUCT)
        y = Piece("1" if self.y.one else w.put(self.y, w.i, row))
        return self.total(y if self.stage.shared else None, given).text

    # ---- the two forms

    def recurrent(self) -> None:
        w, i = self.w, self.w.i
        before, now = self.state(f"{i}−1"), self.state(i)
        plain = "" if self.kind == NONE else self.token_decay(i)
        solved = self.symbol("solved")
        self.U = _Part(solved, self.rank)
        terms = []
        for m in range(self.rank):
            row = w.row(self.rank, m)
            given = self.entered(self.p, row, "", before)
            label = "new" if self.stage.shared else "erased"
            w.add("recurrent", label, w.put(self.U, i, row), self.change(given, row))
            terms.append(self.written(self.x, self.U, i, row, ""))
        if self.stage.writes and not self.stage.shared:
            count = len(self.stage.writes)
            terms += [self.written(self.v, self.y, i, w.row(count, m), "") for m in range(count)]
        for m in range(self.count):
            row = w.row(self.count, m)
            right = self.entered(self.r, row, "", before)
            w.add("recurrent", "read", self.read(row), right.text)
        kept = Piece(self.kept(plain, before))
        w.add("recurrent", "state", now, self.total(kept, *terms).text)

    def read(self, row: str) -> str:
        return self.n.symbol(self.symbol("read"), self.w.i + row)

    def token_decay(self, at: str) -> str:
        if self.constant is not None:
            return self.n.number(self.constant)
        return self.w.put(self.decay, at)

    def chunk(self) -> None:
        w, n, i, j = self.w, self.n, self.w.i, self.w.j
        first, last = self.state("0"), self.state(w.C)
        before = after = whole = ""
        if self.kind != NONE:
            before, after, whole = self.decays()
        along: list[tuple[_Part, _Part, str, str]] = []  # keys, what goes there, scores' letters
        if self.rank:
            along.append((self.x, self.U, "px", "rx"))
        if self.stage.writes and not self.stage.shared:
            along.append((self.v, self.y, "pw", "rw"))
        erased = [self.score(self.p, keys, at, "scores") for keys, _, at, _ in along if self.rank]
        seen = [self.score(self.r, keys, at, "scores") for keys, _, _, at in along if self.count]
        if self.rank:
            terms = [self.applied(s, y) for s, (_, y, *_) in zip(erased, along, strict=True)]
            given = self.total(self.entered(self.p, w.m, before, first), *terms)
            label = "substitute" if self.stage.value_side else "solve"
            row = w.m if self.rank > 1 else ""
            w.add("chunk", label, w.put(self.U, i, row), self.change(given, row))
        if self.count:
            terms = [self.applied(s, y) for s, (_, y, *_) in zip(seen, along, strict=True)]
            right = self.total(self.entered(self.r, w.m, before, first), *terms)
            w.add("chunk", "read", self.read(w.m if self.count > 1 else ""), right.text)
        pieces = []
        for keys, y, *_ in along:
            count = max(keys.count, y.count)
            sign = n.over("Σ", j) + (n.over("Σ", f"{w.u}<={count}") if count > 1 else "")
            pieces.append(Piece(sign + self.written(keys, y, j, w.u, after).text, PRODUCT))
        w.add("chunk", "state", last, self.total(Piece(self.kept(whole, first)), *pieces).text)

    def decays(self) -> tuple[str, str, str]:
        """The products of decays before a token, after one, and of all; between two where scores
        are made. States that decay alike have the same."""
        w, n, i, j, t = self.w, self.n, self.w.i, self.w.j, self.w.t
        if self.constant is not None:
            number = n.number(self.constant)
            steps = [n.power(number, by) for by in (f"{i}−1", f"{i}−{j}−1", f"{w.C}−{j}")]
        else:
            ranges = (f"{t}<{i}", f"{j}<{t}<{i}", f"{t}>{j}")
            steps = [n.over("Π", by) + self.token_decay(t) for by in ranges]
        self.steps = tuple(steps)
        before = self.product("before", i, 0) if self.count or self.rank else ""
        if (self.count or self.rank) and (self.rank or self.stage.writes):
            self.between()
        self.product("after", j, 2)
        after, whole = (n.symbol(self.products("after", 2), at) for at in (j, "0"))
        return before, after, whole

    def between(self) -> str:
        return self.product("between", self.w.i + self.w.j, 1)

    def products(self, meaning: str, which: int) -> Symbol:
        """The symbol of products of decays."""
        return self.w.decayed.setdefault((meaning, self.steps[which]), self.symbol(meaning))

    def product(self, meaning: str, at: str, which: int) -> str:
        """The same at two places; defined where it is used first."""
        new = (meaning, self.steps[which]) not in self.w.decayed
        made = self.n.symbol(self.products(meaning, which), at)
        if new:
            self.w.add("chunk", f"decay {meaning}", made, self.steps[which])
        return made


# ---- of records


def _inputs(rule: Function) -> dict[str, Value]:
    """The inputs of a rule as its record calls them."""
    count = rule.attrs["states"]
    states = {f"S{at}": v for at, v in enumerate(rule.inputs[:count], 1)}
    return states | {f"x{at}": v for at, v in enumerate(rule.inputs[count:], 1)}


def _shape(value: Value) -> tuple[object, ...]:
    assert isinstance(value.type, Tensor)
    return value.type.shape


def _only(x: Expr) -> Atom | None:
    """The atom that an expression is."""
    if len(x.terms) != 1:
        return None
    ((product, n),) = x.terms
    return product[0][0] if n == 1 and len(product) == 1 and product[0][1] == 1 else None


def _over(atom: Atom) -> tuple[str, ...]:
    return tuple(sorted(atom.free))


def _anywhere(atom: Atom) -> Expr:
    """An atom of one index at most, whatever the index is called."""
    free = _over(atom)
    return single(atom) if len(free) != 1 else atom.renamed({free[0]: "*"})


def _plain(x: Expr, indices: tuple[str, ...]) -> bool:
    """Whether an expression is a vector over one index (a number, over none), all through."""
    return all(_plain_atom(a, indices) for product, _ in x.terms for a, _ in product)


def _plain_atom(a: Atom, indices: tuple[str, ...]) -> bool:
    if a.kind in ("sum", "max"):
        body = a.args[0]
        return body.free <= {a.bound} and _plain(body, (a.bound,))
    if a.kind == "delta" or len(a.indices) > 1:
        return False
    return {*a.indices} <= {*indices} and all(_plain(x, indices) for x in a.args)


def _parts(record: Record) -> Iterator[Expr]:
    for stage in record.stages:
        yield stage.decay or ZERO
        for erase in stage.erases:
            yield from (erase.x, erase.e, erase.p)
        for write in stage.writes:
            yield from (write.w, write.y)
        yield from stage.reads
    yield from record.outputs


def _repeated(record: Record) -> list[Atom]:
    """Functions of operands that are long and stand in several places, outermost first."""
    decays = {s.decay for s in record.stages}
    counts: Counter[Expr] = Counter()
    found: dict[Expr, Atom] = {}

    def walk(x: Expr) -> None:
        for product, _ in x.terms:
            for atom, _ in product:
                long = atom.kind == "call" and sum(1 for a in x.atoms()) > 2
                if long and atom.name != "group" and not atom.states and len(atom.free) < 2:
                    counts[_anywhere(atom)] += 1
                    found.setdefault(_anywhere(atom), atom)
                    continue
                for arg in atom.args:
                    walk(arg)

    for x in _parts(record):
        if x not in decays:
            walk(x)
    named = {_anywhere(a) for d in decays if d is not None for a in [_only(d)] if a is not None}
    return [a for key, a in found.items() if counts[key] > 1 and key not in named]


def _is_automatic(value: Value, record: Record) -> bool:
    """Whether a value is named by its op, and not by the user."""
    op = next((op for op in record.rule.ops if value in op.results), None)
    return op is None or value.name.rstrip("_0123456789") == op.kind


def _chain(record: Record) -> list[Op]:
    """The ops behind values that the algebra does not look into, in order."""
    wanted = {*record.values.values()}
    found: list[Op] = []
    for op in reversed(record.rule.ops):
        if wanted & {*op.results}:
            found.insert(0, op)
            wanted |= {*op.values}
    return found


def fed_by(stage: Stage) -> frozenset[str]:
    """The states whose reads feed a stage."""
    own = [stage.decay or ZERO]
    own += [x for t in stage.erases for x in (t.x, t.e, t.p)]
    own += [x for t in stage.writes for x in (t.w, t.y)]
    names = frozenset().union(*(x.states for x in own))
    return frozenset(name.partition(".")[0] for name in names) - {stage.state}
