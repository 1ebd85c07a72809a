"""The token by token gradient against torch's autograd through the recurrent form."""

from __future__ import annotations

import numpy as np
import pytest

from archir.recurrence.backward import backward
from tests.recurrence.library import EXAMPLES, placed
from tests.recurrence.test_chunk import case, operator, slopes


@pytest.mark.parametrize("name", EXAMPLES)
def test_backward(name: str) -> None:
    """Of every operand and of the state before, through outputs and final states."""
    given, rule = case(name, 9), placed(name).rule
    lead, count = placed(name).axes.values(), len(rule.outputs)
    rows = []
    for row in (slice(0, 1), slice(1, 2)):
        xs = [x[row] if "T" in a else x for x, a in zip(given.operands.values(), lead, strict=True)]
        seeds, states = [x[row] for x in given.cotangents], [s[row] for s in given.states]
        rows.append(backward(rule, xs, seeds[:count], states, seeds[count:]))
    (of_first, first), (of_second, second) = rows
    have = [
        np.concatenate([x, y]) if "T" in a else x + y
        for x, y, a in zip(of_first, of_second, lead, strict=True)
    ]
    have += [np.concatenate(pair) for pair in zip(first, second, strict=True)]
    want = slopes(operator(name, "recurrent"), given)
    for label, x, y in zip(given.labels, have, want, strict=True):
        assert np.all(np.abs(x - y) <= 1e-13 * np.max(np.abs(y))), label
