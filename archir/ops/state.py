"""Ops that read and write state: recurrence, short convolution, the KV cache, the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from archir import types
from archir.dims import Poly
from archir.ir import Function
from archir.ops.attention import require_scalar, rows_of
from archir.ops.base import Sample, Site, op
from archir.ops.interval import UNKNOWN, Interval
from archir.sequence import Rows
from archir.types import Tensor, Type


def _infer_append(site: Site) -> tuple[Type, ...]:
    cache, x = site.tensor(0), site.tensor(1)
    rows = rows_of(site, 2)
    if cache.rank < 2 or cache.shape[0] != rows:
        raise site.fail(f"the cache must be [{rows}, P, …]")
    if cache.shape[2:] != x.shape[2:] or cache.dtype != x.dtype:
        raise site.fail(f"cache entries and new entries differ: {cache} and {x}")
    return (Tensor(x.dtype, (rows, cache.shape[1] + x.shape[1], *x.shape[2:])),)


@op(
    "state",
    infer=_infer_append,
    samples=(Sample(("f[R, P, 2, 8]", "f[B, T, 2, 8]", "sequence[R]")),),
    invalid=(
        Sample(("f[R, P, 2, 8]", "f[B, T, 2, 6]", "sequence[R]"), message="new entries differ"),
        Sample(("f[N, P, 2, 8]", "f[B, T, 2, 8]", "sequence[R]"), message="must be [R, P, …]"),
    ),
)
def append(cache: Any, x: Any, seq: Rows) -> Any:
    """Row r becomes its valid `past[r]` entries, then its new ones; the rest is zero (D5)."""
    out = np.zeros((len(seq), cache.shape[1] + x.shape[1], *x.shape[2:]), x.dtype)
    flat = x.reshape(-1, *x.shape[2:])
    for row, (start, stop, past) in enumerate(seq):
        out[row, :past] = cache[row, :past]
        out[row, past : past + stop - start] = flat[start:stop]
    return out


@op(
    "state",
    infer=lambda site: (site.tensor(0), ())[1],
    samples=(Sample(("f[R, 2, 8]",), {"path": "s"}),),
    invalid=(Sample(("sequence[R]",), {"path": "s"}, "needs a tensor as operand 1"),),
    effect=True,
)
def store(x: Any, *, path: str) -> tuple[()]:
    """Writes the field at `path`; the interpreter and the backends do it by the path."""
    return ()


def state_axes(rule: Function) -> tuple[int, int]:
    """How many of a rule's inputs are states, how many are operands."""
    states = rule.attrs["states"]
    return states, len(rule.inputs) - states


def placed(operand: Tensor, declared: int) -> str:
    """Which leading axes an operand of a rule has, by rank (D8)."""
    extra = operand.rank - declared
    return {3: "BTH", 2: "BT", 1: "H", 0: ""}.get(extra, "?")


def rule_heads(site_types: list[Tensor], rule: Function) -> int | Poly:
    """The number of heads of a state update: the largest among its operands."""
    states, _ = state_axes(rule)
    sizes: list[int | Poly] = []
    for found, declared in zip(site_types, rule.inputs[states:], strict=True):
        assert isinstance(declared.type, Tensor)
        leading = placed(found, declared.type.rank)
        if "H" in leading:
            sizes.append(found.shape[leading.index("H")])
    ints = [s for s in sizes if isinstance(s, int)]
    return max(ints) if ints else (sizes[0] if sizes else 1)


