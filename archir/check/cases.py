"""What cells and laws share: a spec in a dtype, rows of tokens, a machine, and its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from archir import types
from archir.check.batch import Batch, Piece, joined, stacked
from archir.check.machines import Arrays, Gradients, Interpreter, Machine
from archir.check.signature import Lines, Signature
from archir.check.tolerance import Distance, distance, exact
from archir.compile import Request
from archir.inputs import random_inputs, random_weights
from archir.interp import to_dtype
from archir.ir import fields

Pair = tuple[Lines, Lines]
SEED = 11  # of dropout


@dataclass(frozen=True)
class Study:
    """A spec in a dtype: what all its cases share.

    weights: random, rounded to the dtype they are kept in.  interpreters: the reference, which runs
    in float64, and the anchor, which runs in the dtype.
    """

    request: Request
    signature: Signature
    weights: dict[str, np.ndarray]
    interpreters: tuple[Interpreter, Interpreter]
    seed: int

    @staticmethod
    def of(request: Request, seed: int) -> Study:
        """With weights drawn from the seed."""
        module, dtype = request.module, request.options.dtype
        drawn, short = random_weights(module, seed), types.short_dtype(dtype)
        kept = {
            path: types.resolve("F", short) if field.attrs.get("dtype") else short
            for kind in ("weight", "buffer")
            for path, field in fields(module, kind).items()
        }
        weights = {path: to_dtype(x, kept[path]) for path, x in drawn.items()}
        reference = Interpreter(module, request.options, "float64", "precision")
        anchor = Interpreter(module, request.options, stage="precision")
        for interpreter in (reference, anchor):
            interpreter.load(weights)
        return Study(request, Signature(module), weights, (reference, anchor), seed)


class Case:
    """Rows of tokens of a study, and what the interpreter makes of them.

    `outputs`, `states`, `last` and `loss` come in pairs, of the reference and of the anchor. Rows
    of unlike length are interpreted one by one, each dense and alone.
    """

    def __init__(self, study: Study, length: int, ragged: bool) -> None:
        self.study, self.length = study, length
        self.signature, self.dtype = study.signature, study.request.options.dtype
        self.batch = _draw(study, _lengths(length, ragged))

    @cached_property
    def outputs(self) -> Pair:
        """Of the phase without state, so that no error in state hides in them."""
        return self._both(lambda machine, batch: _whole(machine, batch)[0])

    @cached_property
    def states(self) -> Pair:
        """After all tokens."""
        of = self.signature.by_row
        return self._both(lambda machine, batch: of(_whole(machine, batch, phase="prefill")[1]))

    @cached_property
    def last(self) -> Pair:
        """Scores of each row's last token."""
        return self._both(lambda machine, batch: _whole(machine, batch, head="last")[0])

    @cached_property
    def loss(self) -> Pair:
        """The mean over the targets of all rows, as of a single row."""
        counts = [int(np.sum(batch.targets != -100)) for batch in self._alone]
        pair = self._both(lambda machine, batch: _whole(machine, batch, head="loss")[0][:1])
        want, anchor = (np.dot(counts, [row["loss"] for row in means]) for means in pair)
        total = max(1, sum(counts))
        return [{"loss": np.asarray(want / total)}], [{"loss": np.asarray(anchor / total)}]

    @cached_property
    def training(self) -> Pair:
        """With dropout drawn from `SEED`; which element is dropped depends on the grid, so only
        dense rows have it."""
        return self._both(lambda machine, batch: _whole(machine, batch, seed=SEED)[0])

    @property
    def _alone(self) -> list[Batch]:
        return [self.batch] if self.batch.uniform else self.batch.alone()

    def _both(self, found: Callable[[Machine, Batch], Lines]) -> Pair:
        reference, anchor = (
            [row for batch in self._alone for row in found(machine, batch)]
            for machine in self.study.interpreters
        )
        return reference, anchor


def _whole(machine: Machine, batch: Batch, **how: Any) -> tuple[Lines, Arrays]:
    piece = batch.piece("dense", **how)
    (outputs,), state = machine.run([piece.call])
    return piece.lines(outputs), state


