"""Ahead of time: a folder that offers a spec or a rule, with kernels compiled for named targets.

    module.py       what a person imports        kernels.py      an index of the kernels
    <kernel>.py     one kernel, and its torch op  manifest.json   what each binary takes and moves
    <kernel>.<target>.cubin or .hsaco, and <kernel>.ragged.… where rows are not dense

The manifest is written last, and an older one is removed first: a folder with a manifest is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton

from archir import dims, ir
from archir.compile import Request, RuleRequest
from archir.diagnostics import UnsupportedError
from archir.dims import Poly
from archir.ir import Function, Module, Value
from archir.passes.specialize import LAYOUTS, only_dense, only_full
from archir.pipeline import lower
from archir.types import Tensor
from backends.eager.names import RESERVED, class_names, free, function_names, in_brackets, quoted
from backends.runtime import cache
from backends.runtime.state import GROWING
from backends.triton.backend import Triton, kernels_of
from backends.triton.binary import Binary, check_targets, compile_kernel, config_for
from backends.triton.kernel import TORCH, Kernel, takes_rows
from backends.triton.ops import KERNELS
from backends.triton.render import render

SCHEMA = "archir.package/1"
MANIFEST = "manifest.json"
PRODUCTS = {
    "a100": "sm_80", "h100": "sm_90", "h200": "sm_90", "b200": "sm_100", "gb200": "sm_100",
    "mi300": "gfx942", "mi300a": "gfx942", "mi300x": "gfx942", "mi325x": "gfx942",
}  # fmt: skip
# What stands in the manifest.
MEANING = {
    "op": "the torch op around the kernel",
    "layout": "dense: every line of the grid of tokens is a row; ragged: rows are padded or packed",
    "dtype": "the model's; a kernel may also take and keep what is wider",
    "sizes": "fixed in the kernel: dims of a rule and H heads of its states, D elements of a row "
    "of a norm, I elements of a token",
    "registers": "per thread; on AMD vector registers of both files",
    "spill_bytes": "of a thread's memory beside its registers, where those that do not fit lie: "
    "the stack and local memory (NVIDIA), scratch (AMD)",
    "shared_bytes": "that a launch asks for per program",
    "warps": "per program",
    "stages": "of loads that a loop keeps in flight, at most",
    "read_bytes": "that unmasked lanes of one launch load, over the symbols; ceildiv(a, n) is "
    "a / n rounded up",
    "written_bytes": "that unmasked lanes of one launch store, likewise",
}
SYMBOLS = {
    "B": "lines of the grid of tokens: rows of a dense batch",
    "T": "tokens of a line of the grid",
    "N": "tokens that ragged rows own, of all rows together",
    "R": "rows: sequences that have a state each",
    "P": "tokens that a state has seen",
}
ROWS = (
    "rows: (start, stop) of each row on the grid of tokens [B, T] read line by line, where rows",
    "are padded or packed; None where every line is a row.",
)
IMPORTED = {"torch", "ar", "sys", "importlib", "Path"}  # by `module.py`
DTYPES = TORCH | {"i32": "torch.int32", "i64": "torch.int64", "bool": "torch.bool"}
# Names of `module.py` that no input may take.
OF_RULE = {"rows", "count", "state", "made", "SIZES", "TAKES", "_check"}
OF_MODEL = OF_RULE | {"model", "start", "stop", "_check_state"}
Report = Callable[[str], None]


def write_package(
    backend: Triton,
    request: Request | RuleRequest,
    targets: Sequence[str],
    out: Path,
    report: Report,
) -> list[Path]:
    """Writes a package for some targets into a folder; its files. `report` is told each step."""
    targets = list(dict.fromkeys(targets))
    _refuse_products(targets)
    check_targets(targets)
    manifest = out / MANIFEST
    before = _listed(manifest)
    made = _Package(backend, request, report)
    out.mkdir(parents=True, exist_ok=True)
    manifest.unlink(missing_ok=True)
    paths = cache.write(out, made.files)
    entries = []
    plan = [
        (kernel, target, layout)
        for kernel in made.kernels.values()
        for layout in (LAYOUTS if takes_rows(kernel.skeleton.op) else LAYOUTS[:1])
        for target in targets
    ]
    for number, (kernel, target, layout) in enumerate(plan, 1):
        fn = getattr(backend.load(out, kernel.name), kernel.skeleton.name)
        binary = compile_kernel(kernel, fn, target, layout)
        path = out / _binary_name(kernel, target, layout, binary.suffix)
        _write(path, binary.code)
        paths.append(path)
        entries.append(_entry(kernel, target, layout, binary, request.options.dtype))
        report(
            f"{number} of {len(plan)}: {path.name}, {binary.registers} registers, "
            f"{binary.spill_bytes} bytes spilled, {binary.shared_bytes} shared"
        )
    for name in before - {path.name for path in paths}:
        (out / name).unlink(missing_ok=True)
    text = {
        "schema": SCHEMA,
        "name": request.name,
        "dtype": request.options.dtype,
        "targets": targets,
        "triton": triton.__version__,
        "meaning": MEANING,
        "symbols": _symbols(entries),
        "files": sorted(path.name for path in paths),
        "kernels": entries,
    }
    _write(manifest, (json.dumps(text, indent=2) + "\n").encode())
    return [*paths, manifest]


def _refuse_products(names: Iterable[str]) -> None:
    """Raises UnsupportedError for a GPU named as it is sold."""
    for name in names:
        target = PRODUCTS.get(name.lower())
        if target is not None:
            raise UnsupportedError(
                f"there is no target {name!r}: it is a GPU, whose code is for {target}",
                code="target",
                next=f"write --target {target}",
            )


def _listed(manifest: Path) -> set[str]:
    """The files of the package that a folder has; what else has a manifest is not written over."""
    if not manifest.is_file():
        return set()
    try:
        found = json.loads(manifest.read_text())
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise UnsupportedError(
            f"{manifest} is there, and is not of a package ({SCHEMA})",
            code="out-taken",
            next="name another folder with --out, or remove the file",
        )
    return {name for name in found["files"] if name == os.path.basename(name)}


def _write(path: Path, content: bytes) -> None:
    """Aside, then renamed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_bytes(content)
    os.replace(aside, path)


