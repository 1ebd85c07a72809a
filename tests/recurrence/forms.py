"""A rule in a form and a chunk size, run by the interpreter or by torch, and how far that lies from
the literal loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from archir.check.batch import lay_out, place
from archir.check.placed import Placed
from archir.interp import empty_state, interpret, to_dtype
from archir.ir import Module
from archir.pipeline import lower
from archir.recurrence.literal import Loop
from archir.sequence import Rows
from archir.types import short_dtype

Arrays = Sequence[np.ndarray]
BOUND = 1e-12  # of the running maximum of |S| and |o| (D16)


@contextmanager
def chunks_of(size: int) -> Iterator[None]:
    """Chunks of so many tokens in what `ar.op` makes."""
    from archir.passes import choose_form

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_form, "CHUNK", size)
        yield


@dataclass(frozen=True)
class Ran:
    """Outputs [B, T, H, …], and final states [R, H, …], each in the rule's order."""

    outputs: tuple[np.ndarray, ...]
    states: tuple[np.ndarray, ...]


class Form:
    """A rule on operands of given shapes in a form, in the interpreter."""

    def __init__(self, placed: Placed, form: str, chunk: int = 16, dtype: str = "float64") -> None:
        self.placed, self.form, self.chunk, self.dtype = placed, form, chunk, dtype
        self._modules: dict[str, Module] = {}

    def run(
        self,
        operands: Mapping[str, np.ndarray],
        states: Arrays | None = None,
        rows: Rows | None = None,
    ) -> Ran:
        """What it makes of operands by name, of rows on the grid (dense unless given), which have
        seen what the states say (zeros unless given)."""
        rule, names = self.placed.rule, dict(zip(self.placed.rule.operands, self.placed.names))
        module = self._module("dense" if rows is None else "ragged")
        given = {names[name]: x for name, x in operands.items()}
        inputs: list[Any] = [given[name] for name in self.placed.signature.inputs]
        inputs += [] if rows is None else [np.array(rows.start), np.array(rows.stop)]
        tokens = next(x for name, x in operands.items() if "T" in self.placed.axes[name])
        count = tokens.shape[0] if rows is None else len(rows)
        before = empty_state(module, count, short_dtype(self.dtype))
        paths = [f"state_update_0.{v.name}" for v in rule.function.inputs[: len(rule.states)]]
        if states is not None:
            wide = to_dtype(np.zeros(0), short_dtype(self.dtype)).dtype
            before |= {path: np.asarray(s, wide) for path, s in zip(paths, states, strict=True)}
        outputs, after = interpret(module, inputs, {}, before, dtype=self.dtype)
        return Ran(tuple(outputs.values()), tuple(after[path] for path in paths))

    def _module(self, layout: str) -> Module:
        if layout not in self._modules:
            self._modules[layout] = lower(
                self.placed.module, "prefill", layout, dtype=self.dtype, form=self.form,
                chunk=self.chunk,
            )  # fmt: skip
        return self._modules[layout]


def start(placed: Placed, rows: int, rng: np.random.Generator) -> list[np.ndarray]:
    """States of rows that have seen tokens, [R, H, …] each."""
    sizes: dict[str, int] = {}
    heads = 1
    shapes = placed.shapes(1, 1)
    for name, dims in placed.rule.operands.items():
        shape = shapes[name]
        sizes |= zip(dims, shape[len(shape) - len(dims) :], strict=True)
        if "H" in placed.axes[name]:
            heads = max(heads, shape[len(placed.axes[name]) - 1])
    declared = placed.rule.function.inputs[: len(placed.rule.states)]
    return [
        rng.standard_normal((rows, heads, *(sizes[str(d)] for d in v.type.shape)))  # type: ignore[union-attr]
        for v in declared
    ]


def laid_out(layout: str, lengths: Sequence[int]) -> Rows | None:
    """Rows of these lengths on a grid, with a column of padding to spare; None where dense."""
    return None if layout == "dense" else place(layout, lengths, room=1)


def difference(have: Ran, want: Loop, rows: Rows | None = None) -> float:
    """The largest difference as a part of the running maximum of |S| and |o|; infinite where
    something is no number. What stands in padding is not compared."""
    batch, length, heads = want.largest.shape
    rows = rows or Rows.dense(batch, length)
    largest = want.largest.reshape(batch * length, heads)
    worst = 0.0
    for row, (first, stop, _) in enumerate(rows):
        for x, y in zip(have.outputs, want.outputs, strict=True):
            x, y = (np.reshape(z, (batch * length, heads, -1))[first:stop] for z in (x, y))
            worst = max(worst, _share(x, y, largest[first:stop, :, None]))
        for x, y in zip(have.states, want.states, strict=True):
            last = largest[stop - 1] if stop > first else np.max(np.abs(y), initial=0)
            last = np.broadcast_to(last, heads)[:, None]
            worst = max(worst, _share(x[row].reshape(heads, -1), y[row].reshape(heads, -1), last))
    return worst


def _share(have: np.ndarray, want: np.ndarray, largest: np.ndarray) -> float:
    error = np.abs(np.asarray(have, np.float64) - want)
    with np.errstate(all="ignore"):
        share = np.where(error == 0, 0.0, error / largest)
    return float(np.max(np.where(np.isnan(share), np.inf, share), initial=0))


def cut(placed: Placed, operands: Mapping[str, np.ndarray], at: slice) -> dict[str, np.ndarray]:
    """Some tokens of dense operands."""
    axes = placed.axes
    return {name: x[:, at] if "T" in axes[name] else x for name, x in operands.items()}


def in_pieces(
    form: Form,
    layout: str,
    operands: Mapping[str, np.ndarray],
    states: Arrays,
    rows: Rows,
    cuts: Sequence[int],
) -> Ran:
    """The rows on a grid in two calls: row r up to its token `cuts[r]`, then the rest. In padding
    stands what is no number. Dense rows are all cut at one place."""
    placed, lengths = form.placed, [b - a for a, b, _ in rows]
    outputs: list[np.ndarray] | None = None
    for spans in ([(0, c) for c in cuts], list(zip(cuts, lengths, strict=True))):
        piece = laid_out(layout, [b - a for a, b in spans])
        on = piece or Rows.dense(len(cuts), spans[0][1] - spans[0][0])
        parts = {
            name: _moved(x, rows, on, spans) if "T" in placed.axes[name] else x
            for name, x in operands.items()
        }
        ran = form.run(parts, states, piece)
        states = ran.states
        if outputs is None:
            grid = (rows.batch, rows.length)
            outputs = [np.full((*grid, *x.shape[2:]), np.nan) for x in ran.outputs]
        for whole, x in zip(outputs, ran.outputs, strict=True):
            flat, part = whole.reshape(-1, *whole.shape[2:]), x.reshape(-1, *x.shape[2:])
            for row, (a, b) in enumerate(spans):
                at = rows.start[row]
                flat[at + a : at + b] = part[on.start[row] : on.stop[row]]
    assert outputs is not None
    return Ran(tuple(outputs), tuple(states))


def _moved(x: np.ndarray, rows: Rows, on: Rows, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Some tokens of every row of [B, T, …], as they lie on another grid."""
    flat = x.reshape(-1, *x.shape[2:])
    parts = [flat[at + a : at + b] for at, (a, b) in zip(rows.start, spans, strict=True)]
    return lay_out(parts, on, np.full((on.batch * on.length, *x.shape[2:]), np.nan))
