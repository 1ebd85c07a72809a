"""What archir says about a user's file: each case is written to a file of its own and traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import archir as ar
from archir.diagnostics import ArchirError
from tests.goldens import check_golden

HEAD = """\
import math

import numpy as np
import archir as ar


@ar.config
class Config:
    vocab: int = 16
    width: int = 8
    heads: int = 2


"""


def trace_file(file: Path) -> None:
    """Traces the spec, block or rule called `broken`."""
    ar.trace(f"{file}:broken")


def message(folder: Path, source: str, run: Callable[[Path], object] = trace_file) -> str:
    """The error that `run` raises on a file of this source, below the usual head."""
    file = folder / "spec.py"
    file.write_text(HEAD + source)
    with pytest.raises(ArchirError) as caught:
        run(file)
    return str(caught.value)


def check_messages(golden: str, folder: Path, cases: Mapping[str, str]) -> None:
    """Holds every case's message against one golden file; each points at the user's file."""
    parts = []
    for ordinal, (name, source) in enumerate(cases.items()):
        place = folder / str(ordinal)
        place.mkdir()
        text = message(place, source)
        assert f"{place}/spec.py:" in text, f"{name} names no line of the user:\n{text}"
        assert "^" in text, f"{name} has no caret:\n{text}"
        assert "\nnext: " in text, f"{name} names no next step:\n{text}"
        parts.append(f"## {name}\n\n{text.replace(str(place), 'TMP')}\n")
    check_golden(golden, "\n".join(parts))


def spec_of(body: str) -> str:
    """A spec with this body; `x` is f[B, T, width]."""
    lines = "\n".join(f"    {line}" if line else "" for line in body.strip("\n").split("\n"))
    return (
        "@ar.spec(Config)\ndef broken(tokens, c):\n"
        '    x = ar.embedding(tokens, c.vocab, c.width, name="embed")\n'
        f"{lines}\n"
    )
