"""The table of configurations: how the kernels of each skeleton are launched, by what runs them."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
OPTIONS = ("num_warps", "num_stages")
ANY = "any"


@cache
def _table() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(Path(__file__).with_name("configurations.toml").read_text())


def entry(skeleton: str, runs: str) -> dict[str, Any]:
    """The first entry of a skeleton that fits what runs it: `interpreter`, a target, or `any`."""
    return next(e for e in _table()[skeleton] if e.get("runs", runs) == runs)


def longest_row() -> int:
    """The longest row that a tile holds whole."""
    return _table()["rows"][0]["longest"]


def configs(skeleton: str, name: str, size: int, beside: int) -> dict[str, dict[str, int]]:
    """For what runs it: as many places of a dim per program as a tile has room for beside the
    others, a power of two.

    name: of the parameter.  size: of the dim.  beside: elements of the tile for one place.
    """
    whole = 1 << max(size - 1, 0).bit_length()

    def made(runs: str) -> dict[str, int]:
        found = entry(skeleton, runs)
        room = max(1, found["elements"] // beside)
        block = min(whole, 1 << (room.bit_length() - 1))
        return {name: block} | {k: found[k] for k in OPTIONS if k in found}

    default = made(ANY)
    special = {runs: made(runs) for runs in ("interpreter", *TARGETS)}
    return {runs: c for runs, c in special.items() if c != default} | {ANY: default}
