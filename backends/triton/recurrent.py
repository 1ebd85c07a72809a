"""The recurrent form of any rule as one Triton kernel, its body printed from the rule's IR.

One program runs one row, one head and one part of the split dim (value columns, as a rule): states
stay in registers, tokens go by in a loop. A dim can be split where the rule sums nothing over it.
A state or an output without it is computed by every part alike, and stored by the first.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from archir import dims, types
from archir.dims import Poly
from archir.ir import Function, Module, Op, Value
from archir.ops.state import placed, rule_heads, state_axes
from archir.types import Tensor
from backends.triton import configurations
from backends.triton.body import Axis, Body, printable, reduced
from backends.triton.kernel import TAKEN, TORCH, Argument, own_names, pointer
from backends.triton.render import render


@dataclass(frozen=True)
class Recurrent:
    """A `state_update` of static sizes. Its grid is (rows, heads, parts of the split dim)."""

    used: Op
    module: Module
    kind = "recurrent"

    @cached_property
    def op(self) -> Op:
        """The op with B batches of T tokens and R rows, whatever they are where it stands."""
        rule = self.module[self.used.attrs["rule"].name]
        states, count = state_axes(rule)
        batch, tokens, rows = (dims.symbol(d) for d in "BTR")

        def placed_in(value: Value, lead: tuple[Poly, ...]) -> Value:
            shape = value.tensor.shape
            return replace(value, type=value.tensor.with_shape((*lead, *shape[len(lead) :])))

        *tensors, seq = self.used.values
        operands = [
            placed_in(x, (batch, tokens) if "T" in _lead(x, v) else ())
            for x, v in zip(tensors, rule.inputs[states:], strict=False)
        ]
        operands += [placed_in(x, (rows,)) for x in tensors[count:]]
        made = len(self.used.results) - states
        results = [placed_in(x, (batch, tokens)) for x in self.used.results[:made]]
        results += [placed_in(x, (rows,)) for x in self.used.results[made:]]
        operands.append(replace(seq, type=types.Sequence(rows)))
        return replace(self.used, operands=tuple(operands), results=tuple(results))

    @staticmethod
    def refusal(op: Op, module: Module) -> str:
        """Why an op has no kernel of this kind; "" where it has."""
        rule = module[op.attrs["rule"].name]
        states, count = state_axes(rule)
        if op.attrs.get("form", "recurrent") != "recurrent":
            return f"its form is {op.attrs['form']}, for which torch runs the algebra"
        if len(op.values) != count + states + 1:
            return "its states are not explicit yet"
        for value, declared in zip(op.values, rule.inputs[states:], strict=False):
            inner = value.tensor.shape[value.tensor.rank - declared.tensor.rank :]
            heads = value.tensor.shape[2:3] if "T" in _lead(value, declared) else ()
            if not all(isinstance(size, int) for size in (*inner, *heads)):
                return f"the sizes of {declared.name} are not known: {value.type}"
        return printable(rule)

    @cached_property
    def rule(self) -> Function:
        """The rule."""
        return self.module[self.op.attrs["rule"].name]

    @property
    def stem(self) -> str:
        """The rule's name."""
        return self.rule.name

    @property
    def name(self) -> str:
        """Of the Triton function, which profilers show."""
        return f"{self.stem}_recurrent"

    @property
    def about(self) -> str:
        """What it computes, and where that is written."""
        return f"{self.rule.name}, token by token" + (
            f" (rule at {self.rule.loc.short})" if self.rule.loc else ""
        )

    @cached_property
    def states(self) -> tuple[Value, ...]:
        """The rule's states."""
        return self.rule.inputs[: self.rule.attrs["states"]]

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """The rule's operands."""
        return self.rule.inputs[self.rule.attrs["states"] :]

    @cached_property
    def outputs(self) -> tuple[Value, ...]:
        """The rule's outputs."""
        return self.rule.outputs[self.rule.attrs["states"] :]

    @cached_property
    def given(self) -> tuple[tuple[Value, Tensor, str], ...]:
        """Each operand of the rule, the type of what is given for it, and its leading axes."""
        pairs = zip(self.inputs, self.op.values, strict=False)
        return tuple((v, x.tensor, _lead(x, v)) for v, x in pairs)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Of the rule's dims."""
        found: dict[str, Any] = {}
        for value, type_, _ in self.given:
            declared = value.tensor
            inner = Tensor(declared.dtype, type_.shape[type_.rank - declared.rank :])
            types.match(declared, inner, found)
        return found

    @cached_property
    def heads(self) -> int:
        """Of the states."""
        found = rule_heads([t for _, t, _ in self.given], self.rule)
        assert isinstance(found, int)
        return found

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

    @cached_property
    def wide(self) -> str:
        """The dtype it computes in, and of states, as in types: f32 or f64."""
        return self.op.values[len(self.inputs)].tensor.dtype

    @cached_property
    def dtype(self) -> str:
        """The dtype it computes in, in Triton's words."""
        return {"f32": "float32", "f64": "float64"}[self.wide]

    @cached_property
    def configs(self) -> dict[str, dict[str, int]]:
        """How it is launched, by what runs it."""
        most = max((s for s in self.states), key=lambda s: math.prod(self._blocks(s)))
        d = self.split
        beside = math.prod(self.axes[x].block for x in letters(most) if x != d)
        name, size = (f"BLOCK_{d}", self.sizes[d]) if d else ("BLOCK", 1)
        found = configurations.configs(self.kind, name, size, beside)
        return {k: {n: x for n, x in c.items() if n != "BLOCK"} for k, c in found.items()}

    def _blocks(self, value: Value) -> list[int]:
        return [self.axes[d].block for d in letters(value)]

    @cached_property
    def names(self) -> dict[Value, str]:
        """Names of the rule's inputs in the file."""
        taken = set(TAKEN) | {f"{word}_{d}" for d in self.axes for word in ("at", "in", "BLOCK")}
        return dict(zip(self.rule.inputs, own_names(self.rule.inputs, taken), strict=True))

    @property
    def operands(self) -> tuple[str, ...]:
        """The rule's operands, then the states before."""
        return tuple(self.names[v] for v in (*self.inputs, *self.states))

    @cached_property
    def made(self) -> tuple[str, ...]:
        """Outputs, then the states after."""
        outputs = [f"out_{i}" for i in range(len(self.outputs))]
        return (*outputs, *(f"{self.names[s]}_after" for s in self.states))

    def _strided(self) -> list[str]:
        return [self.names[v] for v, _, lead in self.given if "T" in lead]

    @cached_property
    def text(self) -> str:
        """The kernel, its configurations, `empty` and `run`."""
        taken = set(TAKEN) | {f"{word}_{d}" for d in self.axes for word in ("at", "in")}
        taken |= {*self.names.values(), *self.made}
        body = Body(self.rule, self.axes, taken, self.dtype)
        lines = body.print(self.names)
        pairs = zip(self.states, self.rule.outputs, strict=False)
        changed = [(self.names[s], body(v)) for s, v in pairs if body(v) != self.names[s]]
        olds, news = (", ".join(side) for side in zip(*changed)) if changed else ("", "")
        moved = [f"{olds} = {news}"] if changed else []  # all at once: one may be another's old
        loads: dict[bool, list[str]] = {True: [], False: []}
        for value, type_, lead in self.given:
            loads["T" in lead].append(self._operand(value, type_, lead))
        stores = [
            self._store(v, body(v), f"{name}_ptr", "token")
            for v, name in zip(self.outputs, self.made, strict=False)
        ]
        like = next(self.names[v] for v, _, lead in self.given if lead.startswith("BT"))
        shapes = [(self.heads, *(self.sizes[d] for d in letters(o))) for o in self.outputs]
        result = self.op.results[0].tensor.dtype if self.outputs else self.wide
        memory = [
            f"{name} = make((*tokens, {', '.join(map(str, shape))}), dtype={TORCH[result]}, "
            f"device={like}.device)"
            for name, shape in zip(self.made, shapes, strict=False)
        ]
        after = [f"{self.names[s]}_after" for s in self.states]
        memory += [
            f"{a} = torch.empty({n}.shape, dtype={n}.dtype, device={n}.device)"
            for a, n in zip(after, self.operands[len(self.inputs) :], strict=True)
        ]
        flatten = []
        for value, _, lead in self.given:
            n = self.names[value]
            flatten.append(
                f"{n} = at.by_token({n}, 2)" if "T" in lead else f"{n} = {n}.contiguous()"
            )
        flatten += [f"{self.names[s]} = {self.names[s]}.contiguous()" for s in self.states]
        everything = (*self.operands, *self.made)
        d = self.split
        fixed = [f"BLOCK_{a.name}={a.block}" for a in self.axes.values() if a.name != d]
        return render(
            "recurrent",
            name=self.name,
            rule=self.rule.name,
            split=d or "nothing",
            pointers=", ".join(f"{n}_ptr" for n in everything),
            strides=", ".join(f"stride_{n}" for n in self._strided()),
            blocks=", ".join(f"BLOCK_{d}: tl.constexpr" for d in self.axes),
            places=[line for axis in self.axes.values() for line in self._place(axis)],
            states_in=[
                f"{self.names[s]} = {self._load(s, f'{self.names[s]}_ptr', 'row')}"
                for s in self.states
            ],
            once=loads[False],
            loads=loads[True],
            body=lines,
            stores=[*stores, *moved],
            states_out=[
                self._store(s, self.names[s], f"{self.names[s]}_after_ptr", "row")
                for s in self.states
            ],
            configs=json.dumps(self.configs),
            arguments=", ".join(self.operands),
            like=like,
            memory=memory,
            made=", ".join(self.made),
            flatten=flatten,
            heads=self.heads,
            parts=f'triton.cdiv({self.sizes[d]}, config["BLOCK_{d}"])' if d else "1",
            first_state=self.operands[len(self.inputs)],
            given=", ".join(everything),
            given_strides=", ".join(f"{n}.stride(0)" for n in self._strided()),
            fixed=", ".join(fixed),
        )

    # ---- ahead of time

    @property
    def known(self) -> dict[str, int]:
        """Sizes of the rule's dims, and H, the heads of its states."""
        return {**self.sizes, "H": self.heads}

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's parameters and their types, constants aside."""
        types_ = [*(t.dtype for _, t, _ in self.given), *([self.wide] * len(self.states))]
        types_ += [v.tensor.dtype for v in self.op.results]
        names = [f"{n}_ptr" for n in (*self.operands, *self.made)]
        found = [Argument(n, pointer(t)) for n, t in zip(names, types_, strict=True)]
        found += [Argument("bounds", "*i64"), Argument("length", "i32")]
        for value, type_, lead in self.given:
            if "T" in lead:
                inner = math.prod(n for n in type_.shape[2:] if isinstance(n, int))
                found.append(Argument(f"stride_{self.names[value]}", "i32", inner))
        return tuple(found)

    def constants(self, config: dict[str, int], layout: str) -> dict[str, Any]:
        """Values of the constant parameters."""
        blocks = {f"BLOCK_{a.name}": a.block for a in self.axes.values() if a.name != self.split}
        dense = {"DENSE": True, "bounds": None} if layout == "dense" else {"DENSE": False}
        return {**dense, **blocks, **config}

    def traffic(self, config: dict[str, int], layout: str) -> tuple[int | Poly, int | Poly]:
        """Bytes read and written by one launch: over B lines of T tokens, or R rows of N in all.

        Every part of the split dim reads what has no such dim again; so do all heads that share.
        """
        batch, length, rows = (dims.symbol(x) for x in "BTR")
        tokens: int | Poly = batch * length
        if layout == "dense":
            rows = batch
        else:
            tokens = dims.symbol("N")
        d = self.split
        parts = -(-self.sizes[d] // config[f"BLOCK_{d}"]) if d else 1
        read: int | Poly = 0 if layout == "dense" else rows * (self.heads * parts * 16)
        written: int | Poly = 0
        for value, type_, lead in self.given:
            times = self.heads * (1 if d in letters(value) else parts)
            often = tokens if "T" in lead else rows
            read = read + often * (times * self.count(value) * types.size_of(type_.dtype))
        for state in self.states:
            size = self.heads * self.count(state) * types.size_of(self.wide)
            read = read + rows * (size * (1 if d in letters(state) else parts))
            written = written + rows * size
        for value, result in zip(self.outputs, self.op.results, strict=False):
            size = self.heads * self.count(value) * types.size_of(result.tensor.dtype)
            written = written + tokens * size
        return read, written

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
        name = self.names[value]
        base = f"{name}_ptr"
        if "T" in leading:
            base += f" + token * stride_{name}"
        if "H" in leading:
            own = type_.shape[leading.index("H")]
            assert isinstance(own, int)
            head = "head" if own == self.heads else f"head // {self.heads // own}"
            base += f" + {head}" + _times(self.count(value))
        return f"{name} = {self._loaded(value, base)}"

    def _load(self, value: Value, base: str, index: str) -> str:
        return self._loaded(value, f"{base} + {self._block(value, index)}")

    def _loaded(self, value: Value, base: str) -> str:
        offsets, masks = self._tile(value)
        rest = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
        return f"tl.load({' + '.join([base, *offsets])}{rest}).to(tl.{self.dtype})"

    def _store(self, value: Value, text: str, base: str, index: str) -> str:
        offsets, masks = self._tile(value)
        if self.split and self.split not in letters(value):
            masks.append("(part == 0)")
        place = f"{base} + {self._block(value, index)}"
        rest = f", mask={' & '.join(masks)}" if masks else ""
        return f"tl.store({' + '.join([place, *offsets])}, {text}{rest})"

    def _block(self, value: Value, index: str) -> str:
        """Where a head of a token or row begins, in a contiguous value."""
        first = f"{index} * {self.heads} + head" if self.heads > 1 else index
        count = self.count(value)
        return f"({first}) * {count}" if count > 1 and self.heads > 1 else first + _times(count)

    def _tile(self, value: Value) -> tuple[list[str], list[str]]:
        """Offsets of a tile along each of its axes, and what is real of them."""
        offsets, masks, names = [], [], letters(value)
        for at, d in enumerate(names):
            index = ", ".join(":" if i == at else "None" for i in range(len(names)))
            index = f"[{index}]" if len(names) > 1 else ""
            stride = math.prod(self.sizes[later] for later in names[at + 1 :])
            offsets.append(f"at_{d}{index}{_times(stride)}")
            if d == self.split or not self.axes[d].whole:
                masks.append(f"in_{d}{index}")
        return offsets, masks


def _times(n: int) -> str:
    return f" * {n}" if n > 1 else ""


def letters(value: Value) -> tuple[str, ...]:
    """The dims of a rule's operand, state or output."""
    assert isinstance(value.type, Tensor)
    found = [dims.bare(size) for size in value.type.shape]
    return tuple(d for d in found if d is not None)


def _lead(value: Value, declared: Value) -> str:
    """Which leading axes an operand has."""
    return placed(value.tensor, declared.tensor.rank)
