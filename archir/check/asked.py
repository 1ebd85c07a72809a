"""What `check_recurrence` is asked for, held against what there is to check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from archir.check.batch import LAYOUTS
from archir.check.placed import Placed
from archir.compile import DTYPES
from archir.diagnostics import SpecError, UnsupportedError, nearest
from archir.recurrence import Rule
from archir.spec import resolve


@dataclass(frozen=True)
class Asked:
    """A check that can be made.

    lengths: of the longest row, in tokens.  forms: None for all that are legal.
    """

    placed: Placed
    lengths: tuple[int, ...]
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    backends: tuple[str, ...]
    forms: tuple[str, ...] | None


def asked(
    rule: Any,
    T: int | Sequence[int],
    given: Mapping[str, int],
    sizes: Mapping[str, int],
    heads: int | Mapping[str, int],
    axes: Mapping[str, str],
    *,
    dtypes: str | Sequence[str],
    layouts: str | Sequence[str],
    backends: str | Sequence[str],
    forms: str | Sequence[str] | None,
) -> Asked:
    """The arguments of `check_recurrence`, which raises as this does.

    given: sizes of dims that the rule may have.  sizes: of those that it has.
    """
    found = resolve(rule)
    if not isinstance(found, Rule):
        raise SpecError(
            f"{getattr(found, 'name', rule)} is not a rule",
            code="check-rule",
            next="archir.check compares specs and blocks; this takes what @ar.recurrence made",
        )
    letters = [*dict.fromkeys(d for shape in found.operands.values() for d in shape)]
    for name in sizes:
        if name not in letters:
            raise SpecError(
                f"rule {found.name} has no dim {name}",
                code="sizes-dim",
                next=nearest(name, letters),
            )
    lengths = tuple(T) if isinstance(T, Iterable) else (T,)
    if not lengths or not all(map(_is_count, lengths)):
        raise UnsupportedError(
            f"T = {T} is no length to check", code="check-cells", next="give T=(1, 17, …)"
        )
    counts = {f"the size of {d}": n for d, n in {**given, **sizes}.items()}
    each = heads if isinstance(heads, Mapping) else {"every operand": heads}
    counts |= {f"the number of heads of {name}": n for name, n in each.items()}
    for what, count in counts.items():
        if not _is_count(count):
            raise UnsupportedError(
                f"{what} is {count!r}", code="check-cells", next="give a whole number from 1 on"
            )
    return Asked(
        Placed(found, {**given, **sizes}, heads, axes),
        lengths,
        _some("dtype", dtypes, DTYPES),
        _some("layout", layouts, LAYOUTS),
        _some("backend", backends),
        None if forms is None else _some("form", forms),
    )


def _is_count(x: Any) -> bool:
    whole = isinstance(x, int | np.integer) and not isinstance(x, bool)
    return whole and bool(x >= 1)


def _some(
    what: str, given: str | Sequence[str], known: Sequence[str] | None = None
) -> tuple[str, ...]:
    """One name or several, and where it is told which are `known`, no other."""
    names = (given,) if isinstance(given, str) else tuple(given)
    if not names:
        raise UnsupportedError(
            f"no {what} is given, so that nothing would be checked",
            code="check-cells",
            next=f"name a {what}, or leave the argument out",
        )
    for name in names:
        if known and name not in known:
            raise UnsupportedError(
                f"there is no {what} {name!r}", code="check-cells", next=nearest(name, [*known])
            )
    return names
