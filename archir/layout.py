"""Where a spec's weights lie in published files: pure data that loads, saves and states shapes.

A layout says how one weight of a spec is made from published tensors:

    tensor("ln_f.weight")                                     the tensor itself
    tensor("mlp.c_fc.weight").T                               published transposed
    tensor("attn.c_attn.weight").T.rows(0, 768)               rows of what is published as one
    concat([tensor("gate_proj.weight"), tensor("up_proj.weight")])     published apart
    rotary_rows(tensor("blk.0.attn_q.weight"), heads=9)       GGUF's order of llama's q and k rows

A spec has one function `names(c) -> {spec weight: layout}` per convention (`hf`, `gguf`), total
and one-to-one (`check_total`). `load` and `save` take NumPy arrays and torch tensors alike: they
use what both offer, and import only NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from archir.diagnostics import MismatchError, SpecError, nearest

Array = Any  # a NumPy array or a torch tensor
Shape = tuple[int, ...]
Get = Callable[[str], Array]


@dataclass(frozen=True)
class Layout:
    """How one weight of a spec is made from published tensors; `load` and `save` are inverse."""

    @property
    def T(self) -> Layout:
        """Published transposed; rank 2 only."""
        return Transpose(self)

    def reshape(self, *shape: int, stored: Sequence[int]) -> Layout:
        """The weight has `shape`, the published tensor has the shape `stored`."""
        return Reshape(self, tuple(shape), tuple(stored))

    def rows(self, start: int, stop: int) -> Layout:
        """Rows `start` to `stop` of a tensor that several weights share (or of its transpose)."""
        kind = type(self).__name__
        raise SpecError(
            f"rows({start}, {stop}) needs a whole tensor or its transpose, not {kind}",
            code="layout-rows",
            next="take rows first: tensor(name).rows(start, stop), then the other steps",
        )

    def pad(self, count: int, dim: int = 0) -> Layout:
        """The weight has `count` more entries along `dim` than published, zeros by contract."""
        return Pad(self, count, dim)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Every published tensor, or slice of one, that any alternative reads."""
        raise NotImplementedError

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the published tensors that any alternative reads, each once."""
        return tuple(dict.fromkeys(leaf.name for leaf in self.leaves))

    def resolve(self, present: Container[str]) -> Layout:
        """This layout for a file that holds `present`: alternatives chosen, absent aliases gone."""
        raise NotImplementedError

    def shapes(self, shape: Shape) -> dict[Tensor, Shape]:
        """The shape each published piece must have for a weight of `shape`."""
        raise NotImplementedError

    def load(self, get: Get) -> Array:
        """The weight, from `get(name)`, which returns a whole published tensor."""
        raise NotImplementedError

    def save(self, array: Array) -> dict[Tensor, Array]:
        """The published pieces of the weight `array`; `assemble` joins slices of one tensor."""
        raise NotImplementedError


@dataclass(frozen=True)
class Tensor(Layout):
    """A published tensor, or entries `start` to `stop` of it along `dim`."""

    name: str
    start: int | None = None
    stop: int | None = None
    dim: int = 0

    def __str__(self) -> str:
        if self.start is None:
            return self.name
        return f"{self.name}[{':, ' * self.dim}{self.start}:{self.stop}]"

    def rows(self, start: int, stop: int) -> Layout:
        if self.start is not None:
            return super().rows(start, stop)
        return Tensor(self.name, start, stop)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (self,)

    def resolve(self, present: Container[str]) -> Layout:
        return self

    def shapes(self, shape: Shape) -> dict[Tensor, Shape]:
        if self.start is not None and self.stop is not None:
            have = shape[self.dim] if self.dim < len(shape) else None
            if have != self.stop - self.start:
                raise _shape_error(f"{self} holds {self.stop - self.start} rows", shape)
        return {self: shape}

    def load(self, get: Get) -> Array:
        array = get(self.name)
        if self.start is None:
            return array
        return array[_along(self.dim, self.start, self.stop)]

    def save(self, array: Array) -> dict[Tensor, Array]:
        return {self: array}


@dataclass(frozen=True)
class _Mapped(Layout):
    """One layout seen through a change of shape or order."""

    of: Layout

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.of.leaves

    def resolve(self, present: Container[str]) -> Layout:
        return replace(self, of=self.of.resolve(present))

    def shapes(self, shape: Shape) -> dict[Tensor, Shape]:
        return self.of.shapes(self.stored(shape))

    def load(self, get: Get) -> Array:
        return self.forward(self.of.load(get))

    def save(self, array: Array) -> dict[Tensor, Array]:
        return self.of.save(self.backward(array))

    def stored(self, shape: Shape) -> Shape:
        """The shape below this step for a weight of `shape`."""
        raise NotImplementedError

    def forward(self, array: Array) -> Array:
        """From the order below to the weight's."""
        raise NotImplementedError

    def backward(self, array: Array) -> Array:
        """From the weight's order to the one below."""
        raise NotImplementedError


