"""The laws hold, of every layout, on the interpreter and on eager; and each of them can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import archir as ar
from archir.check.batch import LAYOUTS
from archir.check.laws import LAWS
from archir.ops import OPS
from backends.eager import backend
from specs import gpt2
from tests.runtime.test_layouts import SPECS
from tests.runtime.test_snapshots import named
from tests.specs import conv, kda

MACHINES = ("numpy", "eager")
CONV, KDA = (f"{Path(m.__file__)}:{name}" for m, name in ((conv, "conv_lm"), (kda, "kda_lm")))


def holds(**how: Any) -> set[Any]:
    """Runs every cell and law; (backend, phase, layout) of all, none of which may fail."""
    report = ar.check(**how, backends=MACHINES, layouts=LAYOUTS, laws=True)
    assert report.ok, report.failures
    return {(row["backend"], row["phase"], row["layout"]) for row in report.rows}


@pytest.mark.parametrize("name", SPECS)
def test_cells_and_laws_hold(name: str) -> None:
    """One token beyond a chunk of 16."""
    ran = holds(**SPECS[name], dtypes=("float64",), lengths=(17,))
    for machine in MACHINES:
        for layout in LAYOUTS:
            laws = {*LAWS} - ({"padding"} if layout in ("dense", "packed") else set())
            phases = {"full", "prefill", "decode", "state", "last", "loss"} | laws
            assert {(machine, phase, layout) for phase in phases} <= ran


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 130])
@pytest.mark.parametrize("name", SPECS)
def test_cells_and_laws_hold_at_every_length(name: str, length: int) -> None:
    holds(**SPECS[name], dtypes=("float64",), lengths=(length,))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPECS)
def test_laws_that_are_exact_hold_in_every_dtype(name: str, dtype: str) -> None:
    holds(**SPECS[name], dtypes=(dtype,), phases=(), lengths=(1, 17, 65))


@ar.block
def conv_layer(x: "f[B, T, width]", c):
    return conv.layer.fn(x, c, 4)


@ar.block
def kda_layer(x: "f[B, T, width]", c):
    return kda.layer.fn(x, None, c, kda.kda_mixer)


BLOCKS: dict[str, dict[str, Any]] = {
    "gpt2": {"spec": gpt2.layer, "config": gpt2.PRESETS["tiny"]},
    "conv": {"spec": conv_layer, "config": conv.Conv()},
    "kda": {"spec": kda_layer, "config": kda.KDA()},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_cells_and_laws_hold_of_blocks(name: str) -> None:
    """Their input is of floats: padding gets no gradient, and has finite content of any kind."""
    assert ("eager", "gradient", "dense") in holds(
        **BLOCKS[name], dtypes=("float64", "bfloat16"), lengths=(9,)
    )


def test_cells_and_laws_hold_of_outputs_of_every_sort() -> None:
    """Per token, of floats and of integers, and of no row."""
    holds(spec=named, dtypes=("float64", "bfloat16"), lengths=(9,))


@dataclass(frozen=True)
class Break:
    """Code behind one of the files that lie with emitted ones, where it shows, and what fails.

    fails: phase or law → what `where` says.  only: whether nothing else fails.
    """

    code: str
    spec: str
    layout: str
    fails: dict[str, str]
    file: str = "support.py"
    only: bool = False


BREAKS = {
    "positions are columns": Break(
        "def positions(x, seq, limit=None):\n"
        "    return torch.arange(x.shape[1]).expand(x.shape[:2])",
        "gpt2", "left", {"full": "logits", "prefill": "logits", "padding": "more padding"},
    ),
    "packed rows go on from each other": Break(
        "def positions(x, seq, limit=None):\n"
        "    return torch.arange(x.shape[1]).expand(x.shape[:2])",
        "gpt2", "packed", {"full": "logits", "rows": "rows in reverse"},
    ),
    "padding is tokens": Break(
        "def ragged(x, start, stop, length=None):\n"
        "    return dense(x, length)",
        "gpt2", "left", {"full": "logits", "state": "length", "padding": "other padding"},
    ),
    "targets in padding count": Break(
        "def mask_targets(targets, seq):\n"
        "    return targets",
        "gpt2", "right", {"loss": "loss", "padding": "loss, other padding: loss"},
    ),
    "the last token is the last column": Break(
        "def last(x, seq):\n"
        "    return x[:, -1:]",
        "gpt2", "right", {"last": "logits", "padding": "last, other padding: logits"},
    ),
    "a row that has ended goes on": Break(
        "def valid(seq, device):\n"
        "    return torch.ones(seq.longest, len(seq), dtype=torch.bool)",
        KDA, "left", {"state": "layers.0.kda.S", "decode": "logits", "split": "pieces"},
    ),
    "a convolution takes what lies before the row": Break(
        "_right = short_conv\n"
        "def short_conv(x, w, seq, window=None, activation=None):\n"
        "    y, after = _right(x, w, seq, window, activation)\n"
        "    line, _ = _right(x, w, Rows.dense(*x.shape[:2]), None, activation)\n"
        "    return (y if seq.full else line), after",
        CONV, "packed", {"full": "logits", "gradient": "d/d", "rows": "rows in reverse"},
    ),
    "a convolution keeps its window": Break(
        "_right = short_conv\n"
        "def short_conv(x, w, seq, window=None, activation=None):\n"
        "    y, after = _right(x, w, seq, window, activation)\n"
        "    return y, after if window is None else window",
        CONV, "dense", {"state": "conv.window", "decode": "logits", "split": "pieces of 1"},
    ),
    "a convolution forgets its window where there is no token": Break(
        "_right = short_conv\n"
        "def short_conv(x, w, seq, window=None, activation=None):\n"
        "    y, after = _right(x, w, seq, window, activation)\n"
        "    return y, after * (seq.longest > 0)",
        CONV, "right", {"rows": "no tokens", "split": "drawn pieces"},
    ),
    "no gradient goes through a window": Break(
        "_right = short_conv\n"
        "def short_conv(x, w, seq, window=None, activation=None):\n"
        "    return _right(x, w, seq, window if window is None else window.detach(), activation)",
        CONV, "left", {"split": "d/d"}, only=True,
    ),
    "no gradient goes through the cache": Break(
        "_right = Cache.append\n"
        "def _append(self, x, seq):\n"
        "    before = Storage(self.storage.detach(), self.store.filled, self.store.writable)\n"
        "    return _right(Cache(before, self.lengths), x, seq)\n"
        "Cache.append = _append",
        "gpt2", "dense", {"split": "d/d"}, file="cache.py", only=True,
    ),
    "attention sees one key too many": Break(
        "_right = attention\n"
        "def attention(q, k, v, seq, *args, keys='tokens', **how):\n"
        "    if keys == 'tokens' and not seq.full:\n"
        "        k, v = k.roll(-1, 1), v.roll(-1, 1)\n"
        "    return _right(q, k, v, seq, *args, keys=keys, **how)",
        "gpt2", "packed", {"full": "logits", "causality": "full, later tokens changed: logits"},
    ),
    "a step takes all pasts for the longest": Break(
        "_right = attention\n"
        "def attention(q, k, v, seq, *args, **how):\n"
        "    if seq.full:\n"
        "        seq = Rows.dense(seq.batch, seq.length, (max(seq.past),) * len(seq))\n"
        "    return _right(q, k, v, seq, *args, **how)",
        "gpt2", "left", {"rows": "a step after unlike pasts: logits"}, only=True,
    ),
    "a trace of padding": Break(
        "_right = attention\n"
        "def attention(q, *args, **how):\n"
        "    return _right(q, *args, **how) + 1e-15 * q.sum().detach()",
        "gpt2", "right", {"padding": "other padding", "causality": "later tokens changed"},
        only=True,
    ),
    "outputs at padding are infinite": Break(
        "_right = attention\n"
        "def attention(q, k, v, seq, *args, **how):\n"
        "    out = _right(q, k, v, seq, *args, **how)\n"
        "    owned = torch.zeros(q.shape[:2]).flatten()\n"
        "    owned[places(seq, q.device)[2]] = 1\n"
        "    return torch.where(owned.view(*q.shape[:2], 1, 1) > 0, out, torch.inf)",
        "gpt2", "left", {"padding": "outputs at padding"},
    ),
    "a trace of padding in gradients": Break(
        "_right = attention\n"
        "def attention(q, *args, **how):\n"
        "    return _right(q, *args, **how) + (q.sum() - q.sum().detach())",
        "gpt2", "right",
        {"gradient": "d/d", "padding": "d/d padding", "causality": "later tokens: d/d lookup 0"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_of_eager_is_found(
    name: str, failed_cells: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    this, emit_tree = BREAKS[name], backend.Eager.emit_tree

    def broken(*given: Any) -> dict[str, str]:
        files = emit_tree(*given)
        return {**files, this.file: f"{files[this.file]}\n\n{this.code}\n"}

    monkeypatch.setattr(backend.Eager, "emit_tree", broken)
    rows = failed_cells(this.spec, "--layouts", this.layout, "--laws", length=9)
    assert {row["backend"] for row in rows} == {"eager"}
    where = {row["phase"]: row["where"] for row in rows}
    assert {
        phase: text for phase, text in this.fails.items() if text not in where.get(phase, "")
    } == {}
    assert not this.only or where.keys() == this.fails.keys()


def test_a_break_of_the_interpreter_is_found(
    failed_cells: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that have ended go on: no row is alone with others beside it, and eager is right."""
    wrong = replace(OPS["valid"], meaning=lambda seq, chunk=0: seq.grid(chunk)[1] | True)
    monkeypatch.setitem(OPS, "valid", wrong)
    rows = failed_cells(KDA, "--layouts", "packed", "--backends", "numpy,eager", length=9)
    assert {row["backend"] for row in rows} == {"numpy"}
    assert {row["phase"] for row in rows} == {"prefill", "decode", "state"}
