"""IR text: Python syntax that is parsed with `ast` and never executed (D15).

    @entry
    def gpt2(tokens: i64[B, T], *,
        wte: f[50257, 768] = weight("wte.weight", init=normal(0.02), decay=True),
    ) -> f[B, T, 50257]:
        x: f[B, T, 768] = embedding(tokens, wte)          # gpt2.py:31
        q, k = split(x, n=2, axis=-1) @ (f[B, T, 384], f[B, T, 384])
        y: f[B, T, 768] = call(layer, x, scope="h.0")
        return y

Laws, tested on generated modules: `parse(print(m)) == m`; printing is deterministic. Types in the
text are checked by `verify`, which `parse` runs.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Mapping
from typing import Any

from archir import dims, types
from archir.diagnostics import Loc, ParseError
from archir.dims import Poly
from archir.ir import ROLES, Field, Function, Init, Module, Op, Operand, Ref, Value
from archir.types import Type

WIDTH = 100


def print_module(module: Module, locs: bool = True) -> str:
    """Canonical text; `locs` adds each op's spec line as a trailing comment."""
    return "\n\n".join(print_function(f, locs) for f in module.functions) + "\n"


def print_function(function: Function, locs: bool = True) -> str:
    """One function's text."""
    lines = []
    if function.role != "block":
        attrs = _print_attrs(function.attrs)
        lines.append(f"@{function.role}({attrs})" if attrs else f"@{function.role}")
    inputs = ", ".join(f"{v.name}: {v.type}" for v in function.inputs)
    returns = _print_types([v.type for v in function.outputs])
    if function.fields:
        lines.append(f"def {function.name}({inputs}{', ' if inputs else ''}*,")
        lines += [f"    {_print_field(f)}," for f in function.fields]
        lines.append(f") -> {returns}:")
    else:
        lines.append(f"def {function.name}({inputs}) -> {returns}:")
    body = [(f"    {print_op(op)}", op.loc) for op in function.ops]
    column = min(max((len(text) for text, _ in body), default=0) + 2, WIDTH - 18)
    for text, loc in body:
        comment = f"{' ' * max(column - len(text), 2)}# {loc.short}" if locs and loc else ""
        fits = len(text + comment) <= WIDTH
        lines.append(text + comment if fits else text)
    lines.append(f"    return {_print_outputs(function)}")
    return "\n".join(piece for line in lines for piece in wrap(line))


def wrap(line: str, width: int = WIDTH) -> list[str]:
    """A line broken after commas inside brackets where it is too wide; still the same Python."""
    pieces: list[str] = []
    indent, opened = len(line) - len(line.lstrip()) + 8, 0  # brackets open where a line begins
    while len(line) > width:
        depth, place = opened, 0
        least, quoted = len(line), False
        for at, letter in enumerate(line[: width - 1]):
            quoted ^= letter == '"'
            depth += (letter in "([{") - (letter in ")]}") if not quoted else 0
            spaced = letter == "," and line[at + 1 : at + 2] == " " and not quoted
            if spaced and 0 < depth <= least and at > indent:
                place, least = at + 1, depth
        if not place:
            break
        opened = least
        pieces.append(line[:place])
        line = " " * indent + line[place:].lstrip()
    return [*pieces, line]


def print_op(op: Op) -> str:
    """One op as a statement."""
    parts = [_print_operand(x) for x in op.operands]
    attrs = dict(op.attrs)
    if op.kind == "call":
        parts.insert(0, attrs.pop("callee").name)
    rest = _print_attrs(attrs)
    right = f"{op.kind}({', '.join([*parts, rest] if rest else parts)})"
    if not op.results:
        return right
    if len(op.results) == 1:
        return f"{op.result.name}: {op.result.type} = {right}"
    left = ", ".join(v.name for v in op.results)
    return f"{left} = {right} @ ({', '.join(str(v.type) for v in op.results)})"


def _print_types(found: list[Type]) -> str:
    if len(found) == 1:
        return str(found[0])
    return f"({', '.join(str(t) for t in found)})"


def _print_outputs(function: Function) -> str:
    if function.names:
        pairs = zip(function.names, function.outputs, strict=True)
        return "{" + ", ".join(f"{_print_text(name)}: {value.name}" for name, value in pairs) + "}"
    return ", ".join(v.name for v in function.outputs) or "()"


def _print_field(field: Field) -> str:
    attrs = _print_attrs(field.attrs)
    path = _print_text(field.path)
    inner = f"{path}, {attrs}" if attrs else path
    return f"{field.value.name}: {field.value.type} = {field.kind}({inner})"


