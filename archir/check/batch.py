"""A batch of rows of tokens, and the ways to lay it out on a grid and to cut it into calls (D4).

What goes in and what comes out is kept row by row, so that however rows were laid out and cut, the
results are compared as those of the same rows:

    rows of 3, 0 and 1 tokens        left          right         packed
                                     a b c         a b c         a b c d
                                     · · ·         · · ·
                                     · · d         d · ·
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from archir.check.machines import Arrays, Call
from archir.check.signature import Lines, Signature
from archir.sequence import Rows

LAYOUTS = ("dense", "left", "right", "packed")
WILD = (np.nan, np.inf, -np.inf, 1e30)  # floats that may stand in padding

# For each row, where some of its tokens begin and end.
Spans = Sequence[tuple[int, int]]


def place(layout: str, lengths: Sequence[int], room: int = 0) -> Rows:
    """Where rows of these lengths lie; padded lines have `room` columns beyond the longest row."""
    if layout == "packed":
        ends = (0, *accumulate(lengths))
        return Rows.ragged(1, ends[-1], ends[:-1], ends[1:])
    width = max(lengths, default=0) + (0 if layout == "dense" else room)
    first = [width - n if layout == "left" else 0 for n in lengths]
    start = tuple(row * width + at for row, at in enumerate(first))
    stop = tuple(at + n for at, n in zip(start, lengths, strict=True))
    return Rows.ragged(len(lengths), width, start, stop)


def lay_out(parts: Sequence[np.ndarray], rows: Rows, filler: np.ndarray) -> np.ndarray:
    """The parts [n, …] of all rows on the grid [B, T, …], `filler` [B·T, …] where none lies."""
    flat = np.array(filler)
    for part, start, stop in zip(parts, rows.start, rows.stop, strict=True):
        flat[start:stop] = part
    return flat.reshape(rows.batch, rows.length, *flat.shape[1:])


def stacked(lines: Lines, name: str) -> np.ndarray:
    """What all rows have under a name: [R, …], or where the rows are of unlike length, one after
    another, [1, N, …]. Empty where a row has none."""
    parts = [np.asarray(row.get(name, np.zeros(0))) for row in lines]
    if len({part.shape for part in parts}) == 1:
        return np.stack(parts)
    return np.concatenate(parts)[None]


@dataclass(frozen=True)
class Piece:
    """One call: the tokens `spans[r]` of every row r, which lie at `rows` on its grid."""

    call: Call
    rows: Rows
    spans: Spans
    signature: Signature

    def lines(self, outputs: Arrays) -> Lines:
        """Outputs of the call by row."""
        return self._by_row({name: (x, self._owner(name)) for name, x in outputs.items()})

    def per_token(self, outputs: Arrays) -> dict[str, np.ndarray]:
        """Those outputs of the call that are [B, T, …]."""
        return {name: x for name, x in outputs.items() if self._owner(name) == "tokens"}

    def tokens(self, inputs: Arrays) -> Lines:
        """Arrays [B, T, …] by row, without padding."""
        return self._by_row({name: (x, "tokens") for name, x in inputs.items()})

    def padding(self, x: np.ndarray) -> np.ndarray:
        """What an array [B, T, …] holds where no row has a token, [n, …]."""
        owned = np.zeros(self.rows.batch * self.rows.length, bool)
        for start, stop, _ in self.rows:
            owned[start:stop] = True
        return x.reshape(-1, *x.shape[2:])[~owned]

    def cotangent(self, lines: Lines, last: bool) -> dict[str, np.ndarray]:
        """A cotangent of every row as one of the call's outputs. What is not per token counts in
        the `last` piece only; what belongs to no row, once for every row."""
        made: dict[str, np.ndarray] = {}
        for name in lines[0]:
            owner, parts = self._owner(name), [row[name] for row in lines]
            if owner == "tokens":
                cut = [x[a:b] for x, (a, b) in zip(parts, self.spans, strict=True)]
                shape = (self.rows.batch * self.rows.length, *parts[0].shape[1:])
                made[name] = lay_out(cut, self.rows, np.zeros(shape))
            elif last:
                made[name] = np.stack(parts) if owner == "rows" else np.sum(parts, axis=0)
        return made

    def _owner(self, name: str) -> str:
        heads = {"last": "rows", "loss": ""}
        return heads.get(self.call.head, self.signature.outputs.get(name, ""))

    def _by_row(self, arrays: Mapping[str, tuple[np.ndarray, str]]) -> Lines:
        def of(row: int, x: np.ndarray, owner: str) -> np.ndarray:
            if owner == "tokens":
                return x.reshape(-1, *x.shape[2:])[self.rows.start[row] : self.rows.stop[row]]
            return x[row] if owner == "rows" else x

        count = range(len(self.rows))
        return [{name: of(row, *found) for name, found in arrays.items()} for row in count]


@dataclass(frozen=True)
class Batch:
    """Rows of tokens, however they will be laid out.

    lines: inputs by row, [n, …] per token, and `targets`.  shared: inputs that belong to no row.
    lengths: tokens of each row.
    """

    signature: Signature
    lines: Lines
    shared: Arrays
    lengths: tuple[int, ...]

    @property
    def uniform(self) -> bool:
        """Whether all rows are equally long: only then can they be dense."""
        return len(set(self.lengths)) == 1

    @property
    def targets(self) -> np.ndarray:
        """The targets of all rows, [N]."""
        return np.concatenate([line["targets"] for line in self.lines])

    def take(self, rows: Sequence[int]) -> Batch:
        """Some rows, in this order."""
        lengths = tuple(self.lengths[r] for r in rows)
        return replace(self, lines=[self.lines[r] for r in rows], lengths=lengths)

    def alone(self) -> list[Batch]:
        """A batch of each row."""
        return [self.take([row]) for row in range(len(self.lengths))]

    def moved(self, name: str, by: np.ndarray) -> Batch:
        """The same rows with something, [R, …], added to one of their inputs."""
        pairs = zip(self.lines, by, strict=True)
        return replace(self, lines=[{**line, name: line[name] + x} for line, x in pairs])

    def changed(self, first: Sequence[int], seed: int) -> Batch:
        """The same rows with other inputs from their token `first[r]` on."""
        rng = np.random.default_rng(seed)
        pool = self._pool()

        def change(name: str, x: np.ndarray, at: int) -> np.ndarray:
            if not self._per_token(name):
                return x
            drawn = pool[name][rng.integers(0, len(pool[name]), len(x) - at)]
            return np.concatenate([x[:at], drawn])

        lines = [
            {name: change(name, x, at) for name, x in line.items()}
            for line, at in zip(self.lines, first, strict=True)
        ]
        return replace(self, lines=lines)

    def piece(
        self,
        layout: str,
        spans: Spans | None = None,
        *,
        phase: str = "full",
        head: str = "all",
        room: int = 0,
        filler: int = 0,
        seed: int | None = None,
    ) -> Piece:
        """Some tokens of every row, all unless given, as one call.

        room: columns of padding beyond the longest row.  filler: seed of what stands in padding:
        what stands at some tokens, so that it is valid; of floats, unless it is 0, WILD numbers.
        seed: of dropout, for a call in training.
        """
        spans = [(0, n) for n in self.lengths] if spans is None else spans
        rows = place(layout, [b - a for a, b in spans], room)
        rng, pool = np.random.default_rng(filler), self._pool()

        def grid(name: str) -> np.ndarray:
            parts = [line[name] for line in self.lines]
            if not self._per_token(name):
                return np.stack(parts)
            cut = [x[a:b] for x, (a, b) in zip(parts, spans, strict=True)]
            chosen = rng.integers(0, max(len(pool[name]), 1), rows.batch * rows.length)
            content = pool[name][chosen]
            if filler and np.issubdtype(content.dtype, np.floating):
                content = rng.choice(WILD, content.shape)
            return lay_out(cut, rows, content)

        call = Call(
            inputs=tuple(
                self.shared[name] if name in self.shared else grid(name)
                for name in self.signature.inputs
            ),
            rows=(rows.start, rows.stop) if layout == "packed" or not rows.full else None,
            phase=phase,
            head=head,
            targets=grid("targets") if head == "loss" else None,
            seed=seed,
        )
        return Piece(call, rows, spans, self.signature)

    def pieces(
        self, layout: str, cuts: Sequence[Sequence[int]], phase: str | None = None
    ) -> list[Piece]:
        """The tokens of every row r cut at `cuts[r]`, as calls one after another.

        phase: of each piece; unless given, decode where no row has more than one token.
        """
        found = []
        for spans in zip(*(pairwise(ends) for ends in cuts), strict=True):
            single = max(b - a for a, b in spans) == 1
            chosen = phase or ("decode" if single else "prefill")
            found.append(self.piece(layout, spans, phase=chosen))
        return found

    def _per_token(self, name: str) -> bool:
        return self.signature.inputs.get(name, "tokens") == "tokens"

    def _pool(self) -> dict[str, np.ndarray]:
        """For each input per token, the tokens of all rows."""
        return {
            name: np.concatenate([line[name] for line in self.lines])
            for name in self.lines[0]
            if self._per_token(name)
        }


def joined(pieces: Sequence[Piece], outputs: Sequence[Arrays]) -> Lines:
    """Outputs of the calls by row: tokens one after another; of anything else, the last."""
    parts = [piece.lines(made) for piece, made in zip(pieces, outputs, strict=True)]
    per_token = {k for k, owner in pieces[-1].signature.outputs.items() if owner == "tokens"}
    whole = per_token if pieces[-1].call.head == "all" else set()
    return [
        {k: np.concatenate([x[k] for x in row]) if k in whole else row[-1][k] for k in row[-1]}
        for row in zip(*parts, strict=True)
    ]
