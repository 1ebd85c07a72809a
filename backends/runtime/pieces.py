"""A prompt read in pieces, with a snapshot after each: what a server needs to cache prefixes.

Piece k holds the new tokens k·n … (k + 1)·n − 1 of every row, one row after another: a slice [B, n]
where rows are dense, one packed line [1, ≤ R·n] where they are ragged, so no piece holds padding.
Read line by line both name the same tokens in the same order, and go back in one way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import add
from typing import Any

import torch
from torch import Tensor

from archir import dims, types
from archir.ir import Function, Value
from archir.philox import fold
from archir.sequence import Rows
from backends.runtime.layout import Bounds
from backends.runtime.state import State


@dataclass(frozen=True)
class Piece:
    """Up to n tokens of every row; a row that has ended has none.

    places: of the tokens on the flat grid of the prompt.  bounds: (start, stop) of every row on
    the line of these tokens.
    """

    places: Tensor
    bounds: Bounds

    @property
    def reached(self) -> Tensor:
        """Whether a row has tokens here, [R]."""
        found = [stop > start for start, stop in zip(*self.bounds, strict=True)]
        return torch.tensor(found, dtype=torch.bool, device=self.places.device)


def read(
    model: Any,
    tokens: Tensor,
    rows: Bounds | None,
    n: int,
    given: State | None,
    head: str,
    seed: int | None = None,
) -> tuple[Any, State]:
    """What `model.prefill` gives for tokens [B, T] after a state, with a snapshot of each piece.

    rows: (start, stop) of every row on the grid, None where they are dense.  seed: of dropout, from
    which each piece makes its own.
    """
    grid = (tokens.shape[0], tokens.shape[1])
    entry = model.lowered("prefill", head, "dense" if rows is None else "ragged").entry
    lines = Rows.dense(*grid)
    start, stop = rows or (lines.start, lines.stop)
    new = [b - a for a, b in zip(start, stop, strict=True)]
    state: State = model.empty_state(len(new)) if given is None else given
    state.check(model)
    if len(state.lengths) == len(new):  # the first piece refuses a state of more or fewer rows
        model._check_context(new, state.lengths)
        state = with_room(state, max(map(add, new, state.lengths), default=0))
    made, whole, snapshots = None, [None] * len(entry.outputs), []
    for index, piece in enumerate(cut((start, stop), n, tokens.device)):
        bounds, part = None, tokens[:, index * n : (index + 1) * n]
        if rows is not None:
            bounds, part = piece.bounds, tokens.flatten(0, 1)[piece.places][None]
        own = None if seed is None else fold(seed, f"piece {index}")[0]
        made, state = model(part, phase="prefill", head=head, state=state, rows=bounds, seed=own)
        snapshots.append(state.snapshot())
        whole = [
            joined(so_far, x, piece, grid, _axes(value, entry))
            for so_far, x, value in zip(whole, _listed(made), entry.outputs, strict=True)
        ]
    state._snapshots = tuple(snapshots)
    return _like(made, whole), state


def cut(rows: Bounds, n: int, device: torch.device) -> Iterator[Piece]:
    """The pieces of a prompt, ⌈longest row / n⌉ of them; an empty one where no row has tokens."""
    spans = [range(start, stop) for start, stop in zip(*rows, strict=True)]
    longest = max(map(len, spans), default=0)
    for first in range(0, max(longest, 1), n):
        parts = [span[first : first + n] for span in spans]
        ends = [0, *accumulate(map(len, parts))]
        places = torch.tensor([*chain(*parts)], dtype=torch.int64, device=device)
        yield Piece(places, (tuple(ends[:-1]), tuple(ends[1:])))


def joined(
    so_far: Tensor | None, part: Tensor, piece: Piece, grid: tuple[int, int], axes: str
) -> Tensor:
    """One output of the pieces so far and of one more.

    An output per token is laid out on the grid, zeros in its padding; one per row is from the last
    piece that the row reaches; any other is the same for every piece.
    """
    if axes == "tokens":
        laid_out = part.new_zeros(*grid, *part.shape[2:]) if so_far is None else so_far
        # in place: only this function has seen the grid
        laid_out.flatten(0, 1).index_put_((piece.places,), part.flatten(0, 1))
        return laid_out
    if axes == "rows" and so_far is not None:
        return torch.where(piece.reached[:, None, None], part, so_far)
    return part


def with_room(state: State, longest: int) -> State:
    """The same state, told that its rows will hold up to `longest` tokens. Consumes the handle.

    So the pieces move no growing entry that a single one would have left where it is.
    """

    def told(path: str, entry: Any) -> Any:
        if not state._schema.growing(path):
            return entry
        if not entry.length:
            rows, _, *rest = entry.storage.shape
            empty = entry.storage.new_zeros(rows, longest, *rest)
            entry = entry.of(empty, entry.lengths, entry.reserve)
        entry.reserve = max(entry.reserve, longest)
        return entry

    return state._next(told)


def _axes(value: Value, entry: Function) -> str:
    """What the first axes of an output are: "tokens", [B, T, …], "rows", [R, 1, …], or neither."""
    tokens, found = entry.inputs[0].type, value.type
    assert isinstance(tokens, types.Tensor) and isinstance(found, types.Tensor)
    if found.shape[:2] == tokens.shape[:2]:
        return "tokens"
    return "rows" if found.shape and dims.bare(found.shape[0]) == "R" else ""


def _listed(made: Any) -> Sequence[Tensor]:
    """The outputs of a model in order: it gives one, a tuple, or a dict by name."""
    if isinstance(made, Tensor):
        return [made]
    return [*made.values()] if isinstance(made, dict) else made


def _like(made: Any, outputs: Sequence[Any]) -> Any:
    """The inverse of `_listed`: outputs in the form of `made`."""
    if isinstance(made, Tensor):
        return outputs[0]
    return dict(zip(made, outputs, strict=True)) if isinstance(made, dict) else tuple(outputs)
