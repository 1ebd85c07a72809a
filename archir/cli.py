"""The command `archir`. Exit codes: 0, 1 a difference found by `check`, 2 an error, 130 Ctrl-C.

Whatever a command does not need is imported inside it: `list` and `show` never load torch.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from archir import cost as costs
from archir.compile import (
    Request,
    RuleRequest,
    all_sizes,
    find_backend,
    request_for,
    request_for_rule,
)
from archir.compile import compile as compile_model
from archir.diagnostics import ArchirError, Loc, MismatchError, SpecError, UnsupportedError, nearest
from archir.pipeline import STAGES, lower
from archir.recurrence import Rule
from archir.spec import USER_MODULE, Spec, builtin_names, resolve, trace

DTYPES = ("float32", "bfloat16", "float64")

app = typer.Typer(
    help="A compiler for language-model architectures.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
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
    """An error nobody raised on purpose: from the machine, the user's own file, or a bug."""
    if isinstance(error, OSError):
        return ArchirError(str(error), code="file").render()
    what = f"{type(error).__name__}: {error}"
    users = {m.__file__ for name, m in sys.modules.items() if name.startswith(USER_MODULE)}
    if isinstance(error, SyntaxError) and error.filename in users:
        loc = Loc(error.filename or "", error.lineno or 1, (error.offset or 1) - 1)
        return SpecError(error.msg, code="python", loc=loc).render()
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if frame.filename in users]
    frame = (theirs or frames)[-1]
    loc = Loc(frame.filename, frame.lineno or 1, frame.colno or 0, frame.end_colno)
    if theirs:
        return SpecError(what, code="python", loc=loc).render()
    step = "this is a bug of archir: report the command and this message"
    return ArchirError(what, code="internal", loc=loc, next=step).render()


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the built-in specs and their presets."""
    rows = []
    for name in builtin_names():
        spec = resolve(name)
        first, *_ = (spec.doc if isinstance(spec, Spec) else "").split("\n")
        presets = list(spec.presets) if isinstance(spec, Spec) else []
        rows.append({"spec": name, "presets": presets, "what": first})
    _print_rows("archir.list/1", rows, as_json)


@app.command()
def show(
    spec: SpecArgument,
    preset: Preset = None,
    config: Config = None,
    phase: Annotated[str | None, typer.Option(help="full, prefill or decode")] = None,
    stage: Annotated[
        str | None, typer.Option(help=f"after which pass: {', '.join(STAGES)}")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="for which backend")] = None,
    dtype: Dtype = "float32",
) -> None:
    """Print the IR text of a spec: as traced, or, for a phase, as its backend gets it."""
    module = trace(spec, preset, config)
    stage = stage or ("trace" if phase is None and backend is None else STAGES[-1])
    module = lower(module, phase or "full", backend=backend, stage=stage, dtype=_dtype(dtype))
    _print_code(str(module))


@app.command("compile")
def compile_(
    spec: SpecArgument,
    preset: Preset = None,
    config: Config = None,
    backend: Annotated[str, typer.Option(help="what to emit")] = "eager",
    dtype: Dtype = "float32",
    out: Annotated[Path | None, typer.Option(help="copy the files to this folder")] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(help="compile kernels ahead of time: sm_80, sm_90, sm_100, gfx942"),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="of a rule's dims and its heads (1 if not given): K=128,H=4")
    ] = None,
) -> None:
    """Emit the code of every phase of a spec or a rule, and print where the files are.

    With --target, a spec or a rule becomes a package of files that needs archir no more.
    """
    found, dtype = resolve(spec), _dtype(dtype)
    _refuse_file(out)
    targets = [name for text in target or () for name in text.split(",")]
    request, runtime = _request(spec, found, preset, config, dtype, sizes), find_backend(backend)
    if targets:
        for path in runtime.package(request, targets, _out(out), _progress):
            print(path)
        return
    request = request.as_model() if isinstance(request, RuleRequest) else request
    model = runtime.build(request)
    for phase, head in request.programs:
        model.program(phase, head)
    for file in model.files:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            file = Path(shutil.copy(file, out))
        print(file)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _refuse_file(out: Path | None) -> None:
    """Raises UnsupportedError where a folder cannot be made, before anything is compiled."""
    there = next((p for p in (out, *out.parents) if p.exists()), None) if out else None
    if there is not None and not there.is_dir():
        raise UnsupportedError(
            f"--out names a folder, and {there} is a file",
            code="out-file",
            next="name another folder with --out, or remove the file",
        )


def _out(out: Path | None) -> Path:
    if out is None:
        raise SpecError(
            "a package is a folder, and none is named",
            code="out-missing",
            next="add --out DIR",
        )
    return out


def _request(
    given: str,
    found: Any,
    preset: str | None,
    config: Path | None,
    dtype: str,
    sizes: str | None,
) -> Request | RuleRequest:
    """What is compiled ahead of time: a spec or a block, or a rule of given sizes.

    A rule whose heads are not given has one, which is said: one head is all that a rule itself
    knows of, so this is no error, but nearly every model has more, and the package takes no other
    number than it was compiled for.
    """
    if not isinstance(found, Rule):
        if sizes is not None:
            raise _sizes_of_spec(given)
        return request_for(found, preset, config, dtype=dtype)
    if preset is not None or config is not None:
        raise SpecError(
            f"{given} is a rule: it has no presets and no config",
            code="rule-config",
            next="give its sizes: --sizes K=128,V=128",
        )
    found_sizes = _sizes(sizes)
    request = request_for_rule(found, found_sizes, dtype=dtype)
    if "H" not in found_sizes:
        more = all_sizes(found, found_sizes | {"H": 16})
        _progress(f"H = 1 head is taken, as none is given; for 16 write --sizes {more}")
    return request


def _sizes(given: str | None) -> dict[str, int]:
    """`K=128,V=64` as sizes by dim."""
    found: dict[str, int] = {}
    for item in given.split(",") if given else ():
        name, _, size = (part.strip() for part in item.partition("="))
        if not name or not size.isdecimal() or int(size) == 0:
            raise SpecError(
                f"{item!r} in --sizes is no dim with a size",
                code="sizes-format",
                next="write --sizes K=128,V=128",
            )
        found[name] = int(size)
    return found


def _sizes_of_spec(given: str) -> SpecError:
    return SpecError(
        f"--sizes is of a rule's dims, and {given} has its sizes from a config",
        code="sizes-spec",
        next="give --preset or --config",
    )


@app.command()
def run(
    spec: SpecArgument,
    weights: Annotated[Path, typer.Option(help="a Hugging Face folder, .safetensors or .gguf")],
    prompt: Annotated[str, typer.Option(help="the text to go on from")],
    preset: Annotated[str | None, typer.Option(help="sizes by name; default: the file's")] = None,
    config: Config = None,
    n: Annotated[int, typer.Option("-n", min=1, help="how many tokens at most")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="draw from this share")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="of the draws")] = None,
    backend: Annotated[str, typer.Option(help="what runs it")] = "eager",
    dtype: Dtype = "float32",
) -> None:
    """Load published weights and write on from a prompt, token by token."""
    dtype, found = _dtype(dtype), _resolve_spec(spec)
    runtime = find_backend(backend)
    chosen = _config_for(found, preset, config, weights, runtime.open_checkpoint(weights).config)
    tokenizer = runtime.load_tokenizer(weights)
    model = compile_model(found, config=chosen, backend=backend, dtype=dtype)
    model.load_weights(weights)
    ids = tokenizer.encode(prompt) or ([tokenizer.bos_id] if tokenizer.bos_id is not None else [])
    if not ids:
        raise MismatchError(
            "the prompt is empty, and the model has no token that begins a text",
            code="prompt-empty",
            next="give a prompt of a character at least",
        )
    options = {"temperature": temperature, "top_p": top_p, "seed": seed}
    tokens = model.stream(ids, n, **options, stop=tokenizer.eos_ids)
    sys.exit(_write(tokens, tokenizer, len(ids)))


def _write(tokens: Iterable[int], tokenizer: Any, prompt: int) -> int:
    """Streams text to stdout and the speed to stderr; the exit code."""
    text, times, code, note = tokenizer.stream(), [time.perf_counter()], 0, ""
    try:
        for token in tokens:
            times.append(time.perf_counter())
            if token not in tokenizer.eos_ids:
                print(text.put(token), end="", flush=True)
    except KeyboardInterrupt:
        code = 130
    except MismatchError as error:
        if error.code != "context-exceeded" or len(times) == 1:
            raise
        note = f"; {error.what}"
    print(text.finish(), flush=True)
    first, *rest = [b - a for a, b in itertools.pairwise(times)] or [0.0]
    speed = f", then {len(rest) / sum(rest):.1f} tokens per second" if rest else ""
    count = len(times) - 1
    print(
        f"{count} tokens after {prompt}: {first:.2f} s to the first{speed}{note}", file=sys.stderr
    )
    return code


def _config_for(
    spec: Spec, preset: str | None, config: Path | None, weights: Path, found: Mapping[str, Any]
) -> Any:
    """The checkpoint's config; one asked for by name must describe the same program."""
    if preset is None and config is None:
        if not found:
            raise SpecError(
                f"{weights} says nothing about its sizes: there is no config.json beside it",
                code="config-file",
                next="give --preset or --config",
            )
        return spec.configure(config=found)
    asked = spec.configure(preset, config)
    if found and spec.config_class is not None:
        name = f"preset {preset}" if config is None else str(config)
        spec.check_same(asked, spec.configure(config=found), name, str(weights))
    return asked


