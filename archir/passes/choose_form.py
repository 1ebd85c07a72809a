"""choose_form: which form each attention and state update runs in, and why.

    o, S_1 = state_update(…, rule=kda)              → …, form="recurrent")
    a = attention(q, k, v, seq)                     → …, form="full")
    a = attention(q, k_1, v_1, seq, keys="cache")   → …, form="cached")

The choice is a record (`choices`): candidates, whether each is legal and why not. `form=` asks for
one; an illegal one is an error that gives the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from archir.diagnostics import Loc, UnsupportedError, nearest
from archir.ir import Module, Op
from archir.passes.rewrite import Rewriter, rewrite

FORMS = ("auto", "recurrent", "chunk", "parallel")
_UNDERIVED = "chunked algebra is not derived yet: a rule runs token by token"


@dataclass(frozen=True)
class Candidate:
    """A form, and the reason it cannot be taken ("" when it can)."""

    form: str
    reason: str = ""


@dataclass(frozen=True)
class Choice:
    """One op's form: where it stands, what was possible, what was taken."""

    function: str
    op: str
    loc: Loc | None
    candidates: tuple[Candidate, ...]
    form: str


def choices(module: Module, form: str = "auto") -> tuple[Choice, ...]:
    """The record of every choice in a specialised module."""
    found = []
    for function in module.functions:
        for op in function.ops:
            if op.kind in ("attention", "state_update"):
                candidates = _candidates(op)
                taken = _take(op, candidates, form)
                found.append(Choice(function.name, op.results[0].name, op.loc, candidates, taken))
    return tuple(found)


def _candidates(op: Op) -> tuple[Candidate, ...]:
    if op.kind == "attention":
        cached = op.attrs.get("keys") == "cache"
        return (Candidate("cached" if cached else "full"),)
    return (
        Candidate("recurrent"),
        Candidate("chunk", _UNDERIVED),
        Candidate("parallel", _UNDERIVED),
    )


def _take(op: Op, candidates: tuple[Candidate, ...], form: str) -> str:
    if form not in FORMS:
        raise UnsupportedError(f"there is no form {form!r}", code="form", next=nearest(form, FORMS))
    wanted = [c for c in candidates if form in ("auto", c.form) or op.kind == "attention"]
    legal = [c for c in wanted if not c.reason]
    if not legal:
        raise UnsupportedError(
            f"form {form!r} is not legal for this {op.kind}",
            code="form-illegal",
            loc=op.loc,
            facts=[f"{c.form}: {c.reason or 'legal'}" for c in candidates],
            next="ask for form='auto' or a legal form",
        )
    return legal[0].form


def choose_form(module: Module, form: str = "auto") -> Module:
    """Writes the chosen form into each op."""

    def visit(new: Rewriter, op: Op) -> bool:
        if op.kind not in ("attention", "state_update"):
            return False
        new.copy(op, attrs={**op.attrs, "form": _take(op, _candidates(op), form)})
        return True

    return rewrite(module, visit)
