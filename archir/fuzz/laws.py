"""What must hold of every module, as functions that raise AssertionError or the error found."""

from __future__ import annotations

from typing import Any

from archir.diagnostics import ArchirError
from archir.inputs import random_inputs
from archir.interp import interpret
from archir.ir import Module
from archir.pipeline import STAGES, lower
from archir.text import parse, print_module
from archir.verify import verify

DTYPES = ("float64", "float32", "bfloat16")


def text(module: Module) -> None:
    """It verifies; printing is deterministic; what is printed parses to the same module."""
    verify(module)
    printed = print_module(module)
    again = parse(printed)
    assert again == module
    assert print_module(again) == printed
    assert print_module(module) == printed


def refused(module: Module) -> None:
    """A module whose stated types are wrong does not parse."""
    printed = print_module(module)
    try:
        parse(printed)
    except ArchirError:
        return
    raise AssertionError(f"accepted:\n{printed}")


def runs(module: Module) -> None:
    """The interpreter runs it in every dtype; it holds each result against its type."""
    inputs, weights, _ = random_inputs(module)
    for dtype in DTYPES:
        interpret(module, inputs, weights, dtype=dtype)


def lowers(module: Module, phase: str = "full", layout: str = "dense", **options: Any) -> None:
    """Every pass keeps the meaning, and the text law holds at every stage."""
    options = {"dtype": "bfloat16", **options}
    lower(module, phase, layout, check=2, **options)
    for stage in STAGES:
        text(lower(module, phase, layout, stage=stage, **options))