@app.command()
def check(
    spec: SpecArgument,
    backends: Annotated[
        str | None,
        typer.Option(
            help="with commas between; default: eager; of a rule numpy, the interpreter, too"
        ),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="sizes by name; default: tiny")] = None,
    config: Config = None,
    dtype: Annotated[
        str | None, typer.Option(help="with commas between; default: all, of a rule float64")
    ] = None,
    layouts: Annotated[
        str | None, typer.Option(help="dense, left, right, packed, with commas between")
    ] = None,
    forms: Annotated[
        str | None, typer.Option(help="of a rule: recurrent, chunk, parallel; default: all legal")
    ] = None,
    laws: Annotated[
        bool, typer.Option("--laws", help="hold it to the laws of padding, cuts, rows, causality")
    ] = False,
    seed: Annotated[int, typer.Option(help="of weights and inputs")] = 0,
    as_json: Json = False,
) -> None:
    """Compare every phase and layout of a spec's code with NumPy, or every form of a rule with its
    body run literally; exit 1 where they differ."""
    found = resolve(spec)
    asked: dict[str, Any] = {
        "backends": _items(backends),
        "layouts": _items(layouts),
        "forms": _items(forms),
    }
    asked = {name: items for name, items in asked.items() if items is not None}
    dtypes = tuple(_dtype(name) for name in _items(dtype) or ())
    if isinstance(found, Rule):
        _refuse_of_rule(spec, {"--preset": preset, "--config": config, "--laws": laws or None})
        _check_rule(found, {**asked, "dtype": dtypes or "float64", "rng": seed}, as_json)
        return
    if forms is not None:
        raise SpecError(
            f"--forms is of a rule, and {spec} is a model",
            code="forms-spec",
            next="name a rule, path/to/file.py:rule, or leave --forms out",
        )
    from archir.check import check as compare

    cell = "{spec} {backend} {dtype} {phase} {layout} T = {T}"
    asked |= {"dtypes": dtypes or DTYPES, "laws": laws, "seed": seed}
    with _status(cell) as progress:
        report = compare(found, preset, config, progress=progress, **asked)
    _print_rows("archir.check/1", report.rows, as_json)
    wrong = report.failures
    if wrong:
        first = cell.format_map(wrong[0])
        print(f"{len(wrong)} of {len(report.rows)} cells differ, first {first}", file=sys.stderr)
        sys.exit(1)


