"""How far a result in some dtype may lie from the float64 reference (D16).

The anchor is the interpreter run in that dtype. Two bounds hold, overall and per 64-token chunk:

    RMS(error)  ≤  max(2 · RMS(anchor error), 8 u · RMS(ref))          as accurate as the anchor
    max|error|  ≤  max(4 · max|anchor error|, 8 u · max|ref|)          and no element far off

u is 2⁻²⁴ for float32 and 2⁻⁸ for bfloat16. The maximum is allowed 4, not 2: rounding errors have
heavy tails, and two equally accurate programs were seen 2.09 apart in their maxima at 1.3 in RMS.
In float64: max|error| ≤ 1e-12 · max|ref|. Integers, and what a law says is exact, may not differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from archir import types

UNIT = {"f32": 2.0**-24, "bf16": 2.0**-8}
CHUNK = 64


@dataclass(frozen=True)
class Distance:
    """The worst of the bounds of a comparison: what was found, what was allowed, where."""

    error: float
    allowed: float
    where: str

    @property
    def share(self) -> float:
        """error / allowed; above 1 is too far."""
        if np.isnan(self.error):
            return np.inf
        if self.allowed > 0:
            return self.error / self.allowed
        return np.inf if self.error > 0 else 0.0

    @property
    def ok(self) -> bool:
        return self.share <= 1.0


def distance(
    have: np.ndarray, want: np.ndarray, anchor: np.ndarray, dtype: str, name: str = ""
) -> Distance:
    """How far `have` lies from the reference `want`; `anchor` is the interpreter's in the dtype."""
    have, anchor = np.asarray(have, np.float64), np.asarray(anchor, np.float64)
    if have.shape != want.shape or not want.size or not np.issubdtype(want.dtype, np.floating):
        return exact(have, want, name)
    error, noise = np.abs(have - want), anchor - want
    found = []
    for label, part in _parts(want, name):
        if types.short_dtype(dtype) == "f64":
            found.append(Distance(_max(error[part]), 1e-12 * _max(want), label))
            continue
        u = UNIT[types.short_dtype(dtype)]
        found.append(
            Distance(_rms(error[part]), max(2 * _rms(noise[part]), 8 * u * _rms(want[part])), label)
        )
        found.append(
            Distance(_max(error[part]), max(4 * _max(noise[part]), 8 * u * _max(want[part])), label)
        )
    return max(found, key=lambda d: d.share)


def exact(have: np.ndarray, want: np.ndarray, name: str = "") -> Distance:
    """How far two results lie apart that must agree bit for bit (zeros of both signs are equal)."""
    if have.shape != want.shape:
        return Distance(np.inf, 0.0, f"{name} has shape {list(have.shape)}, not {list(want.shape)}")
    error = np.abs(np.asarray(have, np.float64) - np.asarray(want, np.float64))
    return Distance(float(np.max(error, initial=0)), 0.0, name)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _max(x: np.ndarray) -> float:
    return float(np.max(np.abs(x)))


def _parts(want: np.ndarray, name: str) -> list[tuple[str, tuple[slice, ...]]]:
    """The whole, and its 64-token chunks where it has a token axis."""
    found: list[tuple[str, tuple[slice, ...]]] = [(name, ())]
    if want.ndim >= 2 and want.shape[1] > CHUNK:
        for start in range(0, want.shape[1], CHUNK):
            stop = min(start + CHUNK, want.shape[1])
            found.append((f"{name}[:, {start}:{stop}]", (slice(None), slice(start, stop))))
    return found
