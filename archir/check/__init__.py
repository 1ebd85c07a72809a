"""check: a spec's machines against NumPy, cell by cell, and against themselves, law by law.

A cell is (backend, dtype, phase, layout, T). Weights and inputs are rounded to the dtype, then the
reference is the interpreter in float64; `archir.check.tolerance` says what is allowed. A law says
of one machine what must not matter: padding, cuts, the order of rows, later tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from archir.check.batch import LAYOUTS
from archir.check.cases import Bench, Case, Study, worst
from archir.check.cells import PHASES
from archir.check.laws import LAWS
from archir.check.machines import Interpreter, Machine
from archir.check.rows import Rows
from archir.check.tolerance import Distance
from archir.compile import find_backend, request_for
from archir.diagnostics import UnsupportedError, nearest
from archir.inputs import context

DTYPES = ("float64", "float32", "bfloat16")
LENGTHS = (1, 7, 65)
INTERPRETER = "numpy"  # stands among the backends: the interpreter, of what they print


@dataclass
class Report(Rows):
    """Rows of a differential check; `ok` when every one holds."""

    spec: str
    rows: list[dict[str, Any]] = field(default_factory=list)


def check(
    spec: Any,
    preset: str | None = None,
    config: Any = None,
    *,
    backends: Sequence[str] = ("eager",),
    dtypes: Sequence[str] = DTYPES,
    phases: Sequence[str] = tuple(PHASES),
    layouts: Sequence[str] | None = None,
    lengths: Sequence[int] = LENGTHS,
    laws: bool = False,
    seed: int = 0,
    progress: Any = None,
) -> Report:
    """Runs every cell of a spec and returns the report; `progress(row)` is called for each row.

    preset: `tiny` by default where the spec has it.  backends: `numpy` is the interpreter.
    layouts: unless given, dense at all lengths and the others at the largest.  laws: whether the
    laws of `archir.check.laws` are run too, of the interpreter and every backend: what is exact in
    every dtype, what has a tolerance in float64.
    """
    _refuse_unknown("phase", phases, tuple(PHASES))
    _refuse_unknown("layout", layouts or (), LAYOUTS)
    if not lengths:
        raise UnsupportedError(
            "there is no length to check", code="check-cells", next="give lengths=(1, 7, …)"
        )
    report = Report("")
    more_dtypes, more_backends = (("float64",), (INTERPRETER,)) if laws else ((), ())
    for dtype in dict.fromkeys([*dtypes, *more_dtypes]):
        study = Study.of(request_for(spec, preset, config, dtype=dtype, default="tiny"), seed)
        report.spec = study.request.name
        for backend, bench in _benches(study, [*backends, *more_backends], lengths, layouts):
            asked = phases if dtype in dtypes and backend in backends else ()
            cell = {"spec": report.spec, "backend": backend, "dtype": dtype}
            for phase, found in _found(bench, asked, laws):
                at = {"phase": phase, "layout": bench.layout, "T": bench.case.length}
                report.rows.append({**cell, **at, **asdict(found), "ok": found.ok})
                if progress:
                    progress(report.rows[-1])
    return report


def _benches(
    study: Study, backends: Sequence[str], lengths: Sequence[int], layouts: Sequence[str] | None
) -> Iterator[tuple[str, Bench]]:
    """Every backend, length and layout; see `check`."""
    request = study.request
    most = context(request.module) or max(lengths)
    fitting = [*dict.fromkeys(min(length, most) for length in lengths)]
    cases = []
    for ragged in (False, True):
        chosen = [x for x in _layouts(study, layouts) if (x != "dense") == ragged]
        for length in [max(fitting)] if ragged and layouts is None else fitting:
            case = Case(study, length, ragged)
            cases += [(case, layout) for layout in chosen]
    for backend in dict.fromkeys(backends):
        machine: Machine = (
            Interpreter(request.module, request.options)
            if backend == INTERPRETER
            else find_backend(backend).runner(request)
        )
        machine.load(study.weights)
        for case, layout in cases:
            yield backend, Bench(case, machine, layout, case.batch)


def _layouts(study: Study, asked: Sequence[str] | None) -> list[str]:
    """The layouts asked for; unless any is, those that the spec has."""
    refused = {x: study.signature.refusal(x) for x in LAYOUTS}
    for layout in asked or ():
        if refused[layout]:
            raise UnsupportedError(
                f"{study.request.name} has no {layout} layout: {refused[layout]}",
                code="check-layout",
                next=f"it has {', '.join(x for x in LAYOUTS if not refused[x])}",
            )
    return [x for x in asked or LAYOUTS if not refused[x]]


def _found(bench: Bench, phases: Sequence[str], laws: bool) -> Iterator[tuple[str, Distance]]:
    """The distance of every cell, and of every law the one that is worst."""
    for phase in phases:
        found = PHASES[phase](bench)
        if found is not None:
            yield phase, found
    for name, law in LAWS.items() if laws else ():
        distances = [*law(bench)]
        if distances:
            yield name, worst(distances)


def _refuse_unknown(what: str, asked: Sequence[str], known: tuple[str, ...]) -> None:
    unknown = next((name for name in asked if name not in known), None)
    if unknown is not None:
        raise UnsupportedError(
            f"there is no {what} {unknown!r}", code="check-cells", next=nearest(unknown, known)
        )