@contextmanager
def _status(cell: str) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """On a terminal, a line that says which row of a table was made last."""
    from rich.console import Console

    count = itertools.count(1)
    with Console(stderr=True).status("") as status:
        yield lambda row: status.update(f"{next(count)}: {cell.format_map(row)}")


def _items(given: str | None) -> tuple[str, ...] | None:
    """What stands between commas; None where nothing is given."""
    return None if given is None else tuple(given.split(","))


def _refuse_of_rule(given: str, options: Mapping[str, Any]) -> None:
    for option, value in options.items():
        if value is not None:
            raise SpecError(
                f"{option} is of a model, and {given} is a rule",
                code="check-rule",
                next=f"leave {option} out; a rule is checked in every form and layout",
            )


def _check_rule(rule: Rule, options: Mapping[str, Any], as_json: bool) -> None:
    from archir.check.recurrence import check_recurrence

    cell = "{rule} {form} {backend} {dtype} {layout} T = {T}, {what}"
    with _status(cell) as progress:
        report = check_recurrence(rule, progress=progress, **options)
    if as_json:
        found = {
            "schema": "archir.check_recurrence/1", "worst": report.worst,
            "worst_gradient": report.worst_gradient, "forms": report.forms,
            "gradients": report.gradients, "rows": report.rows,
        }  # fmt: skip
        print(json.dumps(found, indent=2))
    else:
        print(report)
    wrong = report.failures
    if wrong:
        first = cell.format_map(wrong[0])
        print(f"{len(wrong)} of {len(report.rows)} cells differ, first {first}", file=sys.stderr)
    if not report.ok:
        sys.exit(1)


