"""Tensor ops: linear, einsum, layout and reduction."""

from __future__ import annotations

import operator
import string
from functools import reduce
from typing import Any

import numpy as np

from archir import dims, types
from archir.diagnostics import MismatchError
from archir.dims import Poly
from archir.ops.base import Sample, Site, constant, op
from archir.ops.interval import UNKNOWN, Interval, around, joined, moved, summed, within
from archir.types import DTYPES, Tensor, Type


def matmul(x: Any, w: Any) -> Any:
    """x wᵀ as one product of all rows.

    NumPy would take an array of more axes matrix by matrix, and of one token each it rounds less
    than any backend: torch's float32 errors at T = 1 were 1.6 times as large (1.03 times those of
    one product), in a model of width 256.
    """
    return (x.reshape(-1, x.shape[-1]) @ w.T).reshape(*x.shape[:-1], w.shape[0])


@op(
    "tensor",
    "tokens: i[*A], table: f[N, D] -> f[*A, D]",
    samples=(Sample(("i64[B, T]", "f[16, 8]")),),
    invalid=(Sample(("f[B, T]", "f[16, 8]"), message="tokens must be an integer"),),
    vjp="it adds into rows of the table, which no op does",
    bounds=lambda tokens, table: table,
)
def embedding(tokens: Any, table: Any) -> Any:
    """Row `tokens[...]` of a table; a token that is none of its rows is an error."""
    wrong = (tokens < 0) | (tokens >= len(table))
    if np.any(wrong):
        raise MismatchError(
            f"token {tokens[wrong][0]} is no row of a table of {len(table)}",
            code="token-range",
            next=f"give tokens from 0 to {len(table) - 1}: is the tokenizer that of this model?",
        )
    return table[tokens]


def linear_vjp(c: Any, y: Any, x: Any, w: Any, b: Any = None) -> tuple[Any, ...]:
    """c w; cᵀ x over all rows; c."""
    lead = string.ascii_lowercase[: x.rank - 1]
    by_weight = c.einsum(x, equation=f"{lead}y,{lead}z->yz")
    return c.linear(w.transpose(axes=(1, 0))), by_weight, *(() if b is None else (c,))


@op(
    "tensor",
    "x: f[*A, I], w: f[O, I], b?: f[O] -> f[*A, O]",
    samples=(Sample(("f[B, T, 8]", "f[4, 8]")), Sample(("f[B, T, 8]", "f[4, 8]", "f[4]"))),
    invalid=(
        Sample(("f[B, T, 8]", "f[4, 6]"), message="I = 8 and I = 6 disagree"),
        Sample(("F[B, T, 8]", "f[4, 8]"), message="w is f, the operands before it are F"),
    ),
    vjp=linear_vjp,
)
def linear(x: Any, w: Any, b: Any = None) -> Any:
    """x wᵀ + b; the weight is [out, in]."""
    y = matmul(x, w)
    return y if b is None else y + b


def _infer_heads(site: Site) -> tuple[Type, ...]:
    x, parts, heads = site.tensor(0), site.attrs["parts"], site.attrs["heads"]
    if x.rank < 1:
        raise site.fail("needs an axis to split", "rank-mismatch")
    width = x.shape[-1]
    if isinstance(width, int) and width % (parts * heads):
        raise site.fail(
            f"width {width} is not parts × heads × size = {parts} × {heads} × size",
            next=f"make the width a multiple of {parts * heads}",
        )
    size = dims.divide(width, parts * heads)
    return (Tensor(x.dtype, (*x.shape[:-1], heads, size)),) * parts


def _heads_vjp(c: Any, y: Any, x: Any, *, parts: int, heads: int) -> Any:
    """The parts side by side again."""
    pieces = [piece.merge() for piece in _filled(c, y)]
    return pieces[0].concat(*pieces[1:], axis=x.rank - 1) if parts > 1 else pieces[0]


def _filled(c: Any, y: Any) -> list[Any]:
    """The cotangents of one or several results, zeros for those that nothing flows to."""
    pairs = zip(c, y, strict=True) if isinstance(y, tuple) else [(c, y)]
    return [
        r.made("fill", shape=r.shape, value=0.0) if piece is None else piece for piece, r in pairs
    ]


