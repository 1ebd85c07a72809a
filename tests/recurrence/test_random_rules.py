"""Random affine rules: chunked in the interpreter and on eager, they are their literal loops; and
so are their gradients."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

import archir as ar
from archir.check.placed import Placed, draw
from archir.recurrence import Rule
from archir.recurrence.backward import backward
from archir.recurrence.literal import literal
from archir.sequence import Rows
from tests.recurrence.forms import BOUND, Form, Ran, chunks_of, difference, in_pieces, laid_out
from tests.recurrence.random_rules import WANTED, Drawn, rules

LENGTHS = (1, 2, 15, 16, 17, 17, 31, 33, 33, 63, 64, 65)
LAYOUTS = ("dense", "packed", "left", "right")
FORMS = (*(("chunk", n) for n in (1, 2, 7, 16, 16, 32, 64)), ("parallel", 16))


def check(drawn: Drawn, data: st.DataObject, folder: Path, emit: bool) -> None:
    """One T, layout, split and form, cut in two; emitted as a whole."""
    note(drawn.text)
    rule = drawn.rule(folder)
    placed = Placed(rule, drawn.sizes, drawn.heads, drawn.axes)
    T, layout = data.draw(st.sampled_from(LENGTHS)), data.draw(st.sampled_from(LAYOUTS))
    form = data.draw(st.sampled_from(FORMS))
    lengths = (T,) if layout == "dense" else (0, T, data.draw(st.integers(0, min(T, 17))))
    rows = laid_out(layout, lengths) or Rows.dense(1, T)
    cuts = [data.draw(st.integers(0, n)) for n in lengths]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    operands = draw(rule, placed.shapes(rows.batch, rows.length), rng)
    zeros = literal(rule, list(operands.values()), None, rows).states
    signs = {"z": abs}  # a normaliser is positive
    states = [
        signs.get(name[0], np.asarray)(rng.normal(size=s.shape))
        for name, s in zip(rule.states, zeros, strict=True)
    ]
    want = literal(rule, list(operands.values()), states, rows)
    note(f"T={T} {layout} {lengths} cut at {cuts}, {form}")
    have = in_pieces(Form(placed, *form), layout, operands, states, rows, cuts)
    assert difference(have, want, rows) <= BOUND
    if emit:
        cotangents = [rng.uniform(-1, 1, x.shape) for x in (*want.outputs, *want.states)]
        ran, slopes = emitted(rule, form, layout, operands, states, lengths, cotangents)
        assert difference(ran, want, rows) <= BOUND
        right = slopes_by_token(placed, operands, states, rows, cotangents)
        for name, x, y in zip((*operands, *rule.states), slopes, right, strict=True):
            assert np.max(np.abs(x - y), initial=0) <= 1e-9 * np.max(np.abs(y), initial=0), name


def slopes_by_token(
    placed: Placed,
    operands: dict[str, np.ndarray],
    states: list[np.ndarray],
    rows: Rows,
    cotangents: list[np.ndarray],
) -> list[np.ndarray]:
    """Gradients by every operand and state before, of each row alone, token by token backwards."""
    rule, count = placed.rule, len(placed.rule.outputs)
    found = [np.zeros_like(x) for x in (*operands.values(), *states)]
    tokens = ["T" in axes for axes in placed.axes.values()]

    def flat(x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, *x.shape[2:])

    for row, (start, stop, _) in enumerate(rows):
        at, one = slice(start, stop), slice(row, row + 1)
        xs = [flat(x)[at][None] if t else x for x, t in zip(operands.values(), tokens, strict=True)]
        seeds = [flat(c)[at][None] for c in cotangents[:count]]
        before, final = [s[one] for s in states], [c[one] for c in cotangents[count:]]
        of_operands, of_states = backward(rule, xs, seeds, before, final)
        for x, slope, t in zip(found, of_operands, tokens, strict=False):
            if t:
                flat(x)[at] = slope[0]
            else:
                x += slope
        for x, slope in zip(found[len(operands) :], of_states, strict=True):
            x[one] = slope
    return found


def emitted(
    rule: Rule,
    form: tuple[str, int],
    layout: str,
    operands: dict[str, np.ndarray],
    states: list[np.ndarray],
    lengths: tuple[int, ...],
    cotangents: list[np.ndarray],
) -> tuple[Ran, list[np.ndarray]]:
    """What torch makes of the rows at once, and gradients by every operand and state before."""
    rows: dict[str, Any] = {}
    if layout == "packed":
        rows = {"cu_seqlens": [0, *np.cumsum(lengths).tolist()]}
    elif layout != "dense":
        rows = {"lengths": list(lengths), "padding": layout}
    xs = [torch.tensor(x, requires_grad=True) for x in operands.values()]
    initial = tuple(torch.tensor(s, requires_grad=True) for s in states)
    with chunks_of(form[1]):
        f = ar.op(rule, "eager", form=form[0])
        outputs, after = f(*xs, initial_state=initial, return_state=True, **rows)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    after = after if isinstance(after, tuple) else (after,)
    seeds = [torch.tensor(c) for c in cotangents]
    slopes = torch.autograd.grad((*outputs, *after), (*xs, *initial), seeds, materialize_grads=True)
    ran = Ran(tuple(x.detach().numpy() for x in outputs), tuple(x.detach().numpy() for x in after))
    return ran, [x.numpy() for x in slopes]


def test_random_rules(tmp_path: Path) -> None:
    """Two hundred, every tenth also emitted; at least twenty with each of what is `WANTED`."""
    seen: Counter[str] = Counter()

    @settings(
        max_examples=200,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(rules(), st.data())
    def run(drawn: Drawn, data: st.DataObject) -> None:
        emit = seen["rules"] % 10 == 0
        seen["drawn"] += 1
        folder = tmp_path / str(seen["drawn"])
        folder.mkdir()
        check(drawn, data, folder, emit)
        seen.update(["rules", *drawn.features, *(["emitted"] if emit else [])])

    run()
    assert seen["rules"] >= 200 and seen["emitted"] >= 20
    assert all(seen[feature] >= 20 for feature in WANTED), seen
