"""Machines: what runs the calls of a check, the interpreter or a backend's model, in NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from archir import dims
from archir.interp import empty_state, interpret
from archir.ir import Field, Module, fields
from archir.pipeline import Options, lower
from archir.types import Tensor, short_dtype

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Call:
    """One call of a model.

    inputs: in the order of the entry.  rows: (start, stop) of every row on the grid of tokens read
    line by line, None where they are dense.  targets: what the head `loss` needs, i64[B, T].
    seed: of dropout, in training; None where the call is not for training.
    """

    inputs: tuple[np.ndarray, ...]
    rows: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    phase: str = "full"
    head: str = "all"
    targets: np.ndarray | None = None
    seed: int | None = None

    @property
    def layout(self) -> str:
        """What the program of this call is lowered for."""
        return "dense" if self.rows is None else "ragged"

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.inputs[0].shape[0] if self.rows is None else len(self.rows[0])


@dataclass(frozen=True)
class Gradients:
    """Of every weight by path; and for each call of every float input by name and of what was
    looked up at its tokens (`lookup 0`, …), [B, T, …]."""

    weights: Arrays
    inputs: list[Arrays]


class Machine(Protocol):
    """Runs calls. Nothing is kept between runs but the weights.

    runs: what of the calls so far ran beyond the backend's plain ops, in words; "" where nothing.
    """

    differentiates: bool

    @property
    def runs(self) -> str: ...

    def load(self, weights: Arrays) -> None:
        """Fills every weight and buffer by the spec's name."""
        ...

    def run(self, calls: Sequence[Call]) -> tuple[list[Arrays], Arrays]:
        """Outputs of each call by name, and the state after the last by path.

        The state goes from call to call and is empty before the first; what grows is [R, P, …]
        with P the longest row's tokens, `length` is [R]. The phase `full` has none. The head `loss`
        gives `loss`.
        """
        ...

    def gradients(self, calls: Sequence[Call], cotangents: Sequence[Arrays]) -> Gradients:
        """d Σ ⟨cotangent, output⟩ over all calls, through the state that goes between them.

        cotangents: for each call by output. Only where `differentiates`.
        """
        ...


class Interpreter:
    """A spec in NumPy: its module lowered to a stage, interpreted in a dtype.

    dtype: the one it is lowered for unless given.  stage: the last, what backends print.
    """

    differentiates = False
    runs = ""

    def __init__(
        self, module: Module, options: Options, dtype: str | None = None, stage: str | None = None
    ) -> None:
        self._module, self._options, self._stage = module, options, stage
        self._dtype = dtype or options.dtype
        self._lowered: dict[tuple[str, str, str, bool], Module] = {}
        self._weights: Arrays = {}

    def load(self, weights: Arrays) -> None:
        """Takes weights and buffers by path."""
        self._weights = weights

    def run(self, calls: Sequence[Call]) -> tuple[list[Arrays], Arrays]:
        """See `Machine`; a state that a broken pass did not store is missing."""
        made: list[Arrays] = []
        state: dict[str, np.ndarray] = {}
        stored: dict[str, np.ndarray] = {}
        for call in calls:
            module = self._module_for(call)
            given = [*call.inputs, *(np.array(side) for side in call.rows or ())]
            given += [] if call.targets is None else [call.targets]
            if call.phase != "full" and not state:
                state = empty_state(module, call.count, short_dtype(self._dtype))
            outputs, found = interpret(
                module, given, self._weights, state, call.seed, dtype=self._dtype
            )
            names = ("loss",) if call.head == "loss" else self._module.entry.output_names
            made.append(dict(zip(names, outputs.values(), strict=True)))
            if call.phase != "full":
                stored = _states(module, found)
                state |= stored
        return made, stored

    def gradients(self, calls: Sequence[Call], cotangents: Sequence[Arrays]) -> Gradients:
        """The interpreter has none."""
        raise NotImplementedError

    def _module_for(self, call: Call) -> Module:
        key = (call.phase, call.head, call.layout, call.seed is not None)
        if key not in self._lowered:
            o = self._options
            self._lowered[key] = lower(
                self._module, call.phase, call.layout, stage=self._stage, dtype=o.dtype,
                form=o.form, head=call.head, param_dtype=o.param_dtype, state_dtype=o.state_dtype,
                training=call.seed is not None, chunk=o.chunk,
            )  # fmt: skip
        return self._lowered[key]


def grows(field: Field) -> bool:
    """Whether a state holds something per past token, [R, P, …]."""
    shape = field.value.type.shape if isinstance(field.value.type, Tensor) else ()
    return len(shape) > 1 and dims.bare(shape[1]) == "P"


def _states(module: Module, stored: Arrays) -> dict[str, np.ndarray]:
    """The states among stored fields; `append` leaves room for padding, which is cut off."""
    longest = int(np.max(stored["length"], initial=0)) if "length" in stored else None
    return {
        path: stored[path][:, :longest] if grows(field) else stored[path]
        for path, field in fields(module, "state").items()
        if path in stored
    }
