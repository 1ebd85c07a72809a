"""check holds on every spec, and can fail: broken emitters and passes are found and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archir as ar
from archir.check.batch import LAYOUTS
from archir.check.laws import LAWS
from archir.diagnostics import ArchirError
from archir.ir import Op
from archir.passes import specialize
from backends.eager.ops import EMIT
from backends.eager.ops import elementwise as elementwise_emitters
from tests.goldens import check_golden
from tests.specs.conv import conv_lm
from tests.specs.kda import kda_lm

KDA = f"{Path(__file__).parent.parent / 'specs' / 'kda.py'}:kda_lm"


@pytest.mark.parametrize("preset", kda_lm.presets)
def test_the_recurrence_spec_holds(preset: str) -> None:
    """Grouped and plain heads, windowed and full attention, K ≠ V: all phases and dtypes."""
    sizes = (1, 17) if preset == "tiny" else (9,)
    layouts = None
    if preset == "full":
        sizes, layouts = (5,), ("dense",)
    report = ar.check(kda_lm, preset=preset, lengths=sizes, layouts=layouts)
    assert report.ok, report.failures
    assert {row["phase"] for row in report.rows} == {
        *("full", "prefill", "decode", "state", "last", "loss", "gradient")
    }


@pytest.mark.parametrize("preset", conv_lm.presets)
def test_the_convolution_spec_holds(preset: str) -> None:
    layouts = ("dense",) if preset == "full" else None
    report = ar.check(conv_lm, preset=preset, lengths=(1, 17), layouts=layouts)
    assert report.ok, report.failures


@pytest.mark.slow
@pytest.mark.parametrize("spec", [kda_lm, conv_lm, "gpt2", "llama"], ids=str)
def test_every_spec_holds_at_long_lengths(spec: Any) -> None:
    report = ar.check(spec, lengths=(65, 129))
    assert report.ok, report.failures


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_built_in_specs_hold(name: str) -> None:
    report = ar.check(name, lengths=(1, 7, 33))
    assert report.ok, report.failures
    assert ("training" in {row["phase"] for row in report.rows}) == (name == "gpt2")


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
    "key heads change places": (
        replaced("repeat", ".repeat_int", ".roll(1, -2).repeat_int"), KDA, "full",
    ),
    "the recurrence runs backwards": (
        replaced("scan", ".shape[0]):", ".shape[0])[::-1]:"), KDA, "full",
    ),
    "dropout keeps what it should drop": (
        replaced("dropout", ", 0.1)", ", 0.2)"), "gpt2", "training",
    ),
    "the state is not stored": (keep_the_old_state, KDA, "decode"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_found_and_named(
    name: str, failed_cells: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, spec, phase = BREAKS[name]
    apply(monkeypatch)
    rows = failed_cells(spec, "--layouts", "dense", length=7)
    assert phase in {row["phase"] for row in rows}
    assert {row["spec"] for row in rows} == {spec.rsplit(":", 1)[-1]}


def mixers() -> dict[str, Any]:
    """Ways in which a token may see later ones."""
    return {
        "mean": lambda x: x - x.mean(axis=1, keepdims=True),
        "einsum": lambda x: np.einsum("btd,bsd->btd", x, x),
        "attention": lambda x: ar.merge(
            ar.attention(*(ar.heads(x, 1, 2) for _ in range(3)), causal=False)
        ),
    }


@ar.config
class Tiny:
    vocab: int = 11
    width: int = 8


def looks_ahead(mixer: str) -> Any:
    @ar.spec(Tiny)
    def ahead(tokens: Any, c: Tiny) -> Any:
        table = ar.weight("table", [c.vocab, c.width])
        return ar.logits(mixers()[mixer](ar.embedding(tokens, table)), table)

    return ahead


@pytest.mark.parametrize("name", ["mean", "einsum", "attention"])
def test_a_spec_that_looks_ahead_has_only_the_phase_full(name: str) -> None:
    """Where it is not attention that looks, it has no padding either."""
    report = ar.check(looks_ahead(name))
    assert report.ok, report.failures
    assert {row["phase"] for row in report.rows} == {"full", "last", "loss", "gradient"}
    assert {row["layout"] for row in report.rows} == {
        *(LAYOUTS if name == "attention" else ("dense",))
    }
    model = ar.compile(looks_ahead(name)).init_weights(0)
    assert not model.causal
    with pytest.raises(ArchirError, match="phase-causal"):
        model.prefill([[1, 2]])


@ar.block
def per_line(x: "f[B, T, 8]", scale: "f[B, 8]"):
    return x * scale[:, None]


def test_a_report_of_nothing_is_not_ok() -> None:
    assert not ar.check("gpt2", phases=()).ok


def test_which_cells_are_run() -> None:
    """Ragged rows at the largest length unless layouts are named; `progress` sees every row."""
    how: dict[str, Any] = {"dtypes": ("float32",), "phases": ("full",), "lengths": (1, 7)}
    seen: list[dict[str, Any]] = []
    assert ar.check("gpt2", progress=seen.append, **how).rows == seen
    assert [(row["layout"], row["T"]) for row in seen] == [
        ("dense", 1), ("dense", 7), ("left", 7), ("right", 7), ("packed", 7)
    ]  # fmt: skip
    found = ar.check("gpt2", layouts=("left",), laws=True, **how).rows
    cells = [row for row in found if row["phase"] == "full"]
    assert [(row["backend"], row["layout"], row["T"]) for row in cells] == [
        ("eager", "left", 1), ("eager", "left", 7)
    ]  # fmt: skip
    for dtype, laws in (("float32", {"padding", "rows", "causality"}), ("float64", {*LAWS})):
        for machine in ("numpy", "eager"):
            mine = [row for row in found if (row["dtype"], row["backend"]) == (dtype, machine)]
            assert {row["phase"] for row in mine} - {"full"} == laws


def test_what_cannot_be_checked() -> None:
    wrong: dict[str, dict[str, Any]] = {
        "phase": {"spec": "gpt2", "phases": ("ful",)},
        "layout": {"spec": "gpt2", "layouts": ("dense", "lefty")},
        "lengths": {"spec": "gpt2", "lengths": ()},
        "layout of a spec": {"spec": looks_ahead("mean"), "layouts": ("dense", "left")},
        "layout of inputs": {"spec": per_line, "layouts": ("packed",)},
    }
    parts = []
    for name, arguments in wrong.items():
        with pytest.raises(ArchirError) as caught:
            ar.check(**arguments)
        parts.append(f"## {name}\n\n{caught.value}\n")
    check_golden("check/refused", "\n".join(parts))
