"""Prints an IR function of one head and one token (a rule), or of scalars, as Triton statements.

A value whose axes are dims of the rule is a tile of whole blocks: dim K of size 100 has a block of
128, of which `in_K` are real. Beyond them a tile holds anything finite, so every sum over an axis
whose block is larger than its size takes only the real part; loads put zeros there, stores leave
them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from archir import dims
from archir.diagnostics import UnsupportedError
from archir.ir import Function, Op, Operand, Value
from archir.ops import OPS, lookup
from archir.types import Tensor

TABLE = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "floor_divide": "tl.floor({0} / {1})",
    "mod": "{0} - tl.floor({0} / {1}) * {1}",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "floor": "tl.floor({0})",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "expm1": "_expm1({0})",
    "log": "tl.log({0})",
    "log1p": "_log1p({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "tanh": "_tanh({0})",
    "sigmoid": "tl.sigmoid({0})",
    "silu": "{0} * tl.sigmoid({0})",
    "relu": "tl.maximum({0}, 0.0, propagate_nan=tl.PropagateNan.ALL)",
    "softplus": "tl.maximum({0}, 0.0) + _log1p(tl.exp(-tl.abs({0})))",
    "gelu_tanh": "_gelu_tanh({0})",
    "less": "{0} < {1}",
    "less_equal": "{0} <= {1}",
    "greater": "{0} > {1}",
    "greater_equal": "{0} >= {1}",
    "equal": "{0} == {1}",
    "not_equal": "{0} != {1}",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_not": "~{0}",
    "where": "tl.where({0}, {1}, {2})",
}
# What a row of the table above may call: written into a file of kernels where it is used.
HELPERS = {
    "_power": '''
        """|x|^y by logarithms, with the sign that a whole y gives."""
        size = tl.exp(y * tl.log(tl.abs(x)))
        whole, odd = tl.floor(y) == y, tl.floor(y * 0.5) * 2.0 != y
        signed = tl.where(odd, -size, size)
        size = tl.where(x < 0.0, tl.where(whole, signed, float("nan")), size)
        return tl.where(y == 0.0, 1.0, size)
    ''',
    "_log1p": '''
        """log(1 + x), accurate near 0 (Kahan: the rounding of 1 + x is divided out)."""
        u = 1.0 + x
        plain = (u == 1.0) | (u == float("inf"))
        return tl.where(plain, x, tl.log(u) * x / tl.where(plain, 1.0, u - 1.0))
    ''',
    "_expm1": '''
        """exp(x) − 1, accurate near 0 (Kahan)."""
        u = tl.exp(x)
        plain = (u == 1.0) | (tl.abs(x) > 40.0)  # there u − 1 is as good
        exact = (u - 1.0) * tl.where(plain, 0.0, x) / tl.log(tl.where(plain, 2.0, u))
        return tl.where(plain, tl.where(u == 1.0, x, u - 1.0), exact)
    ''',
    "_tanh": '''
        """tanh(x), accurate near 0."""
        t = _expm1(-2.0 * tl.abs(x))
        return tl.where(x < 0.0, t / (t + 2.0), -t / (t + 2.0))
    ''',
    "_gelu_tanh": '''
        """x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2 (Hendrycks & Gimpel 2016)."""
        return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    ''',
}


@dataclass(frozen=True)
class Axis:
    """A dim of a rule in a kernel: its size, the power of two that holds it (or a part of it)."""

    name: str
    size: int
    block: int

    @property
    def whole(self) -> bool:
        """Whether every place of a tile is real."""
        return self.size % self.block == 0


def _number(value: float) -> str:
    """A number as Triton reads it, in brackets where it has a sign."""
    text = repr(value) if math.isfinite(value) else f'float("{value}")'
    return f"({text})" if text.startswith("-") else text


class Body:
    """The statements of a function; names of values are kept where they are free.

    dtype: what it computes in, `float32` or `float64`.
    """

    def __init__(
        self, function: Function, axes: Mapping[str, Axis], taken: set[str], dtype: str
    ) -> None:
        self.function, self.axes, self.taken, self.dtype = function, axes, taken, dtype
        self.names: dict[Value, str] = {}
        self.known: dict[Value, float | bool] = {}

    def print(self, inputs: Mapping[Value, str], ops: Sequence[Op] | None = None) -> list[str]:
        """One line per op, with the spec's line as a comment; results are in `names`."""
        self.names |= inputs
        return [line for op in (self.function.ops if ops is None else ops) for line in self.op(op)]

    def op(self, op: Op) -> list[str]:
        """The line of an op; none where its result is a number known already."""
        if self._fold(op):
            return []
        text = self.expression(op)
        place = f"  # {op.loc.short}" if op.loc else ""
        return [f"{self.define(op.result)} = {text}{place}"]

    def __call__(self, operand: Operand) -> str:
        if isinstance(operand, Value) and operand not in self.known:
            return self.names[operand]
        found = self.known[operand] if isinstance(operand, Value) else operand
        return str(found) if isinstance(found, bool) else _number(float(found))

    def tile(self, operand: Operand) -> str:
        """An operand that an op must not take as a bare number: Triton's are float32."""
        known = not isinstance(operand, Value) or operand in self.known
        return f"tl.full((), {self(operand)}, tl.{self.dtype})" if known else self(operand)

    def define(self, value: Value) -> str:
        """The name of a value: its own where that is free."""
        if value in self.names:
            return self.names[value]
        name, ordinal = value.name, 0
        while name in self.taken:
            ordinal += 1
            name = f"{value.name}_{ordinal}"
        self.taken.add(name)
        self.names[value] = name
        return name

    def _fold(self, op: Op) -> bool:
        """Takes an op whose operands are all known numbers out of the kernel."""
        if op.kind == "size":
            self.known[op.result] = float(self._size(op.attrs["dim"]))
            return True
        if op.kind == "pow" and self._number_of(op.operands[1]) == 0:
            self.known[op.result] = 1.0
            return True
        given = [self.known.get(x) if isinstance(x, Value) else x for x in op.operands]
        numbers = [float(x) for x in given if x is not None]
        scalar = lookup(op.kind).family == "elementwise" or op.kind == "cast"
        if not scalar or len(numbers) < len(given):
            return False
        made = numbers[0] if op.kind == "cast" else OPS[op.kind].meaning(*numbers)
        truth = isinstance(op.result.type, Tensor) and op.result.type.dtype == "bool"
        self.known[op.result] = bool(made) if truth else float(made)
        return True

    def _number_of(self, x: Operand) -> float | None:
        return self.known.get(x) if isinstance(x, Value) else x

    def _size(self, size: Any) -> int:
        return dims.evaluate(size, {name: axis.size for name, axis in self.axes.items()})

    # ---- tiles

    def letters(self, value: Value) -> tuple[str | None, ...]:
        """The dim of each axis of a tile; None for an axis of size 1."""
        assert isinstance(value.type, Tensor)
        return tuple(dims.bare(size) for size in value.type.shape)

    def expression(self, op: Op) -> str:
        """The right side of an op's line."""
        if op.kind == "where":
            condition, *branches = op.operands
            return TABLE["where"].format(self(condition), *(self.tile(x) for x in branches))
        if op.kind in TABLE:
            return TABLE[op.kind].format(*(self(x) for x in op.operands))
        if op.kind not in _TILES:
            raise UnsupportedError(
                f"a kernel has no way to say {op.kind}",
                code="kernel-op",
                loc=op.loc,
                next="write it in elementwise ops, np.einsum, np.sum, np.transpose, np.where",
            )
        return _TILES[op.kind](self, op)

    def real(self, text: str, value: Value, axis: int, other: str = "0.0") -> str:
        """A tile with `other` beyond the real part of an axis."""
        letter = self.letters(value)[axis]
        if letter is None or self.axes[letter].whole:
            return text
        index = ", ".join(":" if i == axis else "None" for i in range(len(self.letters(value))))
        return f"tl.where(in_{letter}[{index}], {text}, {other})"


