"""Published recurrences: each written in six lines, every form of each against its literal loop."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import archir as ar
from archir.check.recurrence import FORMS, RecurrenceReport
from archir.recurrence.canonical import canonical
from archir.recurrence.literal import literal
from tests.recurrence.library import (
    CHUNKABLE,
    EXAMPLES,
    KDA_REWRITTEN,
    RECURRENT_ONLY,
    draw,
    kda,
    kda_renamed,
    placed,
    shapes,
)

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 130)


def report_of(
    name: str, T: int | Sequence[int], backends: tuple[str, ...] = ("numpy",), **how: Any
) -> RecurrenceReport:
    rule, given = EXAMPLES[name]
    return ar.check_recurrence(rule, T, **given, backends=backends, **how)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_rule_is_six_lines(name: str) -> None:
    lines = inspect.getsource(EXAMPLES[name][0].fn).splitlines()
    body = [line for line in lines if line.startswith("    ") and '"""' not in line]
    body = [line for line in body if not line.strip().startswith(('"q:K', '"r:K', "domain="))]
    assert 1 + len(body) <= 6


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_form_is_the_literal_loop(name: str) -> None:
    """Dense and ragged, at once, in pieces with empty ones, token by token."""
    report = report_of(name, 17)
    assert report.ok, report
    assert report.worst <= 1e-12
    assert report.ran == (FORMS if name in CHUNKABLE else ("recurrent",))


@pytest.mark.parametrize("name", RECURRENT_ONLY)
def test_why_a_rule_does_not_chunk(name: str) -> None:
    forms = report_of(name, 1).forms
    assert forms["chunk"] == forms["parallel"] != ""
    assert "ran" not in forms["chunk"].split() and "library.py:" in forms["chunk"]


@pytest.mark.parametrize("name", ["rwkv7", "cascade", "mlstm"])
def test_emitted(name: str) -> None:
    """With gradients, of which the literal body gives central differences."""
    report = report_of(name, 17, backends=("eager",), layouts=("left",))
    assert report.ok, report
    assert {row["what"] for row in report.rows} == {"outputs", "gradients"}
    assert report.worst_gradient < 1e-13 and report.rows[-1]["form"] == "body"


@pytest.mark.parametrize("name", ["kda", "cascade", "normed"])
def test_what_is_chosen_unless_asked(name: str) -> None:
    """On either side of the length from which chunks are taken."""
    report = report_of(name, (15, 16), forms=("auto",), layouts=("dense", "right"))
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_form_at_every_length(name: str) -> None:
    """In the interpreter and emitted."""
    report = report_of(name, LENGTHS, backends=("numpy", "eager"))
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_form_in_low_precision(name: str) -> None:
    backends, dtypes = ("numpy", "eager"), ("float32", "bfloat16")
    report = report_of(name, (1, 65), dtype=dtypes, backends=backends)
    assert report.ok, report


@pytest.mark.parametrize("name", EXAMPLES)
def test_operands_are_inside_the_domain(name: str) -> None:
    rule, given = EXAMPLES[name]
    made = draw(name, 2, 9, 3)
    assert {k: x.shape for k, x in made.items()} == shapes(name, 2, 9)
    for operand, domain in rule.domain.items():
        x = made[operand]
        if domain == "unit":
            np.testing.assert_allclose(np.sum(x * x, axis=-1), 1)
        elif ".." in domain:
            low, high = map(float, domain.split(".."))
            assert np.all((low <= x) & (x <= high))
        else:
            assert np.all(x <= 0 if domain == "<= 0" else x >= 0)
    # inside it, no state explodes
    loop = literal(rule, [*draw(name, 1, 130, 3).values()])
    assert np.max(loop.largest) < 300
    assert given.get("K", 5) != given.get("V", 7) or name == "rwkv7"


def test_kda_in_other_words_is_kda() -> None:
    operands = [*draw("kda", 2, 20).values()]
    want = literal(kda, operands)
    for rule in (*KDA_REWRITTEN, kda_renamed):
        made = literal(rule, operands)
        for x, y in zip((*made.outputs, *made.states), (*want.outputs, *want.states), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


def test_kda_in_other_words_has_its_record() -> None:
    records = {str(canonical(rule.function)) for rule in (kda, *KDA_REWRITTEN, kda_renamed)}
    assert len(records) == 1, "\n".join(records)


def test_operands_of_every_kind_are_among_them() -> None:
    """All heads, grouped, one for all heads, one for all tokens, one for all."""
    leads = {lead for name in EXAMPLES for lead in placed(name).axes.values()}
    assert leads == {"BTH", "BT", "H", ""}
