"""A small algebra of tensors by index: sums of products of atoms, in a normal form.

    exp(g[k]) · S[k, v]  −  beta · k[k] · (Σ_j k[j] exp(g[j]) S[j, v])  +  beta · k[k] · v[v]

An expression is a sum of products of powers of atoms with a number each. Two expressions are equal
where they are the same sum after the rules below, however they were written:

    products of exponentials are one, exponents apart by index:  e^(a + s) = e^a · e^s
    log e^a = a,   (√a)² = a,   1 / a is a to the power −1
    sums over an index are linear, what lacks the index stands before them
    a sum over an index of a state is a read of it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from archir.diagnostics import Loc

Kind = str  # operand, state, read, call, sum, max, delta, size, value


@dataclass(frozen=True)
class Atom:
    """What an expression is made of.

    operand, state: `name` at `indices`.  value: another value of the rule, not looked into.
    call: an elementwise function of `args`.  sum, max: of one argument over the index `bound`.
    read: Σ over `bound` of args[0] · state, whose key axis is `place`; `indices` are those left.
    delta: 1 where two indices are equal.  size: of the dim `name`.
    """

    kind: Kind
    name: str
    indices: tuple[str, ...] = ()
    args: tuple[Expr, ...] = ()
    place: int = 0
    bound: str = ""
    loc: Loc | None = field(default=None, compare=False)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.name, self.indices, self.args, self.place, self.bound))

    @cached_property
    def free(self) -> frozenset[str]:
        """The indices it depends on."""
        inner = frozenset().union(*(a.free for a in self.args))
        return frozenset(self.indices) | inner - {self.bound}

    @cached_property
    def states(self) -> frozenset[str]:
        """The states it depends on."""
        own = {self.name} if self.kind in ("state", "read") else set()
        return frozenset(own).union(*(a.states for a in self.args))

    @cached_property
    def key(self) -> str:
        """Its text, by which products are ordered."""
        return show_atom(self)

    def renamed(self, names: Mapping[str, str]) -> Expr:
        """With other names of indices."""
        indices = tuple(names.get(i, i) for i in self.indices)
        inner = {k: v for k, v in names.items() if k != self.bound}
        args = tuple(a.renamed(inner) for a in self.args)
        if self.kind == "delta" and indices[0] == indices[1]:
            return ONE
        if self.kind == "delta":
            indices = tuple(sorted(indices))
        return single(replace(self, indices=indices, args=args))


Product = tuple[tuple[Atom, float], ...]  # atoms and their powers, in order


@dataclass(frozen=True)
class Expr:
    """A sum: product → its number, in order of their text."""

    terms: tuple[tuple[Product, float], ...]

    @cached_property
    def free(self) -> frozenset[str]:
        """The indices it depends on."""
        return frozenset().union(*(a.free for p, _ in self.terms for a, _ in p))

    @cached_property
    def states(self) -> frozenset[str]:
        """The states it depends on."""
        return frozenset().union(*(a.states for p, _ in self.terms for a, _ in p))

    @property
    def number(self) -> float | None:
        """Its value, where it is a number."""
        if not self.terms:
            return 0.0
        ((product, number),) = self.terms if len(self.terms) == 1 else (((None,), 0.0),)
        return number if product == () else None

    def __add__(self, other: Expr) -> Expr:
        return collect([*self.terms, *other.terms])

    def __sub__(self, other: Expr) -> Expr:
        return self + other.scaled(-1.0)

    def __mul__(self, other: Expr) -> Expr:
        found: list[tuple[Product, float]] = []
        for a, m in self.terms:
            for b, n in other.terms:
                found += ((p, m * n * k) for p, k in _product([*a, *b]).terms)
        return collect(found)

    def scaled(self, number: float) -> Expr:
        """Times a number."""
        return collect([(p, n * number) for p, n in self.terms])

    def renamed(self, names: Mapping[str, str]) -> Expr:
        """With other names of indices."""
        if not self.free & names.keys():
            return self
        found: list[tuple[Product, float]] = []
        for product, number in self.terms:
            part = ONE.scaled(number)
            for atom, power in product:
                part = part * raised(atom.renamed(names), power)
            found += part.terms
        return collect(found)

    def atoms(self) -> Iterator[Atom]:
        """Every atom, also inside of others."""
        for product, _ in self.terms:
            for atom, _ in product:
                yield atom
                for arg in atom.args:
                    yield from arg.atoms()

    def __str__(self) -> str:
        return show(self)


def collect(terms: Iterable[tuple[Product, float]]) -> Expr:
    """A sum of products, equal ones together, zeros left out."""
    found: dict[Product, float] = {}
    for product, number in terms:
        found[product] = found.get(product, 0.0) + number
    left = [(p, n) for p, n in found.items() if n != 0]
    return Expr(tuple(sorted(left, key=lambda t: show_product(t[0]))))


def number(x: float) -> Expr:
    """A number as an expression."""
    return Expr((((), float(x)),)) if x else Expr(())


ZERO, ONE = number(0), number(1)


def single(atom: Atom) -> Expr:
    """An atom as an expression."""
    return Expr(((((atom, 1.0),), 1.0),))


def _product(factors: Iterable[tuple[Atom, float]]) -> Expr:
    """Atoms with powers as an expression: exponentials of one set of indices are one, and one
    without indices joins another, so that e^(x − max x) is never two that overflow."""
    powers: dict[Atom, float] = {}
    exponents: dict[frozenset[str], Expr] = {}
    rest = ONE
    for atom, power in factors:
        if atom.kind == "call" and atom.name == "exp":
            old = exponents.get(atom.free, ZERO)
            exponents[atom.free] = old + atom.args[0].scaled(power)
        else:
            powers[atom] = powers.get(atom, 0.0) + power
    found: dict[Atom, float] = {}
    for atom, power in powers.items():
        if atom.kind == "call" and atom.name == "sqrt" and abs(power) >= 2:
            whole = math.trunc(power / 2)
            rest = rest * raised(atom.args[0], whole)
            power -= 2 * whole
        if atom.kind == "delta" and power > 0:
            power = 1.0
        if power:
            found[atom] = power
    exponents = {indices: x for indices, x in exponents.items() if x.terms}
    if len(exponents) > 1 and frozenset() in exponents:
        scalar = exponents.pop(frozenset())
        first = min(exponents, key=sorted)
        exponents[first] = exponents[first] + scalar
    for exponent in exponents.values():
        if exponent.number is None:
            found[Atom("call", "exp", (), (exponent,))] = 1.0
        else:
            rest = rest.scaled(math.exp(exponent.number))
    made = Expr(((tuple(sorted(found.items(), key=lambda f: f[0].key)), 1.0),))
    return made if rest == ONE else rest * made


def raised(x: Expr, power: float) -> Expr:
    """A power of an expression: of products factor by factor, of sums only by whole numbers."""
    if power == 1 or x == ONE:
        return x
    if len(x.terms) == 1:
        ((product, n),) = x.terms
        whole = power == int(power)
        if (whole and n != 0) or (n > 0 and _rooted(product)):
            return _product([(a, p * power) for a, p in product]).scaled(n**power)
    if power == int(power) and 0 <= power <= 4:
        made = ONE
        for _ in range(int(power)):
            made = made * x
        return made
    return Expr(((((Atom("call", "group", (), (x,)), float(power)),), 1.0),))


def kept(x: Expr) -> Expr:
    """A factor as it is to be multiplied: a sum that no state is in stays one number, as 1 − a, of
    which products apart would cancel digits."""
    if len(x.terms) < 2 or x.states or any(a.kind == "delta" for a in x.atoms()):
        return x
    return single(Atom("call", "group", (), (x,)))


def written_out(x: Expr) -> Expr:
    """A sum of sums as one: 1 − (1 − a) is a."""
    made: list[tuple[Product, float]] = []
    for product, n in x.terms:
        alone = len(product) == 1 and product[0][0].name == "group" and product[0][1] == 1
        inner = product[0][0].args[0].terms if alone else ((product, 1.0),)
        made += ((p, n * m) for p, m in inner)
    return collect(made)


def _rooted(product: Product) -> bool:
    """Whether a product has the powers of its factors: not (x²)^½, which is |x|, nor (x y)^½."""
    signed = [p for a, p in product if not (a.kind == "call" and a.name in ("exp", "sqrt", "abs"))]
    return len(signed) <= 1 and all(abs(p) <= 1 for p in signed)


def call(name: str, *args: Expr, loc: Loc | None = None) -> Expr:
    """An elementwise function of expressions, simplified where that is exact."""
    if name == "exp":
        return _exp(args[0])
    if name == "log" and len(args[0].terms) == 1:
        ((product, n),) = args[0].terms
        exps = [a.args[0].scaled(p) for a, p in product if a.kind == "call" and a.name == "exp"]
        if n == 1 and len(exps) == len(product) > 0:
            return sum(exps[1:], exps[0])
    if name == "sqrt" and args[0].number is not None and args[0].number >= 0:
        return number(math.sqrt(args[0].number))
    return single(Atom("call", name, (), args, loc=loc))


def _exp(x: Expr) -> Expr:
    """e^x, apart for each set of indices that terms of x depend on; what depends on none stays
    with the first of them."""
    if x.number is not None:
        return number(math.exp(x.number))
    groups: dict[frozenset[str], list[tuple[Product, float]]] = {}
    for product, n in x.terms:
        groups.setdefault(Expr(((product, n),)).free, []).append((product, n))
    parts = [collect(terms) for terms in groups.values()]
    return _product([(Atom("call", "exp", (), (part,)), 1.0) for part in parts])


def total(x: Expr, index: str, size: Expr) -> Expr:
    """Σ of x over an index whose dim has a size."""
    found: list[tuple[Product, float]] = []
    for product, n in x.terms:
        outside = [(a, p) for a, p in product if index not in a.free]
        inside = [(a, p) for a, p in product if index in a.free]
        part = _product(outside) * _total(inside, index, size)
        found += part.scaled(n).terms
    return collect(found)


def _total(factors: list[tuple[Atom, float]], index: str, size: Expr) -> Expr:
    if not factors:
        return size
    for atom, power in factors:
        if atom.kind == "delta" and power == 1:
            (other,) = (i for i in atom.indices if i != index)
            rest = [f for f in factors if f[0] is not atom]
            return _product(rest).renamed({index: other})
    raw = [(a, p) for a, p in factors if a.kind == "state" and a.indices.count(index) == 1]
    others = [f for f in factors if f not in raw]
    if len(raw) == 1 and raw[0][1] == 1 and not any(_holds(a, raw[0][0]) for a, _ in others):
        state = raw[0][0]
        place = state.indices.index(index)
        left = tuple(i for i in state.indices if i != index)
        weight, bound = _bound(_product(others), index)
        if weight.free <= {bound}:
            return single(Atom("read", state.name, left, (weight,), place, bound, state.loc))
    inner, bound = _bound(_product(factors), index)
    return single(Atom("sum", "", (), (inner,), bound=bound))


def _holds(a: Atom, state: Atom) -> bool:
    """Whether what a state is summed with depends on it, or on another that is not only read."""
    inner = [a, *(x for arg in a.args for x in arg.atoms())]
    return state.name in a.states or any(x.kind == "state" for x in inner)


def largest(x: Expr, index: str) -> Expr:
    """The maximum of x over an index."""
    inner, bound = _bound(x, index)
    return single(Atom("max", "", (), (inner,), bound=bound))


def _bound(x: Expr, index: str) -> tuple[Expr, str]:
    """An expression to be summed over an index, which gets a name that nothing in it has."""
    taken = {a.bound for a in x.atoms()}
    name = "_"
    while name in taken:
        name += "'"
    return x.renamed({index: name}), name


# ---- text


def show(x: Expr) -> str:
    """`beta · k[k] − 2 · v[v]`"""
    if not x.terms:
        return "0"
    parts = []
    for at, (product, n) in enumerate(x.terms):
        sign = "− " if n < 0 else "+ " if at else ""
        text = show_product(product)
        size = "" if abs(n) == 1 and text else _plain(abs(n))
        parts.append(sign + " · ".join(filter(None, [size, text])))
    return " ".join(parts).replace("− ", "−", 1) if x.terms[0][1] < 0 else " ".join(parts)


def _plain(n: float) -> str:
    return str(int(n)) if n == int(n) else repr(n)


def show_product(product: Product) -> str:
    """`beta · k[k]²`"""
    raised_ = {2.0: "²", 3.0: "³", 0.5: "^½", -1.0: "⁻¹"}
    return " · ".join(
        a.key + ("" if p == 1 else raised_.get(p, f"^{_plain(p)}")) for a, p in product
    )


def show_atom(a: Atom) -> str:
    """`k[k]`, `exp(g[k])`, `Σ(k[_]²)`, `read(S: k[_])[v]`"""
    at = f"[{', '.join(a.indices)}]" if a.indices else ""
    args = ", ".join(show(x) for x in a.args)
    match a.kind:
        case "call":
            return f"({args})" if a.name == "group" else f"{a.name}({args})"
        case "sum":
            return f"Σ({args})"
        case "max":
            return f"max({args})"
        case "read":
            return f"read({a.name}: {args}){at}"
        case "delta":
            return f"δ{at}"
        case "size":
            return f"size({a.name})"
    return f"{a.name}{at}"


def replaced(x: Expr, change: Callable[[Atom], Expr | None]) -> Expr:
    """With `change(atom)` for every atom for which it is not None, outermost first."""
    found: list[tuple[Product, float]] = []
    for product, n in x.terms:
        part, same = ONE.scaled(n), True
        for atom, power in product:
            new = change(atom)
            if new is None:
                args = tuple(replaced(arg, change) for arg in atom.args)
                new = single(atom) if args == atom.args else single(replace(atom, args=args))
            same = same and new == single(atom)
            part = part * raised(new, power)
        found += ((product, n),) if same else part.terms
    return collect(found)
