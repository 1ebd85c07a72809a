"""Prints a lowered module as PyTorch: one function per IR function, one line per op.

Python names follow the spec: a value takes over the name of an older version (`x_1` → `x`) once
that is dead, so code reads as it was written and intermediates are freed as they would be by hand.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from archir import dims, types
from archir.dims import CeilDiv, Poly
from archir.ir import Field, Function, Module, Op, Operand, Ref, Value
from archir.ops import lookup
from archir.text import wrap
from archir.types import List, Sequence, Tensor
from backends.eager import tree
from backends.eager.names import RESERVED, free, function_names, in_brackets, quoted
from backends.eager.ops import EMIT
from backends.eager.ops.base import Emitter, number

_TORCH = {
    "bf16": "torch.bfloat16",
    "f16": "torch.float16",
    "f32": "torch.float32",
    "f64": "torch.float64",
    "i32": "torch.int32",
    "i64": "torch.int64",
    "bool": "torch.bool",
}
WIDTH = 100
# Before these ops dead intermediates are freed: they make the largest values of a function.
_LARGE = ("call", "linear", "attention", "logits", "cross_entropy")
_DEVICE = ".device"  # stands among the symbols, which have no dots


@dataclass(frozen=True)
class Program:
    """What printing a function must know of its module.

    names: Python names of functions.  stateful: functions that take `state`.  drawing: functions
    that take the call's `seed`.  linears: for each function, its scopes that are nn.Linear.
    emit: how each kind of op is printed.  imported: names that are taken.
    """

    names: Mapping[str, str]
    stateful: Collection[str]
    drawing: Collection[str]
    linears: Mapping[str, Collection[str]]
    emit: Mapping[str, Emitter]
    imported: frozenset[str] = frozenset()


class Printer:
    """One function being printed. Called on an operand, it gives its Python expression."""

    def __init__(self, function: Function, program: Program) -> None:
        self.function, self.program = function, program
        self._linears = program.linears.get(function.name, ())
        self.names: dict[Value, str] = {}
        self.lines: list[str] = []
        self._holders: dict[str, Value | None] = {}
        self._now = 0
        self._last = _last_uses(function)
        self._fields = {f.value: f for f in function.fields}
        self._cast_inside = self._casts_inside()
        self._inside: str | None = None
        self._reserved = RESERVED.union(program.names.values(), program.imported)
        if any(tree.pinned(f) for f in function.fields):
            self._reserved |= {"w"}
        # Symbol → its Python name, and → where it can first be read and how; `_needed` are read.
        self._symbols: dict[str, str] = {}
        self._readable: dict[str, tuple[int, str]] = {}
        self._needed: set[str] = set()
        for symbol in [*sorted(_symbols(function)), _DEVICE]:
            name = free(symbol.lstrip("."), self._reserved)
            self._symbols[symbol] = name
            self._reserved |= {name}

    # ---- expressions

    def __call__(self, operand: Operand) -> str:
        if not isinstance(operand, Value):
            return number(operand)
        field = self._fields.get(operand)
        if field is None:
            return self.names[operand]
        if field.kind == "state":
            return self.state(field.path)
        if field.kind == "key":
            return f"ar.key(self, {quoted(field.path)}, seed)"
        if not tree.pinned(field):
            return tree.access("self", field.path)
        place, (_, leaf) = _float32(field), tree.split_path(field.path)
        return f"w.{leaf}" if place == self._inside else f"{place}.{leaf}"

    def type(self, operand: Operand) -> Tensor:
        """The type of a tensor operand."""
        assert isinstance(operand, Value) and isinstance(operand.type, Tensor)
        return operand.type

    def dim(self, size: int | Poly) -> str:
        """A size as an expression over the function's symbols."""
        if isinstance(size, int):
            return str(size)
        terms = []
        for monomial, coefficient in size.terms:
            factors = [self._atom(atom) for atom in monomial]
            if abs(coefficient) != 1 or not factors:
                factors.insert(0, str(abs(coefficient)))
            terms.append(("- " if coefficient < 0 else "+ ") + " * ".join(factors))
        return " ".join(terms).removeprefix("+ ")

    def _atom(self, atom: str | CeilDiv) -> str:
        if isinstance(atom, CeilDiv):
            top = self.dim(atom.top)
            return f"-(-{top if top.isidentifier() else f'({top})'} // {atom.by})"
        self._needed.add(atom)
        return self._symbols[atom]

    def shape(self, sizes: tuple[int | Poly, ...]) -> str:
        """A tuple of sizes: `()`, `(3,)`, `(R, 4)`."""
        return in_brackets([self.dim(size) for size in sizes])

    def dtype(self, name: str) -> str:
        """A dtype in torch's words."""
        return _TORCH[name]

    def device(self) -> str:
        """The device of what is made from nothing: that of the first input."""
        self._needed.add(_DEVICE)
        return self._symbols[_DEVICE]

    def state(self, path: str) -> str:
        """An entry of the state, or the entries of a called scope."""
        return f"state[{quoted(path)}]"

    def factory(self, value: Value) -> str:
        """dtype and device of a tensor made from nothing."""
        return f"dtype={self.dtype(self.type(value).dtype)}, device={self.device()}"

    def linear_owner(self, op: Op) -> str | None:
        """The nn.Linear that holds this op's weight; it casts the weight itself."""
        weight = self._cast_inside.get(op.values[1], op.values[1])
        field = self._fields.get(weight)
        if field is None or tree.split_path(field.path)[0] not in self._linears:
            return None
        return tree.access("self", tree.split_path(field.path)[0])

    def _casts_inside(self) -> dict[Value, Value]:
        """Casts of weights of nn.Linear modules that only they read → the weight."""
        readers: dict[Value, set[str]] = {}
        for op in self.function.ops:
            for value in op.values:
                readers.setdefault(value, set()).add(op.kind)
        return {
            op.result: op.values[0]
            for op in self.function.ops
            if op.kind == "cast"
            and (field := self._fields.get(op.values[0])) is not None
            and tree.split_path(field.path)[0] in self._linears
            and readers.get(op.result, set()) <= {"linear", "logits"}
        }

    def member(self, scope: str) -> str:
        """The module of a called scope."""
        return tree.access("self", scope)

    def function_name(self, ref: Ref) -> str:
        """The Python name of a function that an op carries."""
        return self.program.names[ref.name]

    def has_state(self, ref: Ref) -> bool:
        """Whether a function takes `state`."""
        return ref.name in self.program.stateful

    def draws(self, ref: Ref) -> bool:
        """Whether a function takes `seed`."""
        return ref.name in self.program.drawing

    def field_kind(self, path: str) -> str:
        """The kind of the field at a path."""
        field = self.function.field_of(path)
        assert field is not None
        return field.kind

    # ---- names

    def fresh(self, hint: str) -> str:
        """A Python name nothing holds."""
        name = free(hint, self._reserved.union(self._holders))
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
        self._read_inputs()
        for index, op in enumerate(function.ops):
            self._now = index
            self._op(op)
        returned = ", ".join(self(v) for v in function.outputs)
        if function.names and function.role == "entry" and len(function.names) > 1:
            pairs = zip(function.names, function.outputs, strict=True)
            returned = "{" + ", ".join(f"{quoted(n)}: {self(v)}" for n, v in pairs) + "}"
        plain = function.role in ("body", "pointwise", "rule")
        head = ([] if plain else ["self"]) + inputs
        head += ["seed"] if function.name in self.program.drawing else []
        head += ["state"] if function.name in self.program.stateful else []
        pairs = zip(inputs, function.inputs, strict=True)
        text = [f"def {self.program.names[function.name]}({', '.join(head)}):"]
        said = [f"{name}: {value.type}" for name, value in pairs]
        said += ["seed: int"] if function.name in self.program.drawing else []
        text += _docstring(", ".join(said))
        text += [f"    {line}" for line in self._with_sizes()]
        text.append(f"    return {returned}")
        return "\n".join(piece for line in text for piece in _fold(line))

    def _read_inputs(self) -> None:
        """Sizes and the device can be read from inputs, then from what the function's scope has."""
        fields = [f for f in self.function.fields if f.kind not in ("tap", "key")]
        for value in (*self.function.inputs, *(f.value for f in fields)):
            self._read(value)
            place = f"{self(value)}[0]" if isinstance(value.type, List) else self(value)
            if isinstance(value.type, List | Tensor):
                self._readable.setdefault(_DEVICE, (0, f"{place}.device"))
        self._readable.setdefault(_DEVICE, (0, '"cpu"'))

    def _read(self, value: Value, cached: bool = False) -> None:
        """Remembers where symbols that stand bare in a type can be read, if nowhere before."""
        field = self._fields.get(value)
        kept = cached or (field is not None and field.attrs.get("kind") == "kv")
        text = f"{self(value)}.rows" if kept else self(value)
        for size, expression in _sizes(value, text):
            symbol = dims.bare(size)
            if symbol is not None:
                self._readable.setdefault(symbol, (len(self.lines), expression))

    def _with_sizes(self) -> list[str]:
        """The lines, each symbol they need bound as soon as it can be read."""
        lines = list(self.lines)
        found = ((*self._readable[s], self._symbols[s]) for s in self._needed)
        for place, expression, name in sorted(found, key=lambda f: (f[0], f[2]), reverse=True):
            lines.insert(place, f"{name} = {expression}")
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
        if op.results and op.results[0] in self._cast_inside:
            return
        if op.kind in _LARGE:
            self._free()
        self._inside = self._float32_of(op)
        made = self.program.emit[op.kind](self, op)
        if isinstance(made, list):
            self.lines += [*made[:-1], made[-1] + _note(op, op.results[-1:])]
        else:
            if self._inside:
                # what it reads are defaults, not cells: torch.compile cannot free those
                read = "".join(f", {n}={n}" for v in op.values if (n := self.names.get(v)))
                made = f"{self._inside}(lambda w{read}: {made})"
            targets = ", ".join(self.define(v) for v in op.results)
            self.lines.append(f"{targets} = {made}{_note(op, op.results[:1])}")
        self._inside = None
        for value in op.results:
            self._read(value, cached=op.kind == "append")

    def _float32_of(self, op: Op) -> str | None:
        """The module in whose forward an op runs, that of its first pinned operand (D9). What
        runs other functions or writes stays outside."""
        if (op.refs() and op.kind != "pointwise") or lookup(op.kind).effect:
            return None
        fields = (self._fields.get(v) for v in op.values)
        return next((_float32(f) for f in fields if f is not None and tree.pinned(f)), None)


