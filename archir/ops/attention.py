"""Sequences, positions, rotary embedding and softmax attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from archir import types
from archir.diagnostics import MismatchError
from archir.dims import Poly, symbol
from archir.ops.base import Sample, Site, op
from archir.ops.interval import Interval
from archir.ops.random import keep_mask
from archir.sequence import Rows
from archir.types import Sequence, Tensor, Type


def _infer_dense(site: Site) -> tuple[Type, ...]:
    x = site.tensor(0)
    if x.rank < 2:
        raise site.fail("needs [B, T, …]", "rank-mismatch")
    if len(site.operands) == 1:
        return (Sequence(x.shape[0]),)
    return (Sequence(site.tensor(1).shape[0]),)


@op(
    "sequence",
    infer=_infer_dense,
    samples=(Sample(("i64[B, T]", "i64[R]")), Sample(("f[B, T, 8]",))),
    invalid=(Sample(("i64[T]",), message="needs [B, T, …]"),),
)
def dense(x: Any, length: Any = None) -> Rows:
    """The sequence of a dense layout: row b is x[b], after `length[b]` tokens of past."""
    past = tuple(int(n) for n in length) if length is not None else None
    if past is not None and len(past) != x.shape[0]:
        raise MismatchError(
            f"{x.shape[0]} rows of tokens meet a state of {len(past)} rows",
            code="state-rows",
            next="decode with as many rows as the state was made with",
        )
    return Rows.dense(x.shape[0], x.shape[1], past)


def _infer_ragged(site: Site) -> tuple[Type, ...]:
    x, start = site.tensor(0), site.tensor(1)
    if x.rank < 2:
        raise site.fail("needs [B, T, …]", "rank-mismatch")
    for index in range(1, len(site.operands)):
        if site.tensor(index) != Tensor("i64", start.shape) or start.rank != 1:
            raise site.fail("start, stop and length must be i64[R] of one R", "rank-mismatch")
    return (Sequence(start.shape[0]),)


@op(
    "sequence",
    infer=_infer_ragged,
    samples=(
        Sample(("i64[B, T]", "i64[R]", "i64[R]", "i64[R]")),
        Sample(("f[B, T, 8]", "i64[R]", "i64[R]")),
    ),
    invalid=(
        Sample(("i64[T]", "i64[R]", "i64[R]"), message="needs [B, T, …]"),
        Sample(("i64[B, T]", "i64[R]", "i64[B]"), message="of one R"),
    ),
)
def ragged(x: Any, start: Any, stop: Any, length: Any = None) -> Rows:
    """The sequence of padded or packed tokens: row r is [start[r], stop[r]) of the flat grid."""
    past = tuple(int(n) for n in length) if length is not None else None
    starts, stops = (tuple(int(n) for n in side) for side in (start, stop))
    return Rows.ragged(x.shape[0], x.shape[1], starts, stops, past)


@op(
    "sequence",
    infer=lambda site: (Tensor("i64", (rows_of(site, 0),)),),
    samples=(Sample(("sequence[R]",)),),
    invalid=(Sample(("i64[R]",), message="operand 1 must be a sequence, i64[R] given"),),
)
def advance(seq: Rows) -> Any:
    """Tokens seen by each row after this call: the next state's `length`."""
    return np.array(seq.lengths, np.int64)


def rows_of(site: Site, index: int) -> int | Poly:
    found = site.operands[index]
    if not isinstance(found, Sequence):
        raise site.fail(f"operand {index + 1} must be a sequence, {found} given", "operand-type")
    return found.rows


def _infer_positions(site: Site) -> tuple[Type, ...]:
    x = site.tensor(0)
    if x.rank < 2:
        raise site.fail("needs [B, T, …]", "rank-mismatch")
    if len(site.operands) > 1:
        rows_of(site, 1)
    return (Tensor("i64", x.shape[:2]),)


@op(
    "sequence",
    infer=_infer_positions,
    samples=(Sample(("i64[B, T]", "sequence[R]")), Sample(("f[B, T, 8]", "sequence[R]"))),
    invalid=(
        Sample(("i64[T]",), message="needs [B, T, …]"),
        Sample(("i64[B, T]", "i64[R]"), message="operand 2 must be a sequence"),
    ),
    ordered=True,
    bounds=lambda *xs, **attrs: Interval(low=0.0),
)
def positions(x: Any, seq: Rows, *, limit: int | None = None) -> Any:
    """Absolute position of each token of its row; beyond `limit` is an error."""
    check_limit(seq, limit)
    return seq.positions()


def check_limit(seq: Rows, limit: int | None) -> None:
    """Raises when a row grows beyond the context the spec was given."""
    longest = max(seq.lengths, default=0)
    if limit is not None and longest > limit:
        raise MismatchError(
            f"{longest} tokens do not fit the context of {limit}",
            code="context-exceeded",
            facts=[f"{seq.length} new tokens after {max(seq.past)} of past"],
            next=f"shorten the prompt to {limit} tokens, or use a spec with a longer context",
        )