@op(
    "tensor",
    infer=_infer_heads,
    samples=(Sample(("f[B, T, 24]",), {"parts": 3, "heads": 2}),),
    invalid=(Sample(("f[B, T, 20]",), {"parts": 3, "heads": 2}, "20 is not parts × heads × size"),),
    vjp=_heads_vjp,
    bounds=moved,
)
def heads(x: Any, *, parts: int, heads: int) -> Any:
    """[…, parts·H·D] → `parts` tensors [..., H, D]."""
    size = x.shape[-1] // (parts * heads)
    split = x.reshape(*x.shape[:-1], parts, heads, size)
    pieces = tuple(split[..., i, :, :] for i in range(parts))
    return pieces if parts > 1 else pieces[0]


@op(
    "tensor",
    "x: f[*A, H, D] -> f[*A, H*D]",
    samples=(Sample(("f[B, T, 2, 4]",)),),
    invalid=(Sample(("f[4]",), message="needs at least 2 axes"),),
    vjp=lambda c, y, x: c.reshape(shape=x.shape),
    bounds=moved,
)
def merge(x: Any) -> Any:
    """[…, H, D] → […, H·D]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def _infer_split(site: Site) -> tuple[Type, ...]:
    x, sizes, axis = site.tensor(0), site.attrs["sizes"], site.attrs["axis"]
    axis = _axis(site, x, axis)
    total: int | Poly = 0
    for size in sizes:
        total = dims.add(total, size)
    if total != x.shape[axis]:
        raise site.fail(
            f"pieces {sizes} add up to {total}, axis {axis} is {x.shape[axis]}",
            next=f"make the pieces add up to {x.shape[axis]}",
        )
    return tuple(Tensor(x.dtype, (*x.shape[:axis], s, *x.shape[axis + 1 :])) for s in sizes)


def _split_vjp(c: Any, y: Any, x: Any, *, sizes: tuple[int, ...], axis: int) -> Any:
    """The pieces one after another again."""
    pieces = _filled(c, y)
    return pieces[0].concat(*pieces[1:], axis=axis) if len(pieces) > 1 else pieces[0]


@op(
    "tensor",
    infer=_infer_split,
    samples=(
        Sample(("f[B, 8]",), {"sizes": (2, 6), "axis": -1}),
        Sample(("f[6, T]",), {"sizes": (6,), "axis": 0}),
    ),
    invalid=(Sample(("f[B, 8]",), {"sizes": (2, 2), "axis": -1}, "add up to 4"),),
    vjp=_split_vjp,
    bounds=moved,
)
def split(x: Any, *, sizes: tuple[int, ...], axis: int) -> Any:
    """Pieces of the given sizes along an axis."""
    pieces: tuple[Any, ...] = tuple(np.split(x, np.cumsum(sizes)[:-1], axis=axis))
    return pieces[0] if len(pieces) == 1 else pieces


def _infer_concat(site: Site) -> tuple[Type, ...]:
    first = site.tensor(0)
    axis = _axis(site, first, site.attrs["axis"])
    total: int | Poly = 0
    for index in range(len(site.operands)):
        other = site.tensor(index)
        if other.rank != first.rank or other.dtype != first.dtype:
            raise site.fail(
                "operands differ in rank or dtype",
                next="bring all to one rank (ar.expand_dims) and one dtype (ar.cast)",
            )
        pairs = zip(first.shape, other.shape, strict=True)
        if any(a != b for i, (a, b) in enumerate(pairs) if i != axis):
            raise site.fail(
                f"operands differ outside axis {axis}",
                next="make all other axes equal, or join along the axis that differs",
            )
        total = dims.add(total, other.shape[axis])
    return (Tensor(first.dtype, (*first.shape[:axis], total, *first.shape[axis + 1 :])),)


def _concat_vjp(c: Any, y: Any, *xs: Any, axis: int) -> Any:
    """To each operand its piece."""
    return c.split(sizes=tuple(x.shape[axis] for x in xs), axis=axis)


@op(
    "tensor",
    infer=_infer_concat,
    samples=(Sample(("f[B, 8]", "f[B, 4]"), {"axis": -1}),),
    invalid=(
        Sample(("f[B, 8]", "f[T, 4]"), {"axis": -1}, "differ outside axis 1"),
        Sample(("f[B, 8]", "F[B, 8]"), {"axis": -1}, "differ in rank or dtype"),
        Sample(("f[B, 8]",), {"axis": 2}, "axis 2 is outside 2 axes"),
    ),
    vjp=_concat_vjp,
    bounds=joined,
)
def concat(*xs: Any, axis: int) -> Any:
    """Operands one after another along an axis."""
    return np.concatenate(xs, axis=axis)


def _axis(site: Site, x: Tensor, axis: int) -> int:
    if not -x.rank <= axis < x.rank:
        raise site.fail(
            f"axis {axis} is outside {x.rank} axes",
            "rank-mismatch",
            next=f"count from 0 to {x.rank - 1}, or from -{x.rank} to -1"
            if x.rank
            else "it has none",
        )
    return axis % x.rank


def _infer_reshape(site: Site) -> tuple[Type, ...]:
    x, shape = site.tensor(0), site.attrs["shape"]
    if dims.product(x.shape) != dims.product(shape):
        raise site.fail(
            f"{dims.product(x.shape)} elements do not fill {list(shape)}, "
            f"which holds {dims.product(shape)}",
            next="give sizes whose product is the same; x.shape has B and T",
        )
    return (Tensor(x.dtype, tuple(shape)),)


@op(
    "tensor",
    infer=_infer_reshape,
    samples=(Sample(("f[B, 8]",), {"shape": (dims.symbol("B"), 2, 4)}),),
    invalid=(Sample(("f[B, 8]",), {"shape": (dims.symbol("B"), 2, 3)}, "do not fill"),),
    vjp=lambda c, y, x, shape: c.reshape(shape=x.shape),
    bounds=moved,
)
def reshape(x: Any, *, shape: tuple[int, ...]) -> Any:
    """The same elements in row-major order under another shape."""
    return x.reshape(shape)


def _infer_transpose(site: Site) -> tuple[Type, ...]:
    x, axes = site.tensor(0), site.attrs["axes"]
    if sorted(axes) != list(range(x.rank)):
        raise site.fail(
            f"{axes} is not an order of {x.rank} axes",
            "rank-mismatch",
            next=f"name each of 0 to {x.rank - 1} once",
        )
    return (Tensor(x.dtype, tuple(x.shape[a] for a in axes)),)


@op(
    "tensor",
    infer=_infer_transpose,
    samples=(Sample(("f[B, T, 8]",), {"axes": (1, 0, 2)}),),
    invalid=(Sample(("f[B, T]",), {"axes": (0, 2)}, "is not an order of 2 axes"),),
    vjp=lambda c, y, x, axes: c.transpose(axes=tuple(axes.index(a) for a in range(x.rank))),
    bounds=moved,
)
def transpose(x: Any, *, axes: tuple[int, ...]) -> Any:
    """Axis i of the result is axis axes[i] of x."""
    return np.transpose(x, axes)


def _infer_expand_dims(site: Site) -> tuple[Type, ...]:
    x, axes = site.tensor(0), site.attrs["axes"]
    rank = x.rank + len(axes)
    if len(set(axes)) != len(axes) or not all(0 <= a < rank for a in axes):
        raise site.fail(
            f"{axes} are not new places among {rank} axes",
            "rank-mismatch",
            next=f"the result has axes 0 to {rank - 1}; name each new one once",
        )
    rest = iter(x.shape)
    return (Tensor(x.dtype, tuple(1 if i in axes else next(rest) for i in range(rank))),)


@op(
    "tensor",
    infer=_infer_expand_dims,
    samples=(Sample(("f[B, 8]",), {"axes": (1,)}),),
    invalid=(Sample(("f[B]",), {"axes": (3,)}, "are not new places among 2 axes"),),
    vjp=lambda c, y, x, axes: c.reduce_sum(axes=axes),
    bounds=moved,
)
def expand_dims(x: Any, *, axes: tuple[int, ...]) -> Any:
    """Axes of size 1 at the given places of the result."""
    return np.expand_dims(x, axes)


def _infer_reduce(site: Site) -> tuple[Type, ...]:
    x, keep = site.tensor(0), site.attrs.get("keepdims", False)
    axes = [_axis(site, x, a) for a in site.attrs["axes"]]
    if len(set(axes)) != len(axes):
        raise site.fail(
            f"axes {site.attrs['axes']} name one twice", "rank-mismatch", next="name each once"
        )
    shape = [1 if i in axes else s for i, s in enumerate(x.shape) if keep or i not in axes]
    return (Tensor(x.dtype, tuple(shape)),)


def _infer_sum(site: Site) -> tuple[Type, ...]:
    (found,) = _infer_reduce(site)
    assert isinstance(found, Tensor)
    return (found if types.is_float(found.dtype) else found.with_dtype("i64"),)


def _infer_mean(site: Site) -> tuple[Type, ...]:
    if not types.is_float(site.tensor(0).dtype):
        raise site.fail(
            f"the mean of {site.tensor(0).dtype} is a float",
            "dtype-mismatch",
            next="cast first: ar.cast(x, 'float32')",
        )
    return _infer_reduce(site)


def _as_kept(y: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """What has the shape of a reduction's result, with axes of size 1 where x was reduced."""
    return y if keepdims else y.expand_dims(axes=tuple(sorted(a % x.rank for a in axes)))