def _cast(p: Body, op: Op) -> str:
    exact = {"i32": "int32", "i64": "int64", "bool": "int1"}
    dtype = exact.get(op.attrs["dtype"], p.dtype)
    return f"({p(op.operands[0])}).to(tl.{dtype})"


def _expand_dims(p: Body, op: Op) -> str:
    rank = len(p.letters(op.result))
    index = ", ".join("None" if i in op.attrs["axes"] else ":" for i in range(rank))
    return f"{p(op.operands[0])}[{index}]"


def _transpose(p: Body, op: Op) -> str:
    return f"tl.permute({p(op.operands[0])}, {tuple(op.attrs['axes'])})"


def _broadcast_to(p: Body, op: Op) -> str:
    x, shape = op.values[0], p.letters(op.result)
    blocks = ", ".join(f"BLOCK_{d}" if d else "1" for d in shape)
    return f"tl.broadcast_to({p(x)}, ({blocks}{',' * (len(shape) == 1)}))"


def _reduce(p: Body, op: Op) -> str:
    x = op.values[0]
    text, empty = p(x), "-float('inf')" if op.kind == "reduce_max" else "0.0"
    for axis in op.attrs["axes"]:
        text = p.real(text, x, axis, empty)
    keep = ", keep_dims=True" if op.attrs.get("keepdims") else ""
    name, count = "max" if op.kind == "reduce_max" else "sum", 1
    for axis in sorted(op.attrs["axes"], reverse=True):
        text = f"tl.{name}({text}, {axis}{keep})"
        letter = p.letters(x)[axis]
        count *= p.axes[letter].size if letter else 1
    return f"{text} / {float(count)}" if op.kind == "reduce_mean" else text


