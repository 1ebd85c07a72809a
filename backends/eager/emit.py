"""Prints a lowered module as PyTorch: one function per IR function, one line per op.

Python names follow the spec: a value takes over the name of an older version (`x_1` → `x`) once
that is dead, so code reads as it was written and intermediates are freed as they would be by hand.
"""

from __future__ import annotations

import builtins
import keyword
import re
import textwrap
from collections.abc import Collection

from archir import dims
from archir.dims import Poly
from archir.ir import Function, Module, Op, Operand, Value
from archir.text import wrap
from archir.types import Sequence, Tensor
from backends.eager import tree
from backends.eager.ops.base import EMIT

_TORCH = {
    "bf16": "torch.bfloat16",
    "f16": "torch.float16",
    "f32": "torch.float32",
    "f64": "torch.float64",
    "i32": "torch.int32",
    "i64": "torch.int64",
    "bool": "torch.bool",
}
_RESERVED = {"self", "state", "torch", "F", "ar", *keyword.kwlist, *dir(builtins)}
WIDTH = 100
# Before these ops dead intermediates are freed: they make the largest values of a function.
_LARGE = ("call", "linear", "attention", "logits", "cross_entropy")


class Printer:
    """One function being printed. Called on an operand, it gives its Python expression."""

    def __init__(
        self,
        function: Function,
        functions: Collection[str],
        stateful: Collection[str],
        linears: Collection[str],
    ) -> None:
        self.function, self.stateful, self._linears = function, stateful, linears
        self._reserved = _RESERVED | set(functions)
        self.names: dict[Value, str] = {}
        self.lines: list[str] = []
        self.symbols: dict[str, str] = {}
        self._holders: dict[str, Value | None] = {}
        self._now = 0
        self._last = _last_uses(function)
        self._fields = {f.value: f for f in function.fields}
        self._pinned_owner: str | None = None

    # ---- expressions

    def __call__(self, operand: Operand) -> str:
        if not isinstance(operand, Value):
            return repr(operand)
        field = self._fields.get(operand)
        if field is None:
            return self.names[operand]
        if field.kind == "state":
            return f'state["{field.path}"]'
        if tree.pinned(field):
            owner, leaf = tree.split_path(field.path)
            place = f"{tree.access('self', owner)}.float32"
            if self._pinned_owner in (None, place):
                self._pinned_owner = place
                return f"w.{leaf}"
            return f"{place}.{leaf}"
        return tree.access("self", field.path)

    def type(self, operand: Operand) -> Tensor:
        """The type of a tensor operand."""
        assert isinstance(operand, Value) and isinstance(operand.type, Tensor)
        return operand.type

    def dim(self, size: int | Poly) -> str:
        """A size as an expression over the function's symbols."""
        if isinstance(size, int):
            return str(size)
        for symbol in dims.symbols(size):
            self.symbols.setdefault(symbol, symbol)
        return re.sub(r"ceildiv\((.*), (\d+)\)", r"-(-(\1) // \2)", str(size))

    def shape(self, sizes: tuple[int | Poly, ...]) -> str:
        """Sizes separated by commas."""
        return ", ".join(self.dim(s) for s in sizes)

    def dtype(self, name: str) -> str:
        """A dtype in torch's words."""
        return _TORCH[name]

    def device(self) -> str:
        """The device of what is made from nothing: that of the first input."""
        tensors = (v for v in self.function.inputs if isinstance(v.type, Tensor))
        return next((f"{self.names[v]}.device" for v in tensors), '"cpu"')

    def factory(self, op: Op) -> str:
        """dtype and device of a tensor made from nothing."""
        return self.factory_of(op.result)

    def factory_of(self, value: Value) -> str:
        """dtype and device of a value."""
        return f"dtype={self.dtype(self.type(value).dtype)}, device={self.device()}"

    def linear_owner(self, op: Op) -> str | None:
        """The nn.Linear that holds this op's weight, if its weight is a field of its own."""
        field = self._fields.get(op.values[1])
        if field is None or tree.split_path(field.path)[0] not in self._linears:
            return None
        return tree.access("self", tree.split_path(field.path)[0])

    def member(self, scope: str) -> str:
        """The module of a called scope."""
        return tree.access("self", scope)

    def has_state(self, name: str) -> bool:
        """Whether a function takes `state`."""
        return name in self.stateful

    def field_kind(self, path: str) -> str:
        """The kind of the field at a path."""
        field = self.function.field_of(path)
        assert field is not None
        return field.kind

    # ---- names

    def fresh(self, hint: str) -> str:
        """A Python name nothing holds."""
        name, ordinal = hint, 0
        while name in self._holders or name in self._reserved:
            ordinal += 1
            name = f"{hint}_{ordinal}"
        self._holders[name] = None
        return name

    def define(self, value: Value, reuse: bool = True) -> str:
        """A Python name for a new value; the spec's own name where its last holder is dead."""
        base = re.sub(r"(_\d+)+$", "", value.name) or value.name
        holder = self._holders.get(base)
        dead = holder is not None and self._last.get(holder, -1) <= self._now
        if reuse and base not in self._reserved and (base not in self._holders or dead):
            name = base
        else:
            name = self.fresh(value.name)
        self._holders[name] = value
        self.names[value] = name
        return name

    # ---- printing

    def print(self) -> str:
        """The function's source."""
        function = self.function
        inputs = [self.define(v, reuse=False) for v in function.inputs]
        for index, op in enumerate(function.ops):
            self._now = index
            self._op(op)
        returned = ", ".join(self(v) for v in function.outputs)
        if function.names and function.role == "entry" and len(function.names) > 1:
            pairs = zip(function.names, function.outputs, strict=True)
            returned = "{" + ", ".join(f'"{n}": {self(v)}' for n, v in pairs) + "}"
        plain = function.role in ("body", "pointwise", "rule")
        head = ([] if plain else ["self"]) + inputs
        head += ["state"] if function.name in self.stateful else []
        given = ", ".join(f"{v.name}: {v.type}" for v in function.inputs)
        text = [f"def {function.name}({', '.join(head)}):"]
        text += _docstring(given)
        text += [f"    {line}" for line in self._sizes(inputs)]
        text += [f"    {line}" for line in self.lines]
        text.append(f"    return {returned}")
        return "\n".join(piece for line in text for piece in _fold(line))

    def _sizes(self, inputs: list[str]) -> list[str]:
        lines = []
        for symbol in sorted(self.symbols):
            for name, value in zip(inputs, self.function.inputs, strict=True):
                if isinstance(value.type, Sequence) and dims.bare(value.type.rows) == symbol:
                    lines.append(f"{symbol} = len({name})")
                    break
                shape = value.type.shape if isinstance(value.type, Tensor) else ()
                places = [i for i, d in enumerate(shape) if dims.bare(d) == symbol]
                if places:
                    lines.append(f"{symbol} = {name}.shape[{places[0]}]")
                    break
        return lines

    def _free(self) -> None:
        """`del` of dead intermediates, so that they do not stand beside what comes next."""
        dead = [
            name
            for name, value in self._holders.items()
            if value is not None
            and value not in self.function.inputs
            and self._last.get(value, -1) < self._now
            and _has_tokens(value)
        ]
        if dead:
            self.lines.append(f"del {', '.join(dead)}")
        for name in dead:
            del self._holders[name]

    def _op(self, op: Op) -> None:
        if op.kind in _LARGE:
            self._free()
        self._pinned_owner = None
        made = EMIT[op.kind](self, op)
        note = self._note(op)
        if isinstance(made, list):
            self.lines += [*made[:-1], made[-1] + note]
            return
        if self._pinned_owner:
            made = f"{self._pinned_owner}(lambda w: {made})"
        targets = ", ".join(self.define(v) for v in op.results)
        self.lines.append(f"{targets} = {made}{note}")

    def _note(self, op: Op) -> str:
        shapes = [str(list(v.type.shape)) for v in op.results if isinstance(v.type, Tensor)]
        shape = shapes[0] if shapes else ""
        place = op.loc.short if op.loc else ""
        return f"  # {'  '.join(p for p in (shape, place) if p)}" if shape or place else ""


