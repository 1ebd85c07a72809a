"""Prints the `nn.Module` tree: one class per IR function, one instance per scope (D9)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from archir.diagnostics import SpecError
from archir.ir import Field, Function, Module, Op
from archir.text import wrap
from archir.types import Tensor


def split_path(path: str) -> tuple[str, str]:
    """`attn.c_proj.weight` → (`attn.c_proj`, `weight`)."""
    owner, _, leaf = path.rpartition(".")
    return owner, leaf


def access(root: str, path: str) -> str:
    """`h.0.attn` → `self.h[0].attn`."""
    text = root
    for part in path.split(".") if path else []:
        text += f"[{part}]" if part.isdigit() else f".{part}"
    return text


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
        if weight is None or weight.path != path or pinned(weight):
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
    """A place in a class: what its `__init__` makes there."""

    made: str = ""
    fields: list[Field] = field(default_factory=list)
    children: dict[str, _Node] = field(default_factory=dict)

    def at(self, path: str) -> _Node:
        node = self
        for part in path.split(".") if path else []:
            node = node.children.setdefault(part, _Node())
        return node


def emit_tree(module: Module, title: str) -> str:
    """The source of `modules.py`."""
    lines = [
        f'"""{title}: the module tree.\n\nEmitted by archir. Parameters are made on `device`, '
        'uninitialised.\n"""',
        "import torch\nfrom torch import nn\n\nfrom . import support as ar",
    ]
    classes = [_class(f, module) for f in module.functions if f.role in ("block", "entry")]
    return "\n\n\n".join(["\n\n".join(lines), *classes]) + "\n"


def class_name(function: Function) -> str:
    """`layer_1` → `Layer1`."""
    return "".join(part[:1].upper() + part[1:] for part in function.name.split("_")) or "Model"


def _class(function: Function, module: Module) -> str:
    root = _Node()
    owned = linears(function)
    for scope, op in owned.items():
        weight, *bias = op.values[1:]
        assert isinstance(weight.type, Tensor)
        out, given = weight.type.shape
        root.at(scope).made = f"ar.Linear({given}, {out}, bias={bool(bias)}, **kw)"
    for item in function.fields:
        owner, _ = split_path(item.path)
        if item.kind in ("weight", "buffer") and owner not in owned:
            root.at(owner).fields.append(item)
    for op in function.ops:
        if op.kind == "call":
            name = class_name(module[op.attrs["callee"].name])
            root.at(op.attrs["scope"]).made = f"{name}(device, dtype)"
    place = f", {function.loc.short}" if function.loc else ""
    lines = [
        f"class {class_name(function)}(ar.Block):",
        f'    """{function.name}{place}"""',
        "",
        '    def __init__(self, device="meta", dtype=torch.float32):',
        "        super().__init__()",
    ]
    body = list(_init(root, "self", function))
    if any("**kw" in line for line in body):
        lines.append("        kw = dict(device=device, dtype=dtype)")
    lines += [piece for line in body for piece in wrap(f"        {line}")]
    return "\n".join(lines)


def _init(node: _Node, at: str, function: Function) -> Iterator[str]:
    """The statements that fill a place: parameters, then children."""
    for item in node.fields:
        yield from _field(item, at)
    for name, child in node.children.items():
        if hasattr(nn.Module, name) or name == "float32":
            raise SpecError(
                f"scope {name!r} in {function.name} is a name every nn.Module has",
                code="scope-reserved",
                loc=function.loc,
                next="choose another name",
            )
        here = access(at, name)
        if child.children and all(k.isdigit() for k in child.children):
            yield from _numbered(child, here, function)
        elif child.made:
            yield f"{here} = {child.made}"
            yield from _init(_Node("", child.fields, child.children), here, function)
        else:
            yield f"{here} = ar.Scope()"
            yield from _init(child, here, function)


def _numbered(node: _Node, here: str, function: Function) -> Iterator[str]:
    """A ModuleList where children are 0 … n−1; runs of equal classes are one comprehension."""
    names = sorted(node.children, key=int)
    if names != [str(i) for i in range(len(names))]:
        raise SpecError(
            f"numbered scopes {', '.join(names)} in {function.name} are not 0 … {len(names) - 1}",
            code="scope-numbers",
            loc=function.loc,
            next="number them from 0 without gaps",
        )
    made = [node.children[n].made or "ar.Scope()" for n in names]
    if len(set(made)) == 1:
        yield f"{here} = nn.ModuleList([{made[0]} for _ in range({len(made)})])"
    else:
        yield f"{here} = nn.ModuleList([{', '.join(made)}])"
    for name in names:
        child = node.children[name]
        yield from _init(_Node("", child.fields, child.children), f"{here}[{name}]", function)


def _field(item: Field, at: str) -> Iterator[str]:
    _, leaf = split_path(item.path)
    assert isinstance(item.value.type, Tensor)
    sizes = "".join(f"{s}, " for s in item.value.type.shape)
    if pinned(item):
        yield f"if not hasattr({at}, 'float32'):"
        yield f"    {at}.float32 = ar.Float32()"
        yield f"{at}.float32.{leaf} = ar.parameter({sizes}device=device, dtype=ar.wide(dtype))"
    elif item.kind == "buffer":
        yield f'{at}.register_buffer("{leaf}", torch.empty({sizes}**kw))'
    else:
        yield f"{at}.{leaf} = ar.parameter({sizes}**kw)"