def _sum_vjp(c: Any, y: Any, x: Any, *, axes: tuple[int, ...], keepdims: bool = False) -> Any:
    """c, at every place that was summed."""
    return _as_kept(c, x, axes, keepdims)


def _mean_vjp(c: Any, y: Any, x: Any, *, axes: tuple[int, ...], keepdims: bool = False) -> Any:
    """c / n, at each of the n places."""
    count = dims.product(tuple(x.shape[a] for a in axes))
    each = c / (count if isinstance(count, int) else x.made("size", dim=count))
    return _as_kept(each, x, axes, keepdims)


def _max_vjp(c: Any, y: Any, x: Any, *, axes: tuple[int, ...], keepdims: bool = False) -> Any:
    """c where x is the maximum; where it is so at several places, in equal parts (torch's amax)."""
    c, y = _as_kept(c, x, axes, keepdims), _as_kept(y, x, axes, keepdims)
    top = x.equal(y)
    places = tuple(a % x.rank for a in axes)
    return top.where(c / top.cast(dtype=x.dtype).reduce_sum(axes=places, keepdims=True), 0.0)


_REDUCE: dict[str, Any] = {
    "samples": (
        Sample(("f[B, 8]",), {"axes": (-1,)}),
        Sample(("f[B, T, 8]",), {"axes": (0, 2), "keepdims": True}),
    ),
    "invalid": (
        Sample(("f[B]",), {"axes": (2,)}, "axis 2 is outside 1 axes"),
        Sample(("f[B, 8]",), {"axes": (1, -1)}, "axes (1, -1) name one twice"),
    ),
}
_INTEGERS = (
    Sample(("bool[B, T, 8]",), {"axes": (0, 2)}),
    Sample(("i64[B, T]",), {"axes": (-1,), "keepdims": True}),
)


