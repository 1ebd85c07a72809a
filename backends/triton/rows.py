"""A norm of every row as one Triton kernel, printed from the op's own NumPy meaning.

The meaning is traced on a tile of rows [R, D]. A row that fits a tile stays in registers; a longer
one is read once for each sum that waits for another, and once more to write the result.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from archir import dims, types
from archir.dims import Poly
from archir.ir import Function, Module, Op, Value
from archir.ops.base import lookup
from archir.trace import trace_meaning
from archir.types import Tensor
from backends.triton import configurations
from backends.triton.body import Axis, Body, printable
from backends.triton.kernel import TAKEN, TORCH, Argument, own_names, pointer
from backends.triton.render import render


@dataclass(frozen=True)
class Pass:
    """One reading of the rows. loops: a tile holds a part of them.  lines: of a tile.  before: the
    sums it makes.  after: what is known once it ends."""

    loops: bool
    lines: tuple[str, ...]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class RowWise:
    """An op that takes each row [D] of its first operand, and [D] vectors for all, to a row."""

    op: Op
    module: Module
    kind = "rows"

    @staticmethod
    def refusal(op: Op, module: Module) -> str:
        """Why an op has no kernel of this kind; "" where it has."""
        shape = op.values[0].tensor.shape
        if not shape or not isinstance(shape[-1], int):
            return f"the length of a row is not known: {op.values[0].type}"
        return printable(RowWise(op, module).fn)

    @property
    def stem(self) -> str:
        """The op's kind."""
        return self.op.kind

    @property
    def name(self) -> str:
        """Of the Triton function, which profilers show."""
        return f"{self.stem}_rows"

    @property
    def about(self) -> str:
        """What it computes."""
        return f"{self.op.kind} of rows of {self.size}"

    @cached_property
    def fn(self) -> Function:
        """The op's meaning on a tile of rows [R, D] and vectors [D]."""
        r, d = dims.symbol("R"), dims.symbol("D")
        first, *rest = lookup_names(self.op)
        found = {first: Tensor("F", (r, d))} | {name: Tensor("F", (d,)) for name in rest}
        return trace_meaning(self.op.kind, found, self.op.attrs)

    @cached_property
    def size(self) -> int:
        """Elements of a row."""
        size = self.op.values[0].tensor.shape[-1]
        assert isinstance(size, int)
        return size

    @cached_property
    def lead(self) -> int:
        """How many leading axes are tokens: up to the last whose size is a symbol."""
        shape = self.op.values[0].tensor.shape
        symbolic = [i for i, size in enumerate(shape) if isinstance(size, Poly)]
        return symbolic[-1] + 1 if symbolic else 0

    @cached_property
    def inner(self) -> int:
        """Rows of a token."""
        return math.prod(self.op.values[0].tensor.shape[self.lead : -1])  # type: ignore[arg-type]

    @cached_property
    def block(self) -> int:
        """Places of a tile in a row: all of it, unless that is too long."""
        return min(1 << max(self.size - 1, 0).bit_length(), configurations.longest_row())

    @cached_property
    def configs(self) -> dict[str, dict[str, int]]:
        """How it is launched, by what runs it."""
        return configurations.configs(self.kind, "BLOCK_R", 1 << 30, self.block)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The rows, then the vectors."""
        return own_names(self.fn.inputs, set(TAKEN))

    @cached_property
    def dtype(self) -> str:
        """The dtype it computes in."""
        found = [v.tensor.dtype for v in (*self.op.values, *self.op.results)]
        return "float64" if "f64" in found else "float32"

    @cached_property
    def text(self) -> str:
        """The kernel, its configurations, `empty` and `run`."""
        first, *rest = self.operands
        row, n = "at_R * stride", self.inner
        if n > 1:
            row = f"at_R // {n} * stride + at_R % {n} * {self.size}"
        return render(
            "rows",
            name=self.name,
            function=self.op.kind,
            parameters=", ".join(
                [*(f"{n}_ptr" for n in self.operands), "out_ptr", "rows", "stride"]
            ),
            first=first,
            line=f"({row})[:, None]",
            size=self.size,
            inner=self.inner,
            passes=self._passes(),
            configs=json.dumps(self.configs),
            arguments=", ".join(self.operands),
            dtype=TORCH[self.op.result.tensor.dtype],
            flatten=[
                f"{first} = at.by_token({first}, {self.lead})",
                *(f"{n} = {n}.contiguous()" for n in rest),
            ],
            given=", ".join([*self.operands, "made", "rows", f"{first}.stride(0)"]),
            block=self.block,
        )

    # ---- passes over the rows

    def _passes(self) -> list[Pass]:
        axes = {"R": Axis("R", 1 << 30, 1 << 30), "D": Axis("D", self.size, self.block)}
        body = Body(self.fn, axes, {*TAKEN, *self.operands, "out", "in_R", "at_R"}, self.dtype)
        inputs = dict(zip(self.fn.inputs, self.operands, strict=True))
        body.names |= inputs
        if self.size <= self.block:
            lines = [*self._loads(self.fn.inputs), *body.print(inputs), self._store(body)]
            return [Pass(False, tuple(lines))]
        level = self._levels()
        last = max(level.values())
        return [self._pass(body, level, n, last) for n in range(last + 1)]

    def _levels(self) -> dict[Value, int]:
        """How many sums over a row, one waiting for the other, each value waits for."""
        level = dict.fromkeys(self.fn.inputs, 0)
        for op in self.fn.ops:
            start = max((level[v] for v in op.values), default=0)
            level |= dict.fromkeys(op.results, start + _sums(op))
        return level

    def _pass(self, body: Body, level: dict[Value, int], n: int, last: int) -> Pass:
        """The sums that wait for n others, or the result."""
        sums = [op for op in self.fn.ops if _sums(op) and level[op.result] == n + 1]
        wanted = [op.values[0] for op in sums] if n < last else list(self.fn.outputs)
        tiles = self._tiles(wanted)
        inputs = tuple(v for v in self.fn.inputs if v in tiles)
        lines = [*self._loads(inputs)]
        lines += body.print({}, [op for op in self.fn.ops if op.result in tiles])
        if n == last:
            return Pass(True, (*lines, self._store(body)))
        before, after = [], []
        for op in sums:
            name, largest = f"sum_{body.define(op.result)}", op.kind == "reduce_max"
            empty = 'float("-inf")' if largest else "0.0"
            before.append(f"{name} = tl.full((BLOCK_R, BLOCK_D), {empty}, tl.{self.dtype})")
            tile = body.real(
                body(op.values[0]), op.values[0], 1, "-float('inf')" if largest else "0.0"
            )
            lines.append(
                f"{name} = tl.maximum({name}, {tile}, propagate_nan=tl.PropagateNan.ALL)"
                if largest
                else f"{name} += {tile}"
            )
            total = f"tl.{'max' if largest else 'sum'}({name}, 1, keep_dims=True)"
            total += f" / {float(self.size)}" if op.kind == "reduce_mean" else ""
            after.append(f"{body.names[op.result]} = {total}")
        small = [
            op
            for op in self.fn.ops
            if level[op.result] == n + 1 and not _sums(op) and not _long(op.result)
        ]
        return Pass(True, tuple(lines), tuple(before), (*after, *body.print({}, small)))

    def _tiles(self, wanted: list[Value]) -> set[Value]:
        """The values with an axis D that some values are computed from, themselves too."""
        makers = {op.result: op for op in self.fn.ops}
        found: set[Value] = set()
        pending = list(wanted)
        while pending:
            value = pending.pop()
            if value in found or not _long(value):
                continue
            found.add(value)
            pending += makers[value].values if value in makers else ()
        return found

    def _loads(self, values: tuple[Value, ...]) -> list[str]:
        first, *_ = self.fn.inputs
        real = "" if self.size % self.block == 0 else "in_D"
        lines = ["at_D = " + "first + " * (self.size > self.block) + "tl.arange(0, BLOCK_D)"]
        lines += [f"in_D = at_D < {self.size}"] * bool(real)
        for value, name in zip(self.fn.inputs, self.operands, strict=True):
            if value not in values:
                continue
            masks = [f"{real}[None, :]"] * bool(real)
            place = f"{name}_ptr + line + at_D[None, :]"
            if value is first:
                masks.insert(0, "in_R[:, None]")
            else:
                place, masks = f"{name}_ptr + at_D", [real] * bool(real)
            rest = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
            lines.append(f"{name} = tl.load({place}{rest}).to(tl.{self.dtype})")
        return lines

    def _store(self, body: Body) -> str:
        (output,) = self.fn.outputs
        mask = "in_R[:, None]" + (" & in_D[None, :]" if self.size % self.block else "")
        place = f"out_ptr + at_R[:, None] * {self.size} + at_D[None, :]"
        return f"tl.store({place}, {body(output)}, mask={mask})"

    # ---- ahead of time

    @property
    def known(self) -> dict[str, int]:
        """D, the elements of a row."""
        return {"D": self.size}

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's parameters and their types, constants aside."""
        names = [*(f"{n}_ptr" for n in self.operands), "out_ptr"]
        values = (*self.op.values, self.op.result)
        found = [Argument(n, pointer(v.tensor.dtype)) for n, v in zip(names, values, strict=True)]
        stride = Argument("stride", "i32", self.inner * self.size)
        return (*found, Argument("rows", "i32", self.inner), stride)

    def constants(self, config: dict[str, int], layout: str) -> dict[str, Any]:
        """Values of the constant parameters."""
        return {"BLOCK_D": self.block, **config}

    def traffic(self, config: dict[str, int], layout: str) -> tuple[int | Poly, int | Poly]:
        """Bytes read and written by one launch: each program reads the vectors for itself, and a
        row longer than a tile is read in every pass that needs it."""
        rows = dims.product(self.op.values[0].tensor.shape[:-1])
        programs = rows if config["BLOCK_R"] == 1 else dims.ceildiv(rows, config["BLOCK_R"])
        times = dict.fromkeys(self.fn.inputs, 1)
        if self.size > self.block:
            times = self._readings()
        read: int | Poly = 0
        for value, operand in zip(self.fn.inputs, self.op.values, strict=True):
            often = rows if value is self.fn.inputs[0] else programs
            read = read + often * (times[value] * self.size * types.size_of(operand.tensor.dtype))
        return read, rows * (self.size * types.size_of(self.op.result.tensor.dtype))

    def _readings(self) -> dict[Value, int]:
        """How many passes read each input."""
        level = self._levels()
        last = max(level.values())
        found = dict.fromkeys(self.fn.inputs, 0)
        for n in range(last + 1):
            sums = [op for op in self.fn.ops if _sums(op) and level[op.result] == n + 1]
            tiles = self._tiles(
                [op.values[0] for op in sums] if n < last else list(self.fn.outputs)
            )
            for value in found:
                found[value] += value in tiles
        return found


def _sums(op: Op) -> bool:
    """Whether an op takes an axis of rows together."""
    return op.kind.startswith("reduce") and _long(op.values[0])


def _long(value: Value) -> bool:
    """Whether a value has something for each place of a row."""
    return any(dims.bare(size) == "D" for size in value.tensor.shape)


def lookup_names(op: Op) -> list[str]:
    """The names of an op's operands in its meaning's signature."""
    code = lookup(op.kind).meaning.__code__
    return list(code.co_varnames[: len(op.values)])
