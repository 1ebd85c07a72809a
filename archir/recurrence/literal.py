"""The literal loop: a rule's body run on arrays, token by token and head by head (D7).

It is what every form of a recurrence is checked against: no IR, no batching, one call of the user's
function for each token of each head, on copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from archir.diagnostics import ShapeError
from archir.ops import lookup
from archir.recurrence.rule import Rule
from archir.sequence import Rows


@dataclass(frozen=True)
class Loop:
    """What the literal loop gives.

    outputs: the rule's, each [B, T, H, …], zero where no row has a token.  states: after the last
    token of every row, each [R, H, …].  largest: the running maximum of |S| and |o|, [B, T, H]; of
    what a row and head have seen up to a token, the state before it included (D16).
    """

    outputs: tuple[np.ndarray, ...]
    states: tuple[np.ndarray, ...]
    largest: np.ndarray


def literal(
    rule: Rule,
    operands: Sequence[np.ndarray],
    states: Sequence[np.ndarray] | None = None,
    rows: Rows | None = None,
) -> Loop:
    """Runs the body of `rule` on operands placed by rank (D8), in float64.

    operands: [B, T, H, …], [B, T, …], [H, …] or […]; value head h reads head h // (H / h_own) of
    one with fewer heads.  states: before the first token, [R, H, …] each; zeros unless given.
    rows: where rows lie on the grid; dense unless given. Raises ShapeError where operands do not
    fit the rule or each other.
    """
    _ = rule.function  # a body that cannot be traced is refused
    xs = [np.array(x, np.float64) for x in operands]
    extra = leading(rule, xs)
    sizes = sizes_of(rule, xs, extra)
    heads = max(x.shape[e - 1] if e in (1, 3) else 1 for x, e in zip(xs, extra, strict=True))
    batch, length = next(x.shape[:2] for x, e in zip(xs, extra, strict=True) if e >= 2)
    rows = rows or Rows.dense(batch, length)
    now = states_before(rule, sizes, len(rows), heads, states)
    flat = [
        x.reshape(batch * length, *x.shape[2:]) if e >= 2 else x
        for x, e in zip(xs, extra, strict=True)
    ]

    def at(index: int, token: int, head: int) -> np.ndarray:
        x = flat[index][token] if extra[index] >= 2 else flat[index]
        x = x[head // (heads // x.shape[0])] if extra[index] in (1, 3) else x
        return np.array(x)[()]  # a copy; of a scalar, a number

    body = body_on_arrays(rule, sizes)
    outputs = [
        np.zeros((batch * length, heads, *(sizes[d] for d in shape)))
        for shape in rule.outputs.values()
    ]
    largest = np.zeros((batch * length, heads))
    for row, (start, stop, _) in enumerate(rows):
        for head in range(heads):
            seen = max((_most(s[row, head]) for s in now), default=0.0)
            for token in range(start, stop):
                given = [at(i, token, head) for i in range(len(xs))]
                with np.errstate(all="ignore"):
                    made = body(*(np.array(s[row, head])[()] for s in now), *given)
                made = made if isinstance(made, tuple) else (made,)
                for s, new in zip(now, made, strict=False):
                    s[row, head] = new
                for out, new in zip(outputs, made[len(now) :], strict=True):
                    out[token, head] = new
                seen = max(seen, *(_most(x) for x in made))
                largest[token, head] = seen
    return Loop(
        tuple(x.reshape(batch, length, *x.shape[1:]) for x in outputs),
        tuple(now),
        largest.reshape(batch, length, heads),
    )


def body_on_arrays(rule: Rule, sizes: Mapping[str, int]) -> Callable[..., Any]:
    """The body as it runs on arrays: dims are numbers, and words of archir, as `ar.sigmoid`, are
    what their ops mean."""
    found = rule.fn.__globals__.items()
    words = {name: _word(x) for name, x in found if name in rule.fn.__code__.co_names}
    return _with_names(rule.fn, {**words, **sizes})


class _Words:
    """`archir` as a body on arrays sees it."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return _word(getattr(self._module, name))


def _word(x: Any) -> Any:
    if isinstance(x, ModuleType) and x.__name__ == "archir":
        return _Words(x)
    if isinstance(x, FunctionType) and x.__module__ == "archir.dsl":
        return _with_names(x, {"emit": _mean, "_where": np.where, "_expand_dims": np.expand_dims})
    return x


def _mean(kind: str, *operands: Any, hint: str = "", **attrs: Any) -> Any:
    """What an op means, in place of its record."""
    return lookup(kind).meaning(*operands, **attrs)


def _with_names(fn: Callable[..., Any], names: Mapping[str, Any]) -> Callable[..., Any]:
    assert isinstance(fn, FunctionType)
    scope = {**fn.__globals__, **names}
    made = FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, fn.__closure__)
    made.__kwdefaults__ = fn.__kwdefaults__
    return made


def _most(x: np.ndarray) -> float:
    return float(np.max(np.abs(x), initial=0))


def leading(rule: Rule, xs: Sequence[np.ndarray]) -> list[int]:
    """How many leading axes each operand has: 3 for [B, T, H], 2 for [B, T], 1 for [H]."""
    if len(xs) != len(rule.operands):
        raise ShapeError(
            f"{rule.name} takes {len(rule.operands)} operands, {len(xs)} given",
            code="operand-count",
            next=f"operands: {', '.join(rule.operands)}",
        )
    extra = [x.ndim - len(s) for x, s in zip(xs, rule.operands.values(), strict=True)]
    wrong = [name for name, e in zip(rule.operands, extra, strict=True) if not 0 <= e <= 3]
    if wrong or max(extra) < 2:
        raise ShapeError(
            f"operand {wrong[0]} of {rule.name} has axes that mean nothing"
            if wrong
            else f"no operand of {rule.name} has tokens",
            code="rank-mismatch",
            next="give [B, T, H, …], [B, T, …], [H, …] or one array for all",
        )
    return extra


def sizes_of(rule: Rule, xs: Sequence[np.ndarray], extra: Sequence[int]) -> dict[str, int]:
    """The size of every dim of the rule."""
    sizes: dict[str, int] = {}
    for (name, shape), x, e in zip(rule.operands.items(), xs, extra, strict=True):
        for dim, size in zip(shape, x.shape[e:], strict=True):
            if sizes.setdefault(dim, size) != size:
                raise ShapeError(
                    f"{name} has {size} on the axis {dim}, the operands before it {sizes[dim]}",
                    code="shape-mismatch",
                    next="give operands of one size on each of the rule's dims",
                )
    return sizes


def states_before(
    rule: Rule,
    sizes: dict[str, int],
    rows: int,
    heads: int,
    given: Sequence[np.ndarray] | None,
) -> list[np.ndarray]:
    """Copies of the states before the first token, or zeros."""
    declared = rule.function.inputs[: len(rule.states)]
    shapes = [
        (rows, heads, *(sizes[str(d)] for d in value.type.shape))  # type: ignore[union-attr]
        for value in declared
    ]
    if given is None:
        return [np.zeros(shape) for shape in shapes]
    found = [np.array(s, np.float64) for s in given]
    if [s.shape for s in found] != shapes:
        raise ShapeError(
            f"states of {rule.name} are {', '.join(str(list(s.shape)) for s in found)}",
            code="initial-state",
            facts=[f"{s} must be {list(shape)}" for s, shape in zip(rule.states, shapes)],
            next="give one state per row and head, in the rule's order",
        )
    return found
