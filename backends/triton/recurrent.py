"""The recurrent form of any rule as one Triton kernel, its body printed from the rule's IR.

One program runs one row, one head and one part of the split dim (value columns, as a rule): states
stay in registers, tokens go by in a loop. A dim can be split where the rule sums nothing over it.
A state or an output without it is computed by every part alike, and stored by the first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from archir import dims
from archir.ir import Function, Value
from archir.ops.state import placed
from archir.types import Tensor
from backends.triton.body import Axis, Body, reduced
from backends.triton.render import render


@dataclass(frozen=True)
class Recurrent:
    """A rule on operands of given types.  sizes: of its dims.  heads: of the states.

    The kernel takes pointers to operands, states before [R, H, …], outputs [B, T, H, …] and states
    after; then bounds, the length of dense rows, and for each operand the elements from token to
    token (its heads are contiguous). The grid is (rows, heads, parts of the split dim).
    """

    rule: Function
    operands: tuple[Tensor, ...]
    sizes: dict[str, int]
    heads: int

    @property
    def states(self) -> tuple[Value, ...]:
        """The rule's states."""
        return self.rule.inputs[: self.rule.attrs["states"]]

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The rule's operands."""
        return self.rule.inputs[self.rule.attrs["states"] :]

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The rule's outputs."""
        return self.rule.outputs[self.rule.attrs["states"] :]

    @cached_property
    def axes(self) -> dict[str, Axis]:
        """Every dim, with the power of two that holds it."""
        return {d: Axis(d, n, 1 << max(n - 1, 0).bit_length()) for d, n in self.sizes.items()}

    @cached_property
    def split(self) -> str | None:
        """The dim whose parts are computed apart: the last that may be, of a state."""
        fixed = reduced(self.rule)
        return next(
            (d for s in reversed(self.states) for d in reversed(letters(s)) if d not in fixed), None
        )

    def source(self, name: str) -> str:
        """The kernel as a function of this name."""
        taken = {"row", "head", "part", "token", "start", "stop", "bounds", "length", "tl"}
        taken |= {f"{word}_{d}" for d in self.axes for word in ("at", "in")}
        taken |= {v.name for v in self.rule.inputs}
        body = Body(self.rule, self.axes, taken)
        lines = body.print({v: v.name for v in self.rule.inputs})
        pairs = zip(self.states, self.rule.outputs, strict=False)
        moved = [f"{s.name} = {body(v)}" for s, v in pairs if body(v) != s.name]
        loads = {True: [], False: []}
        for value, type_ in zip(self.inputs, self.operands, strict=True):
            leading = placed(type_, _rank(value))
            loads["T" in leading].append(self._operand(value, type_, leading))
        names = [v.name for v in (*self.inputs, *self.states)]
        names += [f"out_{i}" for i in range(len(self.outputs))]
        names += [f"{s.name}_after" for s in self.states]
        return render(
            "recurrent",
            name=name,
            title=f"{self.rule.name}, token by token.",
            split=self.split or "nothing",
            pointers=", ".join(f"{n}_ptr" for n in names),
            strides=", ".join(f"stride_{v.name}" for v in self.inputs),
            blocks=", ".join(f"BLOCK_{d}: tl.constexpr" for d in self.axes),
            places=[line for axis in self.axes.values() for line in self._place(axis)],
            states_in=[f"{s.name} = {self._load(s, f'{s.name}_ptr', 'row')}" for s in self.states],
            constants=loads[False],
            loads=loads[True],
            body=lines,
            stores=[
                *(
                    self._store(v, body(v), f"out_{i}_ptr", "token")
                    for i, v in enumerate(self.outputs)
                ),
                *moved,
            ],
            states_out=[self._store(s, s.name, f"{s.name}_after_ptr", "row") for s in self.states],
        )

    def count(self, value: Value) -> int:
        """Elements of one head and one token (or row) of a value."""
        return math.prod(self.sizes[d] for d in letters(value))

    def _place(self, axis: Axis) -> list[str]:
        first = f"part * BLOCK_{axis.name} + " if axis.name == self.split else ""
        lines = [f"at_{axis.name} = {first}tl.arange(0, BLOCK_{axis.name})"]
        if axis.name == self.split or not axis.whole:
            lines.append(f"in_{axis.name} = at_{axis.name} < {axis.size}")
        return lines

    def _operand(self, value: Value, type_: Tensor, leading: str) -> str:
        base = f"{value.name}_ptr"
        if "T" in leading:
            base += f" + token * stride_{value.name}"
        if "H" in leading:
            own = type_.shape[leading.index("H")]
            assert isinstance(own, int)
            head = "head" if own == self.heads else f"(head // {self.heads // own})"
            base += f" + {head} * {self.count(value)}"
        return f"{value.name} = {self._loaded(value, base)}"

    def _load(self, value: Value, base: str, index: str) -> str:
        return self._loaded(value, f"{base} + ({index} * HEADS + head) * {self.count(value)}")

    def _loaded(self, value: Value, base: str) -> str:
        offsets, masks = self._tile(value)
        rest = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
        return f"tl.load({' + '.join([base, *offsets])}{rest}).to(tl.float32)"

    def _store(self, value: Value, text: str, base: str, index: str) -> str:
        offsets, masks = self._tile(value)
        if self.split and self.split not in letters(value):
            masks.append("(part == 0)")
        place = f"{base} + ({index} * HEADS + head) * {self.count(value)}"
        rest = f", mask={' & '.join(masks)}" if masks else ""
        return f"tl.store({' + '.join([place, *offsets])}, {text}{rest})"

    def _tile(self, value: Value) -> tuple[list[str], list[str]]:
        """Offsets of a tile along each of its axes, and what is real of them."""
        offsets, masks, names = [], [], letters(value)
        for at, d in enumerate(names):
            index = ", ".join(":" if i == at else "None" for i in range(len(names)))
            index = f"[{index}]" if len(names) > 1 else ""
            stride = math.prod(self.sizes[later] for later in names[at + 1 :])
            offsets.append(f"at_{d}{index}" + (f" * {stride}" if stride > 1 else ""))
            if d == self.split or not self.axes[d].whole:
                masks.append(f"in_{d}{index}")
        return offsets, masks


def letters(value: Value) -> tuple[str, ...]:
    """The dims of a rule's operand, state or output."""
    assert isinstance(value.type, Tensor)
    found = [dims.bare(size) for size in value.type.shape]
    return tuple(d for d in found if d is not None)


def _rank(value: Value) -> int:
    assert isinstance(value.type, Tensor)
    return value.type.rank