def _infer_state_update(site: Site) -> tuple[Type, ...]:
    rule = site.function("rule")
    states, count = state_axes(rule)
    given = len(site.operands)
    if given not in (count, count + 1, count + 1 + states):
        raise site.fail(f"rule {rule.name} takes {count} operands, {given} given", "operand-count")
    operands = [site.tensor(i) for i in range(count)]
    heads = rule_heads(operands, rule)
    binding: dict[str, int | Poly] = {}
    lead: tuple[int | Poly, ...] = ()
    for index, declared in enumerate(rule.inputs[states:]):
        found = operands[index]
        assert isinstance(declared.type, Tensor)
        leading = placed(found, declared.type.rank)
        if leading == "?" or not types.is_float(found.dtype):
            raise site.fail(
                f"operand {declared.name}: {declared.type} of rule {rule.name} cannot be {found}",
                "rank-mismatch",
                next="give [B, T, H, …], [B, T, …], [H, …] or one tensor for all",
            )
        if leading.startswith("BT"):
            lead = lead or found.shape[:2]
            if found.shape[:2] != lead:
                raise site.fail(
                    f"{declared.name} has tokens {list(found.shape[:2])}, "
                    f"the operands before it {list(lead)}"
                )
        if "H" in leading:
            have = found.shape[leading.index("H")]
            if have != heads and not (
                isinstance(have, int) and isinstance(heads, int) and heads % have == 0
            ):
                raise site.fail(
                    f"{have} heads of {declared.name} do not divide {heads}",
                    next="an operand has all heads, a divisor of them (grouped), or no head axis",
                )
        inner = Tensor(declared.type.dtype, found.shape[len(leading) :])
        problem = types.match(declared.type, inner, binding)
        if problem:
            raise site.fail(f"operand {declared.name} of rule {rule.name}: {problem}")
    if not lead:
        raise site.fail(f"no operand of rule {rule.name} has tokens", "rank-mismatch")
    wide = types.promote(*(types.widen(t.dtype) for t in operands))

    def lifted(type_: Type, *leading: int | Poly) -> Tensor:
        inner = types.substitute(type_, binding)
        assert isinstance(inner, Tensor)
        return Tensor(wide, (*leading, *inner.shape))

    outputs = [lifted(v.type, *lead, heads) for v in rule.outputs[states:]]
    outputs = [o.with_dtype(site.attrs.get("dtype", wide)) for o in outputs]
    if given <= count + 1:
        return tuple(outputs)
    rows = rows_of(site, given - 1)
    kept = [lifted(v.type, rows, heads) for v in rule.inputs[:states]]
    for index, want in enumerate(kept):
        have = site.tensor(count + index)
        if have.shape != want.shape:
            raise site.fail(f"state {rule.inputs[index].name} must be {want}, {have} given")
    return (*outputs, *kept)


