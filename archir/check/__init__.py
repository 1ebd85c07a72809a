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

from archir import dims, types
from archir.check.tolerance import Distance, distance
from archir.compile import Request, find_backend, request_for
from archir.diagnostics import UnsupportedError, nearest
from archir.inputs import context, random_inputs, random_weights
from archir.interp import interpret, to_dtype
from archir.ir import Function, Module, Value, fields
from archir.passes.specialize import only_full
from archir.pipeline import lower

DTYPES = ("float64", "float32", "bfloat16")
PHASES = ("full", "prefill", "decode", "state", "last", "loss", "gradient")
LENGTHS = (1, 7, 65)


@dataclass
class Report:
    """Rows of a differential check; `ok` when every one holds."""

    spec: str
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row["ok"] for row in self.rows)

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
    unknown = [p for p in phases if p not in PHASES]
    if unknown or not lengths:
        raise UnsupportedError(
            f"there is no phase {unknown[0]!r}" if unknown else "there is no length to check",
            code="check-cells",
            next=nearest(unknown[0], PHASES) if unknown else "give lengths=(1, 7, …)",
        )
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
    # of a few tokens the anchor's error is a matter of luck: at T = 1 the rows make up for it
    sizes = {"T": length, "B": max(2, 16 // max(length, 1))}
    inputs, _, _ = random_inputs(module, seed + length, sizes)
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
        low = lower(module, "full", dtype=dtype, stage="precision")
        made, kept = interpret(low, inputs, rounded, dtype=run)
        found.append(dict(zip(output_names(module), made.values(), strict=True)))
        if only_full(module) is None:
            low = lower(module, "prefill", dtype=dtype, stage="precision")
            kept = interpret(low, inputs, rounded, dtype=run)[1]
        found.append(kept)
    reference, state, anchor, anchor_state = found
    return Case(length, dtype, inputs, rounded, reference, anchor, state, anchor_state)


def output_names(module: Module) -> tuple[str, ...]:
    """Names of the outputs as the spec gave them, or of their values as traced."""
    return module.entry.names or tuple(v.name for v in module.entry.outputs)


def _weight_fields(module: Module) -> list[Any]:
    return [*fields(module, "weight").values(), *fields(module, "buffer").values()]


def _rows(
    request: Request, runner: Any, case: Case, phases: Sequence[str], seed: int
) -> Iterator[dict[str, Any]]:
    runner.load(case.weights)
    tokens = [v.name for v in request.module.entry.inputs]
    given = [case.inputs[name] for name in tokens]
    if only_full(request.module) is not None:
        phases = [p for p in phases if p not in ("prefill", "decode", "state")]
        states = []
    else:
        low = lower(request.module, "decode", stage="specialize")
        kinds = {path: f.attrs["kind"] for path, f in fields(low, "state").items()}
        states = [path for path, kind in kinds.items() if kind != "length"]
    entry = request.module.entry
    scored = any(op.kind == "logits" for op in entry.ops) and len(entry.outputs) == 1
    for phase in phases:
        if phase == "full":
            yield _row(case, phase, runner.full(given), case.reference, case.anchor)
        elif phase == "prefill":
            cuts = sorted({0, case.length // 3, case.length})
            made, _ = _pieces(entry, runner, given, cuts)
            yield _row(case, phase, made, case.reference, case.anchor)
        elif phase == "decode":
            first = max(0, case.length - 6)
            made, _ = _pieces(entry, runner, given, [0, *range(max(first, 1), case.length + 1)])
            yield _row(case, phase, made, case.reference, case.anchor)
        elif phase == "state" and states:
            _, made = _pieces(entry, runner, given, sorted({0, case.length // 2, case.length}))
            lost = {k: np.zeros(0) for k in states if k not in case.state}
            want = {k: case.state[k] for k in states if k not in lost}
            yield _row(case, phase, made, want | lost, case.anchor_state | lost)
        elif phase in ("last", "loss") and scored:
            yield _head(request, runner, case, given, phase, seed)
        elif phase == "gradient" and types.short_dtype(case.dtype) == "f64" and case.length < 16:
            yield _gradient(request, runner, case, given, seed)


def _pieces(
    entry: Function, runner: Any, given: list[np.ndarray], cuts: list[int]
) -> tuple[Any, Any]:
    """Outputs and final state of running the tokens piece by piece."""
    made: dict[str, list[np.ndarray]] = {}
    whole = [_token_axis(v) is None for v in entry.inputs]
    rows = next(x.shape[0] for x, w in zip(given, whole, strict=True) if not w)
    runner.reset(rows)
    for start, stop in pairwise(cuts):
        phase = "decode" if stop - start == 1 else "prefill"
        part = [x if w else x[:, start:stop] for x, w in zip(given, whole, strict=True)]
        for name, x in runner.advance(phase, part).items():
            made.setdefault(name, []).append(x)
    return {k: np.concatenate(v, 1) for k, v in made.items()}, runner.state()


def _token_axis(value: Value) -> int | None:
    """The axis of an input that holds tokens: the second, where it is T."""
    shape = value.type.shape if isinstance(value.type, types.Tensor) else ()
    return 1 if len(shape) > 1 and dims.bare(shape[1]) == "T" else None


def _head(
    request: Request, runner: Any, case: Case, given: list[np.ndarray], head: str, seed: int
) -> dict[str, Any]:
    """The last token's scores, or the loss, against the interpreter's."""
    inputs = dict(case.inputs)
    if head == "loss":
        (scores,) = case.reference.values()
        rng = np.random.default_rng(seed + 5)
        targets = rng.integers(0, scores.shape[-1], scores.shape[:2])
        inputs["targets"] = np.where(rng.random(targets.shape) < 0.2, -100, targets)
    low = lower(request.module, "full", dtype=case.dtype, head=head, stage="precision")
    want, _ = interpret(low, inputs, case.weights)
    anchor, _ = interpret(low, inputs, case.weights, dtype=case.dtype)
    made = runner.head(head, given, inputs.get("targets"))
    (name,) = want
    return _row(case, head, {name: made}, want, anchor)


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
    """Per weight, the derivative of ⟨c, outputs⟩ in a random direction: the backend's against
    central differences of the interpreter in float64. The row shows the weight worst off."""
    rng = np.random.default_rng(seed + 17)
    cotangent = {
        k: rng.standard_normal(x.shape)
        for k, x in case.reference.items()
        if np.issubdtype(x.dtype, np.floating)
    }
    module = lower(request.module, "full", stage="specialize")
    weights = {k: np.float64(x) for k, x in case.weights.items()}

    def value(moved: dict[str, np.ndarray]) -> float:
        made, _ = interpret(module, case.inputs, weights | moved)
        outputs = dict(zip(output_names(module), made.values(), strict=True))
        return float(sum(np.sum(outputs[k] * c) for k, c in cotangent.items()))

    grads, step = runner.gradient(given, cotangent), 1e-5
    rounding = 1e-15 * abs(value({})) / step
    found = []
    for name in fields(request.module, "weight"):
        towards = rng.standard_normal(weights[name].shape) * max(np.std(weights[name]), 0.05)
        ends = [value({name: weights[name] + sign * step * towards}) for sign in (1, -1)]
        want = (ends[0] - ends[1]) / (2 * step)
        each = grads[name] * towards
        scale = float(np.linalg.norm(each)) + abs(want)
        found.append(Distance(abs(float(np.sum(each)) - want), 1e-5 * scale + 10 * rounding, name))
    worst = max(found, key=lambda d: d.share)
    return {
        "dtype": case.dtype,
        "phase": "gradient",
        "T": case.length,
        "error": worst.error,
        "allowed": worst.allowed,
        "where": worst.where,
        "ok": worst.ok,
    }
