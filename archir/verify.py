"""The laws of the IR, checked after every pass.

A module has one entry; names are defined once and before use; functions come callees first; every
result has the type its op infers; a field is stored at most once and a state read at most once;
every symbol of a signature stands bare in an input or a field (D3); a scope is entered once.
What may no longer exist at a stage is checked when a stage is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from archir import dims, ir, types
from archir.diagnostics import ArchirError, Loc, VerifyError
from archir.ir import FIELD_KINDS, Function, Module, Value
from archir.ops import infer_op

LIMIT = 10
ABSTRACT = ("trace", "specialize", "canonicalize", "form")  # stages at which floats may be so


def verify(module: Module, stage: str | None = None) -> None:
    """Raises the only problem as it is, or a VerifyError that lists up to ten."""
    problems: list[ArchirError] = []
    for problem in _problems(module, stage):
        problems.append(problem)
        if len(problems) == LIMIT:
            break
    if len(problems) == 1:
        raise problems[0]
    if problems:
        first = problems[0]
        error = VerifyError(
            f"{len(problems)} problems, the first at {first.loc.short if first.loc else 'no line'}",
            code="verify",
            facts=[line for p in problems for line in str(p).split("\n")],
        )
        error.problems = tuple(problems)
        raise error


def _problems(module: Module, stage: str | None) -> Iterator[ArchirError]:
    counts = Counter(f.name for f in module.functions)
    for name, count in counts.items():
        if count > 1:
            yield _error(f"{count} functions are called {name}", "function-twice")
    try:
        entry = module.entry
    except VerifyError as error:
        yield error
        return
    seen: dict[str, Function] = {}
    broken = False
    for function in module.functions:
        for problem in _function_problems(function, seen, stage):
            broken = True
            yield problem
        seen[function.name] = function
    if not broken and entry.name in seen:
        yield from _scope_problems(module)


def _error(what: str, code: str, loc: Loc | None = None, next: str = "") -> VerifyError:
    return VerifyError(what, code=code, loc=loc, next=next)


def _function_problems(
    function: Function, before: dict[str, Function], stage: str | None
) -> Iterator[ArchirError]:
    where = f"in {function.name}"
    defined: dict[str, Value] = {}
    for value in (*function.inputs, *(f.value for f in function.fields)):
        if value.name in defined:
            yield _error(f"{value.name} is defined twice {where}", "value-twice", value.loc)
        defined[value.name] = value
    yield from _dtype_problems(defined.values(), stage)
    yield from _field_problems(function)
    yield from _symbol_problems(function)
    for op in function.ops:
        for value in op.values:
            if defined.get(value.name) is not value:
                yield _error(
                    f"{value.name} is used before it is defined {where}", "use-before", op.loc
                )
        missing = [ref for ref in op.refs() if ref not in before]
        if missing:
            yield _error(
                f"{op.kind} names {missing[0]}, which does not stand before {function.name}",
                "function-missing",
                op.loc,
            )
            return
        yield from _op_problems(op, before, stage)
        for value in op.results:
            if value.name in defined:
                yield _error(f"{value.name} is defined twice {where}", "value-twice", op.loc)
            defined[value.name] = value
    for value in function.outputs:
        if defined.get(value.name) is not value:
            yield _error(f"output {value.name} is not defined {where}", "use-before", function.loc)
    if function.names and len(function.names) != len(function.outputs):
        yield _error(
            f"{function.name} names {len(function.names)} outputs of {len(function.outputs)}",
            "output-names",
            function.loc,
        )


def _op_problems(
    op: ir.Op, before: dict[str, Function], stage: str | None
) -> Iterator[ArchirError]:
    try:
        inferred = infer_op(op, before)
    except ArchirError as error:
        yield error.at(op.loc)
        return
    stated = tuple(v.type for v in op.results)
    if inferred != stated:
        yield _error(
            f"{op.kind} gives {', '.join(map(str, inferred)) or 'nothing'}, "
            f"the text states {', '.join(map(str, stated)) or 'nothing'}",
            "type-stated",
            op.loc,
        )
    yield from _dtype_problems(op.results, stage)


def _dtype_problems(values: Iterable[Value], stage: str | None) -> Iterator[ArchirError]:
    """After `precision` no float is abstract."""
    if stage is None or stage in ABSTRACT:
        return
    for value in values:
        type_ = value.type.element if isinstance(value.type, types.List) else value.type
        if isinstance(type_, types.Tensor) and type_.dtype in types.ABSTRACT_FLOATS:
            yield _error(f"{value} is abstract after precision", "dtype-abstract", value.loc)


def _field_problems(function: Function) -> Iterator[ArchirError]:
    paths = Counter(f.path for f in function.fields)
    for path, count in paths.items():
        if count > 1:
            yield _error(f"{count} fields at {path!r} in {function.name}", "field-twice")
    stored = Counter(op.attrs["path"] for op in function.ops if op.kind == "store")
    for path, count in stored.items():
        if path not in paths:
            yield _error(f"store to {path!r}, which {function.name} has no field for", "store")
        if count > 1:
            yield _error(f"{path!r} is stored {count} times in {function.name}", "store-twice")
    reads = Counter(value for op in function.ops for value in op.values)
    for field in function.fields:
        if field.kind not in FIELD_KINDS:
            yield _error(f"{field.kind!r} is not a kind of field", "field-kind")
        if field.kind == "state" and reads[field.value] > 1:
            yield _error(
                f"state {field.path!r} is read {reads[field.value]} times in {function.name}",
                "state-linear",
                next="a state has one reader, so that it may be updated in place",
            )


def _symbol_problems(function: Function) -> Iterator[ArchirError]:
    if function.role in ("rule", "body", "pointwise"):
        return
    bare = set()
    for value in (*function.inputs, *(f.value for f in function.fields)):
        for size in _sizes(value.type):
            name = dims.bare(size)
            bare |= {name} if name else set()
    for name in sorted(ir.symbols(function) - bare):
        yield _error(
            f"{name} stands bare in no input of {function.name}, so nothing binds it",
            "symbol-unbound",
            function.loc,
        )


def _sizes(type_: types.Type) -> list[int | dims.Poly]:
    match type_:
        case types.Tensor(shape=shape):
            return list(shape)
        case types.List(count=count, element=element):
            return [count, *element.shape]
        case types.Sequence(rows=rows):
            return [rows]


def _scope_problems(module: Module) -> Iterator[ArchirError]:
    entered: dict[str, str] = {}
    for scope, function in ir.scopes(module):
        if scope in entered and function.fields:
            yield _error(
                f"scope {scope!r} is entered by {entered[scope]} and by {function.name}",
                "scope-twice",
                next="give each call its own name; to share weights, pass the value",
            )
        entered[scope] = function.name
    owners: dict[str, str] = {}
    for scope, function in ir.scopes(module):
        for field in function.fields:
            path = ir.join(scope, field.path)
            if path in owners:
                yield _error(f"two scopes own the field {path!r}", "field-shared")
            owners[path] = scope
