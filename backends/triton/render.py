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
    return "\n".join(piece for line in text.splitlines() for piece in wrap(line, 100)) + "\n"


def kernel_file(title: str, kernels: Sequence[str]) -> str:
    """The source of a file of kernels, and the helpers they call."""
    found: dict[str, str] = {}
    pending = list(kernels)
    while pending:
        text = pending.pop()
        for name, body in HELPERS.items():
            if name not in found and f"{name}(" in text:
                lines = indent(dedent(body).strip("\n").rstrip(), "    ")
                found[name] = f"@triton.jit\ndef {name}(x):\n{lines}\n"
                pending.append(found[name])
    head = f'"""{title}\n\nEmitted by archir.\n"""\n\nimport triton\nimport triton.language as tl\n'
    helpers = [found[name] for name in HELPERS if name in found]
    return "\n\n".join([head, *helpers, *kernels])
