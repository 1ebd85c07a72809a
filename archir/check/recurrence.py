"""check_recurrence: every form of a rule against its body run literally, in every layout.

    report = ar.check_recurrence(kda, T=65, heads={"q": 2, "k": 2, "g": 2, "v": 4, "beta": 4})
    print(report)           # a table: one row per form, backend, dtype, layout and T
    report.worst            # the largest difference, of the running maximum of |S| and |o|
    report.forms["chunk"]   # what ran, or why it did not

A cell runs the same rows in several ways: at once without state, at once into a state, in pieces
that go on from a state, empty ones among them, and in single tokens. Operands are drawn inside the
rule's domain.

outputs     of every token, and final states. The reference is the literal loop in float64 (D7); in
            float64 a difference may be 1e-12 of the largest number that the row and head have seen
            up to the token, in other dtypes as D16 says, with the recurrent form in that dtype as
            the anchor.
gradients   by every operand, through the states between pieces too, where a backend has them. The
            reference is the rule's reverse pass run token by token in float64; a difference may be
            1e-9 of the operand's largest gradient and 1e-12 of any operand's. In other dtypes it
            may be what D16 says, the same in float32 being the anchor; of a constant of all tokens
            only float64 is judged. The reference is itself held to central differences of the body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from archir import types
from archir.check.asked import asked
from archir.check.batch import LAYOUTS, Batch, Piece, joined
from archir.check.cases import Slopes, worst
from archir.check.machines import Arrays, Interpreter, Machine
from archir.check.placed import Placed
from archir.check.rows import Rows
from archir.check.signature import Lines
from archir.check.tolerance import Distance, distance, exact
from archir.compile import Request, find_backend
from archir.diagnostics import UnsupportedError
from archir.interp import to_dtype
from archir.ir import Module
from archir.passes.gradient import gradient
from archir.pipeline import Options, lower
from archir.recurrence import Rule
from archir.recurrence.backward import backward
from archir.recurrence.literal import literal
from archir.spec import Spec

FORMS = ("recurrent", "chunk", "parallel")
INTERPRETER = "numpy"
BODY = "body"  # of the rows that hold the reference of gradients to the body
BOUND = 1e-12  # float64, of the running maximum of |S| and |o| (D16)
SLOPE = 1e-9  # float64, of an operand's largest gradient
STEP, DIFFERENCE = 2.0**-20, 1e-6  # of central differences, and what they allow
HEADS = ("form", "backend", "dtype", "layout", "T", "what", "error", "allowed", "where", "ok")
TOKENS = "by token"
_SHORT = 32  # rows up to so many tokens also run token by token, call by call


@dataclass
class RecurrenceReport(Rows):
    """What `check_recurrence` found; prints as a table.

    rows: one per cell.  worst: the largest difference of any form from the literal loop, as a part
    of the running maximum of |S| and |o|.  worst_gradient: of any gradient, as a part of the
    operand's largest.  forms: for each form what ran, or why it did not.  gradients: so of them;
    empty where no backend that was asked for has them.
    """

    rule: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    forms: dict[str, str] = field(default_factory=dict)
    gradients: str = ""

    @property
    def worst(self) -> float:
        return max((x["relative"] for x in self.rows if x["what"] == "outputs"), default=0.0)

    @property
    def worst_gradient(self) -> float:
        return max((x["relative"] for x in self.rows if x["what"] == "gradients"), default=0.0)

    @property
    def ran(self) -> tuple[str, ...]:
        """The forms that ran."""
        return tuple(dict.fromkeys(row["form"] for row in self.rows if row["form"] != BODY))

    def __str__(self) -> str:
        lines = [HEADS, *(tuple(_shown(row[k]) for k in HEADS) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEADS))]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        forms = [f"{form}: {text}" for form, text in self.forms.items()]
        gradients = [f"gradients: {self.gradients}"] if self.gradients else []
        return "\n".join([f"rule {self.rule}", *table, *forms, *gradients])


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.1e}" if isinstance(value, float) else str(value)


def check_recurrence(
    rule: Any,
    T: int | Sequence[int] = (1, 17, 65),
    K: int = 5,
    V: int = 7,
    heads: int | Mapping[str, int] = 2,
    rng: int | np.random.Generator = 0,
    dtype: str | Sequence[str] = "float64",
    *,
    sizes: Mapping[str, int] | None = None,
    axes: Mapping[str, str] | None = None,
    forms: str | Sequence[str] | None = None,
    backends: str | Sequence[str] = (INTERPRETER, "eager"),
    layouts: str | Sequence[str] = LAYOUTS,
    progress: Callable[[dict[str, Any]], None] = lambda row: None,
) -> RecurrenceReport:
    """Compares every form of a rule with its body run token by token and head by head.

    rule: the object, or `path.py:name`.  T: tokens of the longest row; ragged rows are shorter,
    some empty.  K, V, sizes: of the rule's dims; 3 unless given.  heads: of all operands, or of
    each by name, divisors of the largest (grouped).  axes: which leading axes an operand has, by
    name: "BTH" unless given, "BT" (one for all heads), "H" (one for all tokens) or "".  rng: a seed
    or a generator of operands.  dtype: float64, float32, bfloat16, or several.  forms: those asked
    for; unless given, all that are legal.  backends: `numpy` is the interpreter.
    progress: called for each row.

    Raises UnsupportedError where a form is asked for that is not legal, and where nothing would be
    checked; SpecError for names that the rule does not have.
    """
    given = asked(
        rule, T, {"K": K, "V": V}, sizes or {}, heads, axes or {},
        dtypes=dtype, layouts=layouts, backends=backends, forms=forms,
    )  # fmt: skip
    placed, generator = given.placed, np.random.default_rng(rng)
    report = RecurrenceReport(placed.rule.name)
    legal = []
    for form in given.forms or FORMS:
        reason = _illegal(placed.module, form, asked=given.forms is not None)
        report.forms[form] = reason
        legal += [] if reason else [form]
    batches = {
        (length, layout != "dense"): placed.draw(length, layout != "dense", generator)
        for length in given.lengths
        for layout in given.layouts
        if layout == "dense" or length == max(given.lengths)
    }
    report.gradients = _without_gradient(placed.rule)
    cases: dict[tuple[int, bool], _Case] = {}
    for name in given.dtypes:
        cases = {key: _Case(placed, batch, name) for key, batch in batches.items()}
        for form, backend in product(legal, given.backends):
            for row in _rows(report, placed, cases, given.layouts, form, backend):
                report.rows.append(row)
                progress(row)
    if any(row["what"] == "gradients" for row in report.rows):
        report.rows.append([*cases.values()][-1].differences())
    _sum_up(report, legal)
    return report


def _sum_up(report: RecurrenceReport, legal: Sequence[str]) -> None:
    """What ran of each form, and of gradients."""

    def ran(rows: Sequence[dict[str, Any]]) -> str:
        by = {row["backend"]: row["runs"] for row in rows}
        where = ", ".join(f"{name} ({runs})" if runs else name for name, runs in by.items())
        return f"ran on {where}, worst {max(row['relative'] for row in rows):.1e}"

    outputs = [row for row in report.rows if row["what"] == "outputs"]
    for form in legal:
        if rows := [row for row in outputs if row["form"] == form]:
            report.forms[form] = f"{ran(rows)}; {report.forms[form]}".removesuffix("; ")
    slopes = [r for r in report.rows if r["what"] == "gradients" and r["form"] != BODY]
    if slopes:
        report.gradients = ran([{**row, "runs": ""} for row in slopes])


def _without_gradient(rule: Rule) -> str:
    """Why a rule has no gradient; empty where it has."""
    try:
        gradient(rule.function)
    except UnsupportedError as error:
        return f"{error.what}{f' ({error.loc.short})' if error.loc else ''}"
    return ""


def _illegal(module: Module, form: str, asked: bool) -> str:
    """Why a form is not legal for a rule; empty where it is."""
    try:
        lower(module, "prefill", stage="form", form=form)
    except UnsupportedError as error:
        if asked or error.code != "form-illegal":
            raise
        return next(
            (x.removeprefix(f"{form}: ") for x in error.facts if x.startswith(f"{form}: ")),
            error.what,
        )
    return ""


# ---- rows in one dtype


@dataclass(frozen=True)
class _Part:
    """One output or final state of all rows, [N, H, …]: what was made, the literal loop's, the
    anchor's, and the running maximum of |S| and |o|, [N, H]."""

    name: str
    have: np.ndarray
    want: np.ndarray
    anchor: np.ndarray
    largest: np.ndarray


