"""What an op is: one `OpDef` holds its meaning, shape rule, samples and documentation.

A signature names dims, and is both inference and verification:

    x: f[*A, I], w: f[O, I], b?: f[O] -> f[*A, O]

`*A` matches any number of axes, `?` marks an operand that may be left out. Dtype letters: `f` is
one float dtype shared by all operands so marked, `g` any float, `i` any integer, `any` anything.
Where a signature cannot say it, `infer` is a function of the same inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from archir import dims, types
from archir.diagnostics import ShapeError, UnsupportedError, nearest
from archir.dims import Poly
from archir.ir import Function, Op, Value
from archir.ops.interval import Bounds
from archir.types import Tensor, Type


@dataclass(frozen=True)
class Site:
    """One use of an op, as its shape rule sees it."""

    kind: str
    operands: tuple[Type | int | float, ...]
    names: tuple[str, ...]
    attrs: Mapping[str, Any]
    functions: Mapping[str, Function]

    def tensor(self, index: int) -> Tensor:
        """The type of operand `index`, which must be a tensor."""
        if index >= len(self.operands):
            raise ShapeError(
                f"{self.kind} needs operand {index + 1}, but {len(self.operands)} were given",
                code="operand-count",
            )
        found = self.operands[index]
        if not isinstance(found, Tensor):
            raise ShapeError(
                f"{self.kind} needs a tensor as operand {index + 1}, {found} was given",
                code="operand-type",
            )
        return found

    def function(self, attr: str) -> Function:
        """The function that attribute `attr` refers to."""
        return self.functions[self.attrs[attr].name]

    def show(self, index: int) -> str:
        """`x: f[B, T, 512]`"""
        name, found = self.names[index], self.operands[index]
        return f"{name}: {found}" if name else str(found)

    def fail(self, what: str, code: str = "shape-mismatch", next: str = "") -> ShapeError:
        """A ShapeError that lists the operands as facts."""
        shown = tuple(dict.fromkeys(self.show(i) for i in range(len(self.operands))))
        return ShapeError(f"{self.kind}: {what}", code=code, facts=shown, next=next)


Infer = Callable[[Site], tuple[Type, ...]]
Vjp = Callable[..., Any]


@dataclass(frozen=True)
class Sample:
    """Operand types (as text) and attributes an op accepts or, with `message`, refuses."""

    operands: tuple[str, ...]
    attrs: Mapping[str, Any] | None = None
    message: str = ""


@dataclass(frozen=True)
class OpDef:
    """Everything archir knows about one op.

    meaning: NumPy, called as `meaning(*arrays, **attrs)`; functions an op carries arrive as
    callables. Returns an array, or a tuple where the op has several results.
    effect: it writes something, so it is never dropped or merged.
    ordered: it must know which tokens follow which: `specialize` gives it the sequence last.
    made: its result is made from sizes alone; attribute `dtype` says its dtype (`F` by default).
    vjp: its gradient in IR ops, called as `vjp(c, y, *operands, **attrs)` with terms (ops/terms.py)
    and numbers: c is the cotangent of the result y, both tuples where there are several results, a
    c that nothing flows to being None. Returns the cotangent of the operand, or a tuple of one for
    each; None is zero. `archir.passes.gradient` then brings it to the operand's dtype and shape:
    axes that were stretched are summed, axes of size 1 stretched. Or, in words, why it has none.
    bounds: in which interval its results lie, from those of its operands (ops/interval.py); without
    a rule nothing is known of them.
    """

    kind: str
    family: str
    doc: str
    meaning: Callable[..., Any]
    infer: Infer
    samples: tuple[Sample, ...] = ()
    invalid: tuple[Sample, ...] = ()
    effect: bool = False
    ordered: bool = False
    made: bool = False
    vjp: Vjp | str = ""
    bounds: Bounds | None = None


OPS: dict[str, OpDef] = {}


def register(definition: OpDef) -> OpDef:
    """Adds an op; a kind is registered once."""
    if definition.kind in OPS:
        raise UnsupportedError(f"op {definition.kind!r} exists already", code="op-exists")
    OPS[definition.kind] = definition
    return definition


def op(
    family: str,
    signature: str | None = None,
    *,
    infer: Infer | None = None,
    samples: tuple[Sample, ...] = (),
    invalid: tuple[Sample, ...] = (),
    effect: bool = False,
    ordered: bool = False,
    made: bool = False,
    vjp: Vjp | str = "",
    bounds: Bounds | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares the decorated NumPy function to be an op's meaning; its name is the kind."""

    def declare(meaning: Callable[..., Any]) -> Callable[..., Any]:
        rule = infer or infer_by(signature or "")
        kind = meaning.__name__.rstrip("_")
        doc = (meaning.__doc__ or "").strip()
        flags = (effect, ordered, made)
        register(OpDef(kind, family, doc, meaning, rule, samples, invalid, *flags, vjp, bounds))
        return meaning

    return declare