@op(
    "tensor",
    infer=_infer_sum,
    **{**_REDUCE, "samples": (*_REDUCE["samples"], *_INTEGERS)},
    vjp=_sum_vjp,
    bounds=lambda x, **attrs: summed(x),
)
def reduce_sum(x: Any, *, axes: tuple[int, ...], keepdims: bool = False) -> Any:
    """Σ over axes; of bools it counts those that hold, in i64."""
    return np.sum(x, axis=axes, keepdims=keepdims)


@op(
    "tensor",
    infer=_infer_mean,
    samples=_REDUCE["samples"],
    invalid=(
        *_REDUCE["invalid"], Sample(("i64[B]",), {"axes": (0,)}, "the mean of i64 is a float"),
    ),
    vjp=_mean_vjp,
    bounds=moved,
)  # fmt: skip
def reduce_mean(x: Any, *, axes: tuple[int, ...], keepdims: bool = False) -> Any:
    """Mean over axes."""
    return np.mean(x, axis=axes, keepdims=keepdims)


@op(
    "tensor",
    infer=_infer_reduce,
    **{**_REDUCE, "samples": (*_REDUCE["samples"], *_INTEGERS)},
    vjp=_max_vjp,
    bounds=moved,
)
def reduce_max(x: Any, *, axes: tuple[int, ...], keepdims: bool = False) -> Any:
    """Maximum over axes."""
    return np.max(x, axis=axes, keepdims=keepdims)