def _binary_name(kernel: Kernel, target: str, layout: str, suffix: str) -> str:
    ragged = ".ragged" if layout == "ragged" else ""
    return f"{kernel.name}{ragged}.{target}.{suffix}"


def _entry(kernel: Kernel, target: str, layout: str, binary: Binary, dtype: str) -> dict[str, Any]:
    """What the manifest says of one binary."""
    skeleton = kernel.skeleton
    read, written = skeleton.traffic(config_for(skeleton, target), layout)
    return {
        "name": kernel.name,
        "what": skeleton.about,
        "op": f"archir::{kernel.name}",
        "file": f"{kernel.name}.py",
        "binary": _binary_name(kernel, target, layout, binary.suffix),
        "target": target,
        "layout": layout,
        "dtype": dtype,
        "sizes": skeleton.known,
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes,
        "shared_bytes": binary.shared_bytes,
        "warps": binary.warps,
        "stages": binary.stages,
        "read_bytes": str(read),
        "written_bytes": str(written),
    }


def _symbols(entries: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """What the symbols of the formulas mean."""
    texts = [entry[side] for entry in entries for side in ("read_bytes", "written_bytes")]
    found = sorted({symbol for text in texts for symbol in dims.symbols(dims.parse(text))})
    return {symbol: SYMBOLS.get(symbol, "an axis of the spec's inputs") for symbol in found}


class _Package:
    """The sources of a package. files: name → text.  kernels: by name."""

    def __init__(self, backend: Triton, request: Request | RuleRequest, report: Report) -> None:
        self.backend, self.request, self.report = backend, request, report
        self.kernels: dict[str, Kernel] = {}
        self.programs: list[dict[str, str]] = []
        text = f"{request.module}\0{request.options}"
        self.package = f"{request.name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        self.title = f"{request.name} in {request.options.dtype}"
        self.files = backend.emit_tree(request.module, self.title)
        if isinstance(request, RuleRequest):
            self.files["module.py"] = self._rule(request)
        else:
            self.files["module.py"] = self._model(request)
        self.files["kernels.py"] = render(
            "kernels",
            title=self.title,
            package=self.package,
            kernels=[
                {"name": name, "about": quoted(kernel.skeleton.about)}
                for name, kernel in self.kernels.items()
            ],
        )
        self.files = _imported(self.files, ["__init__.py", "module.py", "kernels.py"])

    def _lowered(self, phase: str, layout: str, head: str, **options: Any) -> Module:
        o = self.request.options
        return lower(
            self.request.module, phase, layout, dtype=o.dtype, form=o.form, head=head,
            param_dtype=o.param_dtype, state_dtype=o.state_dtype, **options,
        )  # fmt: skip

    def _program(self, phase: str, layout: str, head: str) -> str:
        """Emits one program; the name of its file."""
        self.report(f"printing {phase}, {layout}")
        module = self._lowered(phase, layout, head, backend=self.backend.name)
        self.kernels |= kernels_of(module)
        file = f"{phase}_{layout}"
        title = f"{self.title}: {phase}, {layout}, head {head}"
        self.files |= self.backend.emit_program(module, self.request.module, title, file)
        entry = function_names(module)[module.entry.name]
        self.programs.append({"file": file, "entry": entry})
        return file

    # ---- a spec

    def _model(self, request: Request) -> str:
        """The source of `module.py` for a spec."""
        ahead = only_full(request.module)
        ragged = only_dense(request.module) is None
        inputs = ", ".join(_named(request.module.entry.inputs, OF_MODEL))
        phases = [self._phase(phase, head, inputs, ragged) for phase, head in request.programs]
        module = self._lowered("prefill" if ahead is None else "full", "dense", "all",
                               stage="precision")  # fmt: skip
        entry, parts = _state(module)
        names = _named(request.module.entry.inputs, OF_MODEL)
        inner = [value.tensor for value in module.entry.inputs]
        use = ['    model = build("cuda")  # then model.load_state_dict(…)']
        use += [f"    made = full(model, {inputs})"]
        if ahead is None:
            use += [f'    made, state = prefill(model, {inputs}, empty_state(count, "cuda"))']
            use += [f"    made, state = decode(model, {inputs}, state)"]
        return render(
            "model",
            title=self.title,
            package=self.package,
            use=[*use, *["", *ROWS] * ragged],
            inputs=inputs,
            given=_by_name(names),
            first=names[0],
            sizes="{}",
            takes=[_takes(n, t, t.shape) for n, t in zip(names, inner, strict=False)],
            ragged=ragged,
            stateful=ahead is None,
            programs=self.programs,
            model=class_names(request.module)[request.module.entry.name],
            dtype=f"torch.{request.options.param_dtype or request.options.dtype}",
            phases=phases,
            entry=entry,
            parts=parts,
            grows=any(f.attrs.get("kind") in GROWING for f in ir.fields(module, "state").values()),
        )

    def _phase(self, phase: str, head: str, inputs: str, ragged: bool) -> dict[str, Any]:
        stateful = phase != "full"
        outputs = ", ".join(self.request.module.entry.names) or "outputs"
        tokens = "every token" if head == "all" else "each row's last token"
        parameters = ["model", inputs, *["state"] * stateful, *["rows=None"] * ragged]
        about = f"{outputs.capitalize()} of {tokens}."
        if stateful:
            about = f"({outputs} of {tokens}, the state after); `state` is used up."
        return {
            "name": phase,
            "parameters": ", ".join(parameters),
            "about": about,
            "stateful": stateful,
            "dense": self._program(phase, "dense", head),
            "ragged": self._program(phase, "ragged", head) if ragged else "",
        }

    # ---- a rule

    def _rule(self, request: RuleRequest) -> str:
        """The source of `module.py` for a rule."""
        module = self._lowered("prefill", "dense", "all", stage="precision")
        self._require_kernel(module)
        dense, ragged = (self._program("prefill", layout, "all") for layout in LAYOUTS)
        fields = [f for f in module.entry.fields if f.kind == "state" and f.path != "length"]
        rule = free(request.rule.name, IMPORTED)
        before = [replace(f.value, name=f.path.rpartition(".")[2]) for f in fields]
        names = _named([*module.entry.inputs, *before], {rule, *OF_RULE})
        operands, states = names[: -len(fields)], names[-len(fields) :]
        kept = [
            {"name": name, "zeros": _zeros(field.value.tensor, f"{operands[0]}.device")}
            for name, field in zip(states, fields, strict=True)
        ]
        pairs = list(zip(names, [*module.entry.inputs, *before], strict=True))
        outputs = zip(request.rule.outputs, module.entry.outputs, strict=True)
        many = len(module.entry.outputs) > 1
        entries = {"length": "(0,) * count"} | {
            f.path: name for f, name in zip(fields, states, strict=True)
        }
        after = [f"state[{quoted(f.path)}]" for f in fields]
        return render(
            "rule",
            title=self.title,
            package=self.package,
            programs=self.programs,
            rule=rule,
            operands=", ".join(operands),
            states=", ".join(f"{name}=None" for name in states),
            about=f"{request.rule.name} over the tokens of every row and head: "
            f"({', '.join([*request.rule.outputs, *states])}), the states as they end",
            types=[
                *(f"{name}: {value.type}" for name, value in pairs[: len(operands)]),
                *(f"{name}: {v.type}, zeros if None" for name, v in pairs[len(operands) :]),
                *(f"returns {name}: {value.type}" for name, value in outputs),
            ],
            given=_by_name(operands),
            before=_by_name(states),
            sizes=_sizes(request, pairs),
            takes=[
                _takes(name, value.tensor, axes)
                for (name, value), axes in zip(pairs, _axes(request), strict=True)
            ],
            kept=kept,
            entries="{" + ", ".join(f"{quoted(k)}: {v}" for k, v in entries.items()) + "}",
            dense=dense,
            ragged=ragged,
            made=", ".join(["*made.values()" if many else "made", *after]),
        )

    def _require_kernel(self, module: Module) -> None:
        """Raises UnsupportedError where a rule alone has no kernel."""
        (op,) = (op for op in module.entry.ops if op.kind == "state_update")
        op = replace(op, attrs={**op.attrs, "form": "recurrent"})
        reason = KERNELS[op.kind].refusal(op, module)
        if reason:
            raise UnsupportedError(
                f"{self.request.name} has no kernel to compile: {reason}",
                code="rule-kernel",
                loc=module[op.attrs["rule"].name].loc,
                next="write it in elementwise ops, np.einsum, np.outer, np.sum, np.where",
            )


def _imported(files: Mapping[str, str], roots: Sequence[str]) -> dict[str, str]:
    """Those of some files that roots import, and the roots."""
    found: dict[str, str] = {}
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = files[name]
            pending += [f"{m or n}.py" for m, n in _FROM.findall(files[name])]
    return {name: text for name, text in files.items() if name in found}


# How files of a package import each other.
_FROM = re.compile(r"^ *from \.(\w*) import (\w+)", re.M)


def _state(module: Module) -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
    """What makes an empty state: the entries of the whole, and of each function that it calls."""
    table = {f.name: f for f in module.functions}
    parts: dict[str, dict[str, Any]] = {}
    taken = {"_grows", *RESERVED}

    def lines(function: Function) -> list[dict[str, str]]:
        found = {}
        for field in function.fields:
            if field.kind == "state" and field.attrs["kind"] != "length":
                grows = field.attrs["kind"] in GROWING
                found[field.path] = _zeros(field.value.tensor, grows=grows)
        for op in function.ops:
            if op.kind == "call" and (name := part(table[op.attrs["callee"].name])):
                found[op.attrs["scope"]] = f"{name}(count, device, reserve)"
        return [{"path": quoted(path), "made": made} for path, made in found.items()]

    def part(function: Function) -> str:
        if function.name not in parts:
            name = free(f"_{function.name}", taken)
            taken.add(name)
            made = {"name": name, "function": function.name, "lines": lines(function)}
            parts[function.name] = made
        return parts[function.name]["name"] if parts[function.name]["lines"] else ""

    entry = lines(module.entry)
    return entry, [p for p in parts.values() if p["lines"]]


def _named(values: Sequence[Value], taken: set[str]) -> list[str]:
    """Names of parameters that shadow nothing `module.py` needs."""
    taken, found = {*taken, *RESERVED, *IMPORTED}, []
    for value in values:
        found.append(free(value.name, taken))
        taken.add(found[-1])
    return found


def _by_name(names: Sequence[str]) -> str:
    """`{"q": q, "k": k}`: an expression."""
    return "{" + ", ".join(f"{quoted(name)}: {name}" for name in names) + "}"


def _takes(name: str, type_: Tensor, axes: Iterable[int | Poly | str]) -> dict[str, str]:
    """The dtype and axes of what is given under a name, as an entry of `module.py`'s table."""
    shown = [str(axis) if isinstance(axis, int) else quoted(str(axis)) for axis in axes]
    return {"name": name, "dtype": DTYPES[type_.dtype], "axes": in_brackets(shown)}


def _axes(request: RuleRequest) -> list[tuple[str, ...]]:
    """The axes of a rule's operands, then of its states, as letters."""
    rule = request.rule
    states = [value.tensor.shape for value in rule.function.inputs[: len(rule.states)]]
    found = [("B", "T", "H", *shape) for shape in rule.operands.values()]
    return [*found, *(("R", "H", *map(str, shape)) for shape in states)]


def _sizes(request: RuleRequest, pairs: Sequence[tuple[str, Value]]) -> str:
    """`{"K": 128, "V": 128, "H": 1}`: an expression."""
    found: dict[str, int | Poly] = {}
    for (_, value), axes in zip(pairs, _axes(request), strict=True):
        found |= dict(zip(axes, value.tensor.shape, strict=True))
    letters = [*(d for d in found if d not in ("B", "T", "R", "H")), "H"]
    return "{" + ", ".join(f"{quoted(d)}: {found[d]}" for d in letters) + "}"


def _zeros(type_: Tensor, device: str = "device", grows: bool = False) -> str:
    """The expression of an entry of a state before any token."""
    binding: dict[str, int | Poly] = {"R": dims.symbol("count"), "P": 0}
    sizes = [str(dims.substitute(size, binding)) for size in type_.shape]
    how = f"dtype={TORCH[type_.dtype]}, device={device}"
    if grows:
        return f"_grows({', '.join(sizes)}, {how}, reserve=reserve)"
    return f"torch.zeros({in_brackets(sizes)}, {how})"
