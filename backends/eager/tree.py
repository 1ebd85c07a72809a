"""Prints the `nn.Module` tree: one class per IR function, one instance per scope (D9)."""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from torch import nn

from archir.diagnostics import Loc, SpecError
from archir.ir import Field, Function, Module, Op
from archir.text import wrap
from archir.types import Tensor
from backends.eager.names import class_names, in_brackets
from backends.runtime.model import Model


def split_path(path: str) -> tuple[str, str]:
    """`attn.c_proj.weight` → (`attn.c_proj`, `weight`)."""
    owner, _, leaf = path.rpartition(".")
    return owner, leaf


def access(root: str, path: str) -> str:
    """`h.0.attn` → `self.h[0].attn`."""
    text = root
    for part in path.split(".") if path else []:
        text += f"[{part}]" if _is_number(part) else f".{part}"
    return text


def _is_number(part: str) -> bool:
    """Whether a part of a path is a place in an nn.ModuleList."""
    return part.isdecimal() and part == str(int(part))


def pinned(field: Field) -> bool:
    """Whether a weight is kept in float32 at least."""
    return field.attrs.get("dtype") == "float32"


def linears(function: Function) -> dict[str, Op]:
    """Scopes whose weight (and bias) only linear ops read: these are nn.Linear modules."""
    found: dict[str, Op] = {}
    readers: dict[str, list[Op]] = {}
    by_value = {f.value: f for f in function.fields}
    for op in function.ops:
        for value in op.values:
            if value in by_value:
                readers.setdefault(by_value[value].path, []).append(op)
    for path, ops in readers.items():
        owner, leaf = split_path(path)
        (first, *more) = ops
        if leaf != "weight" or more or first.kind not in ("linear", "logits") or not owner:
            continue
        weight = by_value.get(first.values[1])
        if weight is None or weight.path != path or weight.kind != "weight" or pinned(weight):
            continue
        if len(first.values) == 3:
            bias = by_value.get(first.values[2])
            if bias is None or bias.path != f"{owner}.bias" or len(readers[bias.path]) > 1:
                continue
        others = [f for f in function.fields if split_path(f.path)[0] == owner]
        if len(others) == len(first.values) - 1:
            found[owner] = first
    return found


@dataclass
class _Node:
    """A place in a class: what its `__init__` makes there, and the line that asked for it."""

    path: str = ""
    loc: Loc | None = None
    made: str = ""
    callee: _Node | None = None
    fields: dict[str, Field] = field(default_factory=dict)
    children: dict[str, _Node] = field(default_factory=dict)

    def at(self, path: str, loc: Loc | None) -> _Node:
        """The node at a path below this one."""
        node = self
        for part in path.split(".") if path else []:
            here = f"{node.path}.{part}" if node.path else part
            node = node.children.setdefault(part, _Node(here, loc))
        return node

    @property
    def numbered(self) -> list[_Node]:
        """The children that an nn.ModuleList holds, in order."""
        return [self.children[n] for n in sorted(filter(_is_number, self.children), key=int)]

    @property
    def members(self) -> dict[str, Loc | None]:
        """Names of what stands here, and their lines."""
        fields = {name: f.value.loc for name, f in self.fields.items()}
        return fields | {name: node.loc for name, node in self.children.items()}


def emit_tree(module: Module, title: str) -> str:
    """The source of `modules.py`."""
    lines = [
        f'"""{title}: the module tree.\n\nEmitted by archir. Parameters are made on `device`, '
        'uninitialised.\n"""',
        "import torch\nfrom torch import nn\n\nfrom . import support as ar",
    ]
    names = class_names(module)
    roots: dict[str, _Node] = {}
    classes = []
    for function in module.functions:
        if function.name in names:
            roots[function.name] = _root(function, names, roots)
            _check(roots[function.name], function, Model if function.role == "entry" else nn.Module)
            classes.append(_class(function, names[function.name], roots[function.name]))
    return "\n\n\n".join(["\n\n".join(lines), *classes]) + "\n"


def _root(function: Function, names: dict[str, str], roots: dict[str, _Node]) -> _Node:
    """What a function's class makes; `roots` has the functions it calls."""
    root = _Node(loc=function.loc)
    owned = linears(function)
    for scope, op in owned.items():
        weight, *bias = op.values[1:]
        assert isinstance(weight.type, Tensor)
        out, given = weight.type.shape
        node = root.at(scope, op.loc)
        node.made = f"ar.Linear({given}, {out}, bias={bool(bias)}, **kw)"
    for item in function.fields:
        owner, leaf = split_path(item.path)
        if item.kind in ("weight", "buffer") and owner not in owned:
            root.at(owner, item.value.loc).fields[leaf] = item
    for op in function.ops:
        if op.kind == "call":
            node, callee = root.at(op.attrs["scope"], op.loc), op.attrs["callee"].name
            node.made, node.callee = f"{names[callee]}(device, dtype)", roots[callee]
    return root