def _infer_last(site: Site) -> tuple[Type, ...]:
    x, rows = site.tensor(0), rows_of(site, 1)
    if x.rank < 2:
        raise site.fail("needs [B, T, …]", "rank-mismatch")
    return (Tensor(x.dtype, (rows, 1, *x.shape[2:])),)


@op(
    "sequence",
    infer=_infer_last,
    samples=(Sample(("f[B, T, 8]", "sequence[R]")), Sample(("i64[B, T]", "sequence[R]"))),
    invalid=(
        Sample(("f[T]", "sequence[R]"), message="needs [B, T, …]"),
        Sample(("f[B, T, 8]", "f[B]"), message="operand 2 must be a sequence"),
    ),
)
def last(x: Any, seq: Rows) -> Any:
    """The last token of each row, [R, 1, …]; zero where a row has none."""
    flat = x.reshape(-1, *x.shape[2:])
    found = np.zeros((len(seq), 1, *x.shape[2:]), x.dtype)
    for row, (start, stop, _) in enumerate(seq):
        if stop > start:
            found[row, 0] = flat[stop - 1]
    return found


def rotary_angles(positions: np.ndarray, size: int, theta: float) -> np.ndarray:
    """Angles p · θ^(−2i/size) in float64, […, size / 2]."""
    return positions[..., None] * theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)


def _infer_rotary(site: Site) -> tuple[Type, ...]:
    x, p = site.tensor(0), site.tensor(1)
    if x.rank != 4 or p.shape != x.shape[:2]:
        raise site.fail(
            "needs x: [B, T, H, D] and positions: [B, T]",
            "rank-mismatch",
            next="split x with ar.heads(x, 1, heads), and give ar.positions(tokens)",
        )
    if isinstance(x.shape[3], int) and x.shape[3] % 2:
        raise site.fail(
            f"head size {x.shape[3]} is odd, rotary turns pairs", next="use an even size"
        )
    return (x,)


@op(
    "attention",
    infer=_infer_rotary,
    samples=(Sample(("f[B, T, 2, 8]", "i64[B, T]"), {"theta": 10000.0}),),
    invalid=(Sample(("f[B, T, 2, 7]", "i64[B, T]"), {"theta": 1e4}, "head size 7 is odd"),),
    ordered=True,
)
def rotary(x: Any, positions: Any, seq: Rows | None = None, *, theta: float) -> Any:
    """Turns the pairs (x_i, x_{i+D/2}) by p · θ^(−2i/D) (Su et al. 2021; halves, as in Llama).

    The sequence only serves to memoise the tables of cosines and sines.
    """
    angles = rotary_angles(positions, x.shape[-1], theta)[:, :, None, :]
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _infer_attention(site: Site) -> tuple[Type, ...]:
    q, k, v = site.tensor(0), site.tensor(1), site.tensor(2)
    if not q.rank == k.rank == v.rank == 4:
        raise site.fail(
            "q, k, v need four axes [B, T, H, D]",
            "rank-mismatch",
            next="ar.heads(x, parts, heads) splits the last axis into heads",
        )
    if len(site.operands) > 3:
        rows_of(site, 3)
    if len(site.operands) > 4 and site.tensor(4) != Tensor("i64", (2,)):
        raise site.fail("the key of its dropout must be i64[2]", "operand-type")
    if not q.dtype == k.dtype == v.dtype:
        raise site.fail(
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}",
            "dtype-mismatch",
            next="bring all to the model's dtype: ar.cast(x, 'model')",
        )
    if q.shape[3] != k.shape[3]:
        raise site.fail(
            f"queries have size {q.shape[3]}, keys {k.shape[3]}",
            next="project both to one size per head; only values may have another",
        )
    if k.shape[:3] != v.shape[:3]:
        raise site.fail(
            f"keys are {list(k.shape[:3])}, values {list(v.shape[:3])}",
            next="give every token as many key heads as value heads",
        )
    heads, groups = q.shape[2], k.shape[2]
    if not (isinstance(heads, int) and isinstance(groups, int)) or heads % groups:
        raise site.fail(
            f"{heads} query heads are not a multiple of {groups} key heads",
            next="grouped attention lets each key head serve heads / key_heads query heads",
        )
    require_scalar(site, "score", "a float, the new score", types.is_float)
    require_scalar(site, "mask", "a bool, whether the key is seen", lambda dtype: dtype == "bool")
    return (Tensor(q.dtype, (*q.shape[:3], v.shape[3])),)


_SCALARS = {
    "score": "return s, changed",
    "mask": "compare, as in j > i - 128",
    "activation": "return a function of x, as ar.silu does",
}


