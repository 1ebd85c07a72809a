"""What passes keep, by running the interpreter before and after: check level 2 (D17)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from archir.diagnostics import PassError
from archir.dims import bare
from archir.inputs import random_inputs
from archir.interp import interpret
from archir.ir import Module, fields
from archir.passes.specialize import LAYOUTS, specialize
from archir.types import List, Tensor, Type


def compare(before: Module, after: Module, name: str) -> None:
    """Interprets both modules on the same random inputs in float64; raises where they differ."""
    inputs, weights, state = random_inputs(before, seed=0)
    one, stored_one = interpret(before, inputs, weights, state, seed=0)
    two, stored_two = interpret(after, inputs, weights, state, seed=0)
    pairs = zip(one, one.values(), two.values(), strict=True)
    for key, a, b in (*pairs, *((k, x, stored_two.get(k, np.nan)) for k, x in stored_one.items())):
        _require_equal(a, b, f"{name} changed {key}")


def compare_phases(module: Module, length: int = 5) -> None:
    """Full = prefill from an empty state = prefill in pieces = decode of all tokens (D17)."""
    full, step = specialize(module, "full"), specialize(module, "decode")
    inputs, weights, _ = random_inputs(full, seed=0, sizes={"T": length})
    types = {v.name: v.type for v in full.entry.inputs}
    pairs = zip(full.entry.output_names, full.entry.outputs, strict=True)
    by_token = [name for name, value in pairs if _token_axis(value.type) == 1]
    want, _ = interpret(full, inputs, weights)
    for cuts in ((0, length), (0, length // 2, length), range(length + 1)):
        pieces: list[dict[str, Any]] = []
        state = None
        for start, stop in itertools.pairwise(cuts):
            given = {k: _tokens(x, types[k], start, stop) for k, x in inputs.items()}
            got, stored = interpret(step, given, weights, state)
            state = {path: stored[path] for path in fields(step, "state")}
            pieces.append(got)
        for key in by_token:
            got = np.concatenate([piece[key] for piece in pieces], axis=1)
            _require_equal(want[key], got, f"{key} read in pieces {list(cuts)} is not the whole")


def compare_layouts(
    module: Module, phase: str = "full", lengths: tuple[int, ...] = (3, 0, 5, 1)
) -> None:
    """Rows padded on either side or packed = each row alone: outputs, and states after a past."""
    dense, ragged = (specialize(module, phase, layout) for layout in LAYOUTS)
    inputs, weights, _ = random_inputs(dense, 0, {"B": len(lengths), "T": max(lengths)})
    types = {v.name: v.type for v in dense.entry.inputs}
    states = fields(dense, "state")
    alone, past = [], []
    for row, n in enumerate(lengths):
        line = {k: _tokens(_row(x, types[k], row), types[k], 0, n) for k, x in inputs.items()}
        start = interpret(dense, line, weights)[1] if states else {}
        past.append({path: start[path] for path in states})
        alone.append(interpret(dense, line, weights, past[-1] if states else None))
    for name, (batch, width, starts) in _grids(lengths).items():
        stops = [a + n for a, n in zip(starts, lengths, strict=True)]
        given = {
            k: _laid_out(x, types[k], batch, width, starts, lengths) for k, x in inputs.items()
        }
        given |= {"start": np.array(starts), "stop": np.array(stops)}
        made, stored = interpret(ragged, given, weights, _joined(past) if states else None)
        _compare_rows(ragged, name, alone, made, stored, starts, stops)


def _grids(lengths: tuple[int, ...]) -> dict[str, tuple[int, int, list[int]]]:
    """Layout → rows and columns of the token grid, and where on it each row starts."""
    rows, width = range(len(lengths)), max(lengths) + 2
    return {
        "left": (len(rows), width, [(r + 1) * width - lengths[r] for r in rows]),
        "right": (len(rows), width, [r * width for r in rows]),
        "packed": (1, sum(lengths), [sum(lengths[:r]) for r in rows]),
    }


def _laid_out(
    x: np.ndarray, type_: Type, batch: int, width: int, starts: list[int], lengths: tuple[int, ...]
) -> np.ndarray:
    """The first `lengths[r]` tokens of each row on a grid whose padding repeats other tokens."""
    axis = _token_axis(type_)
    if axis is None:
        return x
    x = np.moveaxis(x, (axis - 1, axis), (0, 1))
    made = np.resize(x[:, ::-1], (batch * width, *x.shape[2:]))
    for row, (start, n) in enumerate(zip(starts, lengths, strict=True)):
        made[start : start + n] = x[row, :n]
    return np.moveaxis(made.reshape(batch, width, *x.shape[2:]), (0, 1), (axis - 1, axis))


def _joined(states: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The rows of several states as one state, growing entries filled up with NaN."""
    made = {}
    for path in states[0]:
        parts = [state[path] for state in states]
        longest = max(x.shape[1] if x.ndim > 1 else 0 for x in parts)
        made[path] = np.concatenate([_grown(x, longest) for x in parts])
    return made


