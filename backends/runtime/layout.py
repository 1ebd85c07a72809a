"""Where the rows of a batch lie: from `lengths=` or `cu_seqlens=` to bounds on the flat token grid.

Four layouts, one mechanism (D4): dense, left- or right-padded, packed. All come out as one pair
(start, stop) per row on the grid [batch, length] read line by line; dense is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from archir.diagnostics import MismatchError

Bounds = tuple[tuple[int, ...], tuple[int, ...]]


def bounds(
    batch: int, length: int, lengths: Any = None, padding: str = "right", cu_seqlens: Any = None
) -> Bounds | None:
    """(start, stop) of every row, or None where all rows fill the grid.

    lengths: tokens of each row of the batch, the rest of its line is padding on the side `padding`.
    cu_seqlens: ends of packed sequences in one line, [0, …, length]. Both stay on the host.
    """
    if lengths is not None and cu_seqlens is not None:
        raise MismatchError(
            "lengths= says rows are padded, cu_seqlens= says they are packed",
            code="layout-both",
            next="give one of them",
        )
    if padding not in ("left", "right"):
        raise MismatchError(
            f"padding={padding!r} is no side", code="layout-padding", next="say 'left' or 'right'"
        )
    if cu_seqlens is not None:
        return _packed(batch, length, _ints(cu_seqlens, "cu_seqlens"))
    if lengths is None:
        return None
    return _padded(batch, length, _ints(lengths, "lengths"), padding)


def _ints(found: Any, name: str) -> tuple[int, ...]:
    values: Sequence[Any] = found.tolist() if hasattr(found, "tolist") else found
    if not all(isinstance(v, int) for v in values):
        raise MismatchError(
            f"{name} must be a flat list of integers, {values!r} given", code="layout-integers"
        )
    return tuple(values)


def _padded(batch: int, length: int, lengths: tuple[int, ...], padding: str) -> Bounds | None:
    if len(lengths) != batch:
        raise MismatchError(
            f"{len(lengths)} lengths for {batch} rows of tokens",
            code="layout-lengths",
            facts=[f"lengths: {list(lengths)}", f"tokens: [{batch}, {length}]"],
            next="give one length per row",
        )
    for row, n in enumerate(lengths):
        if not 0 <= n <= length:
            raise MismatchError(
                f"row {row} has length {n}, the tokens have {length} columns",
                code="layout-lengths",
                next=f"lengths lie between 0 and {length}",
            )
    if all(n == length for n in lengths):
        return None
    first = [
        row * length + (length - n if padding == "left" else 0) for row, n in enumerate(lengths)
    ]
    return tuple(first), tuple(a + n for a, n in zip(first, lengths, strict=True))


def _packed(batch: int, length: int, ends: tuple[int, ...]) -> Bounds:
    problem = ""
    if batch != 1:
        problem = f"packed tokens are one line [1, T], {batch} lines given"
    elif not ends or ends[0] != 0:
        problem = f"it starts at {ends[0] if ends else 'nothing'}, not at 0"
    elif any(b < a for a, b in pairwise(ends)):
        at = next(i for i in range(1, len(ends)) if ends[i] < ends[i - 1])
        problem = f"it decreases from {ends[at - 1]} to {ends[at]} at place {at}"
    elif ends[-1] != length:
        problem = f"it ends at {ends[-1]}, there are {length} tokens"
    if problem:
        raise MismatchError(
            f"cu_seqlens is malformed: {problem}",
            code="layout-cu-seqlens",
            facts=[f"cu_seqlens: {list(ends)}", f"tokens: [{batch}, {length}]"],
            next="give the running sum of sequence lengths: [0, n1, n1 + n2, …, T]",
        )
    return ends[:-1], ends[1:]
