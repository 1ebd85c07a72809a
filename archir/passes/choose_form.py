"""choose_form: which form each attention and state update runs in, and why.

    o, S_1 = state_update(…, rule=kda)              → …, form="recurrent")
    a = attention(q, k, v, seq)                     → …, form="full")
    a = attention(q, k_1, v_1, seq, keys="cache")   → …, form="cached")

The choice is a record (`choices`): candidates, whether each is legal and why not. `form=` asks for
one; an illegal one is an error that gives the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from archir.diagnostics import Loc, UnsupportedError, nearest
from archir.ir import Module, Op
from archir.passes.fuse import Keeps
from archir.passes.rewrite import Rewriter, rewrite
from archir.recurrence.canonical import Reason, canonical

CHUNK = 16  # tokens: any decay is right in chunks of 16 (DESIGN, numerics)
FORMS = ("auto", "recurrent", "chunk", "parallel")


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
                candidates = _candidates(op, module)
                taken = _take(op, candidates, form)
                found.append(Choice(function.name, op.results[0].name, op.loc, candidates, taken))
    return tuple(found)


def _candidates(op: Op, module: Module) -> tuple[Candidate, ...]:
    if op.kind == "attention":
        cached = op.attrs.get("keys") == "cache"
        return (Candidate("cached" if cached else "full"),)
    found = canonical(module[op.attrs["rule"].name])
    reason = str(found) if isinstance(found, Reason) else ""
    return Candidate("chunk", reason), Candidate("recurrent"), Candidate("parallel", reason)


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


def choose_form(
    module: Module, chunk: int, form: str = "auto", keeps: Keeps = lambda op, _: False
) -> Module:
    """Writes the chosen form into each op.

    chunk: tokens of one.  keeps: whether the backend has a kernel for an op. `auto` takes that for
    a recurrence, else chunks, and for sequences shorter than a chunk (`below`) the recurrent form.
    """

    def visit(new: Rewriter, op: Op) -> bool:
        if op.kind not in ("attention", "state_update"):
            return False
        attrs = {**op.attrs, "form": _take(op, _candidates(op, module), form)}
        if form == "auto" and attrs["form"] == "chunk":
            kernel = {**attrs, "form": "recurrent"}
            has_kernel = keeps(replace(op, attrs=kernel), module)
            attrs = kernel if has_kernel else {**attrs, "below": chunk}
        new.copy(op, attrs=attrs)
        return True

    return rewrite(module, visit)
