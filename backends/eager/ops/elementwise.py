"""Elementwise ops: one row each. `{0}`, `{1}`, `{2}` are operands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archir.ir import Op, Value
from backends.eager.ops.base import EMIT, number

if TYPE_CHECKING:
    from backends.eager.emit import Printer

TABLE = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "floor_divide": "{0} // {1}",
    "mod": "{0} % {1}",
    "pow": "{0} ** {1}",
    "maximum": "torch.maximum({0}, {1})",
    "minimum": "torch.minimum({0}, {1})",
    "neg": "-{0}",
    "abs": "torch.abs({0})",
    "floor": "torch.floor({0})",
    "exp": "torch.exp({0})",
    "exp2": "torch.exp2({0})",
    "expm1": "torch.expm1({0})",
    "log": "torch.log({0})",
    "log1p": "torch.log1p({0})",
    "sqrt": "torch.sqrt({0})",
    "rsqrt": "torch.rsqrt({0})",
    "sin": "torch.sin({0})",
    "cos": "torch.cos({0})",
    "tanh": "torch.tanh({0})",
    "sigmoid": "torch.sigmoid({0})",
    "silu": "F.silu({0})",
    "relu": "F.relu({0})",
    "softplus": "F.softplus({0}, threshold=40.0)",
    "gelu_tanh": 'F.gelu({0}, approximate="tanh")',
    "less": "{0} < {1}",
    "less_equal": "{0} <= {1}",
    "greater": "{0} > {1}",
    "greater_equal": "{0} >= {1}",
    "equal": "{0} == {1}",
    "not_equal": "{0} != {1}",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_not": "~{0}",
    "where": "torch.where({0}, {1}, {2})",
}
# With a number as operand, torch says these as a clamp.
_CLAMP = {"maximum": "torch.clamp({0}, min={1})", "minimum": "torch.clamp({0}, max={1})"}


def _emit(p: Printer, op: Op) -> str:
    numbers = [x for x in op.operands if not isinstance(x, Value)]
    if op.kind in _CLAMP and numbers:
        (value,) = op.values
        return _CLAMP[op.kind].format(p(value), number(numbers[0]))
    template = TABLE[op.kind]
    operands = [p(x) for x in op.operands]
    if "(" not in template:  # beside an operator a sign would bind wrongly
        operands = [f"({text})" if text.startswith("-") else text for text in operands]
    return template.format(*operands)


EMIT.update(dict.fromkeys(TABLE, _emit))
