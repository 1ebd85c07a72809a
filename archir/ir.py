"""The program as data: frozen records in order.

    Module(functions)                                  the entry is the function of role "entry"
    Function(name, inputs, fields, ops, outputs)       order of ops is topological order
    Field(kind, path, value, attrs)                    a weight, buffer, state, tap or key (D1)
    Op(kind, operands, results, attrs, loc)            operands: values, or numbers (elementwise)
    Value(name, type, loc)                             defined once

Identity is by object, equality of programs is by canonical text (`str(module)`). Nothing is
mutated: passes rebuild. A field is read by using its value and written at most once, by a `store`
op; a call's `scope` resolves the callee's fields, which are never operands.
"""

from __future__ import annotations

import keyword
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from archir import types
from archir.diagnostics import Loc, VerifyError
from archir.types import Tensor, Type

FIELD_KINDS = ("weight", "buffer", "state", "tap", "key")
ROLES = ("entry", "block", "rule", "pointwise", "body")
_WORDS = ("inf", "list", "sequence", "ceildiv")  # what IR text reads as something else than a name


@dataclass(frozen=True, eq=False)
class Value:
    """A name, a type, and the line of the spec that made it."""

    name: str
    type: Type
    loc: Loc | None = None

    @property
    def tensor(self) -> Tensor:
        """Its type, where that must be a tensor."""
        assert isinstance(self.type, Tensor)
        return self.type

    def __repr__(self) -> str:
        return f"{self.name}: {self.type}"


Operand = Value | int | float


@dataclass(frozen=True)
class Ref:
    """An attribute that names a function of the module."""

    name: str


@dataclass(frozen=True)
class Init:
    """How a weight is drawn: `normal(0.02)`, `zeros()`, `ones()`, `uniform(low, high)`, …"""

    kind: str
    args: tuple[float, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(repr(a) for a in self.args)})"


