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

    def __len__(self) -> int:
        return len(self.start)

    def __iter__(self) -> Any:
        return iter(zip(self.start, self.stop, self.past, strict=True))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens seen by each row after this call."""
        return tuple(p + b - a for a, b, p in self)

    @property
    def uniform(self) -> bool:
        """All rows full and equally long in the past: no mask is needed anywhere."""
        full = len(self) == self.batch and all(b - a == self.length for a, b, _ in self)
        return full and len(set(self.past)) <= 1

    def positions(self) -> np.ndarray:
        """Absolute position of every token, [batch, length]; 0 where no row owns the token."""
        if "positions" not in self.memo:
            flat = np.zeros(self.batch * self.length, np.int64)
            for start, stop, past in self:
                flat[start:stop] = np.arange(past, past + stop - start)
            self.memo["positions"] = flat.reshape(self.batch, self.length)
        return self.memo["positions"]
