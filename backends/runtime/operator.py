"""A rule as a torch function on [B, T, H, …] tensors: what `archir.op` returns.

It runs the program that a model has for its prefill, emitted once for each way operands are given:
ranks, inner sizes, heads and dtypes. Batches and tokens are free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from archir import dims, types
from archir.diagnostics import MismatchError, ShapeError
from archir.ops.state import placed
from archir.pipeline import Options, lower
from archir.provide import active, mark
from archir.recurrence import Rule
from backends.api import KernelRecords
from backends.runtime import cache
from backends.runtime.layout import Bounds, bounds
from backends.runtime.model import _untraced as untraced
from backends.runtime.state import DTYPES

# Of each operand: its dtype, its leading axes, and its other sizes.
Types = tuple[tuple[str, str, tuple[int, ...]], ...]
_SHORT = {dtype: short for short, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Program:
    """An emitted program: its entry, the order it takes operands in, and where it lies."""

    run: Callable[..., Any]
    order: tuple[int, ...]
    folder: Path
    name: str


@dataclass(frozen=True)
class Given:
    """Operands that fit together.

    types: what a program is emitted for; leading axes are "BTH", "BT", "H" or "".  sizes: of the
    rule's dims.  heads: of the states.  tokens: [B, T].
    """

    types: Types
    sizes: dict[str, int]
    heads: int
    tokens: tuple[int, int]


class Operator:
    """A rule as a torch function; see `archir.op`."""

    def __init__(self, rule: Rule, backend: Any, form: str) -> None:
        self.rule, self._backend, self._form = rule, backend, form
        self._provided = active(backend.name)
        self._programs: dict[tuple[Types, str, str], Program] = {}
        self.__name__ = rule.name

    def __repr__(self) -> str:
        names = ", ".join(self.rule.operands)
        return f"archir.op: {self.rule.name}({names}), {self._backend.name}, form {self._form}"

    def __call__(
        self,
        *operands: Tensor,
        initial_state: Any = None,
        lengths: Any = None,
        padding: str = "right",
        cu_seqlens: Any = None,
        return_state: bool = False,
    ) -> Any:
        """The outputs [B, T, heads, …]; with return_state (outputs, state). See `archir.op`.

        lengths: tokens of each row, the rest is `padding`, where outputs are zero.  cu_seqlens:
        ends of sequences packed in one line.  initial_state: zeros unless given. Raises ShapeError
        or MismatchError where operands do not fit the rule, each other, or the rows.
        """
        given = _fit(self.rule, operands)
        batch, length = given.tokens
        rows = bounds(batch, length, lengths, padding, cu_seqlens)
        count = batch if rows is None else len(rows[0])
        states = self._states(operands[0], given, count, initial_state)
        key = given.types, "dense" if rows is None else "ragged", operands[0].device.type
        self._emit(*key)
        program = self._programs[key]
        xs = operands if rows is None else _without_padding(operands, given, rows)
        state: dict[str, Any] = {"length": (0,) * count, **states}
        made = program.run(None, *(xs[i] for i in program.order), *(rows or ()), state)
        # one output alone, several by name
        outputs = tuple(made.values()) if isinstance(made, dict) else made
        if not return_state:
            return outputs
        after = tuple(state[path] for path in states)
        return outputs, after[0] if len(after) == 1 else after

    @property
    def files(self) -> list[Path]:
        """The emitted files so far."""
        folders = dict.fromkeys(program.folder for program in self._programs.values())
        programs = {program.folder / f"{program.name}.py" for program in self._programs.values()}
        found = (p for folder in folders for p in sorted(folder.glob("*.py")) if p.name[0] != ".")
        every = {f"{self.rule.name}_{layout}.py" for layout in ("dense", "ragged")}
        return [p for p in found if p in programs or p.name not in every]

    def kernels(self) -> KernelRecords:
        """What runs beyond torch calls in the programs so far, as of a model."""
        found = [
            record
            for (_, _, device), program in self._programs.items()
            for record in self._backend.kernels(
                program.folder, [program.name], torch.device(device)
            )
        ]
        return KernelRecords(dict.fromkeys(found), len(self._programs))

    # ---- programs

    @untraced
    def _emit(self, operands: Types, layout: str, device: str) -> None:
        """Lowers, prints and loads the program for operands like these unless it is there."""
        if (operands, layout, device) in self._programs:
            return
        grid = dims.symbol("B"), dims.symbol("T")
        dtype = operands[0][0]
        # the entry makes rows from its first input
        first = next(i for i, (_, lead, _) in enumerate(operands) if "T" in lead)
        order = (first, *(i for i in range(len(operands)) if i != first))
        names, declared = [*self.rule.operands], {}
        for i in order:
            kept, lead, shape = operands[i]
            declared[names[i]] = types.Tensor(kept, (*(grid if "T" in lead else ()), *shape))
        traced = mark(self.rule.trace(declared), self._provided, dtype)
        options = Options(dtype=dtype, form=self._form, backend=self._backend.name)
        parts = [*astuple(options), torch.__version__, self._backend.target()]
        folder = cache.folder(f"op_{self.rule.name}", str(traced), *map(str, parts))
        title = f"{self.rule.name} as a function"
        name = f"{self.rule.name}_{layout}"
        if not cache.intact(folder / f"{name}.py"):
            module = lower(
                traced, "prefill", layout, dtype=dtype, form=self._form, backend=self._backend.name
            )
            files = self._backend.emit_tree(traced, title)
            files.pop("modules.py")  # a rule has no weights
            files |= self._backend.emit_program(module, traced, f"{title}, {layout} rows", name)
            cache.write(folder, files)
        file = self._backend.load(folder, name)
        (entry,) = file.__all__
        made = Program(getattr(file, entry), order, folder, name)
        self._programs[operands, layout, device] = made

    def _states(self, first: Tensor, given: Given, rows: int, initial: Any) -> dict[str, Tensor]:
        """The states before by path: those given, checked, or zeros."""
        rule, wide = self.rule, torch.promote_types(first.dtype, torch.float32)
        declared = zip(rule.states, rule.function.inputs, strict=False)
        want = {
            name: (rows, given.heads, *(given.sizes[str(d)] for d in value.type.shape))  # type: ignore[union-attr]
            for name, value in declared
        }
        if initial is None:
            found = [torch.zeros(s, dtype=wide, device=first.device) for s in want.values()]
        else:
            found = list(initial) if isinstance(initial, tuple | list) else [initial]
            self._check_states(first, want, found)
        pairs = zip(rule.states, found, strict=True)
        return {f"state_update_0.{name}": x.to(wide) for name, x in pairs}

    def _check_states(
        self, first: Tensor, want: dict[str, tuple[int, ...]], found: Sequence[Any]
    ) -> None:
        shown = ", ".join(f"{name} {list(shape)}" for name, shape in want.items())
        if len(found) != len(want):
            raise MismatchError(
                f"{len(found)} tensors are given as the initial state of {self.rule.name}, "
                f"which has {len(want)}",
                code="initial-state",
                facts=[f"the rule: {shown}"],
                next="give one tensor, or a tuple in the rule's order",
            )
        for (name, shape), x in zip(want.items(), found, strict=True):
            label = f"initial_state {name}" if len(want) > 1 else "initial_state"
            _check_tensor(self.rule, label, x)
            _check_beside(label, x, next(iter(self.rule.operands)), first)
            if tuple(x.shape) != shape:
                raise MismatchError(
                    f"{label} is {list(x.shape)}, {list(shape)} is needed",
                    code="initial-state",
                    facts=[f"the rule: {shown}, of {shape[0]} rows and {shape[1]} heads"],
                    next="give one state per row: of the batch, or of cu_seqlens",
                )


def _without_padding(operands: Sequence[Tensor], given: Given, rows: Bounds) -> list[Tensor]:
    """Operands with zeros where no row has a token: not even NaN there reaches a gradient."""
    batch, length = given.tokens
    if sum(b - a for a, b in zip(*rows, strict=True)) == batch * length:
        return [*operands]
    owned = torch.zeros(batch * length, dtype=torch.bool, device=operands[0].device)
    for start, stop in zip(*rows, strict=True):
        owned[start:stop] = True
    owned = owned.view(batch, length)
    return [
        torch.where(owned[(...,) + (None,) * (x.ndim - 2)], x, 0) if "T" in lead else x
        for x, (_, lead, _) in zip(operands, given.types, strict=True)
    ]


# ---- do operands fit


def _fit(rule: Rule, operands: Sequence[Any]) -> Given:
    """How operands fit a rule and each other; an error names the two that disagree."""
    names = [*rule.operands]
    if len(operands) != len(names):
        raise ShapeError(
            f"{rule.name} takes {len(names)} operands, {len(operands)} given",
            code="operand-count",
            facts=[f"operands: {', '.join(names)}"],
            next=f"call it as {rule.name}({', '.join(names)}, initial_state=…, cu_seqlens=…)",
        )
    for name, x in zip(names, operands, strict=True):
        _check_tensor(rule, name, x)
        _check_beside(name, x, names[0], operands[0])
    lead: list[str] = []
    seen: dict[str, tuple[int, str]] = {}  # dim → its size, and which operand said so
    for (name, shape), x in zip(rule.operands.items(), operands, strict=True):
        lead.append(_lead(rule, name, shape, x))
        axes = [*lead[-1].replace("H", ""), *shape]
        sizes = [n for axis, n in zip([*lead[-1], *shape], x.shape, strict=True) if axis != "H"]
        for axis, size in zip(axes, sizes, strict=True):
            size_seen, other = seen.setdefault(axis, (size, name))
            if size != size_seen:
                raise _disagree(rule, axis, (other, size_seen), (name, size), operands)
    if "T" not in seen:
        raise ShapeError(
            f"no operand of {rule.name} has tokens",
            code="rank-mismatch",
            facts=[_shown(rule, name, operands) for name in names],
            next="give one at least as [B, T, H, …]",
        )
    pairs = zip(names, operands, lead, strict=True)
    own = {name: int(x.shape[axes.index("H")]) for name, x, axes in pairs if "H" in axes}
    heads = max(own.values()) if own else 1
    for name, n in own.items():
        if n == 0 or heads % n:
            most = next(name for name, n in own.items() if n == heads)
            raise _disagree(rule, "H", (most, heads), (name, n), operands)
    sizes = {d: int(n) for d, (n, _) in seen.items() if d not in "BT"}
    found = tuple(
        (_SHORT[x.dtype], axes, tuple(x.shape[2 if "T" in axes else 0 :]))
        for x, axes in zip(operands, lead, strict=True)
    )
    return Given(found, sizes, heads, (seen["B"][0], seen["T"][0]))


def _check_tensor(rule: Rule, name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise MismatchError(
            f"{name} of {rule.name} is a {type(x).__name__}, not a tensor",
            code="operand-tensor",
            next="give a torch tensor; a constant is a tensor without axes",
        )
    if x.dtype not in _SHORT:
        raise MismatchError(
            f"{name} of {rule.name} is {_plain(x.dtype)}, which is no float that archir computes "
            "with",
            code="operand-dtype",
            facts=[f"floats: {', '.join(_plain(dtype) for dtype in _SHORT)}"],
            next=f"give {name}.float()",
        )


def _check_beside(name: str, x: Tensor, first: str, like: Tensor) -> None:
    """Against the first operand, which says where and in which dtype is computed."""
    if x.device != like.device:
        raise MismatchError(
            f"{name} is on {x.device}, {first} on {like.device}",
            code="operand-device",
            next=f"give {name}.to({str(like.device)!r})",
        )
    wide = torch.promote_types(like.dtype, torch.float32)
    if torch.promote_types(x.dtype, wide) != wide:
        raise MismatchError(
            f"{name} is {_plain(x.dtype)}, and {first} in {_plain(like.dtype)} has it computed in "
            f"{_plain(wide)}",
            code="operand-dtype",
            next=f"give {first} in {_plain(x.dtype)}, or {name}.to(torch.{_plain(wide)})",
        )


def _lead(rule: Rule, name: str, shape: tuple[str, ...], x: Tensor) -> str:
    found = placed(types.Tensor("f", tuple(x.shape)), len(shape))
    if found == "?":
        inner = "".join(f", {d}" for d in shape)
        raise ShapeError(
            f"{name} of {rule.name} has {x.ndim} axes: {list(x.shape)}",
            code="rank-mismatch",
            facts=[
                f"[B, T, H{inner}]: its own for every token and head",
                f"[B, T{inner}]: for every token, one for all heads",
                f"[H{inner}]: for every head, one for all tokens",
                f"[{inner[2:]}]: one for all",
            ],
            next="give one of these",
        )
    return found


def _disagree(
    rule: Rule, axis: str, one: tuple[str, int], other: tuple[str, int], operands: Sequence[Tensor]
) -> ShapeError:
    """Two operands have one axis in two sizes, or heads that do not divide."""
    (a, m), (b, n) = one, other
    called = {"B": "the batch B", "T": "the number of tokens T"}.get(axis, axis)
    what = f"{called} is {m} in {a} and {n} in {b}"
    if axis == "H":
        what = f"{n} heads of {b} do not divide {m} heads of {a}"
    return ShapeError(
        f"{rule.name}: {what}",
        code="shape-mismatch",
        facts=[_shown(rule, name, operands) for name in (a, b)],
        next="an operand has all heads, a divisor of them, or no head axis"
        if axis == "H"
        else f"give {a} and {b} the same size there",
    )


def _shown(rule: Rule, name: str, operands: Sequence[Tensor]) -> str:
    """`k: [2, 5, 2, 7] of K`: an operand as it was given, and its dims in the rule."""
    shape = rule.operands[name]
    of = f" of {' × '.join(shape)}" if shape else " of numbers"
    return f"{name}: {list(operands[[*rule.operands].index(name)].shape)}{of}"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