def _check(node: _Node, function: Function, kind: type) -> None:
    """Raises where a name cannot be an attribute of its module, or two things claim one name."""
    if node.made and not node.callee:
        kind = nn.Linear
    elif node.numbered:
        kind = nn.ModuleList
    theirs = node.callee.members if node.callee else {}
    for name, loc in node.members.items():
        path = f"{node.path}.{name}" if node.path else name
        what, code, step, facts = "", "scope-name", "choose another name", [_place(node)]
        if _is_number(name) and name in node.children:
            if node.made or not node.path:
                what = f"is numbered, but {node.path or function.name} is no list of scopes"
                step = "number scopes in a namespace of their own, as in 'layers.0'"
        elif not name.isidentifier() or keyword.iskeyword(name):
            what, facts = "cannot be a Python attribute", []
            step = "use letters, digits and underscores, no keyword, and numbers for lists"
        elif name.startswith("_") or name in _reserved(kind):
            what, code, facts = f"is a name every {_title(kind)} has", "scope-reserved", []
        elif name in node.fields and name in node.children:
            what, facts = "is both a weight and a scope", [_place(node.children[name])]
        if name in theirs and not what:
            what = f"is made here, and in the block called as {node.path}"
            step = "choose another name, or another scope for one of the two"
        if what:
            raise SpecError(
                f"{path!r} in {function.name} {what}",
                code=code,
                loc=loc or function.loc,
                facts=[fact for fact in facts if fact],
                next=step,
            )
    names = [child.path.rpartition(".")[2] for child in node.numbered]
    if names != [str(i) for i in range(len(names))]:
        raise SpecError(
            f"numbered scopes {', '.join(names)} of {node.path} in {function.name} are not "
            f"0 … {len(names) - 1}",
            code="scope-numbers",
            loc=node.numbered[0].loc or function.loc,
            next="number them from 0 without gaps",
        )
    for child in node.children.values():
        _check(child, function, nn.Module)


@cache
def _reserved(kind: type) -> set[str]:
    """Names that cannot be given to what stands in a module."""
    own = {"weight", "bias", "in_features", "out_features"} if kind is nn.Linear else set()
    # `scope` is set on every module, `float32` holds the pinned weights
    return {*dir(kind), *dir(nn.Module()), *own, "scope", "float32"}


def _title(kind: type) -> str:
    return "model" if kind is Model else f"nn.{kind.__name__}"


def _place(node: _Node) -> str:
    """Where a scope was first named."""
    return f"scope {node.path} is made at {node.loc.short}" if node.path and node.loc else ""


def _class(function: Function, name: str, root: _Node) -> str:
    place = f", {function.loc.short}" if function.loc else ""
    lines = [
        f"class {name}(ar.Block):",
        f'    """{function.name}{place}"""',
        "",
        '    def __init__(self, device="meta", dtype=torch.float32):',
        "        super().__init__()",
    ]
    body = list(_fill(root, "self"))
    if any("**kw" in line for line in body):
        lines.append("        kw = dict(device=device, dtype=dtype)")
    lines += [piece for line in body for piece in wrap(f"        {line}")]
    return "\n".join(lines)


def _fill(node: _Node, here: str) -> Iterator[str]:
    """The statements that fill a place: parameters, then children."""
    theirs = node.callee.fields.values() if node.callee else ()
    if any(map(pinned, node.fields.values())) and not any(map(pinned, theirs)):
        yield f"{here}.float32 = ar.Float32()"
    for leaf, item in node.fields.items():
        yield _field(leaf, item, here)
    for name, child in node.children.items():
        at = access(here, name)
        if not _is_number(name):
            yield f"{at} = {_made(child)}"
        yield from _fill(child, at)


def _made(node: _Node) -> str:
    """What makes a place: a linear, a block, a list of its numbered children (runs of equal ones
    are a comprehension), or a namespace."""
    if node.made or not node.numbered:
        return node.made or "ar.Scope()"
    made = [_made(child) for child in node.numbered]
    if len(set(made)) == 1:
        return f"nn.ModuleList([{made[0]} for _ in range({len(made)})])"
    return f"nn.ModuleList([{', '.join(made)}])"


def _field(leaf: str, item: Field, here: str) -> str:
    assert isinstance(item.value.type, Tensor)
    sizes = [str(size) for size in item.value.type.shape]
    how = "**kw"
    if pinned(item):
        here, how = f"{here}.float32", "device=device, dtype=ar.wide(dtype)"
    if item.kind == "buffer":
        return f'{here}.register_buffer("{leaf}", torch.empty({in_brackets(sizes)}, {how}))'
    return f"{here}.{leaf} = ar.parameter({', '.join([*sizes, how])})"
