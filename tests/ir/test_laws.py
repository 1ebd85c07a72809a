"""Laws of the IR on generated modules."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archir.fuzz import laws
from archir.fuzz.modules import mistyped, modules
from archir.ir import Module


def cases(count: int) -> Any:
    """The same examples at every run, nothing written to disk."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(
        max_examples=count, deadline=None, database=None, derandomize=True,
        suppress_health_check=slow,
    )  # fmt: skip


@cases(150)
@given(modules())
def test_text(module: Module) -> None:
    laws.text(module)


@cases(100)
@given(modules(), st.data())
def test_altered_types_are_refused(module: Module, data: st.DataObject) -> None:
    wrong = data.draw(mistyped(module))
    if wrong is not None:
        laws.refused(wrong)


@cases(50)
@given(modules())
def test_runs_in_every_dtype(module: Module) -> None:
    laws.runs(module)


@cases(25)
@given(modules("smooth"))
def test_passes_keep_the_meaning(module: Module) -> None:
    laws.lowers(module)


@cases(25)
@given(modules("causal"))
def test_decode_is_full(module: Module) -> None:
    laws.lowers(module, phase="decode")
