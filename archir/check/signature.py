"""What a module takes and gives, as a check needs to know it."""

from __future__ import annotations

import numpy as np

from archir import types
from archir.check.machines import Arrays, grows
from archir.dims import Poly
from archir.ir import Module, Value, fields
from archir.passes.specialize import drops, only_full
from archir.pipeline import lower
from archir.types import Tensor

# For each row, arrays by name.
Lines = list[dict[str, np.ndarray]]


class Signature:
    """What a module takes and gives.

    inputs, outputs: for each name "tokens", it is [B, T, …], "rows", [B, …], or "", of no row.
    smooth: outputs that have gradients.  scores: words that the only output scores, 0 where it has
    no logits.  states: entries of the state, and whether each grows by token; none where a token
    sees later ones, so that only the phase `full` has a meaning.  drops: whether training draws.
    """

    def __init__(self, module: Module) -> None:
        entry = module.entry
        self._grid = next((_shape(v)[:2] for v in entry.inputs if len(_shape(v)) > 1), None)
        self._ahead = only_full(module)
        self.drops = drops(module)
        outputs = dict(zip(entry.output_names, entry.outputs, strict=True))
        self.inputs = {v.name: self._owner(v) for v in entry.inputs}
        self.outputs = {name: self._owner(v) for name, v in outputs.items()}
        self.smooth = {
            name
            for name, v in outputs.items()
            if isinstance(v.type, Tensor) and types.is_float(v.type.dtype)
        }
        scored = any(op.kind == "logits" for op in entry.ops) and len(outputs) == 1
        words = _shape(entry.outputs[0])[-1] if scored else 0
        self.scores = words if isinstance(words, int) else 0
        self.states: dict[str, bool] = {}
        if self._ahead is None:
            low = lower(module, "decode", stage="specialize")
            self.states = {path: grows(field) for path, field in fields(low, "state").items()}

    def refusal(self, layout: str) -> str:
        """Why rows of this spec cannot be laid out so; empty where they can."""
        op, by_row = self._ahead, [name for name, owner in self.inputs.items() if owner == "rows"]
        if layout != "dense" and op is not None and op.kind != "attention":
            return f"{op.kind} over tokens takes in padding"
        if layout == "packed" and by_row:
            return f"{by_row[0]} has one entry per line, and packed rows share a line"
        return ""

    def by_row(self, state: Arrays) -> Lines:
        """A state by row: of what grows, the valid entries; nothing of an entry that is missing."""

        def of(row: int, path: str, n: int) -> np.ndarray:
            if path not in state:
                return np.zeros(0)
            return state[path][row, :n] if self.states[path] else state[path][row]

        ends = state["length"].astype(int)
        return [{path: of(row, path, n) for path in self.states} for row, n in enumerate(ends)]

    def _owner(self, value: Value) -> str:
        shape = _shape(value)
        if self._grid is None or shape[:1] != self._grid[:1]:
            return ""
        return "tokens" if shape[:2] == self._grid else "rows"


def _shape(value: Value) -> tuple[int | Poly, ...]:
    return value.type.shape if isinstance(value.type, Tensor) else ()
