"""check_recurrence: every form of a rule against its body run literally, in every layout.

    report = ar.check_recurrence(kda, T=65, heads={"q": 2, "k": 2, "g": 2, "v": 4, "beta": 4})
    print(report)           # a table: one row per form, backend, dtype, layout and T
    report.worst            # the largest difference, of the running maximum of |S| and |o|
    report.forms["chunk"]   # what ran, or why it did not

A cell runs the same rows in several ways: at once without state, at once into a state, in pieces
that go on from a state, empty ones among them, and in single tokens. The reference is the literal
loop in float64 (D7); in float64 a difference may be 1e-12 of the largest number that the row and
head have seen up to the token, in other dtypes as D16 says, with the recurrent form in that dtype
as the anchor. Operands are drawn inside the rule's domain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from archir import dims, types
from archir.check.batch import LAYOUTS, Batch, Piece, joined
from archir.check.cases import worst
from archir.check.machines import Interpreter, Machine
from archir.check.signature import Lines, Signature
from archir.check.tolerance import Distance, distance
from archir.compile import DTYPES, Request, find_backend
from archir.diagnostics import SpecError, UnsupportedError, nearest
from archir.interp import to_dtype
from archir.ir import Module
from archir.pipeline import Options, lower
from archir.recurrence import Rule
from archir.recurrence.literal import literal
from archir.spec import Spec, resolve
from archir.types import Tensor

FORMS = ("recurrent", "chunk", "parallel")
INTERPRETER = "numpy"
BOUND = 1e-12  # float64, of the running maximum of |S| and |o| (D16)
AXES = ("BTH", "BT", "H", "")
_SHORT = 32  # rows up to so many tokens also run token by token, call by call


@dataclass
class RecurrenceReport:
    """What `check_recurrence` found; prints as a table.

    rows: one per cell.  worst: the largest difference of any form from the literal loop, as a part
    of the running maximum of |S| and |o|.  forms: for each form what ran, or why it did not.
    """

    rule: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    forms: dict[str, str] = field(default_factory=dict)
    worst: float = 0.0

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row["ok"] for row in self.rows)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The rows that do not hold."""
        return [row for row in self.rows if not row["ok"]]

    @property
    def ran(self) -> tuple[str, ...]:
        """The forms that ran."""
        return tuple(dict.fromkeys(row["form"] for row in self.rows))

    def __str__(self) -> str:
        heads = ("form", "backend", "dtype", "layout", "T", "error", "allowed", "where", "ok")
        lines = [heads, *(tuple(_shown(row[k]) for k in heads) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        forms = [f"{form}: {text}" for form, text in self.forms.items()]
        return "\n".join([f"rule {self.rule}", *table, *forms])


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
    forms: Sequence[str] | None = None,
    backends: Sequence[str] = (INTERPRETER,),
    layouts: Sequence[str] = LAYOUTS,
) -> RecurrenceReport:
    """Compares every form of a rule with its body run token by token and head by head.

    rule: the object, or `path.py:name`.  T: tokens of the longest row; ragged rows are shorter,
    some empty.  K, V, sizes: of the rule's dims; 3 unless given.  heads: of all operands, or of
    each by name, divisors of the largest (grouped).  axes: which leading axes an operand has, by
    name: "BTH" unless given, "BT" (one for all heads), "H" (one for all tokens) or "".  rng: a seed
    or a generator of operands.  dtype: float64, float32, bfloat16, or several.  forms: those asked
    for; unless given, all that are legal.  backends: `numpy` is the interpreter.

    Raises UnsupportedError where a form is asked for that is not legal, SpecError for names that
    the rule does not have.
    """
    found = resolve(rule)
    if not isinstance(found, Rule):
        raise SpecError(
            f"{getattr(found, 'name', rule)} is not a rule",
            code="check-rule",
            next="archir.check compares specs and blocks; this takes what @ar.recurrence made",
        )
    dtypes = (dtype,) if isinstance(dtype, str) else tuple(dtype)
    for what, asked, known in (("dtype", dtypes, DTYPES), ("layout", layouts, LAYOUTS)):
        for name in asked:
            if name not in known:
                raise UnsupportedError(
                    f"there is no {what} {name!r}", code="check-cells", next=nearest(name, known)
                )
    letters = [*dict.fromkeys(d for shape in found.operands.values() for d in shape)]
    for name in sizes or {}:
        if name not in letters:
            raise SpecError(
                f"rule {found.name} has no dim {name}",
                code="sizes-dim",
                next=nearest(name, letters),
            )
    generator = np.random.default_rng(rng)
    placed = Placed(found, {"K": K, "V": V, **(sizes or {})}, heads, axes or {})
    report = RecurrenceReport(found.name)
    legal = []
    for form in FORMS if forms is None else forms:
        reason = _illegal(placed.module, form, asked=forms is not None)
        report.forms[form] = reason
        legal += [] if reason else [form]
    lengths = (T,) if isinstance(T, int) else tuple(T)
    if not lengths or min(lengths) < 1:
        raise UnsupportedError(
            f"T = {T} is no length to check", code="check-cells", next="give T=(1, 17, …)"
        )
    batches = {
        (length, layout != "dense"): placed.draw(length, layout != "dense", generator)
        for length in lengths
        for layout in layouts
        if layout == "dense" or length == max(lengths)
    }
    for name in dtypes:
        cases = {key: _Case(placed, batch, name) for key, batch in batches.items()}
        for form in legal:
            for backend in backends:
                _run(report, placed, cases, layouts, form, backend)
    for form in legal:
        rows = [row for row in report.rows if row["form"] == form]
        if rows:
            where = ", ".join(dict.fromkeys(row["backend"] for row in rows))
            ran = f"ran on {where}, worst {max(row['relative'] for row in rows):.1e}"
            report.forms[form] = f"{ran}; {report.forms[form]}".removesuffix("; ")
    report.worst = max((row["relative"] for row in report.rows), default=0.0)
    return report


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


# ---- rows of tokens


class Placed:
    """A rule on operands of given sizes, heads and leading axes: its module, and draws of rows.

    names: what the module calls the operands.
    """

    def __init__(
        self,
        rule: Rule,
        sizes: Mapping[str, int],
        heads: int | Mapping[str, int],
        axes: Mapping[str, str],
    ) -> None:
        self.rule = rule
        names = [*rule.operands]
        for name in (*axes, *(heads if isinstance(heads, Mapping) else ())):
            if name not in names:
                raise SpecError(
                    f"{name!r} is no operand of {rule.name}",
                    code="check-operand",
                    next=nearest(name, names),
                )
        for name, lead in axes.items():
            if lead not in AXES:
                raise SpecError(
                    f"{name} cannot have the leading axes {lead!r}",
                    code="check-axes",
                    next="an operand has BTH, BT (one for all heads), H (one for all tokens) or ''",
                )
        most = heads if isinstance(heads, int) else max(heads.values(), default=1)
        each = {n: heads if isinstance(heads, int) else heads.get(n, most) for n in names}
        self.axes = {name: axes.get(name, "BTH") for name in names}
        self._inner: dict[str, tuple[int, ...]] = {}
        for name, shape in rule.operands.items():
            lead = (each[name],) if "H" in self.axes[name] else ()
            self._inner[name] = (*lead, *(sizes.get(d, 3) for d in shape))
        self.module = self._trace()
        self.signature = Signature(self.module)

    def _trace(self) -> Module:
        """The rule on operands so placed, those with tokens first, from which rows are made."""
        grid = dims.symbol("B"), dims.symbol("T")
        traced = self.rule.trace(
            {
                name: Tensor("f", (*(grid if "T" in self.axes[name] else ()), *shape))
                for name, shape in self._inner.items()
            }
        )
        *others, entry = traced.functions
        self.names = [v.name for v in entry.inputs]
        lead = dict(zip(entry.inputs, self.axes.values(), strict=True))
        inputs = sorted(entry.inputs, key=lambda v: "T" not in lead[v])
        ops = tuple(replace(op, loc=entry.loc) for op in entry.ops)  # nobody wrote them
        return Module((*others, replace(entry, inputs=tuple(inputs), ops=ops)))

    def shapes(self, batch: int, length: int) -> dict[str, tuple[int, ...]]:
        """The shape of each operand on a grid [B, T]."""
        return {
            name: (*((batch, length) if "T" in self.axes[name] else ()), *inner)
            for name, inner in self._inner.items()
        }

    def draw(self, length: int, ragged: bool, rng: np.random.Generator) -> Batch:
        """Rows of drawn operands: two of all tokens, or five of unlike length, one empty. In all
        about 16 tokens at least, as of a few the anchor's error is luck."""
        lengths = (length,) * max(2, 16 // length)
        if ragged:
            lengths = (length - length // 3, 0, length, min(length, 1), length // 2)
            lengths *= max(1, -(-16 // sum(lengths)))
        made = draw(self.rule, self.shapes(len(lengths), length), rng)
        named = [*zip(self.names, self.axes.values(), made.values(), strict=True)]
        lines = [
            {name: x[row, :n] for name, lead, x in named if "T" in lead}
            for row, n in enumerate(lengths)
        ]
        shared = {name: x for name, lead, x in named if "T" not in lead}
        return Batch(self.signature, lines, shared, lengths)


def draw(
    rule: Rule, shapes: Mapping[str, tuple[int, ...]], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Operands of these shapes inside the rule's domain: normal numbers, folded at a bound or
    uniform between two, of length 1 on the last axis where they are `unit`."""
    return {name: _draw(rule.domain.get(name, ""), shape, rng) for name, shape in shapes.items()}


def _draw(domain: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    x = rng.standard_normal(shape)
    if domain == "unit":
        return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True))
    if domain.startswith("<="):
        return float(domain[2:]) - np.abs(x)
    if domain.startswith(">="):
        return float(domain[2:]) + np.abs(x)
    if ".." in domain:
        low, high = map(float, domain.split(".."))
        if np.isfinite(low) and np.isfinite(high):
            return rng.uniform(low, high, shape)
        return low + np.abs(x) if np.isfinite(low) else high - np.abs(x)
    return x


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
        self.dtype, self.rule = dtype, placed.rule
        self.batch = replace(
            batch,
            lines=[{k: to_dtype(x, short) for k, x in line.items()} for line in batch.lines],
            shared={k: to_dtype(x, short) for k, x in batch.shared.items()},
        )
        given = [
            {**{k: x[None] for k, x in line.items()}, **self.batch.shared}
            for line in self.batch.lines
        ]
        self.loops = [literal(placed.rule, [x[name] for name in placed.names]) for x in given]
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
            yield "by token", batch.pieces(layout, [[*range(n + 1)] for n in batch.lengths])

    def _inside(self, row: int) -> list[int]:
        """Where a row is cut, once twice: an empty piece. Dense rows are cut at the same places."""
        rng = np.random.default_rng(0 if self.batch.uniform else row)
        cuts = sorted(int(at) for at in rng.integers(0, self.batch.lengths[row] + 1, 3))
        return [*cuts, cuts[-1]]

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


def _run(
    report: RecurrenceReport,
    placed: Placed,
    cases: Mapping[tuple[int, bool], _Case],
    layouts: Sequence[str],
    form: str,
    backend: str,
) -> None:
    """The cells of one form on one backend; where the backend cannot run it, the reason."""
    dtype = next(iter(cases.values())).dtype
    machine = _machine(placed, Options(dtype=dtype, form=form), backend)
    for (length, ragged), case in cases.items():
        for layout in (x for x in layouts if (x != "dense") == ragged):
            try:
                ways = case.ways(layout)
                found = [case.off(case.run(machine, pieces), label) for label, pieces in ways]
            except UnsupportedError as error:
                report.forms[form] = f"{report.forms[form]}; {backend}: {error.what}".lstrip("; ")
                return
            cell = worst(distance for distance, _ in found)
            report.rows.append(
                {
                    "rule": report.rule, "form": form, "backend": backend, "dtype": dtype,
                    "layout": layout, "T": length, "error": cell.error, "allowed": cell.allowed,
                    "relative": max(far for _, far in found),
                    "where": cell.where, "ok": cell.ok,
                }
            )  # fmt: skip


def _machine(placed: Placed, options: Options, backend: str) -> Machine:
    if backend == INTERPRETER:
        return Interpreter(placed.module, options)
    spec = Spec(placed.rule.fn, None)
    machine = find_backend(backend).runner(
        Request(placed.rule.name, placed.module, None, spec, options)
    )
    machine.load({})
    return machine


__all__ = ["FORMS", "Placed", "RecurrenceReport", "check_recurrence", "draw"]
