"""The registry of eager emissions.

An emitter is called with the printer of the function and the op. It returns the expression of the
result (an assignment to the results is put around it), or a list of whole lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from archir.ir import Op

if TYPE_CHECKING:
    from backends.eager.emit import Printer

Emitter = Callable[["Printer", Op], "str | list[str]"]

EMIT: dict[str, Emitter] = {}
# Ops that never reach eager's printer, and why.
UNSUPPORTED: dict[str, str] = {
    "state_update": "the pass `expand` writes it as a scan",
    "pointwise": "the pass `expand` writes it as tensor ops",
}


def number(value: object) -> str:
    """A number (or None, or a bool) as Python reads it: infinities and NaN have no literal."""
    if isinstance(value, float) and not math.isfinite(value):
        return "-torch.inf" if value < 0 else f"torch.{value}"
    return repr(value)


def emits(*kinds: str) -> Callable[[Emitter], Emitter]:
    """Registers an emitter for some kinds of op."""

    def add(emitter: Emitter) -> Emitter:
        EMIT.update(dict.fromkeys(kinds, emitter))
        return emitter

    return add
