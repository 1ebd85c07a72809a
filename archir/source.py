"""Where in the user's source a traced call stands, and what the user calls its result."""

from __future__ import annotations

import ast
import linecache
import os
import sys
from functools import lru_cache
from types import CodeType

import numpy as np

from archir.diagnostics import Loc

_OURS = (os.path.dirname(__file__) + os.sep, os.path.dirname(np.__file__) + os.sep, "<frozen")


@lru_cache(maxsize=4096)
def _positions(code: CodeType) -> list[tuple[int | None, int | None, int | None, int | None]]:
    return list(code.co_positions())


@lru_cache(maxsize=256)
def _targets(file: str) -> dict[tuple[int, int, int | None, int | None], tuple[str, ...]]:
    """Range of an assigned expression → the names it is assigned to."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            names: tuple[str, ...] = ()
            if isinstance(target, ast.Name):
                names = (target.id,)
            elif isinstance(target, ast.Tuple) and all(
                isinstance(t, ast.Name) for t in target.elts
            ):
                names = tuple(t.id for t in target.elts if isinstance(t, ast.Name))
            if names:
                start, end = (
                    (value.lineno, value.col_offset),
                    (value.end_lineno, value.end_col_offset),
                )
                found[*start, *end] = names
    return found


def caller() -> tuple[Loc | None, tuple[str, ...]]:
    """The innermost place outside archir and NumPy, and the names its expression is assigned to."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if frame is None:
        return None, ()
    file = frame.f_code.co_filename
    line, end_line, col, end_col = _positions(frame.f_code)[frame.f_lasti // 2]
    if line is None:
        return Loc(file, frame.f_lineno), ()
    names = _targets(file).get((line, col or 0, end_line, end_col), ())
    return Loc(file, line, col or 0, end_col if end_line == line else None), names


def definition(fn: object) -> Loc | None:
    """Where a function is defined."""
    code = getattr(fn, "__code__", None)
    return Loc(code.co_filename, code.co_firstlineno) if code else None