def _einsum(p: Body, op: Op) -> str:
    """A product of tiles brought to all letters, summed over those that the result lacks."""
    left, _, kept = op.attrs["equation"].partition("->")
    terms = left.split(",")
    order = max(terms, key=len)
    order += "".join(x for x in dict.fromkeys("".join(terms)) if x not in order)
    summed = [x for x in order if x not in kept]
    factors = []
    for x, term in zip(op.values, terms, strict=True):
        text = p(x)
        for letter in (c for c in term if c in summed):
            text = p.real(text, x, term.index(letter))
        factors.append(_spread(text, term, order))
    text = " * ".join(factors)
    for letter in sorted(summed, key=order.index, reverse=True):
        text = f"tl.sum({text}, {order.index(letter)})"
    left = "".join(x for x in order if x in kept)
    if left == kept:
        return text
    return f"tl.permute({text}, {tuple(left.index(x) for x in kept)})"


def _spread(text: str, term: str, order: str) -> str:
    """A tile with an axis for every letter of `order`, of size 1 where it has none."""
    placed = "".join(c for c in order if c in term)
    if placed != term:
        text = f"tl.permute({text}, {tuple(term.index(c) for c in placed)})"
    if len(term) == len(order) or not term:
        return text
    return f"{text}[{', '.join(':' if c in term else 'None' for c in order)}]"


def _eye(p: Body, op: Op) -> str:
    d = dims.bare(op.attrs["dim"])
    return f"tl.where(at_{d}[:, None] == at_{d}[None, :], 1.0, 0.0)"


def _fill(p: Body, op: Op) -> str:
    blocks = ", ".join(f"BLOCK_{d}" if d else "1" for d in p.letters(op.result))
    comma = "," * (len(p.letters(op.result)) == 1)
    return f"tl.full(({blocks}{comma}), {_number(float(op.attrs['value']))}, tl.{p.dtype})"


def _pow(p: Body, op: Op) -> str:
    """Whole powers as products, halves as roots, else by logarithms."""
    x, y = op.operands
    n = p.known.get(y) if isinstance(y, Value) else y
    named = {0.5: "tl.sqrt({0})", -0.5: "tl.rsqrt({0})"}
    if n in named:
        return named[n].format(p(x))
    if n is not None and n == int(n) and 0 < abs(n) <= 8:
        product = " * ".join([p(x)] * abs(int(n)))
        return product if n > 0 else f"1.0 / ({product})"
    return f"_power({p.tile(x)}, {p.tile(y)})"


_TILES: dict[str, Callable[[Body, Op], str]] = {
    "cast": _cast,
    "expand_dims": _expand_dims,
    "transpose": _transpose,
    "broadcast_to": _broadcast_to,
    "reduce_sum": _reduce,
    "reduce_mean": _reduce,
    "reduce_max": _reduce,
    "einsum": _einsum,
    "eye": _eye,
    "fill": _fill,
    "pow": _pow,
}


def printable(function: Function) -> str:
    """Why a function cannot be a kernel's body, naming the op; "" where it can."""
    for op in function.ops:
        if op.kind not in TABLE and op.kind not in _TILES and op.kind != "size":
            return f"{op.kind} of {function.name}{_place(op)} has no form on tiles"
        if op.kind == "einsum":
            terms = op.attrs["equation"].partition("->")[0].split(",")
            if any(len(set(term)) < len(term) for term in terms):
                return f"a diagonal in einsum of {function.name}{_place(op)} has no form on tiles"
    return ""


def _place(op: Op) -> str:
    return f" ({op.loc.short})" if op.loc else ""


def reduced(function: Function) -> set[str]:
    """The dims that some op of a function sums or takes the maximum over, or moves in a tile."""
    found: set[str | None] = set()
    for op in function.ops:
        if op.kind.startswith("reduce"):
            (x,) = op.values
            assert isinstance(x.type, Tensor)
            found |= {dims.bare(x.type.shape[axis]) for axis in op.attrs["axes"]}
        elif op.kind == "einsum":
            left, _, kept = op.attrs["equation"].partition("->")
            for term, x in zip(left.split(","), op.values, strict=True):
                assert isinstance(x.type, Tensor)
                pairs = zip(term, x.type.shape, strict=True)
                found |= {dims.bare(size) for c, size in pairs if c not in kept}
        elif op.kind == "eye":
            found.add(dims.bare(op.attrs["dim"]))
    return {d for d in found if d}
