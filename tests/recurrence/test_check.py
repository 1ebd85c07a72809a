"""check_recurrence and `archir check RULE`: what they print, what they find, what they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archir as ar
from archir.check.batch import LAYOUTS
from archir.check.recurrence import FORMS
from archir.diagnostics import ArchirError
from archir.passes import specialize
from archir.sequence import Rows
from backends.eager.ops import elementwise as emitters
from tests.cli.conftest import archir
from tests.goldens import check_golden
from tests.recurrence.library import squashed
from tests.recurrence.rules import RULES
from tests.specs.kda import kda

__all__ = ["archir"]
HERE = Path(__file__).parent
KDA = f"{HERE.parent / 'specs' / 'kda.py'}:kda"


@ar.recurrence("q:K k:K v:V -> o:V")
def sly(S: Any, q: Any, k: Any, v: Any) -> Any:
    """Not what it says it is when it is traced."""
    S = S + (1.0 if isinstance(S, np.ndarray) else 1 + 1e-9) * np.outer(k, v)
    return S, q @ S


@pytest.mark.parametrize("name", RULES)
def test_every_way_of_writing_holds(name: str) -> None:
    report = ar.check_recurrence(RULES[name], 9, forms=("recurrent",), V=5, backends=("numpy",))
    assert report.ok, report


def test_the_report() -> None:
    heads = {"q": 1, "k": 1, "v": 2}
    report = ar.check_recurrence(kda, (1, 5), heads=heads, rng=3, backends=("numpy",))
    assert report.ok and report.ran == FORMS
    assert [(r["form"], r["layout"], r["T"]) for r in report.rows if r["form"] == "recurrent"] == [
        ("recurrent", "dense", 1), ("recurrent", "dense", 5),
        *(("recurrent", layout, 5) for layout in LAYOUTS[1:]),
    ]  # fmt: skip
    assert all(text.startswith("ran on numpy, worst ") for text in report.forms.values())
    assert report.gradients == "" and report.worst_gradient == 0
    assert 0 < report.worst == max(row["relative"] for row in report.rows) < 1e-14


def test_the_table() -> None:
    """Without digits that depend on rounding, and the reasons that others test."""
    text = re.sub(r"\d\.\de-\d\d", "#.#e-##", str(ar.check_recurrence(squashed, 3)))
    text = re.sub(
        r"(at once|into a state|in pieces|by token|central differences): .*? {2,}yes",
        "WHERE  yes",
        text,
    )
    text = re.sub(r"^(chunk|parallel): .*", r"\1: REASON", re.sub(" {2,}", "  ", text), flags=re.M)
    check_golden("recurrence/report", text)


def test_what_ran_is_said() -> None:
    report = ar.check_recurrence(kda, 5, backends=("eager", "triton"), layouts=("dense",))
    assert (
        "ran on eager, triton (the kernel, in Triton's interpreter), " in report.forms["recurrent"]
    )
    assert "triton (torch: its form is chunk" in report.forms["chunk"]


def test_a_generator_goes_on() -> None:
    rng = np.random.default_rng(0)
    first, second, again = (
        ar.check_recurrence(kda, 5, rng=given, forms=("recurrent",), backends=("numpy",)).worst
        for given in (rng, rng, 0)
    )
    assert first == again != second


def test_names_may_stand_alone() -> None:
    report = ar.check_recurrence(kda, 3, forms="chunk", backends="numpy", layouts="packed")
    assert [(row["form"], row["layout"]) for row in report.rows] == [("chunk", "packed")]


@pytest.mark.parametrize("lead", ["", "H"])
def test_a_constant_of_all_tokens(lead: str) -> None:
    """A number, or one of each head, with its gradient."""

    @ar.recurrence("q:K k:K v:V a: -> o:V", domain={"a": "0..1"})
    def kept(S, q, k, v, a):
        S = a * S + np.outer(k, v)
        return S, q @ S

    report = ar.check_recurrence(kept, 17, axes={"a": lead}, backends="eager")
    assert report.ok, report
    assert {row["what"] for row in report.rows} == {"outputs", "gradients"}


def test_low_precision_and_backends() -> None:
    report = ar.check_recurrence(
        kda, 17, dtype=("float32", "bfloat16"), backends=("numpy", "eager"),
        forms=("recurrent",), layouts=("dense", "packed"),
    )  # fmt: skip
    assert report.ok, report
    assert {(r["backend"], r["dtype"]) for r in report.rows} == {
        (b, d) for b in ("numpy", "eager") for d in ("float32", "bfloat16")
    }
    assert 1e-8 < report.worst < 2**-7


def forgets_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call begins with nothing."""

    def wrong(self: Any, path: str, type_: Any, kind: str) -> Any:
        made = self.field("state", path, type_, kind=kind)
        return self.emit("mul", made, 0.0) if kind == "matrix" else made

    monkeypatch.setattr(specialize._Specialized, "state_entry", wrong)