def constant(c: Any, y: Any, *operands: Any, **attrs: Any) -> tuple[None, ...]:
    """The vjp of what changes in steps or depends on sizes alone: zero."""
    return (None,) * len(operands)


def lookup(kind: str) -> OpDef:
    """The definition of a kind, or an error with the nearest names."""
    if kind not in OPS:
        raise ShapeError(f"there is no op {kind!r}", code="unknown-op", next=nearest(kind, [*OPS]))
    return OPS[kind]


def infer_op(op: Op, functions: Mapping[str, Function]) -> tuple[Type, ...]:
    """The result types of an op; raises ShapeError at the op's line."""
    definition = lookup(op.kind)
    operands = tuple(x.type if isinstance(x, Value) else x for x in op.operands)
    names = tuple(x.name if isinstance(x, Value) else "" for x in op.operands)
    if definition.family != "elementwise" and not all(isinstance(x, Value) for x in op.operands):
        raise ShapeError(f"{op.kind} takes values, not numbers", code="operand-type", loc=op.loc)
    try:
        return definition.infer(Site(op.kind, operands, names, op.attrs, functions))
    except ShapeError as error:
        raise error.at(op.loc) from None


@dataclass(frozen=True)
class Pattern:
    """One operand or result of a signature."""

    name: str
    dtype: str
    shape: tuple[str, ...]
    optional: bool = False


@cache
def parse_signature(text: str) -> tuple[tuple[Pattern, ...], tuple[Pattern, ...]]:
    """The operand and result patterns of a signature."""
    left, _, right = text.partition("->")

    def patterns(side: str) -> tuple[Pattern, ...]:
        found = []
        for item in re.findall(r"(?:(\w+)(\?)?\s*:\s*)?(\w+)(?:\[([^\]]*)\])?", side):
            name, optional, dtype, shape = item
            sizes = tuple(s.strip() for s in shape.split(",") if s.strip())
            found.append(Pattern(name, dtype, sizes, bool(optional)))
        return tuple(found)

    return patterns(left), patterns(right)


_ACCEPTS = {
    "f": types.is_float,
    "g": types.is_float,
    "i": lambda dtype: dtype in ("i32", "i64"),
    "bool": lambda dtype: dtype == "bool",
    "any": lambda _: True,
}


def infer_by(signature: str) -> Infer:
    """A shape rule from a signature."""

    def infer(site: Site) -> tuple[Type, ...]:
        wanted, results = parse_signature(signature)
        binding = bind(site, wanted)
        made = []
        for pattern in results:
            dtype = binding.dtypes.get(pattern.dtype, pattern.dtype)
            shape: list[int | Poly] = []
            for size in pattern.shape:
                shape += binding.axes[size] if size.startswith("*") else [binding.size(size)]
            made.append(Tensor(dtype, tuple(shape)))
        return tuple(made)

    return infer


class Binding:
    """Which operand bound each symbol, to what."""

    def __init__(self, attrs: Mapping[str, Any]) -> None:
        self.sizes: dict[str, int | Poly] = {}
        self.source: dict[str, str] = {}
        self.axes: dict[str, list[int | Poly]] = {}
        self.dtypes: dict[str, str] = {}
        self.attrs = attrs

    def size(self, text: str) -> int | Poly:
        return dims.parse(text, {**self.attrs_sizes(), **self.sizes})

    def attrs_sizes(self) -> dict[str, int | Poly]:
        return {k: v for k, v in self.attrs.items() if isinstance(v, int | Poly)}


