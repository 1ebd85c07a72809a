"""The run-time value of type `sequence`: which tokens belong to which row (D4).

Lengths stay on the host. The same object serves the interpreter and every backend; a backend may
memoise what it derives (positions, masks) in `memo`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Rows:
    """Per row `[start, stop)` on the flattened token axis of a [batch, length] grid, and `past`,
    the number of tokens the row's state has already seen."""

    batch: int
    length: int
    start: tuple[int, ...]
    stop: tuple[int, ...]
    past: tuple[int, ...]
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def dense(batch: int, length: int, past: tuple[int, ...] | None = None) -> Rows:
        """Every row full: row b holds tokens b·length … (b+1)·length − 1."""
        starts = tuple(b * length for b in range(batch))
        stops = tuple(s + length for s in starts)
        return Rows(batch, length, starts, stops, past or (0,) * batch)

    @staticmethod
    def ragged(
        batch: int,
        length: int,
        start: tuple[int, ...],
        stop: tuple[int, ...],
        past: tuple[int, ...] | None = None,
    ) -> Rows:
        """Rows anywhere on the grid, in order: padded on either side, or packed in one line."""
        return Rows(batch, length, start, stop, past or (0,) * len(start))

    def __len__(self) -> int:
        return len(self.start)

    def __iter__(self) -> Any:
        return iter(zip(self.start, self.stop, self.past, strict=True))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens seen by each row after this call."""
        return tuple(p + b - a for a, b, p in self)

    @property
    def full(self) -> bool:
        """Every row fills its line of the grid: there is no padding and nothing is packed."""
        if "full" not in self.memo:
            lines = len(self) == self.batch and all(
                (a, b) == (row * self.length, (row + 1) * self.length)
                for row, (a, b, _) in enumerate(self)
            )
            self.memo["full"] = lines
        return self.memo["full"]

    @property
    def uniform(self) -> bool:
        """All rows full and equally long in the past: no mask is needed anywhere."""
        return self.full and len(set(self.past)) <= 1

    @property
    def longest(self) -> int:
        """The largest number of new tokens of a row."""
        return max((b - a for a, b, _ in self), default=0)

    def grid(self, chunk: int | str = 0) -> tuple[np.ndarray, np.ndarray]:
        """Flat token index and validity of step j of row r, [longest, rows] each; with chunks of C
        tokens [⌈longest / C⌉, rows, C], with "whole" rows [1, rows, longest].

        Slots past a row's end repeat its last token, so that no invented value is ever computed
        on (D6); a row without tokens repeats a token of another row.
        """
        key = ("grid", chunk)
        if key not in self.memo:
            size = max(self.longest, 1) if chunk == "whole" else max(int(chunk), 1)
            count = 1 if chunk == "whole" else -(-self.longest // size)
            step = np.arange(count * size)[:, None]
            start, stop = np.array([*self.start, 0])[:-1], np.array([*self.stop, 0])[:-1]
            valid = step < (stop - start)[None, :]
            index = np.minimum(start + step, np.maximum(stop - 1, 0))
            some = next((a for a, b, _ in self if b > a), 0)
            found = np.where(stop > start, index, some), valid
            if chunk:
                found = tuple(np.moveaxis(x.reshape(count, size, len(self)), 1, 2) for x in found)
            self.memo[key] = found
        return self.memo[key]

    def single(self, row: int) -> Rows:
        """One row alone, as a dense batch of its own."""
        key = ("single", row)
        if key not in self.memo:
            a, b, past = self.start[row], self.stop[row], self.past[row]
            self.memo[key] = Rows.dense(1, b - a, (past,))
        return self.memo[key]

    def positions(self) -> np.ndarray:
        """Absolute position of every token, [batch, length]; 0 where no row owns the token."""
        if "positions" not in self.memo:
            flat = np.zeros(self.batch * self.length, np.int64)
            for start, stop, past in self:
                flat[start:stop] = np.arange(past, past + stop - start)
            self.memo["positions"] = flat.reshape(self.batch, self.length)
        return self.memo["positions"]