def _print_operand(operand: Operand) -> str:
    return operand.name if isinstance(operand, Value) else _print_attr(operand)


def _print_attrs(attrs: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_print_attr(value)}" for key, value in attrs.items())


def _print_text(text: str) -> str:
    """A string in double quotes, which stand nowhere else: `wrap` counts on it."""
    return '"' + text.encode("unicode_escape").decode().replace('"', r"\x22") + '"'


def _print_attr(value: Any) -> str:
    match value:
        case Ref(name=name):
            return name
        case Init() | Poly():
            return str(value)
        case str():
            return _print_text(value)
        case tuple():
            return "(" + ", ".join(_print_attr(v) for v in value) + ("," * (len(value) == 1)) + ")"
        case dict():
            pairs = (f"{_print_text(k)}: {_print_attr(v)}" for k, v in value.items())
            return "{" + ", ".join(pairs) + "}"
        case float() if value in (float("inf"), float("-inf")):
            return "-inf" if value < 0 else "inf"
        case bool() | int() | float() | None:
            return repr(value)
    raise TypeError(f"{value!r} cannot be an attribute")


def parse(text: str, file: str = "<ir>") -> Module:
    """A verified module from its text. Raises ParseError, ShapeError or VerifyError."""
    from archir.verify import verify

    module = parse_unverified(text, file)
    verify(module)
    return module


def parse_unverified(text: str, file: str = "<ir>") -> Module:
    """A module from its text; only syntax and names are checked."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        place = Loc(file, error.lineno or 1, (error.offset or 1) - 1)
        raise ParseError(f"IR text: {error.msg}", code="parse-syntax", loc=place) from None
    comments = _comments(text)
    definitions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            raise _error(node, file, "only function definitions stand at the top of IR text")
    names = {n.name for n in definitions}
    return Module(tuple(_Parser(n, file, names, comments).function() for n in definitions))


def _comments(text: str) -> dict[int, Loc]:
    """Line number → the place named by a trailing `# file.py:12` comment."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        _, mark, comment = line.rpartition("  # ")
        name, colon, place = comment.strip().rpartition(":")
        if mark and colon and place.isdigit():
            found[number] = Loc(name, int(place))
    return found


def _error(node: ast.AST, file: str, what: str, next: str = "") -> ParseError:
    loc = Loc(
        file,
        getattr(node, "lineno", 1),
        getattr(node, "col_offset", 0),
        getattr(node, "end_col_offset", None),
    )
    return ParseError(what, code="parse-ir", loc=loc, next=next)


