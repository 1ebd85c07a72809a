"""A model behind NumPy arrays: what `archir.check` runs, so that archir needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from archir.check.machines import Arrays, Call, Gradients
from archir.types import short_dtype
from backends.runtime.model import Model
from backends.runtime.state import DTYPES, State


class Runner:
    """A `Machine` of `archir.check`: gives float64 of whatever the model computed."""

    differentiates = True

    def __init__(self, model: Model) -> None:
        self.model = model
        self._names = model._request.module.entry.output_names

    @property
    def runs(self) -> str:
        """What ran beyond torch calls, or why nothing did where a backend has kernels."""
        return "; ".join(dict.fromkeys(kernel.runs for kernel in self.model.kernels()))

    def load(self, weights: Arrays) -> None:
        """Fills every weight and buffer by the spec's name."""
        self.model.set_weights(weights)

    def run(self, calls: Sequence[Call]) -> tuple[list[Arrays], Arrays]:
        """Outputs of each call by name, and the state after the last by path."""
        state, made = None, []
        with torch.no_grad():
            for call in calls:
                outputs, state = self._step(call, self._tensors(call), state)
                made.append({name: _array(x) for name, x in outputs.items()})
        return made, {} if state is None else {path: _array(x) for path, x in state.items()}

    def gradients(self, calls: Sequence[Call], cotangents: Sequence[Arrays]) -> Gradients:
        """d Σ ⟨cotangent, output⟩ over all calls, through the state that goes between them."""
        self.model.zero_grad()
        state, ends, seeds, seen = None, [], [], []
        for call, cotangent in zip(calls, cotangents, strict=True):
            given = [x.requires_grad_(x.is_floating_point()) for x in self._tensors(call)]
            with Lookups(given[0].shape[:2]) as lookups:
                outputs, state = self._step(call, given, state)
            smooth = [name for name in cotangent if outputs[name].requires_grad]
            ends += [outputs[name] for name in smooth]
            seeds += [torch.as_tensor(cotangent[name]).to(outputs[name]) for name in smooth]
            names = (v.name for v in self.model._request.module.entry.inputs)
            leaves = {name: x for name, x in zip(names, given, strict=True) if x.requires_grad}
            seen.append(leaves | lookups.found)
        if ends:
            torch.autograd.backward(ends, seeds)
        return Gradients(_gradients(self.model.tensors()), [_gradients(found) for found in seen])

    def _step(
        self, call: Call, inputs: Sequence[torch.Tensor], state: State | None
    ) -> tuple[dict[str, torch.Tensor], State | None]:
        self.model.train(call.seed is not None)
        made = self.model(
            *inputs, phase=call.phase, head=call.head, rows=call.rows, targets=call.targets,
            state=state, seed=call.seed,
        )  # fmt: skip
        if call.phase != "full":
            made, state = made
        if isinstance(made, dict):
            return made, state
        names = ("loss",) if call.head == "loss" else self._names
        found = made if isinstance(made, tuple) else (made,)
        return dict(zip(names, found, strict=True)), state

    def _tensors(self, call: Call) -> list[torch.Tensor]:
        dtype = DTYPES[short_dtype(self.model._request.options.dtype)]
        made = [torch.from_numpy(np.ascontiguousarray(x)) for x in call.inputs]
        return [x.to(dtype) if x.is_floating_point() else x for x in made]


class Lookups(TorchFunctionMode):
    """While it is on, whatever is looked up at the tokens of a grid keeps its gradient: `found`."""

    def __init__(self, grid: torch.Size) -> None:
        super().__init__()
        self._grid = grid
        self.found: dict[str, torch.Tensor] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is F.embedding and args[0].shape == self._grid and made.requires_grad:
            made.retain_grad()
            self.found[f"lookup {len(self.found)}"] = made
        return made


def _array(x: Any) -> np.ndarray:
    """A tensor in float64, or the lengths of a state."""
    return x.detach().double().numpy() if isinstance(x, torch.Tensor) else np.array(x)


def _gradients(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The gradient of each, zero where nothing reached it."""
    return {
        name: np.zeros(x.shape) if x.grad is None else _array(x.grad) for name, x in tensors.items()
    }