@op("state", infer=_infer_state_update, ordered=True)
def state_update(
    *operands: Any, rule: Callable[..., Any], form: str = "", below: int = 0, dtype: str = ""
) -> Any:
    """Runs a recurrence over the tokens of every row and head: (S, o_t) = rule(S, x_t).

    Operands: the rule's, then (once `specialize` made them explicit) one initial state each and the
    sequence. Results: the rule's outputs per token, then the final states. Value head h reads head
    h // (H / h_own) of an operand with fewer heads. It runs in float32 at least, whatever the
    dtypes of the operands; `dtype` is that of the outputs, unless given the same. `form` says how
    (`below` so many tokens it is recurrent), which changes nothing here.
    """
    function: Function = rule.function  # type: ignore[attr-defined]
    states, count = state_axes(function)
    xs, seq = operands[:count], operands[-1]
    final = [np.array(s) for s in operands[count:-1]]
    heads = final[0].shape[1]
    ranks = [_rank(v.type) for v in function.inputs[states:]]
    flat = [
        x.reshape(-1, *x.shape[2:]) if x.ndim - r >= 2 else x
        for x, r in zip(xs, ranks, strict=True)
    ]

    def at(index: int, token: int, head: int) -> Any:
        extra = xs[index].ndim - ranks[index]
        picked = flat[index][token] if extra >= 2 else xs[index]
        return picked[head // (heads // picked.shape[0])] if extra in (1, 3) else picked

    # What the outputs look like is asked of the rule, on zeros: there may be no token.
    empty = [np.zeros(x.shape[x.ndim - r :], x.dtype) for x, r in zip(xs, ranks, strict=True)]
    example = rule(*(np.zeros(s.shape[2:], s.dtype) for s in final), *empty)[states:]
    lead = (seq.batch * seq.length, heads)
    outputs = [np.zeros((*lead, *np.shape(o)), final[0].dtype) for o in example]
    for row, (start, stop, _) in enumerate(seq):
        for token in range(start, stop):
            for head in range(heads):
                inputs = (at(i, token, head) for i in range(count))
                got = rule(*(s[row, head] for s in final), *inputs)
                for s, new in zip(final, got, strict=False):
                    s[row, head] = new
                for out, o in zip(outputs, got[states:], strict=True):
                    out[token, head] = o
    return (*(o.reshape(seq.batch, seq.length, *o.shape[1:]) for o in outputs), *final)


def _rank(type_: Type) -> int:
    assert isinstance(type_, Tensor)
    return type_.rank


def _infer_short_conv(site: Site) -> tuple[Type, ...]:
    x, w = site.tensor(0), site.tensor(1)
    if x.rank != 3 or w.rank != 2 or w.shape[0] != x.shape[2]:
        raise site.fail(
            "needs x: [B, T, C] and one filter per channel, w: [C, W]",
            "rank-mismatch",
            next="ar.merge(x) joins heads; ar.short_conv(x, W, name=…) makes w",
        )
    if not (types.is_float(x.dtype) and types.is_float(w.dtype)):
        raise site.fail(f"x is {x.dtype} and w is {w.dtype}, both must be floats", "dtype-mismatch")
    require_scalar(site, "activation", "a float", types.is_float)
    if len(site.operands) < 4:
        _ = [rows_of(site, i) for i in range(2, len(site.operands))]
        return (x,)
    window, want = site.tensor(2), conv_window(x, w, rows_of(site, 3))
    if window != want:
        raise site.fail(f"the window must be {want}, {window} given")
    return (x, want)


def conv_window(x: Tensor, w: Tensor, rows: int | Poly) -> Tensor:
    """The state of a short convolution: the last W − 1 inputs of each row, oldest first."""
    return Tensor(x.dtype, (rows, w.shape[1] - 1, x.shape[2]))


def _short_conv_bounds(
    *operands: Interval, activation: Callable[..., Interval] | None = None, **attrs: Any
) -> Interval | tuple[Interval, Interval]:
    """What the activation makes of a sum by unknown weights; of the window nothing."""
    y = replace(UNKNOWN, uses=operands[1].uses)
    y = y if activation is None else activation(y)
    return (y, UNKNOWN) if len(operands) == 4 else y


@op(
    "state",
    infer=_infer_short_conv,
    samples=(
        Sample(("f[B, T, 8]", "f[8, 4]", "sequence[R]")),
        Sample(("f[B, T, 8]", "F[8, 4]", "f[R, 3, 8]", "sequence[R]")),
        Sample(("f[B, T, 8]", "f[8, 1]", "f[R, 0, 8]", "sequence[R]")),
    ),
    invalid=(
        Sample(("f[B, T, 8]", "f[6, 4]", "sequence[R]"), message="one filter per channel"),
        Sample(("f[B, T, 2, 8]", "f[8, 4]", "sequence[R]"), message="needs x: [B, T, C]"),
        Sample(("i64[B, T, 8]", "f[8, 4]", "sequence[R]"), message="both must be floats"),
        Sample(
            ("f[B, T, 8]", "f[8, 4]", "f[R, 4, 8]", "sequence[R]"),
            message="the window must be f[R, 3, 8]",
        ),
    ),
    ordered=True,
    bounds=_short_conv_bounds,
)
def short_conv(x: Any, w: Any, *given: Any, activation: Callable[..., Any] | None = None) -> Any:
    """Causal depthwise convolution of each row: y_t = φ(Σ_j w[:, j] · x_{t−W+1+j}).

    The last tap meets the current token. Before a row's first token lie zeros, or (once
    `specialize` made it explicit) its window: the last W − 1 inputs that its state has seen. With
    a window there are two results, y and the window after this call.
    """
    *before, seq = given
    taps, flat = w.shape[1], x.reshape(-1, x.shape[2])
    (window,) = before or (np.zeros((len(seq), taps - 1, x.shape[2]), x.dtype),)
    y, after = np.zeros(flat.shape, np.result_type(x, w)), np.empty_like(window)
    for row, (start, stop, _) in enumerate(seq):
        line = np.concatenate([window[row], flat[start:stop]])
        for j in range(taps):
            y[start:stop] += w[:, j] * line[j : j + stop - start]
        after[row] = line[stop - start :]
    y = (y if activation is None else activation(y)).reshape(x.shape)
    return (y, after) if before else y
