"""Sizes: an int, or a polynomial with integer coefficients over named symbols.

    dim  := int | poly
    poly := sum of coefficient * product of atoms
    atom := symbol | ceildiv(poly, int)          compared by structure (D3)

Division is exact or it is an error that shows both sizes; `ceildiv` is the named way to round up.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from archir.diagnostics import ParseError, ShapeError

Dim = "int | Poly"

# Symbols the passes bring in; a size of a user's own has another name.
RESERVED = {
    "R": "the number of rows of a state",
    "P": "the number of tokens a state has seen",
    "J": "the number of steps of a recurrence",
}


@dataclass(frozen=True, order=True)
class CeilDiv:
    """`ceildiv(top, by)`: the number of blocks of `by` that cover `top`."""

    top: Poly
    by: int

    def __str__(self) -> str:
        return f"ceildiv({self.top}, {self.by})"


@dataclass(frozen=True, order=True)
class Poly:
    """A normal form: sorted (monomial, coefficient) pairs; a monomial is a sorted tuple of atoms.

    Never constant: constants are plain ints, so `==` on dims is equality of sizes.
    """

    terms: tuple[tuple[tuple[str | CeilDiv, ...], int], ...]

    def __str__(self) -> str:
        parts: list[str] = []
        for monomial, coefficient in self.terms:
            factors = [str(atom) for atom in monomial]
            if abs(coefficient) != 1 or not factors:
                factors.insert(0, str(abs(coefficient)))
            text = "*".join(factors)
            if parts:
                parts.append(("- " if coefficient < 0 else "+ ") + text)
            else:
                parts.append(("-" if coefficient < 0 else "") + text)
        return " ".join(parts)

    __repr__ = __str__

    def __add__(self, other: int | Poly) -> int | Poly:
        return add(self, other)

    __radd__ = __add__

    def __mul__(self, other: int | Poly) -> int | Poly:
        return multiply(self, other)

    __rmul__ = __mul__

    def __sub__(self, other: int | Poly) -> int | Poly:
        return add(self, multiply(other, -1))

    def __rsub__(self, other: int | Poly) -> int | Poly:
        return add(other, multiply(self, -1))

    def __floordiv__(self, other: int | Poly) -> int | Poly:
        return divide(self, other)

    def __bool__(self) -> bool:
        return True


def symbol(name: str) -> Poly:
    """The dim that is one named symbol."""
    return Poly((((name,), 1),))


def _key(atom: str | CeilDiv) -> str:
    return str(atom)


def _terms(dim: int | Poly) -> dict[tuple[str | CeilDiv, ...], int]:
    if isinstance(dim, Poly):
        return dict(dim.terms)
    return {(): dim} if dim else {}


def _build(terms: Mapping[tuple[str | CeilDiv, ...], int]) -> int | Poly:
    kept = {m: c for m, c in terms.items() if c}
    if not kept:
        return 0
    if list(kept) == [()]:
        return kept[()]
    order = sorted(kept, key=lambda m: (not m, [_key(a) for a in m]))
    return Poly(tuple((m, kept[m]) for m in order))


def add(a: int | Poly, b: int | Poly) -> int | Poly:
    """a + b."""
    terms = _terms(a)
    for monomial, coefficient in _terms(b).items():
        terms[monomial] = terms.get(monomial, 0) + coefficient
    return _build(terms)


def multiply(a: int | Poly, b: int | Poly) -> int | Poly:
    """a * b."""
    terms: dict[tuple[str | CeilDiv, ...], int] = {}
    for m1, c1 in _terms(a).items():
        for m2, c2 in _terms(b).items():
            monomial = tuple(sorted(m1 + m2, key=_key))
            terms[monomial] = terms.get(monomial, 0) + c1 * c2
    return _build(terms)


def divide(a: int | Poly, b: int | Poly) -> int | Poly:
    """a / b where it is exact: by an int, or by one monomial. Anything else is a ShapeError."""
    bad = ShapeError(
        f"{a} is not divisible by {b}",
        code="dim-division",
        next="make the sizes divide, or use ceildiv where rounding up is meant",
    )
    if b == 0:
        raise bad
    if a == b:
        return 1
    if isinstance(b, Poly) and len(b.terms) != 1:
        raise bad
    divisor, scale = b.terms[0] if isinstance(b, Poly) else ((), b)
    terms: dict[tuple[str | CeilDiv, ...], int] = {}
    for monomial, coefficient in _terms(a).items():
        rest = list(monomial)
        for atom in divisor:
            if atom not in rest:
                raise bad
            rest.remove(atom)
        if coefficient % scale:
            raise bad
        terms[tuple(rest)] = coefficient // scale
    return _build(terms)


def ceildiv(top: int | Poly, by: int) -> int | Poly:
    """The number of blocks of `by` that cover `top`."""
    if by <= 0:
        raise ShapeError(f"ceildiv by {by}: blocks have at least one element", code="dim-division")
    if isinstance(top, int):
        return -(-top // by)
    return Poly((((CeilDiv(top, by),), 1),))


def product(dims: tuple[int | Poly, ...]) -> int | Poly:
    """The number of elements of a shape."""
    total: int | Poly = 1
    for dim in dims:
        total = multiply(total, dim)
    return total


def symbols(dim: int | Poly) -> set[str]:
    """Every symbol that occurs in a dim, inside ceildiv too."""
    found: set[str] = set()
    if isinstance(dim, Poly):
        for monomial, _ in dim.terms:
            for atom in monomial:
                found |= {atom} if isinstance(atom, str) else symbols(atom.top)
    return found


def bare(dim: int | Poly) -> str | None:
    """The symbol a dim consists of, or None."""
    if isinstance(dim, Poly) and len(dim.terms) == 1:
        (monomial, coefficient) = dim.terms[0]
        if coefficient == 1 and len(monomial) == 1 and isinstance(monomial[0], str):
            return monomial[0]
    return None


def substitute(dim: int | Poly, binding: Mapping[str, int | Poly]) -> int | Poly:
    """A dim with symbols replaced; unbound symbols stay."""
    if not isinstance(dim, Poly):
        return dim
    total: int | Poly = 0
    for monomial, coefficient in dim.terms:
        term: int | Poly = coefficient
        for atom in monomial:
            if isinstance(atom, str):
                term = multiply(term, binding.get(atom, symbol(atom)))
            else:
                term = multiply(term, ceildiv(substitute(atom.top, binding), atom.by))
        total = add(total, term)
    return total


def evaluate(dim: int | Poly, binding: Mapping[str, int]) -> int:
    """The size of a dim where every symbol is bound to an int."""
    value = substitute(dim, binding)
    if isinstance(value, Poly):
        missing = ", ".join(sorted(symbols(value)))
        raise ShapeError(f"{dim} has no value: {missing} is unbound", code="dim-unbound")
    return value


def from_ast(node: ast.expr, names: Mapping[str, int | Poly] | None = None) -> int | Poly:
    """A dim from Python syntax: ints, names, + - * //, ceildiv(a, n). `names` are config sizes."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return symbol(name) if names is None else names.get(name, symbol(name))
        case ast.Attribute(value=ast.Name(), attr=name) if names and name in names:
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return multiply(from_ast(operand, names), -1)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = from_ast(left, names), from_ast(right, names)
            match op:
                case ast.Add():
                    return add(a, b)
                case ast.Sub():
                    return add(a, multiply(b, -1))
                case ast.Mult():
                    return multiply(a, b)
                case ast.FloorDiv() | ast.Div():
                    return divide(a, b)
        case ast.Call(func=ast.Name(id="ceildiv"), args=[top, ast.Constant(value=int(by))]):
            return ceildiv(from_ast(top, names), by)
    raise ParseError(
        f"{ast.unparse(node)!r} is not a size",
        code="parse-dim",
        next="use ints, symbols, + - *, exact // and ceildiv(size, int)",
    )


def parse(text: str, names: Mapping[str, int | Poly] | None = None) -> int | Poly:
    """A dim from text, e.g. `P + T` or `ceildiv(T, 64)`."""
    return from_ast(ast.parse(text, mode="eval").body, names)
