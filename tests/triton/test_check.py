"""`archir check` of the Triton backend: kernels in the interpreter against NumPy, within D16."""

from __future__ import annotations

from typing import Any

import pytest

import archir as ar
from archir.check.batch import LAYOUTS
from archir.check.laws import LAWS
from backends.triton import body
from tests.specs.conv import conv_lm
from tests.specs.kda import KDA, kda_lm

SPECS: dict[str, dict[str, Any]] = {
    "gpt2": {"spec": "gpt2"},
    "llama": {"spec": "llama"},
    "conv": {"spec": conv_lm},
    # one layer, few heads: the interpreter takes a tenth of a second for each token of each head
    "kda": {"spec": kda_lm, "config": KDA(heads=1, value_heads=2, key=5, value=6, mixers=("kda",))},
}
TINY = {**SPECS, "kda": {"spec": kda_lm}}
PHASES = {"full", "prefill", "decode", "state", "last", "loss"}


def holds(spec: dict[str, Any], **how: Any) -> set[tuple[str, str]]:
    """Runs cells, none of which may fail; (phase, layout) of all."""
    report = ar.check(**spec, backends=("triton",), **how)
    assert report.ok, report.failures
    return {(row["phase"], row["layout"]) for row in report.rows}


SLOW = {("kda", "bfloat16")}
CELLS = [
    pytest.param(name, dtype, marks=[pytest.mark.slow] * ((name, dtype) in SLOW))
    for name in SPECS
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.parametrize("name, dtype", CELLS)
def test_every_phase_and_layout(name: str, dtype: str) -> None:
    ran = holds(SPECS[name], dtypes=(dtype,), lengths=(3,) if name == "kda" else (5,))
    assert {(phase, layout) for phase in PHASES for layout in LAYOUTS} <= ran


@pytest.mark.parametrize("name", SPECS)
def test_gradients_and_float64(name: str) -> None:
    """Gradients go through the torch version of each kernel, state and layout included."""
    how = {"dtypes": ("float64",), "phases": ("full", "gradient"), "lengths": (4,)}
    ran = holds(SPECS[name], **how)
    assert {("gradient", layout) for layout in LAYOUTS} <= ran


@pytest.mark.slow
def test_the_laws_of_a_model_whose_kernels_are_fast() -> None:
    laws = {(law, layout) for law in LAWS for layout in LAYOUTS}
    laws -= {("padding", "dense"), ("padding", "packed")}
    ran = holds(SPECS["conv"], dtypes=("float64",), phases=(), lengths=(5,), laws=True)
    assert laws <= ran


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", TINY)
def test_every_length(name: str, dtype: str) -> None:
    holds(TINY[name], dtypes=(dtype,), lengths=(1, 7, 65))


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_every_law(name: str) -> None:
    holds(TINY[name], dtypes=("float64",), phases=(), lengths=(5, 17), laws=True)


@pytest.mark.parametrize("kind", ["exp", "sigmoid"])
def test_it_can_fail(kind: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong row of the table of expressions, in the rule or in a fused function."""
    monkeypatch.setenv("ARCHIR_CACHE", str(tmp_path))
    monkeypatch.setitem(body.TABLE, kind, body.TABLE[kind].replace("{0}", "1.01 * {0}"))
    report = ar.check(
        kda_lm, backends=("triton",), dtypes=("float32",), phases=("full",),
        layouts=("dense",), lengths=(5,),
    )  # fmt: skip
    assert not report.ok
