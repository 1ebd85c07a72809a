"""Arithmetic that emits ops: how gradients are written beside meanings.

    c * x.cos()      emits     cos: f[8] = cos(x);  mul: f[8] = mul(c, cos)

Every op is a method: its first operand is the term, the others are terms or, in elementwise ops,
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from archir.dims import Poly
from archir.ir import Value
from archir.types import Tensor


class Term:
    """A value, and `emit(kind, *operands, **attrs)` of the function that is being built."""

    __slots__ = ("emit", "value")

    def __init__(self, value: Value, emit: Callable[..., Any]) -> None:
        self.value, self.emit = value, emit

    @property
    def type(self) -> Tensor:
        """The type, which must be a tensor's."""
        assert isinstance(self.value.type, Tensor)
        return self.value.type

    @property
    def dtype(self) -> str:
        return self.type.dtype

    @property
    def shape(self) -> tuple[int | Poly, ...]:
        return self.type.shape

    @property
    def rank(self) -> int:
        return self.type.rank

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        if kind.startswith("_"):
            raise AttributeError(kind)
        return lambda *others, **attrs: apply(kind, self, *others, **attrs)

    def made(self, kind: str, **attrs: Any) -> Term:
        """An op that makes a tensor from sizes alone (`eye`, `fill`, `size`), of this dtype."""
        dtype = {} if self.dtype == "F" else {"dtype": self.dtype}
        return Term(self.emit(kind, **attrs, **dtype), self.emit)

    def __add__(self, other: Term | float) -> Term:
        return apply("add", self, other)

    def __sub__(self, other: Term | float) -> Term:
        return apply("sub", self, other)

    def __mul__(self, other: Term | float) -> Term:
        return apply("mul", self, other)

    def __truediv__(self, other: Term | float) -> Term:
        return apply("div", self, other)

    def __radd__(self, other: float) -> Term:
        return apply("add", other, self)

    def __rsub__(self, other: float) -> Term:
        return apply("sub", other, self)

    def __rmul__(self, other: float) -> Term:
        return apply("mul", other, self)

    def __rtruediv__(self, other: float) -> Term:
        return apply("div", other, self)

    def __neg__(self) -> Term:
        return apply("neg", self)

    def __gt__(self, other: Term | float) -> Term:
        return apply("greater", self, other)

    def __lt__(self, other: Term | float) -> Term:
        return apply("less", self, other)

    def __ge__(self, other: Term | float) -> Term:
        return apply("greater_equal", self, other)

    def __le__(self, other: Term | float) -> Term:
        return apply("less_equal", self, other)


def apply(kind: str, *operands: Term | float, **attrs: Any) -> Any:
    """The result of an op as a term, or a tuple of them; one operand at least is a term."""
    emit = next(x.emit for x in operands if isinstance(x, Term))
    made = emit(kind, *(x.value if isinstance(x, Term) else x for x in operands), **attrs)
    return tuple(Term(v, emit) for v in made) if isinstance(made, tuple) else Term(made, emit)