@app.command()
def explain(
    spec: SpecArgument,
    preset: Preset = None,
    config: Config = None,
    latex: Annotated[bool, typer.Option("--latex", help="the equations for LaTeX")] = False,
    as_json: Json = False,
) -> None:
    """Tell what a recurrence rule does, which forms are legal and why, and its chunk equations."""
    from archir.explain import SCHEMA
    from archir.explain import explain as found_of

    found = found_of(spec, preset, config)
    if as_json:
        print(json.dumps({"schema": SCHEMA, "rows": found.rows}, indent=2, ensure_ascii=False))
        return
    print(found.latex() if latex else found)


@app.command()
def cost(
    spec: SpecArgument, preset: Preset = None, config: Config = None, as_json: Json = False
) -> None:
    """Count the parameters of a spec, by part."""
    rows = [asdict(row) for row in costs.rows(trace(spec, preset, config))]
    _print_rows(costs.SCHEMA, rows, as_json)


def _resolve_spec(given: str) -> Spec:
    found = resolve(given)
    if not isinstance(found, Spec):
        raise SpecError(
            f"{given} is a part of a model, and only a whole spec has published weights",
            code="spec-needed",
            next="name a function decorated with @ar.spec",
        )
    return found


def _dtype(name: str) -> str:
    if name not in DTYPES:
        raise UnsupportedError(
            f"there is no model dtype {name!r}", code="dtype", next=nearest(name, DTYPES)
        )
    return name


def _print_rows(schema: str, rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Rows as JSON, or as a table: numbers to the right, text to the left."""
    if as_json:
        print(json.dumps({"schema": schema, "rows": list(rows)}, indent=2))
        return
    if not rows:
        return
    names = list(rows[0])
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    right = [all(isinstance(row[name], int | float) for row in rows) for name in names]
    for line in cells:
        padded = [
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, right, strict=True)
        ]
        print("  ".join(padded).rstrip())


def _cell(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "NO"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.1e}"
        case list() | tuple():
            return ", ".join(str(item) for item in value)
    return str(value)


def _print_code(text: str) -> None:
    """IR text: coloured on a terminal, else as it is."""
    if not sys.stdout.isatty():
        print(text, end="")
        return
    from rich.console import Console
    from rich.syntax import Syntax

    coloured = Syntax("", "python", theme="ansi_dark").highlight(text)
    Console().print(coloured, soft_wrap=True, end="")
