"""The gradient of a recurrence, token by token: what the gradient of every form is held to.

    S_1 … S_n forward, then for t = n … 1
    d S_{t−1}, d x_t = rule_gradient(S_{t−1}, x_t, d S_t, d o_t)

It interprets the rule's IR function and its reverse pass (passes/gradient.py) for all heads of one
row; no form's algebra is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from archir.interp import call
from archir.passes.gradient import gradient
from archir.recurrence.lift import batch
from archir.recurrence.literal import leading, sizes_of, states_before
from archir.recurrence.rule import Rule

Arrays = Sequence[np.ndarray]


def backward(
    rule: Rule,
    operands: Arrays,
    cotangents: Arrays,
    states: Arrays | None = None,
    final: Arrays | None = None,
    dtype: str = "float64",
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """d (Σ ⟨cotangent, output⟩ + Σ ⟨final, last state⟩) by the operands and the first states.

    operands, states: of one row, placed as for `literal`, B = R = 1; states are zeros unless given.
    cotangents: of the outputs, [1, T, H, …] each.  final: of the states after the last token; zeros
    unless given.  dtype: that of the interpreter. Raises UnsupportedError at an op that has no
    gradient.
    """
    extra = leading(rule, operands)
    length, heads = cotangents[0].shape[1:3]
    before = states_before(rule, sizes_of(rule, operands, extra), 1, heads, states)
    xs = [_Operand(np.asarray(x, dtype), e, heads) for x, e in zip(operands, extra, strict=True)]
    step = batch(rule.function, (heads,), {}, rule.name)
    back = batch(gradient(rule.function), (heads,), {}, f"{rule.name}_gradient")
    count = len(before)
    seen = [[s[0] for s in before]]
    for token in range(length):
        made = call(step, [*seen[-1], *(x.at(token) for x in xs)], dtype)
        seen.append([*made[:count]])
    flow = [np.zeros_like(s) for s in seen[0]] if final is None else [s[0] for s in final]
    for token in reversed(range(length)):
        given = [*seen[token], *(x.at(token) for x in xs), *flow]
        made = call(back, [*given, *(c[0, token] for c in cotangents)], dtype)
        flow = [*made[:count]]
        for x, share in zip(xs, made[count:], strict=True):
            x.add(token, share)
    return [x.gradient for x in xs], [s[None] for s in flow]


class _Operand:
    """An operand of one row, [1, T, H, …], [1, T, …], [H, …] or […], and its gradient so far."""

    def __init__(self, x: np.ndarray, extra: int, heads: int) -> None:
        self.gradient = np.zeros_like(x)
        self._tokens, self._own = extra >= 2, x.shape[extra - 1] if extra in (1, 3) else 0
        self._x, self._heads = x, heads

    def at(self, token: int) -> np.ndarray:
        """What every head has at a token, [H, …]."""
        x = self._x[0, token] if self._tokens else self._x
        x = x if self._own else x[None]
        return np.repeat(x, self._heads // len(x), axis=0)

    def add(self, token: int, share: np.ndarray) -> None:
        """Adds the gradient of what `at` gave."""
        own = max(self._own, 1)
        total = np.sum(share.reshape(own, self._heads // own, *share.shape[1:]), axis=1)
        at = (0, token) if self._tokens else ()
        self.gradient[at] += total if self._own else total[0]
