"""Python names of emitted code: none shadows what the code says, no two are one (D15)."""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Container

from archir.ir import Module

# Keywords, builtins, imports and parameters of emitted functions.
RESERVED = frozenset({"self", "seed", "state", "torch", "F", "ar", *keyword.kwlist, *dir(builtins)})


def free(hint: str, taken: Container[str]) -> str:
    """The hint, or the first of `hint_1`, `hint_2`, … that is not taken."""
    name, ordinal = hint, 0
    while name in taken:
        ordinal += 1
        name = f"{hint}_{ordinal}"
    return name


def function_names(module: Module) -> dict[str, str]:
    """IR function → the Python function printed for it."""
    found: dict[str, str] = {}
    for function in module.functions:
        found[function.name] = free(function.name, RESERVED.union(found.values()))
    return found


def class_names(module: Module) -> dict[str, str]:
    """IR function of a scope → its class: `layer_1` → `Layer1`, a later `layer1` → `Layer1_1`."""
    found: dict[str, str] = {}
    for function in module.functions:
        if function.role in ("block", "entry"):
            words = (word for word in function.name.split("_") if word)
            name = "".join(word[0].upper() + word[1:] for word in words)
            name = name if name.isidentifier() else f"Block{name}"
            found[function.name] = free(name, RESERVED.union(found.values()))
    return found


def quoted(text: str) -> str:
    """A string literal in double quotes, which stand nowhere inside it."""
    return '"' + text.encode("unicode_escape").decode().replace('"', r"\x22") + '"'


def in_brackets(items: list[str]) -> str:
    """A tuple: `()`, `(3,)`, `(R, 4)`."""
    return f"({', '.join(items)}{',' * (len(items) == 1)})"
