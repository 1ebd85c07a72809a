"""check: a spec's backends against NumPy, cell by cell.

A cell is (backend, dtype, phase, T). Weights and inputs are rounded to the dtype, then the
reference is the interpreter in float64; `archir.check.tolerance` says what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from archir import types
from archir.check.tolerance import distance
from archir.compile import Request, find_backend, request_for
from archir.inputs import context, random_inputs, random_weights
from archir.interp import interpret, to_dtype
from archir.ir import Module, fields
from archir.pipeline import lower

DTYPES = ("float64", "float32", "bfloat16")
PHASES = ("full", "prefill", "decode", "state", "gradient")
LENGTHS = (1, 7, 65)


@dataclass
class Report:
    """Rows of a differential check; `ok` when every one holds."""

    spec: str
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(row["ok"] for row in self.rows)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The rows that do not hold."""
        return [row for row in self.rows if not row["ok"]]


@dataclass(frozen=True)
class Case:
    """Inputs, weights and float64 results that all phases of one (dtype, T) share."""

    length: int
    dtype: str
    inputs: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    reference: dict[str, np.ndarray]
    anchor: dict[str, np.ndarray]
    state: dict[str, np.ndarray]
    anchor_state: dict[str, np.ndarray]


def check(
    spec: Any,
    preset: str | None = None,
    config: Any = None,
    *,
    backends: Sequence[str] = ("eager",),
    dtypes: Sequence[str] = DTYPES,
    phases: Sequence[str] = PHASES,
    lengths: Sequence[int] = LENGTHS,
    seed: int = 0,
    progress: Any = None,
) -> Report:
    """Runs every cell of a spec and returns the report; `progress(row)` is called for each row.

    preset: `tiny` by default where the spec has it.
    """
    name = None
    report = Report("")
    for dtype in dtypes:
        request = request_for(spec, preset, config, dtype=dtype, default="tiny")
        name = name or request.name
        report.spec = request.name
        most = context(request.module) or max(lengths)
        fitting = dict.fromkeys(min(length, most) for length in lengths)
        cases = [make_case(request.module, dtype, length, seed) for length in fitting]
        for backend in backends:
            runner = find_backend(backend).runner(request)
            for case in cases:
                for row in _rows(request, runner, case, phases, seed):
                    report.rows.append({"spec": request.name, "backend": backend, **row})
                    if progress:
                        progress(report.rows[-1])
    return report


def make_case(module: Module, dtype: str, length: int, seed: int) -> Case:
    """Random inputs at a length, and what the interpreter makes of them."""
    short = types.short_dtype(dtype)
    inputs, _, _ = random_inputs(module, seed + length, {"T": length})
    weights = random_weights(module, seed)
    rounded = {
        name: to_dtype(x, short if f.attrs.get("dtype") is None else types.resolve("F", short))
        for (name, x), f in zip(weights.items(), _weight_fields(module), strict=True)
    }
    inputs = {
        k: to_dtype(x, short) if np.issubdtype(np.asarray(x).dtype, np.floating) else x
        for k, x in inputs.items()
    }
    found: list[dict[str, np.ndarray]] = []
    for run in ("float64", dtype):
        # outputs come from the phase without state, so that no error in state hides in them
        for phase, part in (("full", 0), ("prefill", 1)):
            low = lower(module, phase, dtype=dtype, stage="precision")
            found.append(interpret(low, inputs, rounded, dtype=run)[part])
    reference, state, anchor, anchor_state = found
    return Case(length, dtype, inputs, rounded, reference, anchor, state, anchor_state)


def _weight_fields(module: Module) -> list[Any]:
    return [*fields(module, "weight").values(), *fields(module, "buffer").values()]


