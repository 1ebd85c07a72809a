"""Sizes: arithmetic is that of the integers they stand for; text gives the same size back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archir import dims
from archir.diagnostics import ParseError, ShapeError
from archir.dims import Poly, ceildiv, symbol
from tests.ir.test_laws import cases

B, T, P = symbol("B"), symbol("T"), symbol("P")

atoms = st.one_of(st.integers(-4, 9), st.sampled_from([B, T, P]))
sizes = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from([dims.add, dims.multiply]), inner, inner).map(
            lambda t: t[0](t[1], t[2])
        ),
        st.tuples(inner, st.integers(1, 5)).map(lambda t: ceildiv(*t)),
    ),
    max_leaves=6,
)
bindings = st.fixed_dictionaries({name: st.integers(1, 9) for name in "BTP"})


@cases(200)
@given(sizes, sizes, bindings)
def test_evaluation_is_a_homomorphism(a: Any, b: Any, at: dict[str, int]) -> None:
    x, y = dims.evaluate(a, at), dims.evaluate(b, at)
    assert dims.evaluate(dims.add(a, b), at) == x + y
    assert dims.evaluate(dims.multiply(a, b), at) == x * y
    assert dims.evaluate(ceildiv(a, 3), at) == -(-x // 3)
    assert dims.evaluate(dims.product((a, b, 2)), at) == 2 * x * y
    assert dims.evaluate(dims.substitute(a, {"B": b, "T": 2}), at) == dims.evaluate(
        a, {**at, "B": y, "T": 2}
    )


@cases(200)
@given(sizes, sizes, sizes)
def test_normal_form(a: Any, b: Any, c: Any) -> None:
    assert dims.add(a, b) == dims.add(b, a)
    assert dims.multiply(a, dims.add(b, c)) == dims.add(dims.multiply(a, b), dims.multiply(a, c))
    assert dims.add(a, dims.multiply(a, -1)) == 0
    assert dims.parse(str(a)) == a
    assert isinstance(a, int) or dims.symbols(a)


@cases(200)
@given(sizes, st.one_of(st.integers(1, 6), st.sampled_from([B, 2 * T, B * T])))
def test_division_undoes_multiplication(a: Any, b: Any) -> None:
    assert dims.divide(dims.multiply(a, b), b) == a


PRINTED = {
    "B": B, "2*B": 2 * B, "B*T": T * B, "B*B": B * B, "P + T": T + P, "T + 1": 1 + T,
    "B - T": B - T, "-B": 0 - B, "-2*B + 3": 3 - 2 * B, "4*B*T - 2*P + 1": 4 * T * B - 2 * P + 1,
    "ceildiv(T, 64)": ceildiv(T, 64), "2*ceildiv(P + T, 16)": 2 * ceildiv(P + T, 16),
    "7": B - B + 7, "0": B - B, "3": ceildiv(9, 4),
}  # fmt: skip


@pytest.mark.parametrize("text", PRINTED)
def test_printed(text: str) -> None:
    assert str(PRINTED[text]) == text
    assert dims.parse(text) == PRINTED[text]


DIVISIONS = {
    "exact int": (12, 4, 3),
    "exact poly by int": (6 * B * T + 4 * P, 2, 3 * B * T + 2 * P),
    "exact poly by monomial": (6 * B * T + 2 * T * P, 2 * T, 3 * B + P),
    "by itself": (B + T, B + T, 1),
    "zero": (0, B, 0),
}
REFUSED = {
    "remainder": (768, 5, "768 is not divisible by 5"),
    "coefficient": (3 * B, 2, "3*B is not divisible by 2"),
    "another symbol": (B * T, P, "B*T is not divisible by P"),
    "one term of two": (B * T + 1, T, "B*T + 1 is not divisible by T"),
    "by a sum": (B * B + B, B + 1, "B + B*B is not divisible by B + 1"),
    "int by symbol": (8, T, "8 is not divisible by T"),
    "by zero": (8, 0, "8 is not divisible by 0"),
    "ceildiv is an atom": (ceildiv(T, 2), 2, "ceildiv(T, 2) is not divisible by 2"),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_division(name: str) -> None:
    a, b, quotient = DIVISIONS[name]
    assert dims.divide(a, b) == quotient


@pytest.mark.parametrize("name", REFUSED)
def test_division_error_shows_both_sizes(name: str) -> None:
    a, b, message = REFUSED[name]
    with pytest.raises(ShapeError) as caught:
        dims.divide(a, b)
    assert message in str(caught.value)
    assert "ceildiv" in caught.value.next


def test_ceildiv_is_compared_by_structure() -> None:
    assert ceildiv(T + P, 16) == ceildiv(P + T, 16)
    assert ceildiv(2 * T, 2) != T
    assert ceildiv(T, 16) != ceildiv(T, 8)
    assert dims.substitute(ceildiv(T, 16), {"T": 33}) == 3
    with pytest.raises(ShapeError, match="ceildiv by 0"):
        ceildiv(T, 0)


def test_unbound_symbols_are_named() -> None:
    with pytest.raises(ShapeError, match=r"B\*P \+ T has no value: P, T is unbound"):
        dims.evaluate(B * P + T, {"B": 2})


def test_bare() -> None:
    assert dims.bare(T) == "T"
    for size in (3, 2 * T, T + 1, T * B, ceildiv(T, 2)):
        assert dims.bare(size) is None


def test_config_names_stand_for_sizes() -> None:
    names: dict[str, int | Poly] = {"width": 12, "heads": 4}
    assert dims.parse("width // heads + T", names) == 3 + T
    assert dims.parse("-heads * T", names) == -4 * T


@pytest.mark.parametrize("text", ["T ** 2", "f(T)", "1.5", "T if B else P", "'T'", "ceildiv(T, B)"])
def test_not_a_size(text: str) -> None:
    with pytest.raises(ParseError, match="is not a size"):
        dims.parse(text)