def _float32(field: Field) -> str:
    """The module that holds a pinned field."""
    return f"{tree.access('self', tree.split_path(field.path)[0])}.float32"


def _symbols(function: Function) -> set[str]:
    """Every symbol of a function's types."""
    values = [*function.inputs, *(f.value for f in function.fields)]
    values += [v for op in function.ops for v in op.results]
    return {symbol for value in values for symbol in types.symbols(value.type)}


def _sizes(value: Value, text: str) -> Iterator[tuple[int | Poly, str]]:
    """The sizes of a type, and how to read each. Lengths of rows are tuples: `len` reads both."""
    match value.type:
        case Sequence(rows=rows):
            yield rows, f"len({text})"
        case List(count=count, element=element):
            yield count, f"len({text})"
            for axis, size in enumerate(element.shape):
                yield size, f"{text}[0].shape[{axis}]"
        case Tensor(shape=(size,)):
            yield size, f"len({text})"
        case Tensor(shape=shape):
            for axis, size in enumerate(shape):
                yield size, f"{text}.shape[{axis}]"


def _note(op: Op, results: tuple[Value, ...]) -> str:
    """A trailing comment: the shape of what a line makes, and the spec's line."""
    parts = [str(list(v.type.shape)) for v in results if isinstance(v.type, Tensor)]
    parts += [op.loc.short] if op.loc else []
    return f"  # {'  '.join(parts)}" if parts else ""


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


