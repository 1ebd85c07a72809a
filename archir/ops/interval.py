"""Intervals, and the rules by which ops carry them from operands to results.

An interval holds every number of a tensor; an infinite end says that nothing is known on that
side. It speaks of real numbers: ends are computed in float64 and rounded, and an entry at which
some op divided by zero, overflowed or gave NaN is not spoken of.

It may hold more than is computed: `x − x` is within −1..1 for an x of 0..1. An interval is exact
where its tensor comes as near as one likes to every number in it. What continuous functions make of
exact intervals is exact where no unknown value stands in two of them, as each is then free to be
what it must; that is what `uses` is for.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import product
from typing import Any

import numpy as np

_LARGEST = sys.float_info.max


@dataclass(frozen=True)
class Interval:
    """The numbers from `low` to `high`, both included; shown as a rule's domain is written.

    uses: the unknown values that it was made from, each of them once, where it is exact; None where
    it may be wider than that.
    """

    low: float = -math.inf
    high: float = math.inf
    uses: frozenset[Any] | None = field(default=None, compare=False)

    @property
    def width(self) -> float:
        """high − low; 0 for a point."""
        return self.high - self.low

    def __str__(self) -> str:
        low, high = (f"{end + 0.0:.10g}" for end in (self.low, self.high))  # + 0: no −0
        if math.isinf(self.low):
            return "any number" if math.isinf(self.high) else f"<= {high}"
        if math.isinf(self.high):
            return f">= {low}"
        return f"{low}..{high}" if self.width else low

    def __or__(self, other: Interval) -> Interval:
        """The smallest interval that holds both."""
        return Interval(min(self.low, other.low), max(self.high, other.high))

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low, self.uses)

    def __abs__(self) -> Interval:
        return Interval(max(0.0, self.low, -self.high), max(-self.low, self.high), self.uses)

    def __add__(self, other: Interval) -> Interval:
        return corners(np.add, self, other)

    def __sub__(self, other: Interval) -> Interval:
        return self + -other

    def __mul__(self, other: Interval) -> Interval:
        return corners(np.multiply, self, other)

    def __truediv__(self, other: Interval) -> Interval:
        """Unknown where the divisor may be zero."""
        return UNKNOWN if other.low <= 0 <= other.high else corners(np.divide, self, other)

    def __pow__(self, other: Interval) -> Interval:
        """Unknown where the base may be negative, unless the exponent is a whole number."""
        if self.low >= 0:
            return corners(np.power, self, other)
        if other.width or other.low % 1:
            return UNKNOWN
        if other.low % 2 == 0:
            return abs(self) ** other
        return corners(np.power, self, other) if other.low > 0 or self.high < 0 else UNKNOWN


UNKNOWN = Interval()

# What a rule is: intervals of the operands (a number is a point) and the op's attributes in, those
# of the results out; one interval speaks for all results. Functions an op carries arrive as
# callables from intervals to intervals.
Bounds = Callable[..., Any]


def around(*numbers: float) -> Interval:
    """The smallest interval around what NumPy computes at ends. NaN, which it has for 0 · inf and
    inf / inf, counts as 0, as the limit of numbers that are finite; and no end is beyond them all.
    """
    known = [0.0 if math.isnan(x) else float(x) for x in numbers]
    ends = min(*known, _LARGEST), max(*known, -_LARGEST)
    return Interval(*ends, frozenset() if len(numbers) == 1 else None)


def apart(*xs: Interval) -> frozenset[Any] | None:
    """What intervals use, where all are exact and none uses what another does."""
    found: frozenset[Any] = frozenset()
    for x in xs:
        if x.uses is None or found & x.uses:
            return None
        found |= x.uses
    return found


def corners(fn: Callable[..., Any], *xs: Interval) -> Interval:
    """The image under a continuous function that is monotone in each of its variables."""
    # As floats, as NumPy's integers overflow; and without a −0, whose inverse is −inf.
    ends = ((x.low + 0.0, x.high + 0.0) for x in xs)
    with np.errstate(all="ignore"):
        image = around(*(fn(*corner) for corner in product(*ends)))
    return replace(image, uses=apart(*xs))


def monotone(fn: Callable[..., Any], start: float = -math.inf) -> Bounds:
    """The rule of a function of one variable that only rises or only falls, defined from `start`;
    what lies before it gives NaN."""

    def bounds(x: Interval) -> Interval:
        if x.high < start:
            return UNKNOWN
        return corners(fn, replace(x, low=max(x.low, start)))

    return bounds


def valley(fn: Callable[..., Any], bottom: float) -> Bounds:
    """The rule of an activation that comes from 0, falls until `bottom`, and rises from there."""

    def bounds(x: Interval) -> Interval:
        low, high = max(x.low, -1e3), max(x.high, -1e3)  # before −1000 it is 0 in float64
        ends = corners(fn, Interval(low, high))
        return replace(ends | around(fn(min(max(bottom, low), high))), uses=x.uses)

    return bounds


def within(low: float, high: float) -> Bounds:
    """The rule of an op whose results never leave an interval, and are all of it where its only
    operand may be any number."""

    def bounds(*xs: Interval, **attrs: Any) -> Interval:
        return Interval(low, high, xs[0].uses if xs == (UNKNOWN,) else None)

    return bounds


def moved(x: Interval, **attrs: Any) -> Interval:
    """The rule of an op that moves, repeats or picks the entries of its operand."""
    return x


def joined(*xs: Interval, **attrs: Any) -> Interval:
    """The rule of an op that puts operands side by side."""
    every = reduce(operator.or_, xs)
    if any(x != every or x.uses is None for x in xs):
        return every
    return replace(every, uses=frozenset().union(*(x.uses or () for x in xs)))


def summed(x: Interval) -> Interval:
    """Sums of entries, of unknown number: of what has a sign, the sign stays."""
    return Interval(0.0 if x.low >= 0 else -math.inf, 0.0 if x.high <= 0 else math.inf)