def bind(site: Site, wanted: tuple[Pattern, ...]) -> Binding:
    """Match operands against patterns; the error says who bound a size to what."""
    least = sum(not p.optional for p in wanted)
    if not least <= len(site.operands) <= len(wanted):
        count = str(least) if least == len(wanted) else f"{least} to {len(wanted)}"
        usage = ", ".join(f"[{p.name}]" if p.optional else p.name for p in wanted)
        raise site.fail(
            f"takes {count} operands, {len(site.operands)} given",
            "operand-count",
            next=f"write {site.kind}({usage})",
        )
    binding = Binding(site.attrs)
    for index, pattern in zip(range(len(site.operands)), wanted, strict=False):
        found = site.tensor(index)
        _bind_dtype(site, index, pattern, found, binding)
        _bind_shape(site, index, pattern, found, binding)
    return binding


def _bind_dtype(site: Site, index: int, pattern: Pattern, found: Tensor, binding: Binding) -> None:
    accepts = _ACCEPTS.get(pattern.dtype, lambda dtype: dtype == pattern.dtype)
    if not accepts(found.dtype):
        kind = {"f": "a float", "g": "a float", "i": "an integer"}.get(pattern.dtype, pattern.dtype)
        raise site.fail(
            f"{pattern.name} must be {kind}, {found.dtype} given",
            "dtype-mismatch",
            next=f"give {pattern.name} a value of that dtype: tokens and positions are integers",
        )
    before = binding.dtypes.setdefault(pattern.dtype, found.dtype)
    if pattern.dtype == "f" and before != found.dtype:
        raise site.fail(
            f"{pattern.name} is {found.dtype}, the operands before it are {before}",
            "dtype-mismatch",
            next="cast one of them: ar.cast(x, 'model') or ar.cast(x, 'float32')",
        )


def _bind_shape(site: Site, index: int, pattern: Pattern, found: Tensor, binding: Binding) -> None:
    star = next((i for i, s in enumerate(pattern.shape) if s.startswith("*")), None)
    fixed = len(pattern.shape) - (star is not None)
    if (star is None and found.rank != fixed) or found.rank < fixed:
        shape = f"[{', '.join(pattern.shape)}]"
        least = "at least " if star is not None else ""
        raise site.fail(
            f"{pattern.name} needs {least}{fixed} axes {shape}, {found.rank} given",
            "rank-mismatch",
            next="ar.expand_dims adds an axis, x.reshape and ar.heads split one",
        )
    sizes = list(found.shape)
    pairs: list[tuple[str, int | Poly]] = []
    if star is None:
        pairs = list(zip(pattern.shape, sizes, strict=True))
    else:
        tail = len(pattern.shape) - star - 1
        middle = sizes[star : len(sizes) - tail]
        name = pattern.shape[star]
        if binding.axes.setdefault(name, middle) != middle:
            raise site.fail(
                f"{pattern.name} has leading axes {middle}, expected {binding.axes[name]}",
                next="give operands of the same batch and tokens",
            )
        pairs = list(zip(pattern.shape[:star], sizes[:star], strict=True))
        pairs += zip(pattern.shape[star + 1 :], sizes[len(sizes) - tail :], strict=True)
    for want, have in pairs:
        _bind_size(site, index, want, have, binding)


def _bind_size(site: Site, index: int, want: str, have: int | Poly, binding: Binding) -> None:
    if want.isidentifier() and want not in binding.sizes and want not in binding.attrs_sizes():
        binding.sizes[want] = have
        binding.source[want] = site.show(index)
        return
    expected = binding.size(want)
    if expected != have:
        source = binding.source.get(want, "its attributes")
        raise ShapeError(
            f"{site.kind}: {want} = {expected} and {want} = {have} disagree",
            code="shape-mismatch",
            facts=[
                f"{want} = {expected} from {source}",
                f"{want} = {have} from {site.show(index)}",
            ],
            next=f"make both {expected} or both {have}",
        )