def _rows(
    request: Request, runner: Any, case: Case, phases: Sequence[str], seed: int
) -> Iterator[dict[str, Any]]:
    runner.load(case.weights)
    tokens = [v.name for v in request.module.entry.inputs]
    given = [case.inputs[name] for name in tokens]
    states = [
        path
        for path, f in fields(lower(request.module, "decode", stage="specialize"), "state").items()
        if f.attrs["kind"] != "length"
    ]
    for phase in phases:
        if phase == "full":
            yield _row(case, phase, runner.full(given), case.reference, case.anchor)
        elif phase == "prefill":
            cuts = sorted({0, case.length // 3, case.length})
            made, _ = _pieces(runner, given, cuts)
            yield _row(case, phase, made, case.reference, case.anchor)
        elif phase == "decode":
            first = max(0, case.length - 6)
            made, _ = _pieces(runner, given, [0, *range(max(first, 1), case.length + 1)])
            yield _row(case, phase, made, case.reference, case.anchor)
        elif phase == "state" and states:
            _, made = _pieces(runner, given, sorted({0, case.length // 2, case.length}))
            lost = {k: np.zeros(0) for k in states if k not in case.state}
            want = {k: case.state[k] for k in states if k not in lost}
            yield _row(case, phase, made, want | lost, case.anchor_state | lost)
        elif phase == "gradient" and types.short_dtype(case.dtype) == "f64" and case.length < 16:
            yield _gradient(request, runner, case, given, seed)


def _pieces(runner: Any, given: list[np.ndarray], cuts: list[int]) -> tuple[Any, Any]:
    """Outputs and final state of running the tokens piece by piece."""
    made: dict[str, list[np.ndarray]] = {}
    runner.reset(given[0].shape[0])
    for start, stop in pairwise(cuts):
        phase = "decode" if stop - start == 1 else "prefill"
        for name, x in runner.advance(phase, [x[:, start:stop] for x in given]).items():
            made.setdefault(name, []).append(x)
    return {k: np.concatenate(v, 1) for k, v in made.items()}, runner.state()


def _row(
    case: Case,
    phase: str,
    made: dict[str, np.ndarray],
    reference: dict[str, np.ndarray],
    anchor: dict[str, np.ndarray],
) -> dict[str, Any]:
    """The worst output and chunk of a cell: its error beside what is allowed."""
    worst = max(
        (
            distance(made[name], want, anchor[name], case.dtype, name)
            for name, want in reference.items()
        ),
        key=lambda d: d.share,
    )
    return {
        "dtype": case.dtype,
        "phase": phase,
        "T": case.length,
        "error": worst.error,
        "allowed": worst.allowed,
        "where": worst.where,
        "ok": worst.ok,
    }


def _gradient(
    request: Request, runner: Any, case: Case, given: list[np.ndarray], seed: int
) -> dict[str, Any]:
    """Directional derivative of ⟨c, outputs⟩ in all weights: the backend's against differences."""
    rng = np.random.default_rng(seed + 17)
    cotangent = {k: rng.standard_normal(x.shape) for k, x in case.reference.items()}
    direction = {
        k: rng.standard_normal(x.shape) * max(float(np.std(x)), 0.05)
        for k, x in case.weights.items()
        if k in fields(request.module, "weight")
    }
    module = lower(request.module, "full", stage="specialize")

    def value(step: float) -> float:
        moved = {k: np.float64(x) + step * direction.get(k, 0.0) for k, x in case.weights.items()}
        outputs, _ = interpret(module, case.inputs, moved)
        return float(sum(np.sum(outputs[k] * c) for k, c in cotangent.items()))

    step = 1e-4
    # fourth-order central difference: its own error is about step⁴
    near, far = value(step) - value(-step), value(2 * step) - value(-2 * step)
    want = (8 * near - far) / (12 * step)
    grads = runner.gradient(given, cotangent)
    have = float(sum(np.sum(grads[k] * d) for k, d in direction.items()))
    scale = max(abs(want), float(sum(np.linalg.norm(grads[k] * d) for k, d in direction.items())))
    error, allowed = abs(have - want), 1e-7 * scale
    return {
        "dtype": case.dtype,
        "phase": "gradient",
        "T": case.length,
        "error": error,
        "allowed": allowed,
        "where": "directional derivative",
        "ok": bool(error <= allowed),
    }