def owners(module: Module, kind: str) -> set[str]:
    """Functions that own a field of a kind, or call one that does: those of states take `state`,
    those of keys the call's `seed`."""
    found: set[str] = set()
    for function in module.functions:
        owns = any(f.kind == kind for f in function.fields)
        calls = any(op.kind == "call" and op.attrs["callee"].name in found for op in function.ops)
        if owns or calls:
            found.add(function.name)
    return found


def printed(module: Module) -> list[Function]:
    """Functions that code refers to: not the rules and pointwise functions that became kernels, or
    what `expand` made of them."""
    used: set[str] = set()
    for function in module.functions:
        for op in function.ops:
            used |= set(op.refs()) if op.kind not in ("state_update", "pointwise") else set()
    return [f for f in module.functions if f.name in used or f.role == "entry"]


def emit_program(
    module: Module,
    traced: Module,
    title: str,
    emit: Mapping[str, Emitter] = EMIT,
    imports: Mapping[str, str] | None = None,
) -> str:
    """The source of a lowered module; `traced` decides which scopes are nn.Linear modules.

    imports: what the emitters call beyond torch and the support file, and the lines that import it.
    """
    linears = {f.name: tree.linears(f) for f in traced.functions}
    stateful, drawing = owners(module, "state"), owners(module, "key")
    imports = imports or {}
    program = Program(function_names(module), stateful, drawing, linears, emit, frozenset(imports))
    about = "Emitted by archir from the spec; one line per op, its shape and its line."
    lines = ["import torch", "import torch.nn.functional as F", "", "from . import support as ar"]
    head = "\n".join([f'"""{title}\n\n{about}\n"""\n', *lines, *imports.values()])
    body = [Printer(function, program).print() for function in printed(module)]
    offered = f'__all__ = ["{program.names[module.entry.name]}"]'
    return "\n\n\n".join([head, *body, offered]) + "\n"


def print_plain(module: Module, names: Mapping[str, str]) -> list[str]:
    """The functions of a module without scopes, its entry as a plain function like the others."""
    program = Program(names, (), (), {}, EMIT)
    found = [replace(f, role="body") if f.role == "entry" else f for f in printed(module)]
    return [Printer(function, program).print() for function in found]
