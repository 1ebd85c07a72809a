"""A function of scalars at every element as one Triton kernel, printed from the function's IR.

Operands broadcast: one with the result's leading axes (up to the last whose size is a symbol) is
read from token to token by its stride, without a copy; one without them is read again by each.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from archir import types
from archir.dims import Poly, product
from archir.ir import Function, Module, Op, Value
from archir.types import Tensor
from backends.triton import configurations
from backends.triton.body import Body, printable
from backends.triton.kernel import TAKEN, TORCH, Argument, own_names, pointer
from backends.triton.render import render


@dataclass(frozen=True)
class Pointwise:
    """A `pointwise` op of floats. One program computes BLOCK elements of the result."""

    op: Op
    module: Module
    kind = "pointwise"

    @staticmethod
    def refusal(op: Op, module: Module) -> str:
        """Why an op has no kernel of this kind; "" where it has."""
        for value in (*op.values, *op.results):
            dtype = value.type.dtype if isinstance(value.type, Tensor) else ""
            if not types.is_float(dtype) and (dtype != "bool" or value in op.results):
                return f"{value.name} is {value.type}, kernels compute on floats"
        fn = module[op.attrs["fn"].name]
        dtypes = {value.tensor.dtype for value in (*op.values, *op.results)}
        if len(fn.ops) < 2 and len(dtypes) == 1:
            return "it is one op, for which torch has a kernel"
        return printable(fn)

    @cached_property
    def fn(self) -> Function:
        """The function of scalars."""
        return self.module[self.op.attrs["fn"].name]

    @property
    def stem(self) -> str:
        """The function's name."""
        return self.fn.name

    @property
    def name(self) -> str:
        """Of the Triton function, which profilers show."""
        return f"{self.stem}_pointwise"

    @property
    def about(self) -> str:
        """What it computes, and where that is written."""
        place = self.fn.loc or self.op.loc
        return f"{self.fn.name} at every element" + (f" ({place.short})" if place else "")

    @cached_property
    def shape(self) -> tuple[int | Poly, ...]:
        """Of the result."""
        return self.op.results[0].tensor.shape

    @cached_property
    def lead(self) -> int:
        """How many leading axes are tokens: up to the last whose size is a symbol."""
        symbolic = [i for i, size in enumerate(self.shape) if isinstance(size, Poly)]
        return symbolic[-1] + 1 if symbolic else 0

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The axes of one token."""
        return tuple(size for size in self.shape[self.lead :] if isinstance(size, int))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the operands in the file."""
        return own_names(self.fn.inputs, set(TAKEN))

    @property
    def operands(self) -> tuple[str, ...]:
        """The operands."""
        return self.names

    @cached_property
    def made(self) -> tuple[str, ...]:
        """The results."""
        return tuple(f"out_{i}" for i in range(len(self.op.results)))

    @cached_property
    def configs(self) -> dict[str, dict[str, int]]:
        """How it is launched, by what runs it."""
        return configurations.configs(self.kind, "BLOCK", 1 << 30, 1)

    def _own(self, value: Value) -> tuple[int | Poly, ...]:
        """An operand's axes within a token, aligned with `inner`; 1 where it has none."""
        shape = value.tensor.shape
        return ((1,) * len(self.shape) + shape)[len(shape) + self.lead :]

    def _has_tokens(self, value: Value) -> bool:
        """Whether an operand has a leading axis of the result's."""
        shape = value.tensor.shape
        own = ((1,) * len(self.shape) + shape)[len(shape) :][: self.lead]
        return any(size != 1 for size in own)

    @cached_property
    def dtype(self) -> str:
        """The dtype it computes in."""
        found = [v.tensor.dtype for v in (*self.op.values, *self.op.results)]
        return "float64" if "f64" in found else "float32"

    @cached_property
    def text(self) -> str:
        """The kernel, its configurations, `empty` and `run`."""
        body = Body(self.fn, {}, {*TAKEN, *self.names, *self.made}, self.dtype)
        lines = body.print(dict(zip(self.fn.inputs, self.names, strict=True)))
        pairs = list(zip(self.names, self.op.values, strict=True))
        stores = [
            f"tl.store({name}_ptr + place, {body(v)}, mask=inside)"
            for name, v in zip(self.made, self.fn.outputs, strict=True)
        ]
        strided = [name for name, value in pairs if self._has_tokens(value)]
        first, width = self.made[0], math.prod(self.inner)
        return render(
            "pointwise",
            name=self.name,
            function=self.fn.name,
            parameters=", ".join(
                [
                    *(f"{n}_ptr" for n in (*self.names, *self.made)),
                    "size",
                    *(f"stride_{n}" for n in strided),
                    "BLOCK: tl.constexpr",
                ]
            ),
            inner=width,
            places=[f"token, i = place // {width}, place % {width}"]
            if self.lead
            else ["i = place"],
            loads=[self._load(name, value) for name, value in pairs],
            body=lines,
            stores=stores,
            configs=json.dumps(self.configs),
            arguments=", ".join(self.names),
            shapes=", ".join(f"{n}.shape" for n in self.names),
            memory=[
                f"{n} = torch.empty(shape, dtype={TORCH[v.tensor.dtype]}, "
                f"device={self.names[0]}.device)"
                for n, v in zip(self.made, self.op.results, strict=True)
            ],
            made=", ".join(self.made),
            first=first,
            flatten=[self._flat(name, value) for name, value in pairs],
            given=", ".join(
                [*self.names, *self.made, "size", *(f"{n}.stride(0)" for n in strided)]
            ),
        )

    def _flat(self, name: str, value: Value) -> str:
        """An operand as [tokens, *its own axes], or contiguous where it has no tokens."""
        if not self._has_tokens(value):
            return f"{name} = {name}.contiguous()"
        shape = value.tensor.shape
        if len(shape) == len(self.shape) and shape[: self.lead] == self.shape[: self.lead]:
            return f"{name} = at.by_token({name}, {self.lead})"
        own = ", ".join(map(str, self._own(value)))
        wide = f"{name}.expand(*{self.made[0]}.shape[:{self.lead}], {own})"
        return f"{name} = at.by_token({wide}, {self.lead})"

    def _load(self, name: str, value: Value) -> str:
        terms = [f"{name}_ptr"]
        if self._has_tokens(value):
            terms.append(f"token * stride_{name}")
        terms += self._index(value)
        kept = "int1" if value.tensor.dtype == "bool" else self.dtype
        other = "0" if kept == "int1" else "0.0"
        place = " + ".join(terms)
        if len(terms) == 1:  # one number for all
            place += " + 0 * i"
        return f"{name} = tl.load({place}, mask=inside, other={other}).to(tl.{kept})"

    def _index(self, value: Value) -> list[str]:
        """The place of an operand's element within a token, from the result's place `i`."""
        own, terms = self._own(value), []
        at = 0
        while at < len(own):
            if own[at] == 1:
                at += 1
                continue
            end = at
            while end < len(own) and own[end] != 1:
                end += 1
            later, mine = math.prod(self.inner[end:]), math.prod(own[end:])  # type: ignore[type-var]
            run = math.prod(self.inner[at:end])
            text = "i" if later == 1 else f"i // {later}"
            if math.prod(self.inner[:at]) > 1:
                text = f"{text} % {run}"
            terms.append(text if mine == 1 else f"({text}) * {mine}")
            at = end
        return terms

    # ---- ahead of time

    @property
    def known(self) -> dict[str, int]:
        """I, the elements of a token."""
        return {"I": math.prod(self.inner)}

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's parameters and their types, constants aside."""
        values = (*self.op.values, *self.op.results)
        names = (*self.names, *self.made)
        found = [
            Argument(f"{n}_ptr", pointer(v.tensor.dtype))
            for n, v in zip(names, values, strict=True)
        ]
        found.append(Argument("size", "i32", math.prod(self.inner)))
        for name, value in zip(self.names, self.op.values, strict=True):
            if self._has_tokens(value):
                inner = math.prod(n for n in self._own(value) if isinstance(n, int))
                found.append(Argument(f"stride_{name}", "i32", inner))
        return tuple(found)

    def constants(self, config: dict[str, int], layout: str) -> dict[str, Any]:
        """Values of the constant parameters."""
        return dict(config)

    def traffic(self, config: dict[str, int], layout: str) -> tuple[int | Poly, int | Poly]:
        """Bytes read and written by one launch; every element of the result reads all operands."""
        count = product(self.shape)

        def of(values: tuple[Value, ...]) -> int | Poly:
            return count * sum(types.size_of(v.tensor.dtype) for v in values)

        return of(self.op.values), of(self.op.results)