class _Case:
    """Rows in a dtype: the literal loop of each alone, and in low precision the anchor: what the
    recurrent form makes of each in the dtype."""

    def __init__(self, placed: Placed, batch: Batch, dtype: str) -> None:
        short = types.short_dtype(dtype)
        self.placed, self.dtype, self.rule = placed, dtype, placed.rule
        self.batch = replace(
            batch,
            lines=[{k: to_dtype(x, short) for k, x in line.items()} for line in batch.lines],
            shared={k: to_dtype(x, short) for k, x in batch.shared.items()},
        )
        each = (
            {**{k: x[None] for k, x in line.items()}, **self.batch.shared}
            for line in self.batch.lines
        )
        self._given = [[x[name] for name in placed.names] for x in each]
        self.loops = [literal(placed.rule, xs) for xs in self._given]
        self.anchor: tuple[Lines, Lines] | None = None
        if dtype != "float64":
            options = Options(dtype=dtype, form="recurrent")
            machine = Interpreter(placed.module, options, stage="precision")
            alone = [self.batch] if self.batch.uniform else self.batch.alone()
            made = [self.run(machine, [rows.piece("dense", phase="prefill")]) for rows in alone]
            outputs, states = ([row for part in parts for row in part] for parts in zip(*made))
            self.anchor = outputs, states

    def ways(self, layout: str) -> Iterator[tuple[str, list[Piece]]]:
        """How the same rows are run: a label, and the calls one after another."""
        batch, longest = self.batch, max(self.batch.lengths)
        yield "at once", [batch.piece(layout)]
        # in padding stand NaN and infinities
        yield "into a state", [batch.piece(layout, phase="prefill", filler=1)]
        cuts = [[0, *self._inside(row), n] for row, n in enumerate(batch.lengths)]
        yield "in pieces", batch.pieces(layout, cuts, "prefill")
        if layout == "dense" and self.dtype == "float64" and longest <= _SHORT:
            yield TOKENS, batch.pieces(layout, [[*range(n + 1)] for n in batch.lengths])

    def _inside(self, row: int) -> list[int]:
        """Where a row is cut, once twice: an empty piece. Dense rows are cut at the same places."""
        rng = np.random.default_rng(0 if self.batch.uniform else row)
        cuts = sorted(int(at) for at in rng.integers(0, self.batch.lengths[row] + 1, 3))
        return [*cuts, cuts[-1]]

    @cached_property
    def cotangents(self) -> Lines:
        """Of every output, by row."""
        rng, short = np.random.default_rng(len(self.loops)), types.short_dtype(self.dtype)
        return [
            {
                name: to_dtype(rng.uniform(-1, 1, x.shape[1:]), short)
                for name, x in zip(self.rule.outputs, loop.outputs, strict=True)
            }
            for loop in self.loops
        ]

    @cached_property
    def slopes(self) -> tuple[Arrays, Arrays]:
        """The gradients by every operand that are right, and the anchor."""
        want = self._backward("float64")
        if self.dtype == "float64":
            return want, want
        short = types.short_dtype(self.dtype)
        anchor = self._backward("float32")
        return want, {name: to_dtype(x, short) for name, x in anchor.items()}

    def _backward(self, dtype: str) -> dict[str, np.ndarray]:
        """Gradients by operand: of all tokens of all rows, [N, …], or of one for all tokens."""
        found: list[list[np.ndarray]] = []
        for given, cotangents in zip(self._given, self.cotangents, strict=True):
            seeds = [x[None] for x in cotangents.values()]
            found.append(backward(self.rule, given, seeds, dtype=dtype)[0])
        return {
            name: np.sum(xs, axis=0) if name in self.batch.shared else np.concatenate(xs, axis=1)[0]
            for name, xs in zip(self.placed.names, zip(*found, strict=True), strict=True)
        }

    def slopes_off(
        self, machine: Machine, pieces: Sequence[Piece], label: str
    ) -> tuple[Distance, float]:
        """How far a machine's gradients lie from what they should be, as `off` says it."""
        seeds = [piece.cotangent(self.cotangents, piece is pieces[-1]) for piece in pieces]
        made = machine.gradients([piece.call for piece in pieces], seeds)
        by_row, far = Slopes.of(pieces, made), 0.0
        most_of_all = max((_largest(x) for x in self.slopes[0].values()), default=0.0)
        found = [exact(by_row.padding, np.zeros_like(by_row.padding), "d/d padding")]
        for name, want in self.slopes[0].items():
            shared = name in self.batch.shared
            if shared:
                have = np.sum([of[name] for of in made.inputs], axis=0)
            else:
                have = np.concatenate([row.get(name, want[:0]) for row in by_row.inputs])
            error = _largest(have - want)
            # A gradient may be zero but for rounding.
            scale = _largest(want) + 1e-3 * most_of_all
            far = max(far, np.inf if np.isnan(error) else error / scale if error else 0.0)
            if self.dtype == "float64":
                found.append(Distance(error, SLOPE * scale, f"d/d {name}"))
            elif not shared:  # of a few numbers the anchor's error is luck
                anchor = self.slopes[1][name]
                found.append(distance(have, want, anchor, self.dtype, f"d/d {name}"))
        most = worst(found)
        return replace(most, where=f"{label}: {most.where}"), far

    def differences(self) -> dict[str, Any]:
        """A row of the report: of the body, central differences along a direction of each operand,
        beside the reference of gradients; for the longest row."""
        row = int(np.argmax(self.batch.lengths))
        given, seeds = self._given[row], [*self.cotangents[row].values()]
        slopes, _ = backward(self.rule, given, [x[None] for x in seeds])
        rng, found = np.random.default_rng(0), []

        def total(xs: Sequence[np.ndarray]) -> float:
            outputs = literal(self.rule, xs).outputs
            return float(sum(np.sum(o[0] * c) for o, c in zip(outputs, seeds, strict=True)))

        weight = sum(np.sum(np.abs(o * c)) for o, c in zip(self.loops[row].outputs, seeds))
        for index, (name, slope) in enumerate(zip(self.rule.operands, slopes, strict=True)):
            along = rng.uniform(-1, 1, np.shape(slope))
            ends = [[*given], [*given]]
            for end, sign in zip(ends, (STEP, -STEP), strict=True):
                end[index] = given[index] + sign * along
            rise = (total(ends[0]) - total(ends[1])) / (2 * STEP)
            scale = float(np.sum(np.abs(slope * along)) + 1e-3 * weight)
            error = abs(float(np.sum(slope * along)) - rise)
            found.append(Distance(error, DIFFERENCE * scale, f"d/d {name}"))
        most = worst(found)
        most = replace(most, where=f"central differences: {most.where}")
        length = self.batch.lengths[row]
        cell = {"form": BODY, "backend": INTERPRETER, "runs": "", "layout": "dense", "T": length}
        return self.row(cell, "gradients", [(most, 0.0)])

    def row(
        self, cell: Mapping[str, Any], what: str, found: Sequence[tuple[Distance, float]]
    ) -> dict[str, Any]:
        """A row of the report: the worst of what was found in a cell."""
        most = worst(distance for distance, _ in found)
        return {
            "rule": self.rule.name, **cell, "dtype": self.dtype, "what": what,
            "error": most.error, "allowed": most.allowed,
            "relative": max(far for _, far in found), "where": most.where, "ok": most.ok,
        }  # fmt: skip

    def run(self, machine: Machine, pieces: Sequence[Piece]) -> tuple[Lines, Lines]:
        """Outputs of all tokens and, where the calls keep one, the final state, by row."""
        outputs, state = machine.run([piece.call for piece in pieces])
        return joined(pieces, outputs), pieces[0].signature.by_row(state) if state else []

    def off(self, made: tuple[Lines, Lines], label: str) -> tuple[Distance, float]:
        """How far a result lies from the literal loop: by what is allowed, and as a part of the
        running maximum, infinite where it is no number."""
        parts = [*self._parts(*made, *(self.anchor or made))]
        found = relative = [self._relative(part) for part in parts]
        if self.anchor is not None:
            found = [
                distance(x.have[None], x.want[None], x.anchor[None], self.dtype, x.name)
                for x in parts
            ]
        most = worst(found)
        far = max(np.inf if np.isnan(x.error) else x.error for x in relative)
        return replace(most, where=f"{label}: {most.where}"), float(far)

    def _parts(
        self, outputs: Lines, states: Lines, outputs_anchor: Lines, states_anchor: Lines
    ) -> Iterator[_Part]:
        largest = np.concatenate([loop.largest[0] for loop in self.loops])
        for index, name in enumerate(self.rule.outputs):
            yield _Part(
                name,
                np.concatenate([row[name] for row in outputs]),
                np.concatenate([loop.outputs[index][0] for loop in self.loops]),
                np.concatenate([row[name] for row in outputs_anchor]),
                largest,
            )
        last = [
            x.largest[0, -1] if x.largest.size else np.zeros(largest.shape[1:]) for x in self.loops
        ]
        for index, name in enumerate(self.rule.states if states else ()):
            path = f"state_update_0.{self.rule.function.inputs[index].name}"
            yield _Part(
                f"final {name}",
                np.stack([row[path] for row in states]),
                np.concatenate([loop.states[index] for loop in self.loops]),
                np.stack([row[path] for row in states_anchor]),
                np.stack(last),
            )

    def _relative(self, part: _Part) -> Distance:
        """The largest difference as a part of the running maximum, and where it is."""
        error = np.abs(np.asarray(part.have, np.float64) - part.want)
        if not error.size:
            return Distance(0.0, BOUND, part.name)
        largest = part.largest.reshape(*part.largest.shape, *[1] * (error.ndim - 2))
        with np.errstate(all="ignore"):
            share = np.where(error == 0, 0.0, error / largest)
        place = np.argmax(np.where(np.isnan(share), np.inf, share))
        row, head = (int(i) for i in np.unravel_index(place, share.shape)[:2])
        token = ""
        if not part.name.startswith("final"):
            ends = np.cumsum(self.batch.lengths)
            index, row = row, int(np.searchsorted(ends, row, "right"))
            token = f"token {index - ends[row] + self.batch.lengths[row]} of "
        where = f"{part.name}, {token}row {row}, head {head}"
        return Distance(float(share.flat[place]), BOUND, where)