@dataclass(frozen=True, eq=False)
class Field:
    """A slot of a scope: kind, path relative to the scope, the value that reads it, attributes.

    weight: init, decay (whether weight decay applies).  buffer: init.
    state: kind (kv, latent, matrix, conv, length).  tap: none; it is only written.
    key: none; it is the key of a random op, made from the call's seed and the absolute path.
    """

    kind: str
    path: str
    value: Value
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Op:
    """One operation; `kind` names its `OpDef`."""

    kind: str
    operands: tuple[Operand, ...]
    results: tuple[Value, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    loc: Loc | None = None

    @property
    def values(self) -> tuple[Value, ...]:
        """The operands that are values, numbers left out."""
        return tuple(x for x in self.operands if isinstance(x, Value))

    @property
    def result(self) -> Value:
        """The only result."""
        (value,) = self.results
        return value

    def refs(self) -> tuple[str, ...]:
        """Names of the functions this op carries or calls."""
        return tuple(a.name for a in self.attrs.values() if isinstance(a, Ref))


@dataclass(frozen=True, eq=False)
class Function:
    """Inputs and fields bind values, ops define more, outputs return some.

    `names` are the names of the outputs where the spec gave them; `attrs` belong to the role
    (a rule's number of states and its domain).
    """

    name: str
    inputs: tuple[Value, ...]
    fields: tuple[Field, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Value, ...]
    role: str = "block"
    names: tuple[str, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    loc: Loc | None = None

    def __str__(self) -> str:
        from archir.text import print_function

        return print_function(self)

    @property
    def output_names(self) -> tuple[str, ...]:
        """A name of its own for every output: the spec's, or its value's, the second `x` `x#1`."""
        found: list[str] = []
        for value in () if self.names else self.outputs:
            times = sum(name.partition("#")[0] == value.name for name in found)
            found.append(f"{value.name}#{times}" if times else value.name)
        return self.names or tuple(found)

    def field_of(self, path: str) -> Field | None:
        """The field at a relative path."""
        return next((f for f in self.fields if f.path == path), None)


@dataclass(frozen=True, eq=False)
class Module:
    """Functions, callees before callers; exactly one is the entry."""

    functions: tuple[Function, ...]

    @property
    def entry(self) -> Function:
        found = [f for f in self.functions if f.role == "entry"]
        if len(found) != 1:
            raise VerifyError(
                f"a module has one entry, this one has {len(found)}",
                code="module-entry",
                next="mark one function with @entry",
            )
        return found[0]

    def __getitem__(self, name: str) -> Function:
        for function in self.functions:
            if function.name == name:
                return function
        raise KeyError(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        """Itself: a module never changes."""
        return self

    def __contains__(self, name: str) -> bool:
        return any(function.name == name for function in self.functions)

    def __str__(self) -> str:
        from archir.text import print_module

        return print_module(self)

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Module):
            return NotImplemented
        from archir.text import print_module

        return print_module(self, locs=False) == print_module(other, locs=False)

    def __hash__(self) -> int:
        from archir.text import print_module

        return hash(print_module(self, locs=False))


def identifier(hint: str) -> str:
    """A name IR text can carry: `h.0` → `h_0`, `<lambda>` → `_lambda_`, `f32` → `f32_`."""
    hint = unicodedata.normalize("NFKC", hint) or "x"
    name = "".join(c if f"_{c}".isidentifier() else "_" for c in hint)
    name = name if name.isidentifier() else f"_{name}"
    reserved = keyword.iskeyword(name) or name in types.DTYPES or name in _WORDS
    return f"{name}_" if reserved else name


def plain_name(value: Value, function: Function) -> str:
    """An input as the user calls it: IR text writes `f_` for `f`, which is a dtype."""
    plain = value.name.removesuffix("_")
    taken = any(v.name == plain for v in function.inputs)
    return plain if plain and not taken and identifier(plain) == value.name else value.name


def join(scope: str, path: str) -> str:
    """`h.0` and `attn.k` → `h.0.attn.k`; the empty scope adds nothing."""
    return f"{scope}.{path}" if scope and path else scope or path


def scopes(module: Module) -> Iterator[tuple[str, Function]]:
    """Every (scope, function) entered by one run, callers before callees, in call order."""

    def walk(scope: str, function: Function) -> Iterator[tuple[str, Function]]:
        yield scope, function
        for op in function.ops:
            if op.kind == "call":
                yield from walk(join(scope, op.attrs["scope"]), table[op.attrs["callee"].name])

    table = {f.name: f for f in module.functions}
    yield from walk("", module.entry)


def fields(module: Module, kind: str) -> dict[str, Field]:
    """All fields of one kind by absolute path, in the order scopes are entered."""
    return {
        join(scope, f.path): f
        for scope, function in scopes(module)
        for f in function.fields
        if f.kind == kind
    }


def callees_first(functions: Mapping[str, Function], entry: str) -> tuple[Function, ...]:
    """The functions reachable from an entry, callees before callers, entry last."""
    order: dict[str, Function] = {}

    def visit(name: str) -> None:
        if name in order:
            return
        for op in functions[name].ops:
            for ref in op.refs():
                visit(ref)
        order[name] = functions[name]

    visit(entry)
    return tuple(order.values())


def rebuild(module: Module, change: Callable[[Function], Function]) -> Module:
    """A module with every function replaced by `change(function)`; unreachable ones dropped."""
    table = {f.name: change(f) for f in module.functions}
    return Module(callees_first(table, module.entry.name))


def map_types(function: Function, change: Callable[[Type], Type]) -> Function:
    """A function whose values all have `change(type)`."""
    new: dict[Value, Value] = {}

    def value(old: Value) -> Value:
        if old not in new:
            new[old] = replace(old, type=change(old.type))
        return new[old]

    return Function(
        function.name,
        tuple(value(v) for v in function.inputs),
        tuple(replace(f, value=value(f.value)) for f in function.fields),
        tuple(
            replace(
                op,
                operands=tuple(value(x) if isinstance(x, Value) else x for x in op.operands),
                results=tuple(value(v) for v in op.results),
            )
            for op in function.ops
        ),
        tuple(value(v) for v in function.outputs),
        function.role,
        function.names,
        function.attrs,
        function.loc,
    )


def symbols(function: Function) -> set[str]:
    """Every symbol of a function's signature and fields."""
    found: set[str] = set()
    for value in (*function.inputs, *(f.value for f in function.fields)):
        found |= types.symbols(value.type)
    return found
