"""The three types of the IR (D3): tensor, list, sequence.

    tensor    f[B, T, 768]    a dtype and dims; a scalar is the bare dtype, `f32`
    list      list[N, f[B, T, D]]    N tensors of one type (NumPy: stacked; eager: a Python list)
    sequence  sequence[R]     per row (start, stop, past) over the flattened token axis (D4)

Dtypes: `f` is the model's dtype, abstract until the pass `precision`; `F` is `f` or float32,
whichever is wider (states, pinned weights). The others are concrete.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from archir import dims
from archir.diagnostics import ParseError
from archir.dims import Poly

ABSTRACT_FLOATS = ("f", "F")
CONCRETE_FLOATS = ("bf16", "f16", "f32", "f64")
FLOATS = ABSTRACT_FLOATS + CONCRETE_FLOATS
DTYPES = (*FLOATS, "i32", "i64", "bool")
NAMES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "int32": "i32",
    "int64": "i64",
}
_WIDTH = {"bool": 0, "i32": 1, "i64": 2, "bf16": 3, "f16": 3, "f": 4, "f32": 5, "F": 6, "f64": 7}


@dataclass(frozen=True)
class Tensor:
    """A dtype and a tuple of dims."""

    dtype: str
    shape: tuple[int | Poly, ...] = ()

    def __str__(self) -> str:
        if not self.shape:
            return self.dtype
        return f"{self.dtype}[{', '.join(str(d) for d in self.shape)}]"

    __repr__ = __str__

    @property
    def rank(self) -> int:
        return len(self.shape)

    def with_dtype(self, dtype: str) -> Tensor:
        return Tensor(dtype, self.shape)

    def with_shape(self, shape: tuple[int | Poly, ...]) -> Tensor:
        return Tensor(self.dtype, shape)


@dataclass(frozen=True)
class List:
    """`count` tensors of one type."""

    count: int | Poly
    element: Tensor

    def __str__(self) -> str:
        return f"list[{self.count}, {self.element}]"

    __repr__ = __str__


@dataclass(frozen=True)
class Sequence:
    """Which tokens belong to which of `rows` rows, and how many came before."""

    rows: int | Poly

    def __str__(self) -> str:
        return f"sequence[{self.rows}]"

    __repr__ = __str__


Type = Tensor | List | Sequence


def is_float(dtype: str) -> bool:
    return dtype in FLOATS


def promote(*dtypes: str) -> str:
    """The widest of several dtypes; integers and bools give way to floats."""
    return max(dtypes, key=_WIDTH.__getitem__)


def size_of(dtype: str) -> int:
    """Bytes of one element of a concrete dtype."""
    return {"bool": 1, "bf16": 2, "f16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}[dtype]


def resolve(dtype: str, model: str) -> str:
    """An abstract dtype made concrete for a model dtype: f → model, F → max(f32, model)."""
    if dtype == "f":
        return model
    if dtype == "F":
        return "f64" if model == "f64" else "f32"
    return dtype


def widen(dtype: str) -> str:
    """The dtype of statistics and states beside a dtype: `F` where abstract, else f32 at least."""
    return "F" if dtype in ABSTRACT_FLOATS else promote("f32", dtype)


def short_dtype(name: str) -> str:
    """`bfloat16` or `bf16` → `bf16`."""
    short = NAMES.get(name, name)
    if short not in DTYPES:
        raise ParseError(
            f"{name!r} is not a dtype", code="parse-dtype", next=f"use one of {', '.join(NAMES)}"
        )
    return short


def symbols(type_: Type) -> set[str]:
    """Every symbol in a type."""
    match type_:
        case Tensor(shape=shape):
            return set().union(*(dims.symbols(d) for d in shape))
        case List(count=count, element=element):
            return dims.symbols(count) | symbols(element)
        case Sequence(rows=rows):
            return dims.symbols(rows)


def substitute(type_: Type, binding: Mapping[str, int | Poly]) -> Type:
    """A type with symbols replaced."""
    match type_:
        case Tensor(dtype=dtype, shape=shape):
            return Tensor(dtype, tuple(dims.substitute(d, binding) for d in shape))
        case List(count=count, element=element):
            inner = substitute(element, binding)
            assert isinstance(inner, Tensor)
            return List(dims.substitute(count, binding), inner)
        case Sequence(rows=rows):
            return Sequence(dims.substitute(rows, binding))


def match(pattern: Type, actual: Type, binding: dict[str, int | Poly]) -> str | None:
    """Bind the bare symbols of `pattern` to the sizes of `actual`; a sentence where they disagree.

    Dims of `pattern` that are not bare are compared after substitution, so pass the inputs with
    bare symbols first (D3: binding is matching, not solving).
    """
    if type(pattern) is not type(actual):
        return f"{pattern} expected, {actual} given"
    if isinstance(pattern, Tensor) and isinstance(actual, Tensor):
        if pattern.dtype != actual.dtype:
            return f"dtype {pattern.dtype} expected, {actual.dtype} given"
        if pattern.rank != actual.rank:
            return f"{pattern.rank} axes expected, {actual.rank} given"
        pairs = list(zip(pattern.shape, actual.shape, strict=True))
    elif isinstance(pattern, List) and isinstance(actual, List):
        inner = match(pattern.element, actual.element, binding)
        if inner:
            return inner
        pairs = [(pattern.count, actual.count)]
    else:
        assert isinstance(pattern, Sequence) and isinstance(actual, Sequence)
        pairs = [(pattern.rows, actual.rows)]
    for want, have in pairs:
        name = dims.bare(want)
        if name is not None and binding.setdefault(name, have) == have:
            continue
        bound = dims.substitute(want, binding)
        if bound != have:
            shown = str(want) if want == bound else f"{want} = {bound}"
            return f"{shown} expected, {have} given"
    return None


def from_ast(node: ast.expr, names: Mapping[str, int | Poly] | None = None) -> Type:
    """A type from Python syntax."""
    match node:
        case ast.Name(id=dtype) if dtype in DTYPES:
            return Tensor(dtype)
        case ast.Subscript(value=ast.Name(id="list"), slice=ast.Tuple(elts=[count, element])):
            inner = from_ast(element, names)
            if isinstance(inner, Tensor):
                return List(dims.from_ast(count, names), inner)
        case ast.Subscript(value=ast.Name(id="sequence"), slice=rows):
            return Sequence(dims.from_ast(rows, names))
        case ast.Subscript(value=ast.Name(id=dtype), slice=index) if dtype in DTYPES:
            sizes = index.elts if isinstance(index, ast.Tuple) else [index]
            return Tensor(dtype, tuple(dims.from_ast(size, names) for size in sizes))
    raise ParseError(
        f"{ast.unparse(node)!r} is not a type",
        code="parse-type",
        next=f"write dtype[sizes], list[n, tensor] or sequence[rows]; dtypes: {', '.join(DTYPES)}",
    )


def parse(text: str, names: Mapping[str, int | Poly] | None = None) -> Type:
    """A type from text, e.g. `f[B, T, 768]`."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise ParseError(
            f"{text!r} is not a type", code="parse-type", next="write for example f[B, T, 768]"
        ) from None
    return from_ast(node, names)