def _draw(study: Study, lengths: tuple[int, ...]) -> Batch:
    """Random rows of these lengths, rounded to the dtype."""
    signature, longest = study.signature, max(lengths)
    sizes = {"T": longest, "B": len(lengths)}
    made, _, _ = random_inputs(study.request.module, study.seed + longest, sizes)
    short = types.short_dtype(study.request.options.dtype)
    made = {
        name: to_dtype(x, short) if np.issubdtype(x.dtype, np.floating) else x
        for name, x in made.items()
    }
    owners = dict(signature.inputs)
    if signature.scores:
        rng = np.random.default_rng(study.seed + 5)
        targets = rng.integers(0, signature.scores, (len(lengths), longest))
        made["targets"] = np.where(rng.random(targets.shape) < 0.2, -100, targets)
        owners["targets"] = "tokens"
    lines = [
        {
            name: made[name][row, :n] if owner == "tokens" else made[name][row]
            for name, owner in owners.items()
            if owner
        }
        for row, n in enumerate(lengths)
    ]
    shared = {name: made[name] for name, owner in owners.items() if not owner}
    return Batch(signature, lines, shared, lengths)


def _lengths(length: int, ragged: bool) -> tuple[int, ...]:
    """Tokens of each row; in all about 16 at least, as of a few the anchor's error is luck."""
    if not ragged:
        return (length,) * max(2, 16 // max(length, 1))
    rows = (length - length // 3, 0, length, 1, length // 2)
    return rows * max(1, -(-16 // sum(rows)))


@dataclass(frozen=True)
class Slopes:
    """Gradients of weights; of inputs per token, and of what is looked up at tokens, by row; and of
    both where no row has a token, in one line."""

    weights: Arrays
    inputs: Lines
    padding: np.ndarray

    @staticmethod
    def of(pieces: Sequence[Piece], found: Gradients) -> Slopes:
        """What a machine found for these calls."""
        owners = pieces[0].signature.inputs
        each = [
            {name: x for name, x in made.items() if owners.get(name, "tokens") == "tokens"}
            for made in found.inputs
        ]
        parts = (piece.tokens(x) for piece, x in zip(pieces, each, strict=True))
        rows = zip(*parts, strict=True)
        inputs = [{k: np.concatenate([part[k] for part in row]) for k in row[0]} for row in rows]
        return Slopes(found.weights, inputs, _at_padding(pieces, each))

    def near(self, want: Slopes, label: str) -> Iterator[Distance]:
        """From others, in float64. A gradient is one vector, so 1e-12 is of its largest number,
        whichever weight that belongs to."""
        yield self._none(label)
        scale = max((float(np.max(np.abs(x), initial=0)) for x in want.weights.values()), default=0)
        for name, x in want.weights.items():
            error = float(np.max(np.abs(self.weights[name] - x), initial=0))
            yield Distance(error, 1e-12 * scale, f"{label}d/d {name}")
        yield near(self.inputs, want.inputs, f"{label}d/d ")

    def same(self, want: Slopes, label: str) -> Iterator[Distance]:
        """From others that must be equal."""
        yield self._none(label)
        yield same([dict(self.weights)], [dict(want.weights)], f"{label}d/d ")
        yield same(self.inputs, want.inputs, f"{label}d/d ")

    def _none(self, label: str) -> Distance:
        return exact(self.padding, np.zeros_like(self.padding), f"{label}d/d padding")


@dataclass(frozen=True)
class Result:
    """What calls gave, by row: outputs, the state after them, and gradients where asked for.

    padding: outputs where no row has a token, in one line.
    """

    outputs: Lines
    state: Lines
    slopes: Slopes | None
    padding: np.ndarray

    @staticmethod
    def of_rows(parts: Sequence[Result]) -> Result:
        """Of rows that ran apart, as of one batch; a weight's gradient is the sum of theirs."""
        slopes, apart = None, [x.slopes for x in parts if x.slopes]
        if apart:
            slopes = Slopes(
                weights={
                    k: np.sum([x.weights[k] for x in apart], axis=0) for k in apart[0].weights
                },
                inputs=[row for x in apart for row in x.inputs],
                padding=np.concatenate([x.padding for x in apart]),
            )
        return Result(
            outputs=[row for x in parts for row in x.outputs],
            state=[row for x in parts for row in x.state],
            slopes=slopes,
            padding=np.concatenate([x.padding for x in parts]),
        )

    def take(self, rows: Sequence[int]) -> Result:
        """Outputs and state of some rows."""
        state = [self.state[r] for r in rows] if self.state else []
        return replace(self, outputs=[self.outputs[r] for r in rows], state=state, slopes=None)

    def finite(self, label: str) -> Distance:
        """Outputs at padding are finite; nothing more is said of them (D14)."""
        found = np.isfinite(self.padding)
        return exact(found, np.ones_like(found), f"{label}outputs at padding")

    def near(self, want: Result, label: str) -> Iterator[Distance]:
        """From another in float64, in all that both have."""
        yield near(self.outputs, want.outputs, label)
        yield near(self.state, want.state, label)
        if self.slopes and want.slopes:
            yield from self.slopes.near(want.slopes, label)

    def same(self, want: Result, label: str) -> Iterator[Distance]:
        """From another that must be equal, in all that both have."""
        yield same(self.outputs, want.outputs, label)
        yield same(self.state, want.state, label)
        if self.slopes and want.slopes:
            yield from self.slopes.same(want.slopes, label)


@dataclass(frozen=True)
class Bench:
    """A machine, and rows laid out in one way: where a cell or a law is measured."""

    case: Case
    machine: Machine
    layout: str
    batch: Batch

    @property
    def in_float64(self) -> bool:
        """Whether the dtype is float64, so that a machine can be held against itself."""
        return types.short_dtype(self.case.dtype) == "f64"

    def piece(self, **how: Any) -> Piece:
        """All tokens as one call; see `Batch.piece`."""
        return self.batch.piece(self.layout, **how)

    def cotangent(self, outputs: Lines) -> Lines:
        """Random numbers in the shapes of all outputs that have gradients."""
        rng = np.random.default_rng(self.case.study.seed + 17)
        smooth = self.case.signature.smooth | {"loss"}
        return [
            {k: rng.standard_normal(x.shape) for k, x in row.items() if k in smooth}
            for row in outputs
        ]

    def run(self, pieces: Sequence[Piece], cotangent: Lines | None = None) -> Result:
        """Runs the calls; with a cotangent and a machine that differentiates, back as well."""
        calls, by_row = [piece.call for piece in pieces], self.case.signature.by_row
        outputs, state = self.machine.run(calls)
        slopes = None
        if cotangent is not None and self.machine.differentiates:
            given = [piece.cotangent(cotangent, last=piece is pieces[-1]) for piece in pieces]
            slopes = Slopes.of(pieces, self.machine.gradients(calls, given))
        return Result(
            outputs=joined(pieces, outputs),
            state=by_row(state) if state else [],
            slopes=slopes,
            padding=_at_padding(
                pieces, [piece.per_token(x) for piece, x in zip(pieces, outputs, strict=True)]
            ),
        )


def _at_padding(pieces: Sequence[Piece], arrays: Sequence[Arrays]) -> np.ndarray:
    """What arrays [B, T, …] of every call hold where no row has a token, in one line."""
    pairs = zip(pieces, arrays, strict=True)
    parts = [piece.padding(x).ravel() for piece, found in pairs for x in found.values()]
    return np.concatenate([np.zeros(0), *parts])


def compare(have: Lines, pair: Pair, dtype: str, label: str = "") -> Distance:
    """The result of any row that lies farthest from the reference, by what is allowed."""
    want, anchor = pair
    return worst(
        distance(stacked(have, k), stacked(want, k), stacked(anchor, k), dtype, label + k)
        for k in _names(want)
    )


def near(have: Lines, want: Lines, label: str) -> Distance:
    """The result of any row that lies farthest from another of the machine, in float64."""
    return compare(have, (want, want), "float64", label)


def same(have: Lines, want: Lines, label: str) -> Distance:
    """The result of any row that differs most from another, where none may differ."""
    return worst(exact(stacked(have, k), stacked(want, k), label + k) for k in _names(want))


def worst(found: Iterable[Distance]) -> Distance:
    """The distance that is the largest share of what is allowed."""
    return max(found, key=lambda d: d.share, default=Distance(0.0, 0.0, ""))


def _names(lines: Lines) -> Iterable[str]:
    return lines[0] if lines else ()