def require_scalar(site: Site, attr: str, wanted: str, fits: Callable[[str], bool]) -> None:
    """The function of an attribute returns one scalar of the wanted dtype."""
    if attr not in site.attrs:
        return
    function = site.function(attr)
    found = [v.type for v in function.outputs]
    if len(found) != 1 or not isinstance(found[0], Tensor) or not fits(found[0].dtype):
        raise site.fail(
            f"{attr} {function.name} gives {', '.join(map(str, found))}, it must give {wanted}",
            "dtype-mismatch",
            next=_SCALARS[attr],
        )


@op(
    "attention",
    infer=_infer_attention,
    samples=(
        Sample(
            ("f[B, T, 4, 8]", "f[B, T, 2, 8]", "f[B, T, 2, 6]", "sequence[R]"), {"causal": True}
        ),
        Sample(
            ("f[B, T, 4, 8]", "f[R, S, 4, 8]", "f[R, S, 4, 8]", "sequence[R]"),
            {"causal": True, "window": 5, "keys": "cache"},
        ),
        Sample(
            ("f[B, T, 4, 8]", "f[B, T, 2, 8]", "f[B, T, 2, 6]", "sequence[R]", "i64[2]"),
            {"dropout": 0.25},
        ),
    ),
    invalid=(
        Sample(("f[B, T, 4, 8]", "f[B, T, 3, 8]", "f[B, T, 3, 8]"), {}, "4 query heads"),
        Sample(("f[B, T, 4, 8]", "f[B, T, 4, 6]", "f[B, T, 4, 8]"), {}, "queries have size 8"),
        Sample(("f[B, T, 4, 8]", "f[B, 3, 4, 8]", "f[B, T, 4, 8]"), {}, "keys are [B, 3, 4]"),
        Sample(("f[B, T, 8]", "f[B, T, 8]", "f[B, T, 8]"), {}, "need four axes"),
        Sample(("f[B, T, 4, 8]", "F[B, T, 4, 8]", "f[B, T, 4, 8]"), {}, "q, k, v are f, F, f"),
        Sample((*("f[B, T, 4, 8]",) * 3, "sequence[R]", "i64[3]"), {}, "dropout must be i64[2]"),
    ),
    ordered=True,
)
def attention(
    q: Any,
    k: Any,
    v: Any,
    seq: Rows,
    dropout_key: Any = None,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    score: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | None = None,
    keys: str = "tokens",
    form: str = "",
) -> Any:
    """softmax(scale · q kᵀ) v per row and head; head h reads key head h // (H / G).

    scale: D^−½ unless given.  window: a query sees the last `window` positions, itself included.
    score(s, i, j, h) changes a score, mask(i, j) keeps it; i and j are absolute positions of query
    and key.  keys: "tokens" when k and v lie as q does, "cache" when they lie as [row, position].
    dropout: with a key, the rate at which probabilities become zero, the others divided by one
    minus it; that of head h from token t of the grid to position j as `keep_mask` says for row
    t · H + h.
    """
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    flat = q.reshape(-1, heads, q.shape[3])
    out = np.zeros((flat.shape[0], heads, v.shape[3]), q.dtype)
    for row, (start, stop, past) in enumerate(seq):
        total = past + stop - start
        if keys == "cache":
            row_k, row_v = k[row, :total], v[row, :total]
        else:
            row_k = k.reshape(-1, *k.shape[2:])[start:stop]
            row_v = v.reshape(-1, *v.shape[2:])[start:stop]
        i = np.arange(past, total)[:, None]
        j = np.arange(total - row_k.shape[0], total)[None, :]
        seen = np.ones((i.shape[0], j.shape[1]), bool)
        if causal:
            seen &= j <= i
        if window is not None:
            seen &= j > i - window
        if mask is not None:
            seen &= mask(i, j)
        tokens = np.arange(start, stop)
        for head in range(heads):
            s = scale * (flat[start:stop, head] @ row_k[:, head // group].T)
            if score is not None:
                s = score(s, i, j, np.int64(head))
            s = np.where(seen, s, -np.inf)
            top = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
            p = np.exp(s - np.where(np.isfinite(top), top, 0))
            total_p = np.sum(p, axis=-1, keepdims=True)
            p = p / np.where(total_p == 0, 1, total_p)
            if dropout_key is not None:
                keep = keep_mask(dropout_key, tokens * heads + head, total, dropout)[:, j[0]]
                p = np.where(keep, p / (1 - dropout), 0)
            out[start:stop, head] = p @ row_v[:, head // group]
    return out.reshape(*q.shape[:3], v.shape[3])


STEPS = symbol("J")  # the longest row's new tokens: bound when the program runs (D3)


def _stepped(site: Site, rows: int | Poly) -> tuple[int | Poly, ...]:
    """The first axes of tokens by step: [J, R], [J, R, C] in chunks of C, [1, R, J] as one each."""
    chunk = site.attrs.get("chunk", 0)
    if chunk == "whole":
        return (1, rows, STEPS)
    return (STEPS, rows, chunk) if chunk else (STEPS, rows)


def _infer_steps(site: Site) -> tuple[Type, ...]:
    x, rows = site.tensor(0), rows_of(site, 1)
    if x.rank < 2:
        raise site.fail("needs [B, T, …]", "rank-mismatch")
    return (Tensor(x.dtype, (*_stepped(site, rows), *x.shape[2:])),)


@op(
    "sequence",
    infer=_infer_steps,
    samples=(
        Sample(("f[B, T, 8]", "sequence[R]")),
        Sample(("f[B, T]", "sequence[R]")),
        Sample(("f[B, T, 8]", "sequence[R]"), {"chunk": 1}),
        Sample(("f[B, T]", "sequence[R]"), {"chunk": "whole"}),
    ),
    invalid=(
        Sample(("f[T]", "sequence[R]"), message="needs [B, T, …]"),
        Sample(("f[B, T, 8]", "f[B]"), message="operand 2 must be a sequence"),
    ),
)
def steps(x: Any, seq: Rows, *, chunk: int | str = 0) -> Any:
    """Tokens by step: [B, T, …] → [J, R, …], step j of row r being its j-th token.

    chunk: C gives [J, R, C, …], C tokens of a row at each step; "whole" [1, R, J, …], all of them.
    What is beyond a row's end repeats its last token.
    """
    index, _ = seq.grid(chunk)
    if not x.size or not index.size:
        return np.zeros((*index.shape, *x.shape[2:]), x.dtype)
    return x.reshape(-1, *x.shape[2:])[index]


@op(
    "sequence",
    infer=lambda site: (Tensor("bool", _stepped(site, rows_of(site, 0))),),
    samples=(
        Sample(("sequence[R]",)),
        Sample(("sequence[R]",), {"chunk": 1}),
        Sample(("sequence[R]",), {"chunk": "whole"}),
    ),
    invalid=(Sample(("i64[R]",), message="operand 1 must be a sequence"),),
)
def valid(seq: Rows, *, chunk: int | str = 0) -> Any:
    """Whether row r still has a j-th token, bool[J, R], or as `steps` arranges them."""
    return seq.grid(chunk)[1]


@op(
    "sequence",
    infer=lambda site: (rows_of(site, 1), site.tensor(0))[1:],
    samples=(Sample(("i64[B, T]", "sequence[R]")),),
    invalid=(Sample(("i64[B, T]", "i64[R]"), message="operand 2 must be a sequence"),),
)
def mask_targets(targets: Any, seq: Rows) -> Any:
    """Targets, −100 (ignored) where no row owns the token."""
    owned = np.zeros(targets.size, bool)
    for start, stop, _ in seq:
        owned[start:stop] = True
    return np.where(owned.reshape(targets.shape), targets, -100)


def _infer_unsteps(site: Site) -> tuple[Type, ...]:
    y, like, rows = site.tensor(0), site.tensor(1), rows_of(site, 2)
    lead = _stepped(site, rows)
    if y.shape[: len(lead)] != lead:
        shown = ", ".join(map(str, lead))
        raise site.fail(f"steps are [{shown}, …], {y} given", "rank-mismatch")
    return (Tensor(y.dtype, (*like.shape[:2], *y.shape[len(lead) :])),)


@op(
    "sequence",
    infer=_infer_unsteps,
    samples=(
        Sample(("f[J, R, 8]", "f[B, T, 4]", "sequence[R]")),
        Sample(("f[J, R, 1, 8]", "f[B, T, 4]", "sequence[R]"), {"chunk": 1}),
        Sample(("f[1, R, J]", "f[B, T, 4]", "sequence[R]"), {"chunk": "whole"}),
    ),
    invalid=(
        Sample(("f[R, J, 8]", "f[B, T, 4]", "sequence[R]"), message="steps are [J, R, …]"),
        Sample(("f[J, R, 8]", "f[B, T, 4]", "i64[R]"), message="operand 3 must be a sequence"),
    ),
)
def unsteps(y: Any, like: Any, seq: Rows, *, chunk: int | str = 0) -> Any:
    """The inverse of `steps`, on the token grid of `like`."""
    if chunk:
        y = np.moveaxis(y, 2, 1)
        y = y.reshape(y.shape[0] * y.shape[1], *y.shape[2:])
    out = np.zeros((seq.batch * seq.length, *y.shape[2:]), y.dtype)
    for row, (start, stop, _) in enumerate(seq):
        out[start:stop] = y[: stop - start, row]
    return out.reshape(seq.batch, seq.length, *y.shape[2:])