def _grown(x: np.ndarray, length: int) -> np.ndarray:
    if x.ndim < 2:
        return x
    room = [(0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
    return np.pad(x, room, constant_values=np.nan)


def _compare_rows(
    module: Module, layout: str, alone: list[Any], made: Any, stored: Any,
    starts: list[int], stops: list[int],
) -> None:  # fmt: skip
    """Raises where the outputs or states of a row are not those of the row alone."""
    names = module.entry.output_names
    for row, (outputs, states) in enumerate(alone):
        what = f"row {row} laid out {layout} is not the row alone"
        for key, value in zip(names, module.entry.outputs, strict=True):
            if _token_axis(value.type) == 1:
                flat = made[key].reshape(-1, *made[key].shape[2:])[starts[row] : stops[row]]
                _require_equal(outputs[key][0], flat, f"{key}: {what}")
        for path in fields(module, "state"):
            x = states[path][0]
            _require_equal(x, stored[path][row][tuple(map(slice, x.shape))], f"{path}: {what}")


def _token_axis(type_: Type) -> int | None:
    """The axis of tokens of a type [B, T, …] or of a list of them, stacked."""
    if isinstance(type_, List):
        return 2 if _token_axis(type_.element) else None
    by_token = isinstance(type_, Tensor) and type_.rank > 1 and bare(type_.shape[1]) == "T"
    return 1 if by_token else None


def _tokens(x: np.ndarray, type_: Type, start: int, stop: int) -> np.ndarray:
    """The part of an input that holds tokens start … stop − 1; all of it where it holds none."""
    axis = _token_axis(type_)
    return x if axis is None else x[(slice(None),) * axis + (slice(start, stop),)]


def _row(x: np.ndarray, type_: Type, row: int) -> np.ndarray:
    """One row of an input that holds tokens; all of it where it holds none."""
    axis = _token_axis(type_)
    return x if axis is None else x[(slice(None),) * (axis - 1) + (slice(row, row + 1),)]


def _require_equal(a: Any, b: Any, what: str) -> None:
    """Raises a PassError unless two results agree to 1e-12 of the largest finite number."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        what = f"{what}: shapes {list(a.shape)} and {list(b.shape)}"
    else:
        both = np.isfinite(a) & np.isfinite(b)
        scale = max(float(np.max(np.abs(a), where=both, initial=0)), 1e-300)
        worst = float(np.max(np.abs(a - b), where=both, initial=0)) / scale
        if worst <= 1e-12 and np.array_equal(a[~both], b[~both], equal_nan=True):
            return
        what = f"{what}: relative difference {worst:.1e}"
    raise PassError(
        what,
        code="pass-changed-meaning",
        next="this is a bug of archir: report the module and this message",
    )
