"""Where in the user's source a traced call stands, and what the user calls its result."""

from __future__ import annotations
import __future__

import ast
import functools
import linecache
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any

import numpy as np

from archir.diagnostics import Loc

_HERE = os.path.dirname(__file__) + os.sep
_OURS = (_HERE, os.path.dirname(np.__file__) + os.sep, functools.__file__, "<frozen")
_USERS = os.path.join(_HERE, "fuzz") + os.sep  # its rules are written as a user's are


@lru_cache(maxsize=4096)
def _positions(code: CodeType) -> list[tuple[int | None, int | None, int | None, int | None]]:
    return list(code.co_positions())


@lru_cache(maxsize=256)
def _tree(file: str) -> ast.Module:
    """The syntax of a file; empty where there is none."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


_Place = tuple[int, int, int | None, int | None]


def _place(node: ast.expr | ast.stmt) -> _Place:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


@lru_cache(maxsize=256)
def _conditions(file: str) -> dict[_Place, ast.expr]:
    """Range of an `if` → its condition: Python 3.11 gives the whole as the place of the test."""
    nodes = ast.walk(_tree(file))
    return {_place(n): n.test for n in nodes if isinstance(n, ast.If | ast.IfExp | ast.While)}


@lru_cache(maxsize=256)
def _targets(file: str) -> dict[_Place, tuple[str, ...]]:
    """Range of an assigned expression → the names it is assigned to."""
    found = {}
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            items = target.elts if isinstance(target, ast.Tuple) else [target]
            names = tuple(item.id for item in items if isinstance(item, ast.Name))
            if len(names) == len(items):
                found[_place(value)] = names
    return found


@lru_cache(maxsize=256)
def _functions(file: str) -> dict[int, ast.FunctionDef]:
    """First line, a decorator's where there is one → the function that begins there."""
    return {
        min([node.lineno, *(d.lineno for d in node.decorator_list)]): node
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.FunctionDef)
    }


def refresh() -> None:
    """Forgets what was read of files, which may have changed."""
    linecache.checkcache()
    for cache in (_tree, _targets, _functions, _conditions):
        cache.cache_clear()


def _loc(file: str, line: int, end_line: int | None, start: int, end: int | None) -> Loc:
    """A place given in bytes of UTF-8, as Python counts columns."""
    text = linecache.getline(file, line).encode()

    def column(at: int) -> int:
        return len(text[:at].decode(errors="ignore"))

    return Loc(file, line, column(start), column(end) if end and end_line == line else None)


def _loc_of(file: str, node: ast.expr | ast.stmt) -> Loc:
    return _loc(file, node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)


def caller() -> tuple[Loc | None, tuple[str, ...]]:
    """The innermost place outside archir and NumPy, and the names its expression is assigned to."""
    frame = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None, ()
    file = frame.f_code.co_filename
    line, end_line, col, end_col = _positions(frame.f_code)[frame.f_lasti // 2]
    if line is None:
        return Loc(file, frame.f_lineno), ()
    place = (line, col or 0, end_line, end_col)
    if place in _conditions(file):
        return _loc_of(file, _conditions(file)[place]), ()
    names = _targets(file).get(place, ())
    return _loc(file, line, end_line, col or 0, end_col), names


def _is_ours(file: str) -> bool:
    return file.startswith(_OURS) and not file.startswith(_USERS)


def definition(fn: Callable[..., Any]) -> Loc | None:
    """Where a function is defined: its first line, a decorator's where it has one."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return None
    line = linecache.getline(code.co_filename, code.co_firstlineno).rstrip()
    return Loc(code.co_filename, code.co_firstlineno, 0, len(line) or None)


def _node(fn: Callable[..., Any]) -> tuple[str, ast.FunctionDef | None]:
    code = fn.__code__
    return code.co_filename, _functions(code.co_filename).get(code.co_firstlineno)


def parameter(fn: Callable[..., Any], label: str) -> Loc | None:
    """Where a parameter is annotated; where the function is defined when it is not."""
    file, node = _node(fn)
    for arg in node.args.args if node else ():
        if arg.arg == label and arg.annotation is not None:
            return _loc_of(file, arg.annotation)
    return definition(fn)


def returned(fn: Callable[..., Any]) -> Loc | None:
    """The last value a function returns; where it is defined when it returns none."""
    file, node = _node(fn)
    nodes = [n for statement in node.body for n in ast.walk(statement)] if node else []
    values = [n.value for n in nodes if isinstance(n, ast.Return) and n.value is not None]
    last = max(values, key=lambda value: value.lineno, default=None)
    return _loc_of(file, last) if last is not None else definition(fn)


def annotation(fn: Callable[..., Any], label: str) -> str | None:
    """The type an argument is annotated with in a string, `x: "f[B, T, width]"`, else None.

    Under `from __future__ import annotations` every annotation is a string, and one that was
    written as a string is a string literal inside it.
    """
    note = fn.__annotations__.get(label)
    if not isinstance(note, str):
        return None
    if fn.__code__.co_flags & __future__.annotations.compiler_flag:
        match ast.parse(note, mode="eval").body:
            case ast.Constant(value=str(literal)):
                return literal
        return None
    return note
