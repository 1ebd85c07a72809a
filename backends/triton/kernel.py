"""A kernel as a file: the Triton kernel, its launch, the same in torch, and the torch op of both.

The torch version is what eager prints for the op alone; it runs on a CPU and gives the gradient.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import archir.philox
import archir.sequence
from archir import types
from archir.diagnostics import Loc
from archir.dims import Poly
from archir.ir import Function, Module, Op, Value
from archir.passes.choose_form import CHUNK
from archir.passes.expand import expand
from archir.passes.rewrite import Rewriter
from archir.recurrence.canonical import Record, canonical
from archir.text import wrap
from archir.types import Sequence as Rows
from archir.types import Tensor
from backends.eager import cache as growing
from backends.eager import support
from backends.eager.emit import WIDTH, print_plain, printed
from backends.eager.names import RESERVED, free, in_brackets, quoted
from backends.triton import launch
from backends.triton.render import helpers

TORCH = {
    "bf16": "torch.bfloat16", "f16": "torch.float16", "f32": "torch.float32",
    "f64": "torch.float64",
}  # fmt: skip
# Names of a kernel file that no value of a rule or spec may take.
TAKEN = RESERVED | {
    "tl", "triton", "at", "kernel", "run", "eager", "empty", "call", "config", "CONFIGS", "tokens",
    "row", "head", "part", "token", "start", "stop", "bounds", "length", "place", "inside", "i",
    "size", "grid", "shape", "made", "make", "rows", "stride", "line", "first", "DENSE", "BLOCK",
    *(f"out_{i}" for i in range(16)), *(f"out_{i}_ptr" for i in range(16)), "out", "out_ptr",
}  # fmt: skip


def pointer(dtype: str) -> str:
    """The type Triton gives a pointer to elements of a dtype."""
    return "*" + {"bf16": "bf16", "f16": "fp16", "f32": "fp32", "f64": "fp64", "bool": "i1"}[dtype]


def own_names(values: Sequence[Value], taken: set[str]) -> tuple[str, ...]:
    """A name for each operand of a file: ASCII, as torch's schemas are, and such that nothing made
    from it (`x_ptr`, `stride_x`, …) is another's; `taken` gets them all."""
    found = []
    for value in values:
        base = name = _ascii(value.name)
        ordinal = 0
        while taken & _made_from(name):
            ordinal += 1
            name = f"{base}_{ordinal}"
        found.append(name)
        taken |= _made_from(name)
    return tuple(found)


def _ascii(name: str) -> str:
    """A name that torch's schemas know."""
    found = re.sub(r"[^A-Za-z0-9_]", "", name)
    return found if found.isidentifier() else f"x{found}"


def _made_from(name: str) -> set[str]:
    return {name, f"{name}_ptr", f"stride_{name}", f"{name}_after", f"{name}_after_ptr"}


@dataclass(frozen=True)
class Argument:
    """A parameter of a Triton kernel for compiling it ahead of time.

    type: what Triton calls it.  multiple: what its value is a multiple of where tensors are
    contiguous; the address of one is aligned anyway.
    """

    name: str
    type: str
    multiple: int = 1