def reads_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that have ended go on with the next one's tokens."""
    right = Rows.grid

    def wrong(self: Rows, *chunk: Any) -> Any:
        index, valid = right(self, *chunk)
        return index, np.ones_like(valid)

    monkeypatch.setattr(Rows, "grid", wrong)


def another_exponential(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(emitters.TABLE, "exp", emitters.TABLE["exp"] + " * (1 + 1e-9)")


def no_gradient_of_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(emitters.TABLE, "exp", f"({emitters.TABLE['exp']}).detach()")


BROKEN = {
    "a state that is forgotten": (forgets_the_state, "numpy", {"in pieces", "by token"}, LAYOUTS),
    "rows without an end": (reads_the_row_before, "numpy", None, LAYOUTS[1:]),
    "a wrong emitter": (another_exponential, "eager", None, LAYOUTS),
    "a gradient that is cut": (no_gradient_of_exp, "eager", None, LAYOUTS),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_break_is_found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    apply, backend, ways, layouts = BROKEN[name]
    monkeypatch.setenv("ARCHIR_CACHE", str(tmp_path))
    apply(monkeypatch)
    report = ar.check_recurrence(kda, 7, forms=("recurrent",), backends=(backend,))
    assert {row["layout"] for row in report.failures} == {*layouts}
    if ways:
        assert {row["where"].partition(":")[0] for row in report.failures} <= ways
    if apply is no_gradient_of_exp:
        assert {row["what"] for row in report.failures} == {"gradients"}
        assert all(row["where"].endswith("d/d g") for row in report.failures)


def test_the_command(archir: Any) -> None:
    code, out, err = archir("check", KDA, "--forms", "recurrent", "--layouts", "dense")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "rule kda"
    assert out.splitlines()[1].split() == [
        "form", "backend", "dtype", "layout", "T", "what", "error", "allowed", "where", "ok",
    ]  # fmt: skip
    code, out, _ = archir("check", KDA, "--json", "--backends", "numpy,eager", "--seed", 2,
                          "--dtype", "float64", "--layouts", "packed")  # fmt: skip
    found = json.loads(out)
    assert code == 0 and found["schema"] == "archir.check_recurrence/1"
    assert {(row["form"], row["backend"]) for row in found["rows"] if row["form"] in FORMS} == {
        (form, backend) for form in FORMS for backend in ("numpy", "eager")
    }
    assert found["worst"] < 1e-13 and set(found["forms"]) == {*FORMS}


def test_the_command_exits_1_on_a_difference(archir: Any) -> None:
    code, out, err = archir("check", f"{__file__}:sly", "--layouts", "dense,left")
    assert code == 1
    assert " NO" in out and "sly" in err and "cells differ, first" in err


def test_a_form_that_is_not_legal_gives_the_reason(archir: Any) -> None:
    code, out, err = archir("check", f"{HERE}/library.py:squashed", "--forms", "chunk")
    assert (code, out) == (2, "") and "[form-illegal]" in err and "tanh" in err


REFUSED = {
    "a form that is none": f"check {KDA} --forms recurent",
    "a layout that is none": f"check {KDA} --layouts middle",
    "a dtype that is none": f"check {KDA} --dtype float8",
    "a backend that is none": f"check {KDA} --backends eagr",
    "a preset of a rule": f"check {KDA} --preset tiny",
    "laws of a rule": f"check {KDA} --laws",
    "forms of a spec": "check gpt2 --forms chunk",
}


def test_refused(archir: Any) -> None:
    shown = []
    for name, arguments in REFUSED.items():
        code, out, err = archir(*arguments.split())
        assert (code, out) == (2, "")
        assert "\nnext: " in err
        shown.append(f"## {name}\n\n{err}")
    for name, given in {
        "a spec": {"rule": "gpt2"},
        "no length": {"rule": kda, "T": ()},
        "a length that is no whole number": {"rule": kda, "T": 3.5},
        "no heads": {"rule": kda, "heads": 0},
        "no heads of an operand": {"rule": kda, "heads": {"q": 0}},
        "the size of a dim below zero": {"rule": kda, "sizes": {"K": -1}},
        "a dim without numbers": {"rule": kda, "V": 0},
        "no layouts": {"rule": kda, "layouts": ()},
        "no forms": {"rule": kda, "forms": ()},
        "no backends": {"rule": kda, "backends": ()},
        "no dtypes": {"rule": kda, "dtype": ()},
        "the size of no dim": {"rule": kda, "sizes": {"D": 4}},
        "heads of no operand": {"rule": kda, "heads": {"z": 2}},
        "axes that are none": {"rule": kda, "axes": {"g": "TH"}},
    }.items():
        with pytest.raises(ArchirError) as caught:
            ar.check_recurrence(**given)
        assert caught.value.next
        shown.append(f"## {name}\n\n{caught.value}\n")
    check_golden("recurrence/check_refused", "\n".join(shown))
