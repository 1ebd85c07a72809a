"""Laws of the IR on generated modules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from archir import pipeline
from archir.diagnostics import PassError, UnsupportedError
from archir.fuzz import laws
from archir.fuzz.modules import mistyped, modules
from archir.ir import Module
from archir.passes import rewrite, specialize
from archir.text import parse


def cases(count: int) -> Any:
    """The same examples at every run, nothing written to disk, no minutes spent on shrinking."""
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


@cases(150)
@given(modules())
def test_text(module: Module) -> None:
    note(str(module))
    laws.text(module)


@cases(100)
@given(modules(), st.data())
def test_altered_types_are_refused(module: Module, data: st.DataObject) -> None:
    wrong = data.draw(mistyped(module))
    if wrong is not None:
        laws.refused(wrong)


@cases(60)
@given(modules())
def test_runs_in_every_dtype(module: Module) -> None:
    note(str(module))
    laws.runs(module)


@cases(30)
@given(modules("smooth"))
def test_passes_keep_the_meaning(module: Module) -> None:
    note(str(module))
    laws.lowers(module)


@cases(20)
@given(modules("smooth"))
def test_what_is_fused_keeps_its_meaning(module: Module) -> None:
    note(str(module))
    laws.lowers(module, backend="triton")


@cases(25)
@given(modules("causal"))
def test_decode_is_full(module: Module) -> None:
    note(str(module))
    laws.lowers(module, "decode")


@cases(25)
@given(modules("smooth"))
def test_passes_keep_what_is_drawn(module: Module) -> None:
    note(str(module))
    laws.lowers(module, training=True)


@cases(25)
@given(modules("causal"))
def test_rows_laid_out_are_rows_alone(module: Module) -> None:
    note(str(module))
    laws.lowers(module, "decode", "ragged")


SMALL = """
@entry
def model(tokens: i64[B, T], *,
    w: f[16, 4] = weight("w", init=normal(0.02), decay=True),
) -> f[B, T, 4]:
    x: f[B, T, 4] = embedding(tokens, w)
    q: f[B, T, 2, 2] = heads(x, parts=1, heads=2)
    a: f[B, T, 2, 2] = attention(q, q, q, causal=True)
    y: f[B, T, 4] = merge(a)
    z: f[B, T, 4] = add(x, y)
    return z
"""


def _swap(kind: str, **attrs: Any) -> Any:
    """A pass that changes one kind of op."""

    def change(module: Module, _: Any) -> Module:
        def visit(new: rewrite.Rewriter, op: Any) -> bool:
            if op.kind == kind:
                new.copy(op, attrs={**op.attrs, **attrs})
            return op.kind == kind

        return rewrite.rewrite(module, visit)

    return change


@pytest.mark.parametrize(
    "attrs", [{"causal": False}, {"window": 2}, {"scale": 0.7071}], ids=lambda a: next(iter(a))
)
def test_a_wrong_pass_is_caught(monkeypatch: pytest.MonkeyPatch, attrs: dict[str, Any]) -> None:
    wrong = ("canonicalize", _swap("attention", **attrs))
    monkeypatch.setattr(pipeline, "PASSES", (pipeline.PASSES[0], wrong))
    monkeypatch.setattr(pipeline, "STAGES", ("trace", "specialize", "canonicalize"))
    with pytest.raises(PassError, match="canonicalize changed z: relative difference"):
        pipeline.lower(parse(SMALL), check=2)


def test_a_model_that_looks_ahead_cannot_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    module = parse(SMALL.replace("causal=True", "causal=False"))
    pipeline.lower(module, phase="full", check=2)
    with pytest.raises(UnsupportedError, match="causal=False lets a token see later ones"):
        pipeline.lower(module, phase="decode")
    mean = "m: f[B, 1, 4] = reduce_mean(y, axes=(1,), keepdims=True)\n    "
    module = parse(SMALL.replace("z: f", f"{mean}z: f").replace("(x, y)", "(x, m)"))
    pipeline.lower(module, phase="full", check=2)
    with pytest.raises(UnsupportedError, match="reduce_mean over tokens"):
        pipeline.lower(module, phase="decode")
    # what that check would miss, running in pieces finds
    monkeypatch.setattr(specialize, "only_full", lambda module: None)
    with pytest.raises(PassError, match="z read in pieces"):
        pipeline.lower(module, phase="decode", check=2)
