"""The literal loop: on copies, by head and by token, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import archir as ar
from archir.check.batch import place
from archir.diagnostics import ArchirError, ShapeError, SpecError
from archir.recurrence.literal import literal
from archir.sequence import Rows
from tests.recurrence.library import draw, kda, mamba2
from tests.specs.kda import kda as plain


def test_by_hand() -> None:
    """Grouped heads: value head h reads key head h // 2."""
    x = draw("kda", 1, 3)
    loop = literal(kda, [*x.values()])
    for head in range(4):
        S = np.zeros((5, 7))
        seen = 0.0
        for t in range(3):
            q, k, g = (x[name][0, t, head // 2] for name in "qkg")
            S, o = kda.fn(S, q, k, x["v"][0, t, head], g, x["beta"][0, t, head])
            seen = max(seen, np.max(np.abs(S)), np.max(np.abs(o)))
            np.testing.assert_array_equal(loop.outputs[0][0, t, head], o)
            assert loop.largest[0, t, head] == seen
        np.testing.assert_array_equal(loop.states[0][0, head], S)


def test_shared_operands_and_constants_of_a_head() -> None:
    x = draw("mamba2", 2, 4)
    assert x["b"].ndim == 3 and x["a"].shape == (3,)
    wide = [np.repeat(x[n][:, :, None], 3, axis=2) if n in "cb" else x[n] for n in x]
    wide[-1] = np.broadcast_to(x["a"], (2, 4, 3))
    for one, other in zip(literal(mamba2, [*x.values()]).outputs, literal(mamba2, wide).outputs):
        np.testing.assert_array_equal(one, other)


def test_rows_and_states() -> None:
    """Packed rows, one of them empty, from a state: each alone."""
    x = draw("kda", 1, 7)
    lengths = (3, 0, 4)
    start = np.random.default_rng(0).standard_normal((3, 4, 5, 7))
    loop = literal(kda, [*x.values()], [start], place("packed", lengths))
    np.testing.assert_array_equal(loop.states[0][1], start[1])
    for row, (a, b) in enumerate(((0, 3), (3, 3), (3, 7))):
        alone = literal(kda, [v[:, a:b] for v in x.values()], [start[row : row + 1]])
        np.testing.assert_array_equal(loop.outputs[0][:, a:b], alone.outputs[0])
        np.testing.assert_array_equal(loop.states[0][row], alone.states[0][0])


def test_it_runs_on_copies() -> None:
    """A body that sees arrays and changes them changes nobody's."""

    @ar.recurrence("q:K k:K v:V -> o:V")
    def sly(S: Any, q: Any, k: Any, v: Any) -> Any:
        if isinstance(S, np.ndarray):
            S += np.outer(k, v)
            k *= 0
        else:
            S = S + np.outer(k, v)
        return S, q @ S

    rng = np.random.default_rng(0)
    given = [rng.standard_normal((1, 4, 2, n)) for n in (3, 3, 2)]
    start = rng.standard_normal((1, 2, 3, 2))
    before = [x.copy() for x in (*given, start)]
    literal(sly, given, [start])
    for x, y in zip((*given, start), before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_in_place_is_refused_before_it_happens() -> None:
    @ar.recurrence("q:K k:K v:V -> o:V")
    def broken(S: Any, q: Any, k: Any, v: Any) -> Any:
        S += np.outer(k, v)
        return S, q @ S

    S = np.zeros((3, 2))
    with pytest.raises(SpecError, match="S would be changed in place"):
        broken(S, np.ones(3), np.ones(3), np.ones(2))
    assert not S.any()


def test_words_of_archir_are_what_their_ops_mean() -> None:
    @ar.recurrence("q:K k:K v:V g:K -> o:V")
    def worded(S: Any, q: Any, k: Any, v: Any, g: Any) -> Any:
        S = ar.sigmoid(g)[:, None] * S + np.outer(ar.l2_norm(ar.silu(k)), v)
        return S, ar.where(v > 0, q @ S, 0.0)

    report = ar.check_recurrence(worded, 9)
    assert report.ok, report


REFUSED: dict[str, list[Any]] = {
    "takes 5 operands, 2 given": [np.zeros((1, 2, 1, 3))] * 2,
    "operand beta of kda has axes": [np.zeros((1, 2, 1, 3))] * 5,
    "no operand of kda has tokens": [np.zeros(3)] * 4 + [np.zeros(())],
    "g has 4 on the axis K": [np.zeros((1, 2, 1, n)) for n in (3, 3, 2, 4)] + [np.zeros((1, 2))],
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    with pytest.raises(ArchirError, match=message):
        literal(plain, REFUSED[message])


def test_a_state_of_another_shape_is_refused() -> None:
    x = draw("kda", 1, 2)
    with pytest.raises(ShapeError, match="states of kda are"):
        literal(kda, [*x.values()], [np.zeros((1, 4, 7, 5))], Rows.dense(1, 2))
