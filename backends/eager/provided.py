"""What somebody else's kernels are called by. A copy lies beside emitted files that call one.

archir fills the table in when it loads these files in a process where `archir.provide` was called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Provided(dict[str, Callable[..., Any]]):
    """Name → what is called, `(*operands, *states, seq, dtype=) → (*outputs, *states)`."""

    def __missing__(self, name: str) -> Callable[..., Any]:
        raise LookupError(f"{name!r} is not here: archir.provide it, then compile the model again")


provided = Provided()