def _has_tokens(value: Value) -> bool:
    """Whether a value grows with the tokens: a sequence (its memo), a tensor with symbolic axes."""
    if isinstance(value.type, Tensor):
        return value.type.rank > 1 and any(isinstance(size, Poly) for size in value.type.shape)
    return isinstance(value.type, Sequence)


def _docstring(text: str) -> list[str]:
    """A docstring of one line, or of several where it is too wide."""
    if len(text) <= WIDTH - 10:
        return [f'    """{text}"""']
    lines = textwrap.wrap(text, WIDTH - 8)
    return [f'    """{lines[0]}', *(f"    {line}" for line in lines[1:-1]), f'    {lines[-1]}"""']


def _fold(line: str) -> list[str]:
    """A line within the width: its comment goes first, then it is broken after commas."""
    if len(line) <= WIDTH:
        return [line]
    code, mark, comment = line.rpartition("  # ")
    if not mark:
        return wrap(line, WIDTH)
    if len(code) <= WIDTH:
        short = f"{code}  # {comment.rsplit('  ', 1)[-1]}"
        return [short if len(short) <= WIDTH else code]
    return wrap(code, WIDTH)


def _last_uses(function: Function) -> dict[Value, int]:
    found: dict[Value, int] = {}
    for index, op in enumerate(function.ops):
        for value in op.values:
            found[value] = index
    for value in function.outputs:
        found[value] = len(function.ops)
    return found


def stateful(module: Module) -> set[str]:
    """Functions that take `state`: they own an entry, or call one that does."""
    found: set[str] = set()
    for function in module.functions:
        owns = any(f.kind == "state" for f in function.fields)
        calls = any(op.kind == "call" and op.attrs["callee"].name in found for op in function.ops)
        if owns or calls:
            found.add(function.name)
    return found


def _printed(module: Module) -> list[Function]:
    """Functions that code still refers to (rules and inlined pointwise functions are not)."""
    used: set[str] = set()
    for function in module.functions:
        for op in function.ops:
            used |= set(op.refs())
    return [f for f in module.functions if f.name in used or f.role == "entry"]


def emit_program(module: Module, traced: Module, title: str) -> str:
    """The source of a lowered module; `traced` decides which scopes are nn.Linear modules."""
    has_state = stateful(module)
    linears = {f.name: tree.linears(f) for f in traced.functions}
    about = "Emitted by archir from the spec; one line per op, its shape and its line."
    imports = "import torch\nimport torch.nn.functional as F\n\nfrom . import support as ar"
    head = f'"""{title}\n\n{about}\n"""\n\n{imports}'
    names = [f.name for f in module.functions]
    body = [Printer(f, names, has_state, linears.get(f.name, ())).print() for f in _printed(module)]
    return "\n\n\n".join([head, *body]) + "\n"
