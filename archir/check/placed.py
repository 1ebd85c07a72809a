"""A rule on operands of given sizes, heads and leading axes, and rows of drawn operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from archir import dims
from archir.bounds import parse_domain
from archir.check.batch import Batch
from archir.check.signature import Signature
from archir.diagnostics import SpecError, nearest
from archir.ir import Module
from archir.recurrence import Rule
from archir.types import Tensor

AXES = ("BTH", "BT", "H", "")


class Placed:
    """A rule on operands of given sizes, heads and leading axes: its module, and draws of rows.

    names: what the module calls the operands.
    """

    def __init__(
        self,
        rule: Rule,
        sizes: Mapping[str, int],
        heads: int | Mapping[str, int],
        axes: Mapping[str, str],
    ) -> None:
        self.rule = rule
        names = [*rule.operands]
        for name in (*axes, *(heads if isinstance(heads, Mapping) else ())):
            if name not in names:
                raise SpecError(
                    f"{name!r} is no operand of {rule.name}",
                    code="check-operand",
                    next=nearest(name, names),
                )
        for name, lead in axes.items():
            if lead not in AXES:
                raise SpecError(
                    f"{name} cannot have the leading axes {lead!r}",
                    code="check-axes",
                    next="an operand has BTH, BT (one for all heads), H (one for all tokens) or ''",
                )
        most = heads if isinstance(heads, int) else max(heads.values(), default=1)
        each = {n: heads if isinstance(heads, int) else heads.get(n, most) for n in names}
        self.axes = {name: axes.get(name, "BTH") for name in names}
        self._inner: dict[str, tuple[int, ...]] = {}
        for name, shape in rule.operands.items():
            lead = (each[name],) if "H" in self.axes[name] else ()
            self._inner[name] = (*lead, *(sizes.get(d, 3) for d in shape))
        self.module = self._trace()
        self.signature = Signature(self.module)

    def _trace(self) -> Module:
        """The rule on operands so placed, those with tokens first, from which rows are made."""
        grid = dims.symbol("B"), dims.symbol("T")
        traced = self.rule.trace(
            {
                name: Tensor("f", (*(grid if "T" in self.axes[name] else ()), *shape))
                for name, shape in self._inner.items()
            }
        )
        *others, entry = traced.functions
        self.names = [v.name for v in entry.inputs]
        lead = dict(zip(entry.inputs, self.axes.values(), strict=True))
        inputs = sorted(entry.inputs, key=lambda v: "T" not in lead[v])
        ops = tuple(replace(op, loc=entry.loc) for op in entry.ops)  # nobody wrote them
        return Module((*others, replace(entry, inputs=tuple(inputs), ops=ops)))

    def shapes(self, batch: int, length: int) -> dict[str, tuple[int, ...]]:
        """The shape of each operand on a grid [B, T]."""
        return {
            name: (*((batch, length) if "T" in self.axes[name] else ()), *inner)
            for name, inner in self._inner.items()
        }

    def draw(self, length: int, ragged: bool, rng: np.random.Generator) -> Batch:
        """Rows of drawn operands: two of all tokens, or five of unlike length, one empty. In all
        about 16 tokens at least, as of a few the anchor's error is luck."""
        lengths = (length,) * max(2, 16 // length)
        if ragged:
            lengths = (length - length // 3, 0, length, min(length, 1), length // 2)
            lengths *= max(1, -(-16 // sum(lengths)))
        made = draw(self.rule, self.shapes(len(lengths), length), rng)
        named = [*zip(self.names, self.axes.values(), made.values(), strict=True)]
        lines = [
            {name: x[row, :n] for name, lead, x in named if "T" in lead}
            for row, n in enumerate(lengths)
        ]
        shared = {name: x for name, lead, x in named if "T" not in lead}
        return Batch(self.signature, lines, shared, lengths)


def draw(
    rule: Rule, shapes: Mapping[str, tuple[int, ...]], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Operands of these shapes inside the rule's domain: normal numbers, folded at a bound or
    uniform between two, of length 1 on the last axis where they are `unit`."""
    return {name: _draw(rule.domain.get(name, ""), shape, rng) for name, shape in shapes.items()}


def _draw(domain: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    x = rng.standard_normal(shape)
    if domain == "unit":
        return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True))
    if not domain:
        return x
    within = parse_domain(domain)
    if np.isfinite(within.width):
        return rng.uniform(within.low, within.high, shape)
    if np.isfinite(within.low):
        return within.low + np.abs(x)
    return within.high - np.abs(x) if np.isfinite(within.high) else x