def _infer_einsum(site: Site) -> tuple[Type, ...]:
    left, _, right = site.attrs["equation"].partition("->")
    terms = left.split(",")
    if len(terms) != len(site.operands):
        raise site.fail(f"{len(terms)} terms for {len(site.operands)} operands", "operand-count")
    sizes: dict[str, int | Poly] = {}
    dtype = site.tensor(0).dtype
    for index, term in enumerate(terms):
        x = site.tensor(index)
        if x.dtype != dtype:
            raise site.fail(
                f"operands are {dtype} and {x.dtype}",
                "dtype-mismatch",
                next="cast one of them: ar.cast(x, 'model') or ar.cast(x, 'float32')",
            )
        if len(term) != x.rank:
            raise site.fail(f"term {term!r} names {len(term)} axes of {x.rank}", "rank-mismatch")
        for letter, size in zip(term, x.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise site.fail(f"{letter} = {sizes[letter]} and {letter} = {size} disagree")
    lost = [letter for letter in right if letter not in sizes]
    if lost:
        raise site.fail(f"{lost[0]} stands in no term of {left!r}")
    return (Tensor(dtype, tuple(sizes[letter] for letter in right)),)


def _einsum_vjp(c: Any, y: Any, *xs: Any, equation: str) -> tuple[Any, ...]:
    """For each operand the einsum of c and the others, onto the operand's letters.

    A letter that only this operand has, and that was summed, becomes an axis of size 1; one that
    stands twice in its term becomes two, with an identity between them.
    """
    left, _, right = equation.partition("->")
    terms = left.split(",")
    free = [letter for letter in string.ascii_letters if letter not in left]
    found = []
    for i, (x, term) in enumerate(zip(xs, terms, strict=True)):
        others = [(t, v) for j, (t, v) in enumerate(zip(terms, xs, strict=True)) if j != i]
        wanted = ""
        for letter, size in zip(term, x.shape, strict=True):
            if letter in wanted:
                wanted += (twin := free.pop())
                others.append((letter + twin, x.made("eye", dim=size)))
            else:
                wanted += letter
        known = right + "".join(t for t, _ in others)
        onto = "".join(letter for letter in wanted if letter in known)
        inputs = ",".join([right, *(t for t, _ in others)])
        made = (
            c if inputs == onto else c.einsum(*(v for _, v in others), equation=f"{inputs}->{onto}")
        )
        lost = tuple(a for a, letter in enumerate(wanted) if letter not in known)
        found.append(made.expand_dims(axes=lost) if lost else made)
    return tuple(found)


def _einsum_bounds(*xs: Interval, equation: str) -> Interval:
    """Of products; of their sum over the letters that the result leaves out."""
    left, _, right = equation.partition("->")
    product = reduce(operator.mul, xs)
    return product if set(left) <= {*right, ","} else summed(product)


@op(
    "tensor",
    infer=_infer_einsum,
    samples=(
        Sample(("f[B, 4, 8]", "f[B, 8]"), {"equation": "bkv,bv->bk"}),
        Sample(("f[4, 4]",), {"equation": "kk->"}),
    ),
    invalid=(
        Sample(("f[4]", "f[8]"), {"equation": "k,k->"}, "k = 4 and k = 8 disagree"),
        Sample(("f[4]", "f[4]"), {"equation": "k->"}, "1 terms for 2 operands"),
        Sample(("f[4, 4]",), {"equation": "k->"}, "names 1 axes of 2"),
        Sample(("f[4]", "F[4]"), {"equation": "k,k->"}, "operands are f and F"),
        Sample(("f[4]",), {"equation": "k->j"}, "j stands in no term"),
    ),
    vjp=_einsum_vjp,
    bounds=_einsum_bounds,
)
def einsum(*xs: Any, equation: str) -> Any:
    """Sum of products over the letters that the result leaves out."""
    return np.einsum(equation, *xs)


def _infer_cast(site: Site) -> tuple[Type, ...]:
    dtype = site.attrs["dtype"]
    if dtype not in DTYPES:
        raise site.fail(f"{dtype!r} is not one of {', '.join(DTYPES)}", "dtype-mismatch")
    return (site.tensor(0).with_dtype(dtype),)


def _cast_bounds(x: Interval, dtype: str) -> Interval:
    """A cast between floats keeps numbers; NaN becomes an integer that says nothing."""
    if types.is_float(dtype):
        return x
    return Interval(0.0, 1.0) if dtype == "bool" else UNKNOWN


@op(
    "tensor",
    infer=_infer_cast,
    samples=tuple(Sample(("f[B, 8]",), {"dtype": d}) for d in ("F", "bf16", "i64", "bool")),
    invalid=(Sample(("f[B, 8]",), {"dtype": "f8"}, "'f8' is not one of f, F, bf16"),),
    vjp=lambda c, y, x, dtype: c,
    bounds=_cast_bounds,
)
def cast(x: Any, *, dtype: str) -> Any:
    """The same numbers in another dtype; the interpreter rounds every result, casts too."""
    if dtype in ("i32", "i64"):
        return x.astype(np.int64)
    return x.astype(bool) if dtype == "bool" else x


def made_of(site: Site, *shape: int | Poly) -> tuple[Type, ...]:
    """The type of a tensor made from sizes alone."""
    wrong = [size for size in shape if isinstance(size, int) and size < 0]
    if wrong or site.operands:
        raise site.fail(f"{wrong[0]} is not a size" if wrong else "takes no operands")
    return (Tensor(site.attrs.get("dtype", "F"), shape),)


@op(
    "tensor",
    infer=lambda site: made_of(site),
    samples=(Sample((), {"dim": 8}),),
    invalid=(Sample(("f[8]",), {"dim": 8}, "takes no operands"),),
    made=True,
    vjp=constant,
    bounds=lambda dim, **attrs: around(dim) if isinstance(dim, int) else Interval(0.0),
)
def size(*, dim: int, dtype: str = "F") -> Any:
    """A dim as a number."""
    return np.float64(dim)


@op(
    "tensor",
    infer=lambda site: made_of(site, site.attrs["dim"], site.attrs["dim"]),
    samples=(Sample((), {"dim": 8}), Sample((), {"dim": 8, "dtype": "f32"})),
    invalid=(Sample((), {"dim": -1}, "-1 is not a size"),),
    made=True,
    vjp=constant,
    bounds=within(0.0, 1.0),
)
def eye(*, dim: int, dtype: str = "F") -> Any:
    """The identity matrix."""
    return np.eye(dim)


@op(
    "tensor",
    infer=lambda site: made_of(site, *site.attrs["shape"]),
    samples=(Sample((), {"shape": (8,), "value": 0.0}), Sample((), {"shape": (), "value": 1.0})),
    invalid=(Sample((), {"shape": (8, -2), "value": 0.0}, "-2 is not a size"),),
    made=True,
    vjp=constant,
    bounds=lambda shape, value, **attrs: around(value),
)
def fill(*, shape: tuple[int, ...], value: float, dtype: str = "F") -> Any:
    """A tensor of one number."""
    return np.full(shape, value)


def _infer_broadcast_to(site: Site) -> tuple[Type, ...]:
    x, shape = site.tensor(0), tuple(site.attrs["shape"])
    lead = len(shape) - x.rank
    stretches = (
        all(a in (1, b) for a, b in zip(x.shape, shape[lead:], strict=True)) if lead >= 0 else False
    )
    if not stretches:
        raise site.fail(
            f"{list(x.shape)} does not stretch to {list(shape)}",
            next="only new axes and axes of size 1 stretch",
        )
    return (Tensor(x.dtype, shape),)


@op(
    "tensor",
    infer=_infer_broadcast_to,
    samples=(Sample(("f[1, 8]",), {"shape": (4, 8)}),),
    invalid=(Sample(("f[2, 8]",), {"shape": (4, 8)}, "does not stretch"),),
    vjp=lambda c, y, x, shape: c,
    bounds=moved,
)
def broadcast_to(x: Any, *, shape: tuple[int, ...]) -> Any:
    """x repeated along new axes and axes of size 1."""
    return np.broadcast_to(x, shape)


def _infer_repeat(site: Site) -> tuple[Type, ...]:
    x, axis = site.tensor(0), _axis(site, site.tensor(0), site.attrs["axis"])
    if site.attrs["times"] < 1:
        raise site.fail(f"{site.attrs['times']} times is not at least once")
    size = dims.multiply(x.shape[axis], site.attrs["times"])
    return (Tensor(x.dtype, (*x.shape[:axis], size, *x.shape[axis + 1 :])),)


def _repeat_vjp(c: Any, y: Any, x: Any, *, axis: int, times: int) -> Any:
    """Sum over the repetitions of each slice."""
    axis %= x.rank
    shape = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
    return c.reshape(shape=shape).reduce_sum(axes=(axis + 1,))


@op(
    "tensor",
    infer=_infer_repeat,
    samples=(Sample(("f[B, 2, 8]",), {"axis": 1, "times": 3}),),
    invalid=(
        Sample(("f[B, 2, 8]",), {"axis": 3, "times": 3}, "axis 3 is outside 3 axes"),
        Sample(("f[B, 2, 8]",), {"axis": 1, "times": 0}, "0 times is not at least once"),
    ),
    vjp=_repeat_vjp,
    bounds=moved,
)
def repeat(x: Any, *, axis: int, times: int) -> Any:
    """Each slice along an axis `times` times in a row: key heads for grouped value heads."""
    return np.repeat(x, times, axis=axis)
