"""Types: text there and back, matching, and the order of dtypes."""

from __future__ import annotations

import pytest

from archir import types
from archir.diagnostics import ParseError
from archir.dims import symbol
from archir.types import List, Sequence, Tensor

B, T = symbol("B"), symbol("T")

PRINTED = {
    "f32": Tensor("f32"),
    "f[B, T, 768]": Tensor("f", (B, T, 768)),
    "F[2*B + 1]": Tensor("F", (2 * B + 1,)),
    "bool[1, ceildiv(T, 64)]": types.parse("bool[1, ceildiv(T, 64)]"),
    "list[N, f[B, T, 8]]": List(symbol("N"), Tensor("f", (B, T, 8))),
    "list[3, i64]": List(3, Tensor("i64")),
    "sequence[R]": Sequence(symbol("R")),
}


@pytest.mark.parametrize("text", PRINTED)
def test_printed(text: str) -> None:
    assert str(PRINTED[text]) == text
    assert types.parse(text) == PRINTED[text]


@pytest.mark.parametrize(
    "text",
    [
        "float32[B]",
        "f[B",
        "list[f[B]]",
        "list[3, list[2, f]]",
        "sequence[R, S]",
        "3",
        "f(B)",
        "f[1.5]",
    ],
)
def test_not_a_type(text: str) -> None:
    with pytest.raises(ParseError) as caught:
        types.parse(text)
    assert caught.value.next


MATCHES: dict[tuple[str, str], str | dict[str, object]] = {
    ("f[B, T, 8]", "f[2, T, 8]"): {"B": 2, "T": T},
    ("list[N, f[B, 8]]", "list[3, f[T, 8]]"): {"N": 3, "B": T},
    ("sequence[R]", "sequence[B]"): {"R": B},
    ("f[B, B]", "f[2, 3]"): "B = 2 expected, 3 given",
    ("f[B, 2*B]", "f[4, 8]"): {"B": 4},
    ("f[B, 2*B]", "f[4, 9]"): "2*B = 8 expected, 9 given",
    ("f[B, 8]", "f[B, 9]"): "8 expected, 9 given",
    ("f[B]", "F[B]"): "dtype f expected, F given",
    ("f[B]", "f[B, T]"): "1 axes expected, 2 given",
    ("f[B]", "sequence[B]"): "f[B] expected, sequence[B] given",
    ("list[N, f[B]]", "list[2, f[B, T]]"): "1 axes expected, 2 given",
}


@pytest.mark.parametrize("pattern,actual", MATCHES)
def test_match(pattern: str, actual: str) -> None:
    binding: dict[str, object] = {}
    problem = types.match(types.parse(pattern), types.parse(actual), binding)  # type: ignore[arg-type]
    want = MATCHES[pattern, actual]
    assert (problem or binding) == want


def test_substitution_and_symbols() -> None:
    for text in PRINTED:
        type_ = types.parse(text)
        bound = types.substitute(type_, dict.fromkeys(types.symbols(type_), 6))
        assert not types.symbols(bound)
        assert str(bound) == str(types.parse(str(bound)))


def test_dtypes() -> None:
    """The model's dtype gives way to `F`; `F` is float32 at least; integers give way to floats."""
    assert types.promote("f", "F") == "F"
    assert types.promote("bf16", "f32") == "f32"
    assert types.promote("i64", "f") == "f"
    assert types.promote("bool", "i32") == "i32"
    resolved = {(d, m): types.resolve(d, m) for d in "fF" for m in ("bf16", "f32", "f64")}
    assert resolved == {
        ("f", "bf16"): "bf16", ("f", "f32"): "f32", ("f", "f64"): "f64",
        ("F", "bf16"): "f32", ("F", "f32"): "f32", ("F", "f64"): "f64",
    }  # fmt: skip
    assert [types.widen(d) for d in ("f", "F", "bf16", "f32", "f64")] == [
        "F",
        "F",
        "f32",
        "f32",
        "f64",
    ]
    assert types.short_dtype("bfloat16") == types.short_dtype("bf16") == "bf16"
    with pytest.raises(ParseError, match="'half' is not a dtype"):
        types.short_dtype("half")
