"""What archir finds in a recurrence rule, for the people who design such layers.

    archir explain rule.py:kda          its canonical form, legal forms, equations by chunks
    archir explain rule.py:kda --latex

Everything is rendered from the canonical record; of a rule without one, the reason is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from archir.diagnostics import SpecError
from archir.ir import Function, plain_name
from archir.passes.choose_form import CHUNK
from archir.recurrence import Rule
from archir.recurrence.canonical import Reason, Record, canonical
from archir.recurrence.equations import SECTIONS, Equation, Equations, equations, fed_by
from archir.spec import resolve, trace

SCHEMA = "archir.explain/1"
WIDTH = 100  # columns of a line


@dataclass(frozen=True)
class Form:
    """A way to run a rule: whether it is legal, and how it runs or why it is not."""

    form: str
    legal: bool
    says: str


@dataclass(frozen=True)
class RuleExplanation:
    """One rule. found: its canonical record, or the reason it has none."""

    rule: Function
    found: Record | Reason

    @property
    def forms(self) -> tuple[Form, ...]:
        """Every form, with its reason."""
        recurrent = Form("recurrent", True, "token by token")
        if isinstance(self.found, Reason):
            reason = str(self.found)
            return recurrent, Form("chunk", False, reason), Form("parallel", False, reason)
        stages = self.found.stages
        solve, whole = "nothing is erased, so that nothing is solved", ""
        if any(s.value_side for s in stages):
            solve = "by substitution, as what is erased differs between values"
        elif any(s.erases for s in stages):
            solve = "one unit lower triangular solve in each"
        if any(s.erases for s in stages):
            whole = ", in float64, as a solve over all of them loses digits"
        return (
            recurrent,
            Form("chunk", True, f"chunks of {CHUNK} tokens, {solve}"),
            Form("parallel", True, f"one chunk of all tokens{whole}"),
        )

    @cached_property
    def equations(self) -> Equations | None:
        """The equations; None where the rule has no canonical form."""
        if isinstance(self.found, Reason):
            return None
        return equations(self.found)

    def row(self) -> dict[str, Any]:
        """What `--json` gives."""
        found = self.found if isinstance(self.found, Record) else None
        names = found.names if found else {}
        states = [
            {
                "state": names[s.state],
                "key": s.key,
                "value": s.value,
                "transposed": s.place == 1,
                "decay": s.decay_kind,
                "erase_rank": len(s.erases),
                "erase_per_value": s.value_side,
                "writes": len(s.writes),
                "shared": s.shared,
                "reads": len(s.reads),
                "fed_by": sorted(names[other] for other in fed_by(s)),
            }
            for s in (found.stages if found else ())
        ]
        return {
            "rule": self.rule.name,
            "loc": self.rule.loc.short if self.rule.loc else "",
            "states": states,
            "forms": [asdict(form) for form in self.forms],
            "equations": [asdict(e) for e in (self.equations.all if self.equations else ())],
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Its text."""
        loc = f"  {self.rule.loc.short}" if self.rule.loc else ""
        inputs = ", ".join(plain_name(v, self.rule) for v in self.rule.inputs)
        yield f"{self.rule.name}({inputs}){loc}"
        found = self.equations
        for state, facts in found.facts.items() if found else ():
            yield f"\nstate {state}"
            yield from (f"  {word:<10} {says}" for word, says in facts)
        yield "\nforms"
        for form in self.forms:
            yield f"  {form.form:<10} {'legal' if form.legal else 'no'}: {form.says}"
        if found is None:
            return
        for section in SECTIONS:
            here = [e for e in found.all if e.section == section]
            if not here:
                continue
            yield f"\n{_title(section, found)}"
            sides = [(e.label, *e.text.split(" = ", 1)) for e in here]
            first = max(len(label) for label, _, _ in sides)
            second = max(len(left) for _, left, _ in sides)
            for label, left, right in sides:
                head = f"  {label:<{first}}  {left:<{second}} = "
                for line in _filled(right, WIDTH - len(head)):
                    yield head + " ".join(line)
                    head = " " * len(head)

    def latex(self) -> str:
        """The equations in `align*`, for amsmath; of a rule without, the reason in a comment."""
        if self.equations is None:
            return f"% {self.rule.name}: no chunked form. {self.found}"
        lines = []
        for section in SECTIONS:
            here = [e for e in self.equations.all if e.section == section]
            if not here:
                continue
            title = _title(section, self.equations).replace("…", r"\dots")
            lines += [f"% {self.rule.name}: {title}", r"\begin{align*}"]
            lines += [" \\\\\n".join(f"  {row}" for e in here for row in _latex_rows(e))]
            lines += [r"\end{align*}"]
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: every rule of a model once, or one rule."""

    rules: tuple[RuleExplanation, ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rules as plain data."""
        return [rule.row() for rule in self.rules]

    def __str__(self) -> str:
        return "\n\n\n".join(str(rule) for rule in self.rules)

    def latex(self) -> str:
        """The equations of all rules."""
        return "\n\n".join(rule.latex() for rule in self.rules)


