"""Random affine rules: chunked in the interpreter and on eager, they are their literal loops."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

import archir as ar
from archir.check.recurrence import Placed, draw
from archir.recurrence import Rule
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
        ran = emitted(rule, form, layout, operands, states, lengths)
        assert difference(ran, want, rows) <= BOUND


def emitted(
    rule: Rule,
    form: tuple[str, int],
    layout: str,
    operands: dict[str, np.ndarray],
    states: list[np.ndarray],
    lengths: tuple[int, ...],
) -> Ran:
    """What torch makes of the rows at once."""
    rows: dict[str, Any] = {}
    if layout == "packed":
        rows = {"cu_seqlens": [0, *np.cumsum(lengths).tolist()]}
    elif layout != "dense":
        rows = {"lengths": list(lengths), "padding": layout}
    xs = [torch.tensor(x) for x in operands.values()]
    initial = tuple(torch.tensor(s) for s in states)
    with chunks_of(form[1]), torch.no_grad():
        f = ar.op(rule, "eager", form=form[0])
        outputs, after = f(*xs, initial_state=initial, return_state=True, **rows)
    made = (outputs if isinstance(outputs, tuple) else (outputs,), after)
    after = after if isinstance(after, tuple) else (after,)
    return Ran(tuple(x.numpy() for x in made[0]), tuple(x.numpy() for x in after))


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
