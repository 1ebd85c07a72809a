"""Rules as kernels, run by Triton's interpreter, against `state_update` in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archir.ops import OPS
from archir.sequence import Rows
from backends.triton.recurrent import Recurrent, letters
from tests.goldens import check_golden
from tests.recurrence.test_state_update import CASES, case
from tests.triton.kernels import Surroundings, kernel, loaded, lowered, surrounded

B, T = 2, 5
BOUNDS = {"dense": ((0, 5), (5, 10)), "ragged": ((1, 4), (4, 4), (7, 10))}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_as_a_kernel(name: str, tmp_path: Path) -> None:
    """From a state that has seen tokens, dense and ragged; the split dim in parts of two. Memory
    around what is read and written is NaN, tokens are strided."""
    rule, module, arrays = case(name)
    op, low = lowered(module, "state_update")
    made = kernel(op, low)
    recurrent = made.skeleton
    assert isinstance(recurrent, Recurrent)
    file = loaded(made, tmp_path)
    assert not recurrent.split or f"BLOCK_{recurrent.split}" in file.CONFIGS["interpreter"]
    file.CONFIGS["interpreter"] = dict.fromkeys(file.CONFIGS["interpreter"], 2)
    for bounds in BOUNDS.values():
        _compare(rule, recurrent, arrays, file, bounds)


def _compare(rule: Any, made: Recurrent, arrays: Any, file: Any, bounds: Any) -> None:
    rng = np.random.default_rng(3)
    shapes = [(made.heads, *(made.sizes[d] for d in letters(s))) for s in made.states]
    before = [rng.standard_normal((len(bounds), *shape)) for shape in shapes]
    given = [torch.from_numpy(np.ascontiguousarray(x)).float() for x in (*arrays, *before)]
    ends = [None, None] if bounds == BOUNDS["dense"] else [list(x) for x in zip(*bounds)]

    class Body:
        function = made.rule

        def __call__(self, *x: Any) -> Any:
            return rule(*x)

    seq = Rows.ragged(B, T, *zip(*bounds, strict=True))
    want = OPS["state_update"].meaning(*arrays, *before, seq, rule=Body())
    placed = [
        surrounded(x, x[0, 0].numel() + 5 if x.shape[:2] == (B, T) and x.ndim > 2 else 0)
        for x in given
    ]
    guard = Surroundings(file.empty)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "empty", guard)
        kernel_made = file.run(*placed, *ends)
    guard.check()
    for have in (kernel_made, file.eager(*given, *ends)):
        for y, x in zip(have, want, strict=True):
            assert np.max(np.abs(y.numpy() - x), initial=0) <= 2e-6 * np.max(np.abs(x), initial=1)


def test_a_kernel_reads_beside_its_rule() -> None:
    op, low = lowered(case("grouped keys")[1], "state_update")
    made = kernel(op, low)
    check_golden("triton/kda_recurrent", made.file.replace(made.name, "NAME"))
    assert max(map(len, made.file.splitlines())) <= 100
