"""What a model costs. Now: parameters, by part; the columns to come (FLOPs, bytes) join `Row`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from archir import dims
from archir.ir import Field, Function, Module, join, scopes
from archir.types import Tensor

SCHEMA = "archir.cost/1"


@dataclass(frozen=True)
class Row:
    """One part of a model.

    part: "embedding" (tables that tokens or positions index, a tied head with them), the name of a
    function of the module, or "total".  calls: how often one run enters it.  parameters: of all its
    calls, those of functions it calls left out.  buffers: numbers that are saved and not trained.
    """

    part: str
    calls: int
    parameters: int
    buffers: int = 0


def rows(module: Module) -> list[Row]:
    """Every part with parameters or buffers in the order they are entered, then the total.

    Each parameter is counted once, in one part. All parameters are trainable.
    """
    calls: dict[str, int] = {}
    found: dict[str, dict[str, int]] = {"embedding": {"weight": 0, "buffer": 0}}
    for _, function in scopes(module):
        calls[function.name] = calls.get(function.name, 0) + 1
        tables = _tables(function)
        for field in function.fields:
            part = "embedding" if field in tables else function.name
            if field.kind in ("weight", "buffer"):
                counts = found.setdefault(part, {"weight": 0, "buffer": 0})
                counts[field.kind] += _size(field)
    made = [Row(p, calls.get(p, 1), n["weight"], n["buffer"]) for p, n in found.items()]
    made = [row for row in made if row.parameters or row.buffers]
    total = Row("total", 1, sum(r.parameters for r in made), sum(r.buffers for r in made))
    return [*made, total]


def parameters(module: Module) -> dict[str, int]:
    """Size of every weight by absolute path."""
    return {
        join(scope, field.path): _size(field)
        for scope, function in scopes(module)
        for field in function.fields
        if field.kind == "weight"
    }


def _tables(function: Function) -> list[Field]:
    indexed = {op.values[1] for op in function.ops if op.kind == "embedding"}
    return [field for field in function.fields if field.value in indexed]


def _size(field: Field) -> int:
    assert isinstance(field.value.type, Tensor)
    return math.prod(dims.evaluate(size, {}) for size in field.value.type.shape)