class _Parser:
    """Parses one function: names are resolved in order, so a use before its definition is seen."""

    def __init__(
        self, node: ast.FunctionDef, file: str, functions: set[str], comments: dict[int, Loc]
    ) -> None:
        self.node, self.file, self.functions, self.comments = node, file, functions, comments
        self.values: dict[str, Value] = {}

    def function(self) -> Function:
        node = self.node
        role, attrs = "block", {}
        for decorator in node.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            name = call.func if call else decorator
            if not isinstance(name, ast.Name) or name.id not in ROLES:
                raise _error(decorator, self.file, f"@{ast.unparse(decorator)} is not a role")
            role = name.id
            attrs = self.attrs(call.keywords) if call else {}
        inputs = tuple(self.define(a, a.arg, self.type(a.annotation, a)) for a in node.args.args)
        pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        fields = tuple(self.field(a, default) for a, default in pairs)
        if not node.body or not isinstance(node.body[-1], ast.Return):
            raise _error(node, self.file, f"function {node.name} does not end in return")
        ops = tuple(self.op(statement) for statement in node.body[:-1])
        names, outputs = self.outputs(node.body[-1])
        function = Function(node.name, inputs, fields, ops, outputs, role, names, attrs)
        self.check_returns(function)
        return function

    def check_returns(self, function: Function) -> None:
        returns = self.node.returns
        given = list(returns.elts) if isinstance(returns, ast.Tuple) else [returns]
        stated = [self.type(g, self.node) for g in given if g is not None]
        actual = [v.type for v in function.outputs]
        if stated != actual:
            raise _error(
                self.node,
                self.file,
                f"function {function.name} states {_print_types(stated)} "
                f"but returns {_print_types(actual)}",
            )

    def define(self, node: ast.AST, name: str, type_: Type) -> Value:
        if name in self.values:
            raise _error(node, self.file, f"{name} is defined twice")
        self.values[name] = Value(name, type_, self.comments.get(getattr(node, "lineno", 0)))
        return self.values[name]

    def type(self, annotation: ast.expr | None, node: ast.AST) -> Type:
        if annotation is None:
            raise _error(node, self.file, "every value states its type")
        try:
            return types.from_ast(annotation)
        except ParseError as error:
            raise _error(annotation, self.file, error.what, error.next) from None

    def field(self, node: ast.arg, default: ast.expr | None) -> Field:
        match default:
            case ast.Call(func=ast.Name(id=kind), args=[ast.Constant(value=str(path))]):
                value = self.define(node, node.arg, self.type(node.annotation, node))
                return Field(kind, path, value, self.attrs(default.keywords))
        raise _error(node, self.file, f'field {node.arg} needs `= kind("path", …)`')

    def op(self, statement: ast.stmt) -> Op:
        targets: list[tuple[ast.AST, str, Type]] = []
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=note, value=ast.Call() as call):
                targets = [(statement, name, self.type(note, statement))]
            case ast.Assign(
                targets=[ast.Tuple(elts=left)],
                value=ast.BinOp(
                    left=ast.Call() as call, op=ast.MatMult(), right=ast.Tuple(elts=right)
                ),
            ) if len(left) == len(right):
                for name_node, note in zip(left, right, strict=True):
                    assert isinstance(name_node, ast.Name)
                    targets.append((statement, name_node.id, self.type(note, statement)))
            case ast.Expr(value=ast.Call() as call):
                pass
            case _:
                raise _error(
                    statement,
                    self.file,
                    f"{ast.unparse(statement)!r} is not an op",
                    "write `x: type = op(…)`, `a, b = op(…) @ (T1, T2)` or `op(…)`",
                )
        if not isinstance(call.func, ast.Name):
            raise _error(call, self.file, f"{ast.unparse(call.func)} is not an op name")
        kind, args, attrs = call.func.id, list(call.args), self.attrs(call.keywords)
        if kind == "call":
            if not args or not isinstance(args[0], ast.Name):
                raise _error(call, self.file, "call needs the name of a function first")
            attrs = {"callee": self.ref(args.pop(0)), **attrs}
        operands = tuple(self.operand(a) for a in args)
        results = tuple(self.define(n, name, type_) for n, name, type_ in targets)
        return Op(kind, operands, results, attrs, self.comments.get(statement.lineno))

    def ref(self, node: ast.expr) -> Ref:
        if isinstance(node, ast.Name) and node.id in self.functions:
            return Ref(node.id)
        known = ", ".join(sorted(self.functions))
        raise _error(node, self.file, f"{ast.unparse(node)} is not a function here ({known})")

    def operand(self, node: ast.expr) -> Operand:
        if isinstance(node, ast.Name) and node.id in self.values:
            return self.values[node.id]
        if isinstance(node, ast.Name) and node.id not in ("inf",):
            raise _error(node, self.file, f"{node.id} is used before it is defined")
        number = self.attr(node)
        if isinstance(number, int | float):
            return number
        raise _error(node, self.file, f"{ast.unparse(node)} is neither a value nor a number")

    def outputs(self, node: ast.Return) -> tuple[tuple[str, ...], tuple[Value, ...]]:
        match node.value:
            case ast.Dict(keys=keys, values=values):
                names = tuple(str(k.value) for k in keys if isinstance(k, ast.Constant))
                nodes = values
            case ast.Tuple(elts=nodes):
                names = ()
            case ast.expr() as single:
                names, nodes = (), [single]
            case _:
                raise _error(node, self.file, "return needs a value")
        found = [self.operand(n) for n in nodes]
        return names, tuple(v for v in found if isinstance(v, Value))

    def attrs(self, keywords: list[ast.keyword]) -> dict[str, Any]:
        return {k.arg or "": self.attr(k.value) for k in keywords}

    def attr(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
                return float("-inf")
            case ast.Name(id="inf"):
                return float("inf")
            case ast.Name(id=name) if name in self.functions:
                return Ref(name)
            case ast.Tuple(elts=items):
                return tuple(self.attr(i) for i in items)
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return {k.value: self.attr(v) for k, v in pairs if isinstance(k, ast.Constant)}
            case ast.Call(func=ast.Name(id=kind), args=args) if kind != "ceildiv":
                return Init(kind, tuple(self.attr(a) for a in args))
        try:
            return dims.from_ast(node)
        except ParseError:
            raise _error(node, self.file, f"{ast.unparse(node)} is not an attribute") from None
