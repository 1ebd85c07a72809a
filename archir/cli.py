"""The command `archir`. Exit codes: 0, 1 a difference found by `check`, 2 an error, 130 Ctrl-C.

Whatever a command does not need is imported inside it: `list` and `show` never load torch.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from archir import cost as costs
from archir.compile import compile as compile_model
from archir.compile import find_backend
from archir.diagnostics import ArchirError, Loc, MismatchError, SpecError, UnsupportedError, nearest
from archir.pipeline import STAGES, lower
from archir.spec import Spec, builtin_names, resolve, trace

DTYPES = ("float32", "bfloat16", "float64")

app = typer.Typer(
    help="A compiler for language-model architectures.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

SpecArgument = Annotated[
    str, typer.Argument(metavar="SPEC", help="a built-in name, or path/to/file.py:function")
]
Preset = Annotated[str | None, typer.Option(help="sizes by name; default: full")]
Config = Annotated[Path | None, typer.Option(help="sizes from a Hugging Face config.json")]
Json = Annotated[bool, typer.Option("--json", help="an object with schema and rows")]
Dtype = Annotated[str, typer.Option(help=" or ".join(DTYPES))]


def main() -> None:
    """Entry point: errors are messages on stderr, not tracebacks."""
    try:
        typer.main.get_command(app)()
    except ArchirError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        _fail(_unexpected(error))


def _fail(message: str) -> None:
    sys.stdout.flush()
    print(message, file=sys.stderr)
    sys.exit(2)


def _unexpected(error: Exception) -> str:
    """An error nobody raised on purpose: a slip in the user's own file, or a bug of archir."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(__file__).parent
    users = [f for f in frames if ours not in Path(f.filename).parents and _is_users(f.filename)]
    frame = (users or frames)[-1]
    loc = Loc(frame.filename, frame.lineno or 1, frame.colno or 0, frame.end_colno)
    what = f"{type(error).__name__}: {error}"
    if users:
        return SpecError(what, code="python", loc=loc, next="correct this line").render()
    step = "this is a bug of archir: report this command and this message"
    return ArchirError(what, code="internal", loc=loc, next=step).render()


def _is_users(file: str) -> bool:
    return "site-packages" not in file and not file.startswith((sys.base_prefix, "<"))