class Skeleton(Protocol):
    """A template filled in for one op of a module.

    stem: what it is called.  name: of the Triton function.  about: of what, in words.  operands:
    the tensors that its torch op takes.  text: the kernel, its configurations, `empty` and `run`.
    known: sizes that are fixed in it, by letter.  arguments, constants, traffic: of one launch, for
    the layouts `dense` and `ragged` of rows.
    """

    kind: str
    op: Op
    module: Module

    @property
    def stem(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def about(self) -> str: ...
    @property
    def operands(self) -> tuple[str, ...]: ...
    @property
    def text(self) -> str: ...
    @property
    def configs(self) -> dict[str, dict[str, int]]: ...
    @property
    def known(self) -> dict[str, int]: ...
    @property
    def arguments(self) -> tuple[Argument, ...]: ...
    def constants(self, config: dict[str, int], layout: str) -> dict[str, Any]: ...
    def traffic(self, config: dict[str, int], layout: str) -> tuple[int | Poly, int | Poly]: ...


@dataclass(frozen=True)
class Kernel:
    """A kernel and the torch op around it.

    name: of the torch op, `<stem>_<hash of the file>`.  pieces: of its file, without imports.
    """

    name: str
    skeleton: Skeleton
    pieces: tuple[str, ...]

    @property
    def file(self) -> str:
        """The source of a file with this kernel alone."""
        return kernel_file(self.skeleton.about, self)


def kernel_of(skeleton: Skeleton) -> Kernel:
    """The kernel that a skeleton makes, named by its content."""
    op, arguments = skeleton.op, ", ".join(skeleton.operands)
    layouts = ("dense", "ragged") if takes_rows(op) else ("",)
    printed_ones, names = _torch_version(skeleton, layouts)
    if takes_rows(op):
        eager = (
            f"def eager({arguments}, start, stop):\n"
            '    """The same in torch."""\n'
            "    if start is None:\n"
            f"        return {names[0]}({arguments})\n"
            f"    return {names[1]}({arguments}, tuple(start), tuple(stop))"
        )
    else:
        eager = f"eager = {names[0]}  # the same in torch"
    pieces = [skeleton.text.strip(), *printed_ones, eager]
    name = f"{_ascii(skeleton.stem)}_{_digest([*helpers(pieces), *pieces])}"
    taken = [f"Tensor {x}" for x in skeleton.operands]
    taken += ["SymInt[]? start", "SymInt[]? stop"] if takes_rows(op) else []
    results = ", ".join(["Tensor"] * len(op.results))
    results = f"({results})" if len(op.results) > 1 else results
    schema = f"({', '.join(taken)}) -> {results}"
    given = [_literals(name), _literals(schema), "run, eager, empty"]
    lines = [*(f"    {text}," for text in given), *wrap(f"    {_takes(skeleton)},", WIDTH)]
    return Kernel(name, skeleton, (*pieces, "\n".join(["call = at.operator(", *lines, ")"])))


def _takes(skeleton: Skeleton) -> str:
    """The axes of each tensor that a kernel takes, as a dict: the torch op refuses others."""
    shapes = [value.type.shape for value in skeleton.op.values if isinstance(value.type, Tensor)]
    axes = [[str(n) if isinstance(n, int) else quoted(str(n)) for n in shape] for shape in shapes]
    pairs = zip(skeleton.operands, map(in_brackets, axes), strict=True)
    return "{" + ", ".join(f"{quoted(name)}: {shape}" for name, shape in pairs) + "}"


def _digest(pieces: Sequence[str]) -> str:
    """Of all that a kernel's file does: its pieces, without the comments that name lines of a spec,
    and the files that it imports."""
    bare = [re.sub(r"  # .*$", "", piece, flags=re.M) for piece in pieces]
    return hashlib.sha256("\n".join([*bare, *_imported()]).encode()).hexdigest()[:12]


@cache
def _imported() -> tuple[str, ...]:
    files = (launch, support, growing, archir.philox, archir.sequence)
    return tuple(inspect.getsource(file) for file in files)


def kernel_file(title: str, kernel: Kernel) -> str:
    """The source of a file with a kernel."""
    head = (
        f'"""{title}.\n\nA Triton kernel, how it is launched, and the same in torch. Emitted by '
        'archir.\n"""\n\n'
        "import torch\nimport torch.nn.functional as F\nimport triton\n"
        "import triton.language as tl\n\n"
        "from . import launch as at\nfrom . import support as ar"
    )
    return "\n\n\n".join([head, *helpers(kernel.pieces), *kernel.pieces]) + "\n"


def _literals(text: str) -> str:
    """A string in one literal, or in several lines of them, each within the width."""
    pieces = textwrap.wrap(text, 88, drop_whitespace=False, break_long_words=False)
    return "\n    ".join(f'"{piece}"' for piece in pieces)


def takes_rows(op: Op) -> bool:
    """Whether an op must know which tokens belong to which row."""
    return any(isinstance(x.type, Rows) for x in op.values)


def alone(op: Op, module: Module, layout: str, names: Sequence[str], called: str) -> Module:
    """A module whose entry is one op on operands of these names; where it takes rows, they are made
    from the operands (`dense`) or from two more inputs (`ragged`)."""
    functions = {f.name: f for f in module.functions if f.name in _reached(module, op)}
    new = Rewriter(Function(called, (), (), (), (), "entry"), functions)
    tensors = [x for x in op.values if isinstance(x.type, Tensor)]
    seq = next((x.type for x in op.values if isinstance(x.type, Rows)), None)
    like = next((x for x in tensors if _has_tokens(x)), tensors[0])
    rows: dict[str, int | Poly] = {}
    if seq is not None and layout == "dense":  # as many rows as the batch has
        rows = {str(seq.rows): like.tensor.shape[0]}
    pairs = zip(tensors, names, strict=True)
    operands = [new.input(name, types.substitute(x.type, rows)) for x, name in pairs]
    if seq is not None:
        ends = ("start", "stop") if layout == "ragged" else ()
        sides = [new.input(end, Tensor("i64", (seq.rows,))) for end in ends]
        operands.append(new.emit(layout, operands[tensors.index(like)], *sides, hint="seq"))
    results = new.copy(op, tuple(operands), _in_torch(op, module))
    entry = replace(new.old, inputs=tuple(new.inputs), ops=tuple(new.ops), outputs=results)
    return Module((*functions.values(), entry))


def _in_torch(op: Op, module: Module) -> dict[str, Any]:
    """The attributes of an op as torch runs it: long rows of a recurrence in chunks where they are
    legal, as a loop over tokens is slow forward and more so backward."""
    attrs = dict(op.attrs)
    if op.kind == "state_update":
        legal = isinstance(canonical(module[attrs["rule"].name]), Record)
        attrs |= {"form": "chunk", "below": CHUNK} if legal else {}
    return attrs


def _has_tokens(value: Value) -> bool:
    """Whether a value's first axes are rows and tokens, as symbols."""
    shape = value.tensor.shape[:2]
    return len(shape) == 2 and all(isinstance(size, Poly) for size in shape)


def _reached(module: Module, op: Op) -> set[str]:
    found: set[str] = set()
    pending: Iterable[str] = op.refs()
    while pending := [name for name in pending if name not in found]:
        found |= set(pending)
        pending = [ref for name in pending for inner in module[name].ops for ref in inner.refs()]
    return found


def _torch_version(skeleton: Skeleton, layouts: Sequence[str]) -> tuple[list[str], list[str]]:
    """The functions eager prints for the op alone in some layouts, and their names."""
    taken, text, names = {*TAKEN, skeleton.name}, [], []
    for layout in layouts:
        called = free(f"{skeleton.stem}_{layout}" if layout else f"{skeleton.stem}_torch", taken)
        made = alone(skeleton.op, skeleton.module, layout, skeleton.operands, called)
        module = expand(made, CHUNK)
        found = {}
        for function in printed(module):
            found[function.name] = free(function.name, taken)
            taken.add(found[function.name])
        text += print_plain(module, found)
        names.append(found[called])
    return text, names


def loc_of(op: Op, module: Module) -> Loc | None:
    """The line a kernel comes from: of its function where it has one, else of the op."""
    found = [module[name].loc for name in op.refs()]
    return next((loc for loc in found if loc), op.loc)