@dataclass(frozen=True)
class Transpose(_Mapped):
    """Published transposed."""

    def rows(self, start: int, stop: int) -> Layout:
        if not isinstance(self.of, Tensor) or self.of.start is not None:
            return super().rows(start, stop)
        return Transpose(Tensor(self.of.name, start, stop, dim=1))

    def stored(self, shape: Shape) -> Shape:
        if len(shape) != 2:
            raise _shape_error(".T needs two axes", shape)
        return shape[::-1]

    def forward(self, array: Array) -> Array:
        return array.T

    def backward(self, array: Array) -> Array:
        return array.T


@dataclass(frozen=True)
class Reshape(_Mapped):
    """Published in another shape with the same entries in the same order."""

    shape: Shape
    below: Shape

    def stored(self, shape: Shape) -> Shape:
        if shape != self.shape or math.prod(shape) != math.prod(self.below):
            raise _shape_error(f"reshape{self.shape} is stored as {list(self.below)}", shape)
        return self.below

    def forward(self, array: Array) -> Array:
        return array.reshape(self.shape)

    def backward(self, array: Array) -> Array:
        return array.reshape(self.below)


@dataclass(frozen=True)
class Pad(_Mapped):
    """Published without the last `count` entries along `dim`, which are zeros."""

    count: int
    dim: int

    def stored(self, shape: Shape) -> Shape:
        if self.dim >= len(shape) or shape[self.dim] < self.count:
            raise _shape_error(f"pad({self.count}, dim={self.dim}) has more entries", shape)
        return _sized(shape, self.dim, shape[self.dim] - self.count)

    def forward(self, array: Array) -> Array:
        size = array.shape[self.dim]
        padded = _empty(array, _sized(tuple(array.shape), self.dim, size + self.count))
        padded[_along(self.dim, 0, size)] = array
        padded[_along(self.dim, size, None)] = 0
        return padded

    def backward(self, array: Array) -> Array:
        size = array.shape[self.dim] - self.count
        if bool((array[_along(self.dim, size, None)] != 0).any()):
            raise MismatchError(
                f"{', '.join(self.names)} is published with {size} entries on axis {self.dim}, "
                f"but the {self.count} padding entries after them are not zero",
                code="layout-pad",
                next="publish the padded size (no pad in names), or set the padding to zero",
            )
        return array[_along(self.dim, 0, size)]