def _rows(
    report: RecurrenceReport,
    placed: Placed,
    cases: Mapping[tuple[int, bool], _Case],
    layouts: Sequence[str],
    form: str,
    backend: str,
) -> Iterator[dict[str, Any]]:
    """The cells of one form on one backend; where it cannot run it, the report says why."""
    dtype = next(iter(cases.values())).dtype
    machine = _machine(placed, Options(dtype=dtype, form=form), backend)
    back = machine.differentiates and not report.gradients
    for (length, ragged), case in cases.items():
        for layout in (x for x in layouts if (x != "dense") == ragged):
            cell = {"form": form, "backend": backend, "layout": layout, "T": length}
            ways = [*case.ways(layout)]
            try:
                found = [case.off(case.run(machine, pieces), label) for label, pieces in ways]
            except UnsupportedError as error:
                report.forms[form] = f"{report.forms[form]}; {backend}: {error.what}".lstrip("; ")
                return
            cell["runs"] = machine.runs
            yield case.row(cell, "outputs", found)
            if back:
                found = [
                    case.slopes_off(machine, xs, label) for label, xs in ways if label != TOKENS
                ]
                yield case.row(cell, "gradients", found)


def _largest(x: np.ndarray) -> float:
    return float(np.max(np.abs(x), initial=0))


def _machine(placed: Placed, options: Options, backend: str) -> Machine:
    if backend == INTERPRETER:
        return Interpreter(placed.module, options)
    spec = Spec(placed.rule.fn, None)
    machine = find_backend(backend).runner(
        Request(placed.rule.name, placed.module, None, spec, options)
    )
    machine.load({})
    return machine


__all__ = ["FORMS", "RecurrenceReport", "check_recurrence"]
