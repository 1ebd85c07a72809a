"""A model behind NumPy arrays: what `archir.check` runs, so that archir needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from archir.types import short_dtype
from backends.runtime.model import Model
from backends.runtime.state import DTYPES, State


class Runner:
    """Loads arrays, runs phases, and gives arrays back (float64 of whatever the model computed)."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._state: State | None = None
        entry = model._request.module.entry
        self._names = entry.names or tuple(v.name for v in entry.outputs)

    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        """Fills every weight and buffer by the spec's name."""
        self.model.set_weights(weights)

    def full(self, inputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs of the phase `full`."""
        with torch.no_grad():
            return self._outputs(self.model(*self._tensors(inputs)))

    def head(
        self, head: str, inputs: Sequence[np.ndarray], targets: np.ndarray | None
    ) -> np.ndarray:
        """Scores of the last token, or the loss."""
        with torch.no_grad():
            made = self.model(*self._tensors(inputs), head=head, targets=targets)
        return made.double().numpy()

    def reset(self, rows: int) -> None:
        """Back to the empty state."""
        self._state = self.model.empty_state(rows)

    def advance(self, phase: str, inputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs of more tokens after those seen since `reset`."""
        with torch.no_grad():
            made, self._state = self.model(
                *self._tensors(inputs), phase=phase, head="all", state=self._state
            )
        return self._outputs(made)

    def state(self) -> dict[str, np.ndarray]:
        """The entries of the state by path."""
        assert self._state is not None
        return {
            path: x.detach().double().numpy()
            for path, x in self._state.items()
            if isinstance(x, torch.Tensor)
        }

    def gradient(
        self, inputs: Sequence[np.ndarray], cotangent: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """d⟨cotangent, outputs⟩ / d weight for every weight."""
        self.model.zero_grad()
        outputs = self._named(self.model(*self._tensors(inputs)))
        smooth = [k for k in cotangent if outputs[k].requires_grad]
        torch.autograd.backward(
            [outputs[k] for k in smooth],
            [torch.from_numpy(cotangent[k]).to(outputs[k].dtype) for k in smooth],
        )
        return {
            name: np.zeros(x.shape) if x.grad is None else x.grad.double().numpy()
            for name, x in self.model.tensors().items()
        }

    def _tensors(self, inputs: Sequence[np.ndarray]) -> list[torch.Tensor]:
        dtype = DTYPES[short_dtype(self.model._request.options.dtype)]
        made = [torch.from_numpy(np.ascontiguousarray(x)) for x in inputs]
        return [x.to(dtype) if x.is_floating_point() else x for x in made]

    def _outputs(self, made: Any) -> dict[str, np.ndarray]:
        return {k: x.detach().double().numpy() for k, x in self._named(made).items()}

    def _named(self, made: Any) -> dict[str, torch.Tensor]:
        if isinstance(made, dict):
            return made
        found = made if isinstance(made, tuple) else (made,)
        return dict(zip(self._names, found, strict=True))