@dataclass(frozen=True)
class RotaryRows(_Mapped):
    """Published with the rows of each head in pairs (0, d/2, 1, d/2 + 1, …).

    llama.cpp rotates neighbouring rows of q and k, a spec (like Hugging Face's llama) rotates
    row i with row i + d/2, so `convert_hf_to_gguf.py` permutes them: `LlamaModel.permute`.
    """

    heads: int

    def stored(self, shape: Shape) -> Shape:
        if not shape or shape[0] % (2 * self.heads):
            raise _shape_error(f"rotary_rows needs whole pairs in {self.heads} heads", shape)
        return shape

    def forward(self, array: Array) -> Array:
        return self._swap(array, (array.shape[0] // self.heads // 2, 2))

    def backward(self, array: Array) -> Array:
        return self._swap(array, (2, array.shape[0] // self.heads // 2))

    def _swap(self, array: Array, pairs: tuple[int, int]) -> Array:
        shape = tuple(array.shape)
        return array.reshape((self.heads, *pairs, *shape[1:])).swapaxes(1, 2).reshape(shape)


@dataclass(frozen=True)
class _Joined(Layout):
    """Several layouts that make one weight."""

    of: tuple[Layout, ...]
    dim: int

    def __post_init__(self) -> None:
        leaves = self.leaves
        twice = next((leaf for leaf in leaves if leaves.count(leaf) > 1), None)
        if twice is not None or not self.of:
            what = f"takes {twice} twice" if self.of else "joins no tensor"
            raise SpecError(f"{type(self).__name__.lower()} {what}", code="names-overlap")

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(leaf for layout in self.of for leaf in layout.leaves)

    def resolve(self, present: Container[str]) -> Layout:
        return replace(self, of=tuple(layout.resolve(present) for layout in self.of))

    def shapes(self, shape: Shape) -> dict[Tensor, Shape]:
        parts = zip(self.of, self.split_shape(shape), strict=True)
        return {leaf: s for layout, part in parts for leaf, s in layout.shapes(part).items()}

    def save(self, array: Array) -> dict[Tensor, Array]:
        parts = zip(self.of, self.split(array), strict=True)
        return {leaf: a for layout, part in parts for leaf, a in layout.save(part).items()}

    def split_shape(self, shape: Shape) -> list[Shape]:
        """The shapes of the joined parts of a weight of `shape`."""
        raise NotImplementedError

    def split(self, array: Array) -> list[Array]:
        """The joined parts of a weight, as views."""
        raise NotImplementedError


@dataclass(frozen=True)
class Concat(_Joined):
    """Published apart, one after the other along `dim`; `sizes` when they are not equal."""

    sizes: tuple[int, ...] | None = None

    def split_shape(self, shape: Shape) -> list[Shape]:
        return [_sized(shape, self.dim, b - a) for a, b in self._spans(shape)]

    def split(self, array: Array) -> list[Array]:
        return [array[_along(self.dim, a, b)] for a, b in self._spans(tuple(array.shape))]

    def load(self, get: Get) -> Array:
        return _concat([layout.load(get) for layout in self.of], self.dim)

    def _spans(self, shape: Shape) -> list[tuple[int, int]]:
        total = shape[self.dim] if self.dim < len(shape) else 0
        sizes = self.sizes or (total // len(self.of),) * len(self.of)
        if sum(sizes) != total or len(sizes) != len(self.of):
            raise _shape_error(f"concat of {len(self.of)} tensors of sizes {list(sizes)}", shape)
        return list(pairwise(accumulate(sizes, initial=0)))


@dataclass(frozen=True)
class Stack(_Joined):
    """Published apart, one per index of a new axis `dim`."""

    def split_shape(self, shape: Shape) -> list[Shape]:
        if self.dim >= len(shape) or shape[self.dim] != len(self.of):
            raise _shape_error(f"stack makes axis {self.dim} of {len(self.of)} tensors", shape)
        return [shape[: self.dim] + shape[self.dim + 1 :]] * len(self.of)

    def split(self, array: Array) -> list[Array]:
        return [array[(slice(None),) * self.dim + (i,)] for i in range(len(self.of))]

    def load(self, get: Get) -> Array:
        arrays = [layout.load(get) for layout in self.of]
        shape = tuple(arrays[0].shape)
        stacked = _empty(arrays[0], (*shape[: self.dim], len(arrays), *shape[self.dim :]))
        for i, array in enumerate(arrays):
            stacked[(slice(None),) * self.dim + (i,)] = array
        return stacked


@dataclass(frozen=True)
class Either(Layout):
    """The first alternative whose tensors a file holds; the first of all is what is saved."""

    of: tuple[Layout, ...]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(dict.fromkeys(leaf for layout in self.of for leaf in layout.leaves))

    def resolve(self, present: Container[str]) -> Layout:
        resolved = [layout.resolve(present) for layout in self.of]
        held = (layout for layout in resolved if all(n in present for n in layout.names))
        return next(held, resolved[0])

    def shapes(self, shape: Shape) -> dict[Tensor, Shape]:
        return self.of[0].shapes(shape)

    def load(self, get: Get) -> Array:
        return self.of[0].load(get)

    def save(self, array: Array) -> dict[Tensor, Array]:
        return self.of[0].save(array)


@dataclass(frozen=True)
class Alias(Layout):
    """A tensor that files may hold again under other names, equal to the first; never saved."""

    of: Layout
    others: tuple[str, ...]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (*self.of.leaves, *(Tensor(name) for name in self.others))

    def resolve(self, present: Container[str]) -> Layout:
        others = tuple(name for name in self.others if name in present)
        return Alias(self.of.resolve(present), others) if others else self.of.resolve(present)

    def shapes(self, shape: Shape) -> dict[Tensor, Shape]:
        return self.of.shapes(shape) | {Tensor(name): shape for name in self.others}

    def load(self, get: Get) -> Array:
        array = self.of.load(get)
        for name in self.others:
            other = get(name)
            if tuple(other.shape) != tuple(array.shape) or not bool((other == array).all()):
                first = ", ".join(self.of.names)
                raise MismatchError(
                    f"{name} and {first} are one weight in the spec, but differ in the file",
                    code="weights-tie",
                    facts=[f"{first} {list(array.shape)}", f"{name} {list(other.shape)}"],
                    next="use a spec with a head of its own (tied = False)",
                )
        return array

    def save(self, array: Array) -> dict[Tensor, Array]:
        return self.of.save(array)


def tensor(name: str) -> Tensor:
    """The published tensor `name`, as it is."""
    return Tensor(name)


def concat(layouts: Sequence[Layout], dim: int = 0, sizes: Sequence[int] | None = None) -> Layout:
    """Tensors published apart, joined along `dim`; equal sizes unless `sizes` gives them."""
    return Concat(tuple(layouts), dim, tuple(sizes) if sizes is not None else None)


def stack(layouts: Sequence[Layout], dim: int = 0) -> Layout:
    """Tensors published apart (experts, say), joined along a new axis `dim`."""
    return Stack(tuple(layouts), dim)


def rotary_rows(layout: Layout, heads: int) -> Layout:
    """Rows of `heads` heads that GGUF publishes in rotary pairs: `LlamaModel.permute`."""
    return RotaryRows(layout, heads)


def either(*layouts: Layout) -> Layout:
    """Several ways a weight is published: any is read, the first is saved."""
    return Either(tuple(layouts))


def alias(layout: Layout, *names: str) -> Layout:
    """A weight that files may repeat under `names` (a tied head): must be equal, never saved."""
    return Alias(layout, names)


def check_total(
    shapes: Mapping[str, Shape], names: Mapping[str, Layout], convention: str = "hf"
) -> None:
    """Raise `SpecError` unless `names` places every weight of the spec, each in a place of its own.

    shapes: spec weight name → shape.  Slices of one tensor must tile it from 0 without a gap.
    """
    title = f"the {convention} names"
    missing = [f"{name} {list(shape)}" for name, shape in shapes.items() if name not in names]
    if missing:
        what = f"{title} have no entry for {_count(missing, 'weight')} of the spec"
        raise _names_error(what, "missing", missing, "add each to names(c), with its layout")
    unknown = [f"{name}: {nearest(name, list(shapes))}" for name in names if name not in shapes]
    if unknown:
        what = f"{title} have entries for {_count(unknown, 'weight')} that the spec has not"
        raise _names_error(what, "unknown", unknown, "names(c) must use the spec's weight names")
    clashes = [line for claims in _claims(names).values() for line in _overlaps(claims)]
    if clashes:
        what = f"{title} give one published tensor to two weights"
        raise _names_error(what, "overlap", clashes, "let each weight read rows of its own")
    pieces = _pieces(shapes, names)
    gaps = [line for name, leaves in _by_name(pieces).items() for line in _gaps(name, leaves)]
    if gaps:
        what = f"{title} leave part of a published tensor to no weight"
        raise _names_error(what, "gap", gaps, "the rows of one tensor must tile it")


def published_shapes(shapes: Mapping[str, Shape], names: Mapping[str, Layout]) -> dict[str, Shape]:
    """The shape of every whole published tensor, from the shapes of the spec's weights."""
    whole: dict[str, Shape] = {}
    for leaf, shape in _pieces(shapes, names).items():
        if leaf.stop is not None:
            rows = max(leaf.stop, whole[leaf.name][leaf.dim] if leaf.name in whole else 0)
            shape = _sized(shape, leaf.dim, rows)
        whole[leaf.name] = shape
    return whole


def assemble(pieces: Mapping[Tensor, Array]) -> dict[str, Array]:
    """Whole published tensors from what `Layout.save` returned for all weights."""
    return {
        name: pieces[leaves[0]]
        if leaves[0].start is None
        else _concat([pieces[leaf] for leaf in leaves], leaves[0].dim)
        for name, leaves in _by_name(pieces).items()
    }


def _pieces(shapes: Mapping[str, Shape], names: Mapping[str, Layout]) -> dict[Tensor, Shape]:
    pieces: dict[Tensor, Shape] = {}
    for weight, layout in names.items():
        try:
            pieces |= layout.shapes(tuple(shapes[weight]))
        except SpecError as error:
            what = f"{weight} {list(shapes[weight])}: {error.what}"
            raise SpecError(what, code=error.code, next=error.next) from None
    return pieces


def _by_name(pieces: Mapping[Tensor, Any]) -> dict[str, list[Tensor]]:
    """Leaves by published name, slices in order."""
    leaves = sorted(pieces, key=lambda leaf: leaf.start or 0)
    grouped: dict[str, list[Tensor]] = {leaf.name: [] for leaf in pieces}
    for leaf in leaves:
        grouped[leaf.name].append(leaf)
    return grouped


def _claims(names: Mapping[str, Layout]) -> dict[str, list[tuple[Tensor, str]]]:
    """Who reads what: published name → (leaf, spec weight), slices in order."""
    claims: dict[str, list[tuple[Tensor, str]]] = {}
    for weight, layout in names.items():
        for leaf in layout.leaves:
            claims.setdefault(leaf.name, []).append((leaf, weight))
    return {name: sorted(c, key=lambda claim: claim[0].start or 0) for name, c in claims.items()}


def _overlaps(claims: list[tuple[Tensor, str]]) -> Iterator[str]:
    for (leaf, weight), (after, other) in pairwise(claims):
        apart = leaf.stop is not None and after.start is not None and leaf.stop <= after.start
        if not apart or leaf.dim != after.dim:
            yield f"{leaf} is claimed by {weight}, {after} by {other}"


def _gaps(name: str, leaves: list[Tensor]) -> Iterator[str]:
    end = 0
    for leaf in leaves:
        if leaf.start is not None and leaf.start > end:
            yield f"{name}: {leaf.start - end} rows from {end} to {leaf.start} are claimed by none"
        end = leaf.stop or 0


def _names_error(what: str, slug: str, facts: list[str], step: str) -> SpecError:
    rest = [f"and {len(facts) - 10} more"] if len(facts) > 10 else []
    return SpecError(what, code=f"names-{slug}", facts=facts[:10] + rest, next=step)


def _shape_error(what: str, shape: Shape) -> SpecError:
    return SpecError(
        f"{what}, but the weight has shape {list(shape)}",
        code="layout-shape",
        next="make the layout in names(c) agree with the weight's shape",
    )


def _count(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'s' if len(things) != 1 else ''}"


def _sized(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _along(dim: int, start: int | None, stop: int | None) -> tuple[slice, ...]:
    return (slice(None),) * dim + (slice(start, stop),)


def _empty(like: Array, shape: Shape) -> Array:
    """A new array of the kind and dtype of `like`; torch tensors have `new_empty`."""
    return like.new_empty(shape) if hasattr(like, "new_empty") else np.empty(shape, like.dtype)


def _concat(arrays: list[Array], dim: int) -> Array:
    sizes = [array.shape[dim] for array in arrays]
    joined = _empty(arrays[0], _sized(tuple(arrays[0].shape), dim, sum(sizes)))
    start = 0
    for array, size in zip(arrays, sizes, strict=True):
        joined[_along(dim, start, start + size)] = array
        start += size
    return joined
