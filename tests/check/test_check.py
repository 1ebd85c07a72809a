"""check holds on every spec, and can fail: broken emitters and passes are found and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archir as ar
from archir.diagnostics import ArchirError
from archir.ir import Op
from archir.passes import specialize
from backends.eager.ops import EMIT
from backends.eager.ops import elementwise as elementwise_emitters
from tests.specs.conv import conv_lm
from tests.specs.kda import kda_lm

KDA = f"{Path(__file__).parent.parent / 'specs' / 'kda.py'}:kda_lm"


@pytest.mark.parametrize("preset", kda_lm.presets)
def test_the_recurrence_spec_holds(preset: str) -> None:
    """Grouped and plain heads, windowed and full attention, K ≠ V: all phases and dtypes."""
    sizes = (1, 7, 65) if preset == "tiny" else (1, 9)
    if preset == "full":
        sizes = (5,)
    report = ar.check(kda_lm, preset=preset, lengths=sizes)
    assert report.ok, report.failures
    assert {row["phase"] for row in report.rows} == {
        *("full", "prefill", "decode", "state", "last", "loss", "gradient")
    }


@pytest.mark.parametrize("preset", conv_lm.presets)
def test_the_convolution_spec_holds(preset: str) -> None:
    report = ar.check(conv_lm, preset=preset, lengths=(1, 7, 65))
    assert report.ok, report.failures


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_built_in_specs_hold(name: str) -> None:
    report = ar.check(name, lengths=(1, 7, 129))
    assert report.ok, report.failures


def replaced(kind: str, old: str, new: str) -> Callable[[Any], None]:
    """A break of one emitter: `old` becomes `new` in what it prints."""

    def apply(monkeypatch: pytest.MonkeyPatch) -> None:
        right = EMIT[kind]

        def wrong(p: Any, op: Op) -> Any:
            made = right(p, op)
            lines = made if isinstance(made, list) else [made]
            changed = [line.replace(old, new) for line in lines]
            assert changed != lines, f"the break of {kind} does nothing"
            return changed if isinstance(made, list) else changed[0]

        monkeypatch.setitem(EMIT, kind, wrong)

    return apply


def row(kind: str, text: str) -> Callable[[Any], None]:
    """A break of one row of the elementwise table."""
    return lambda monkeypatch: monkeypatch.setitem(elementwise_emitters.TABLE, kind, text)


def keep_the_old_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A break of `specialize`: the new matrix state is never stored."""
    right = specialize._EXPLICIT["state_update"]

    def wrong(new: Any, op: Op, name: str) -> None:
        right(new, op, name)
        if new.stateful:
            new.ops[:] = [o for o in new.ops if o.attrs.get("path") != f"{name}.S"]

    monkeypatch.setitem(specialize._EXPLICIT, "state_update", wrong)


# what is broken → how, the spec it shows in, and a phase whose cells must fail
BREAKS: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "silu is relu": (row("silu", "F.relu({0})"), "llama", "full"),
    "gelu is exact": (row("gelu_tanh", "F.gelu({0})"), "gpt2", "full"),
    "norm has another eps": (replaced("rms_norm", "eps=1e-06", "eps=2e-06"), "llama", "full"),
    "rotary turns further": (replaced("rotary", "theta=10000.0", "theta=10001.0"), "llama", "full"),
    "attention sees the future": (
        replaced("attention", "causal=True", "causal=False"), "gpt2", "full",
    ),
    "the cache forgets its last write": (
        replaced("append", ".append(", ".append(0 * "), "gpt2", "decode",
    ),
    "positions start again": (
        replaced("positions", ", seq", ", ar.dense(tokens)"), "gpt2", "decode",
    ),
    "key heads are tiled": (
        replaced("repeat", ".repeat_interleave(2, 2)", ".tile(1, 1, 2, 1)"), KDA, "full",
    ),
    "the recurrence runs backwards": (
        replaced("scan", ".shape[0]):", ".shape[0])[::-1]:"), KDA, "full",
    ),
    "the state is not stored": (keep_the_old_state, KDA, "decode"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_found_and_named(
    name: str, archir: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    apply, spec, phase = BREAKS[name]
    monkeypatch.setenv("ARCHIR_CACHE", str(tmp_path))
    apply(monkeypatch)
    done = archir("check", spec, "--dtype", "float64", "--json")
    assert done.code == 1, done.err
    rows = json.loads(done.out)["rows"]
    failed = [r for r in rows if not r["ok"]]
    assert phase in {r["phase"] for r in failed}
    assert {r["spec"] for r in failed} == {spec.rsplit(":", 1)[-1]}
    # the table names the spec and the cell too
    shown = archir("check", spec, "--dtype", "float64")
    assert shown.code == 1
    bad = [line.split() for line in shown.out.splitlines() if line.split()[-1] == "NO"]
    assert [phase] == sorted({line[3] for line in bad} & {phase})
    assert {line[0] for line in bad} == {spec.rsplit(":", 1)[-1]}


def mixers() -> dict[str, Any]:
    """Ways in which a token may see later ones."""
    return {
        "mean": lambda x: x - x.mean(axis=1, keepdims=True),
        "einsum": lambda x: np.einsum("btd,bsd->btd", x, x),
        "attention": lambda x: ar.merge(
            ar.attention(*(ar.heads(x, 1, 2) for _ in range(3)), causal=False)
        ),
    }


@pytest.mark.parametrize("name", ["mean", "einsum", "attention"])
def test_a_spec_that_looks_ahead_has_only_the_phase_full(name: str) -> None:
    @ar.config
    class Tiny:
        vocab: int = 11
        width: int = 8

    @ar.spec(Tiny)
    def ahead(tokens: Any, c: Tiny) -> Any:
        table = ar.weight("table", [c.vocab, c.width])
        return ar.logits(mixers()[name](ar.embedding(tokens, table)), table)

    report = ar.check(ahead)
    assert report.ok, report.failures
    assert {row["phase"] for row in report.rows} == {"full", "last", "loss", "gradient"}
    model = ar.compile(ahead).init_weights(0)
    assert not model.causal
    with pytest.raises(ArchirError, match="phase-causal"):
        model.prefill([[1, 2]])


def test_a_report_of_nothing_is_not_ok() -> None:
    assert not ar.check("gpt2", phases=()).ok
    with pytest.raises(ArchirError, match="there is no phase 'ful'"):
        ar.check("gpt2", phases=("ful",))