def explain(given: Any, preset: str | None = None, config: Any = None) -> Explanation:
    """The canonical form, the legal forms and the equations of a rule, or of a model's rules.

    given: a rule, spec or block, its name or `path.py:function`.  Raises SpecError where a model
    has no recurrence.
    """
    found = resolve(given)
    if isinstance(found, Rule):
        return Explanation((_explained(found.function),))
    module = trace(found, preset, config)
    names = dict.fromkeys(
        op.attrs["rule"].name
        for function in module.functions
        for op in function.ops
        if op.kind == "state_update"
    )
    if not names:
        raise SpecError(
            f"{module.entry.name} has no recurrence to explain",
            code="explain-none",
            next="name a rule, path/to/file.py:rule, or a model that calls one",
        )
    return Explanation(tuple(_explained(module[name]) for name in names))


def _explained(rule: Function) -> RuleExplanation:
    return RuleExplanation(rule, canonical(rule))


# ---- lines


_SIGNS = re.compile(
    r"(?P<open>[(\[{⟨]|\\left|\\langle|\\begin)|(?P<close>[)\]}⟩]|\\right|\\rangle|\\end)"
    r"| (?=[+−-] )"
)


def _terms(text: str) -> list[str]:
    """`a`, `+ b`, `− c` of the sum that a text is, or LaTeX; what stands in brackets is whole."""
    found, depth, start = [], 0, 0
    for sign in _SIGNS.finditer(text):
        depth += (sign["open"] is not None) - (sign["close"] is not None)
        if sign[0] == " " and not depth:
            found.append(text[start : sign.start()])
            start = sign.end()
    return [*found, text[start:]]


def _filled(text: str, room: int) -> list[list[str]]:
    """The terms of a sum by lines, each with as many as have room."""
    lines: list[list[str]] = []
    for term in _terms(text):
        if lines and len(" ".join([*lines[-1], term])) <= room:
            lines[-1].append(term)
        else:
            lines.append([term])
    return lines


def _latex_rows(equation: Equation) -> Iterator[str]:
    """An equation as rows of `align*`, broken after the terms where its text would be."""
    left, right = equation.text.split(" = ", 1)
    terms, sign = iter(_terms(equation.latex)), ""
    for line in _filled(right, WIDTH - len(left)):
        yield sign + " ".join(islice(terms, len(line)))
        sign = r"&\quad "


def _title(section: str, found: Equations) -> str:
    i, j, C = (found.letters[name] for name in "ijC")
    states = [*found.facts]
    enter, leave = (", ".join(f"{s}_{at}" for s in states) for at in ("0", C))
    few = len(states) == 1
    return {
        "terms": f"token {i}",
        "recurrent": "token by token",
        "chunk": f"by chunks of tokens {i}, {j} = 1 … {C}: {enter} enter{'s' if few else ''}, "
        f"{leave} leave{'s' if few else ''}",
        "outputs": f"outputs of token {i}",
    }[section]
