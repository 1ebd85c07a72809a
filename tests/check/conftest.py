"""The command line, as in tests/cli, and `archir check` at one length."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from archir.check import check
from tests.cli.conftest import archir

__all__ = ["archir"]


@pytest.fixture
def failed_cells(
    archir: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., list[dict[str, Any]]]:
    """Runs `archir check` in float64 on files emitted anew, and returns the rows that do not hold;
    the command must exit with 1 and name the first of them."""
    monkeypatch.setenv("ARCHIR_CACHE", str(tmp_path))

    def run(*arguments: str, length: int) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys.modules["archir.check"], "check", partial(check, lengths=(length,)))
        done = archir("check", *arguments, "--dtype", "float64", "--json")
        rows = [row for row in json.loads(done.out)["rows"] if not row["ok"]]
        assert done.code == 1, "nothing failed"
        first = "{spec} {backend} {dtype} {phase} {layout} T = {T}".format_map(rows[0])
        assert first in done.err
        return rows

    return run
