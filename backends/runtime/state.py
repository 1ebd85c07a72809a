"""A state: what decoding carries from call to call, as a handle that is used once.

Entries are nested by scope. `prefill` and `decode` consume a handle and return a new one: buffers
are reused, so the old handle would show a past that has changed, and raises instead. `clone()`
branches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from archir import dims, ir
from archir.diagnostics import MismatchError
from archir.ir import Function, Module
from archir.types import Tensor


class State:
    """A state of `model`: `lengths` says how many tokens each row has seen."""

    def __init__(self, entries: dict[str, Any], model: object) -> None:
        self._entries: dict[str, Any] | None = entries
        self._model = model
        self._lengths = tuple(entries.get("length", ()))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens seen, per row."""
        return self._lengths

    @property
    def consumed(self) -> bool:
        """Whether a prefill or decode has taken this handle."""
        return self._entries is None

    def check(self, model: object) -> None:
        """Raises where this handle is dead, or another model's."""
        if self._entries is None:
            raise MismatchError(
                "this state was consumed by an earlier prefill or decode",
                code="state-consumed",
                facts=[f"it had seen {list(self._lengths)} tokens"],
                next="go on with the state that call returned, or clone() a state to branch",
            )
        if self._model is not model:
            raise MismatchError(
                "this state belongs to another model",
                code="state-model",
                next="prefill with the model that decodes",
            )

    def take(self) -> dict[str, Any]:
        """The entries; this handle is dead afterwards."""
        assert self._entries is not None
        entries, self._entries = self._entries, None
        return entries

    def clone(self) -> State:
        """A second handle with storage of its own."""
        self.check(self._model)
        assert self._entries is not None
        return State(_map(self._entries), self._model)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Every entry by path: tensors, or the valid part of a cache."""
        self.check(self._model)
        assert self._entries is not None
        for path, entry in _walk(self._entries, ""):
            yield path, getattr(entry, "rows", entry)

    @property
    def nbytes(self) -> int:
        """Bytes of all valid entries."""
        return sum(x.nbytes for _, x in self.items() if isinstance(x, torch.Tensor))


def _map(entries: dict[str, Any]) -> dict[str, Any]:
    return {
        k: _map(v) if isinstance(v, dict) else v.clone() if hasattr(v, "clone") else v
        for k, v in entries.items()
    }


def _walk(entries: dict[str, Any], scope: str) -> Iterator[tuple[str, Any]]:
    for key, value in entries.items():
        path = ir.join(scope, key)
        if isinstance(value, dict):
            yield from _walk(value, path)
        else:
            yield path, value


def empty(module: Module, rows: int, device: Any, support: Any, reserve: int) -> dict[str, Any]:
    """The entries of a lowered module before any token, nested by scope."""
    table = {f.name: f for f in module.functions}
    binding = {"R": rows, "P": 0}

    def build(function: Function) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for field in function.fields:
            if field.kind != "state":
                continue
            type_ = field.value.type
            assert isinstance(type_, Tensor)
            shape = tuple(dims.evaluate(d, binding) for d in type_.shape)
            kind = field.attrs["kind"]
            if kind == "length":
                made[field.path] = (0,) * rows
                continue
            zeros = torch.zeros(shape, dtype=DTYPES[type_.dtype], device=device)
            kept = support.Cache(zeros, 0, reserve=reserve) if kind == "kv" else zeros
            made[field.path] = kept
        for op in function.ops:
            if op.kind == "call":
                inner = build(table[op.attrs["callee"].name])
                if inner:
                    made[op.attrs["scope"]] = inner
        return made

    return build(module.entry)


DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
}
