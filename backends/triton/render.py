"""Templates: whole kernels as Python that reads like Python, `{{ }}` for what a rule or spec adds.

Statements of the template stand in lines `#% …`. With every `{{ }}` read as a name a template is a
module that parses, and so is what is rendered; a name that nobody gave is an error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

from archir.text import wrap
from backends.triton.body import HELPERS

FOLDER = Path(__file__).parent / "templates"


@cache
def _environment() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        line_statement_prefix="#%",
        keep_trailing_newline=True,
        autoescape=False,
    )


def parses(template: str) -> None:
    """Raises SyntaxError unless a template is Python once its expressions are names."""
    lines = [line for line in template.splitlines() if not line.lstrip().startswith("#%")]
    ast.parse(re.sub(r"\{\{.*?\}\}", "_", "\n".join(lines)))


def render(template: str, /, **given: Any) -> str:
    """A template filled in, broken after commas where a line is too wide."""
    text = _environment().get_template(f"{template}.py.jinja").render(**given)
    ast.parse(text)
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(("@", "def ", "# ")) and lines and not lines[-1].startswith(("@", "# ")):
            while lines[-1] == "":
                lines.pop()
            lines += ["", ""]  # where a loop of the template ends, its blank lines are lost
        lines += wrap(line, 100) if line else [line]
    return "\n".join(lines) + "\n"


def helpers(texts: Sequence[str]) -> list[str]:
    """The source of the helpers that some texts call, callees first."""
    found: dict[str, str] = {}
    pending = list(texts)
    while pending:
        text = pending.pop()
        for name, body in HELPERS.items():
            if name not in found and f"{name}(" in text:
                lines = indent(dedent(body).strip("\n").rstrip(), "    ")
                given = "x, y" if name == "_power" else "x"
                found[name] = f"@triton.jit\ndef {name}({given}):\n{lines}"
                pending.append(found[name])
    return [found[name] for name in HELPERS if name in found]
