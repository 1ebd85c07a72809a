"""Around a function given to `archir.provide`: rows become dense or packed, results are checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from archir.diagnostics import MismatchError
from archir.provide import Provided, named
from archir.sequence import Rows


def calls() -> dict[str, Callable[..., Any]]:
    """What emitted programs call, by name, of all that was provided in this process."""
    return {name: call_of(entry) for name, entry in named().items()}


@cache
def call_of(entry: Provided) -> Callable[..., Any]:
    """(*operands, *states, seq, dtype=) → (*outputs [B, T, heads, …], *states), by `entry.fn`."""
    ranks = [len(shape) for shape in entry.rule.operands.values()]

    def call(*given: Any, dtype: torch.dtype) -> Any:
        seq = given[-1]
        operands, states = given[: len(ranks)], given[len(ranks) : -1]
        initial = states[0] if len(states) == 1 else states
        if seq.full:
            made = entry.fn(*operands, initial_state=initial, cu_seqlens=None)
            outputs, after = _results(entry, made, operands, states)
        else:
            ends, tokens = _packing(seq, states[0].device)
            pairs = zip(operands, ranks, strict=True)
            line = [x if x.ndim - r < 2 else _packed(x, tokens) for x, r in pairs]
            made = entry.fn(*line, initial_state=initial, cu_seqlens=ends)
            outputs, after = _results(entry, made, line, states)
            outputs = [_unpacked(y, seq, tokens) for y in outputs]
        before = zip(after, states, strict=True)
        return *(y.to(dtype) for y in outputs), *(s.to(old.dtype) for s, old in before)

    return call


def _packing(seq: Rows, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Running ends of rows i64[R + 1], and which tokens of the grid they hold, in order; None where
    those are all of one line. Made once per sequence."""
    key = ("packing", device)
    if key not in seq.memo:
        ends = torch.tensor([0, *accumulate(b - a for a, b, _ in seq)], dtype=torch.int64)
        whole = seq.batch == 1 and (0, *seq.stop) == (*seq.start, seq.length)
        held = [torch.arange(0), *(torch.arange(a, b) for a, b, _ in seq)]
        seq.memo[key] = ends.to(device), None if whole else torch.cat(held).to(device)
    return seq.memo[key]


def _packed(x: Tensor, tokens: Tensor | None) -> Tensor:
    """[B, T, …] → [1, N, …], the tokens that rows hold."""
    return x if tokens is None else x.flatten(0, 1)[tokens][None]


def _unpacked(y: Tensor, seq: Rows, tokens: Tensor | None) -> Tensor:
    """[1, N, …] → [B, T, …], zero where no row owns the token."""
    if tokens is None:
        return y
    grid = y.new_zeros(seq.batch * seq.length, *y.shape[2:])
    return grid.index_put((tokens,), y[0]).unflatten(0, (seq.batch, seq.length))


def _results(
    entry: Provided, made: Any, given: Sequence[Tensor], states: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and states of a call, each of the shape it must have."""
    rule, sizes, lead = entry.rule, {}, ()
    for x, shape in zip(given, rule.operands.values(), strict=True):
        sizes |= zip(shape, x.shape[x.ndim - len(shape) :], strict=True)
        lead = lead or (tuple(x.shape[:2]) if x.ndim - len(shape) >= 2 else ())
    heads = states[0].shape[1]
    want = [(*lead, heads, *(sizes[d] for d in shape)) for shape in rule.outputs.values()]
    want += [tuple(s.shape) for s in states]
    found = made if isinstance(made, tuple) and len(made) == 2 else ()
    flat = [x for part in found for x in (part if isinstance(part, tuple | list) else (part,))]
    if [tuple(x.shape) if isinstance(x, Tensor) else None for x in flat] != want:
        names = (*rule.outputs, *rule.states)
        shown = ", ".join(f"{n} {list(shape)}" for n, shape in zip(names, want, strict=True))
        raise MismatchError(
            f"{entry.name}, provided for {rule.name}, returned something else than the rule",
            code="provided-results",
            facts=[f"the rule: {shown}", f"returned: {_described(made)}"],
            next="return (outputs, state), each a tuple where there are several",
        )
    return flat[: len(rule.outputs)], flat[len(rule.outputs) :]


def _described(made: Any) -> str:
    """`([2, 5, 4, 6], [2, 4, 8, 6])`: a result without its numbers."""
    if isinstance(made, tuple | list):
        return f"({', '.join(map(_described, made))})"
    return str(list(made.shape)) if isinstance(made, Tensor) else type(made).__name__
