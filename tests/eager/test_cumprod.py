"""Running products and their gradients, and the chunked forms that are made of them, under
compilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import archir as ar
from backends.eager import support
from tests.specs.kda import kda, kda_lm

FORMS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "one by one": support.cumprod,
    "by doubling": support._Cumprod.apply,
}
# torch's own: its compiler makes an instance of what it says not to
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def product_rule(x: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The gradient along the first axis: Σ_{i≥t} c_i Π_{s≤i, s≠t} x_s."""
    found = np.zeros_like(x)
    for t in range(len(x)):
        others = x.copy()
        others[t] = 1
        found[t] = np.sum(ends[t:] * np.cumprod(others, axis=0)[t:], axis=0)
    return found


@pytest.mark.parametrize("special", [(), (0.0,), (0.0, 0.0), (1e-41,), (1e-41, 1e-41)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_gradients(form: str, special: tuple[float, ...]) -> None:
    """Those of float32 numbers, zeros and subnormal ones among them, to its rounding."""
    rng = np.random.default_rng(0)
    for length in (1, 2, 3, 4, 5, 8, 9, 17):
        x, ends = rng.uniform(-1.5, 1.5, (2, length, 3)).astype("float32")
        for at, number in enumerate(special[:length]):
            x[(2 + 3 * at) % length, at:] = number
        for dtype in (torch.float32, torch.float64):
            for axis in (0, 1):
                given = torch.tensor(x, dtype=dtype).movedim(0, axis).requires_grad_()
                made = FORMS[form](given, axis)
                (found,) = torch.autograd.grad(made, given, torch.tensor(ends).movedim(0, axis))
                want = product_rule(x.astype("float64"), ends.astype("float64"))
                far = np.abs(found.movedim(axis, 0).numpy() - want)
                unit = torch.finfo(dtype).eps
                assert np.all(far <= 2 * length * unit * np.max(np.abs(want), axis=0))
                plain = np.cumprod(x, axis=0)
                assert np.allclose(made.detach().movedim(axis, 0).numpy(), plain, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_gradients(form: str) -> None:
    x = torch.randn(2, 5, 2, dtype=torch.float64)
    x[0, 2] = 0
    assert torch.autograd.gradgradcheck(lambda x: FORMS[form](x, 1), x.requires_grad_())


def test_one_graph_for_lengths_of_one_size() -> None:
    """Gradients are made by doubling: from 2ⁿ + 2 to 2ⁿ⁺¹ + 1 factors they take as many steps."""
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda x: support.long_cumprod(x, 1), fullgraph=True, backend=counter)
    for length in (10, 16, 17):
        x = torch.randn(2, length, 3).requires_grad_()
        torch._dynamo.mark_dynamic(x, 1)
        made = [torch.autograd.grad(f(x, 1).square().sum(), x)[0] for f in (
            lambda x, _: run(x), support.cumprod,
        )]  # fmt: skip
        torch.testing.assert_close(*made)
    assert counter.frame_count == 1


@pytest.mark.parametrize("form", ("chunk", pytest.param("parallel", marks=pytest.mark.slow)))
def test_a_rule_in_one_graph(form: str) -> None:
    """Its gradients too; the last chunk is not full."""
    f, rng = ar.op(kda, form=form), np.random.default_rng(0)
    shapes = {"q": (2, 19, 2, 3), "k": (2, 19, 2, 3), "v": (2, 19, 2, 4), "g": (2, 19, 2, 3)}
    drawn = [torch.tensor(rng.uniform(-1, 0, s)) for s in shapes.values()]
    given = [x.requires_grad_() for x in (*drawn, torch.rand(2, 19, 2, dtype=torch.float64))]
    made = []
    for run in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        out = run(*given)
        made.append([out, *torch.autograd.grad(out.square().sum(), given)])
    torch.testing.assert_close(*made, rtol=1e-12, atol=1e-12)


def test_export_of_the_parallel_form() -> None:
    """One program for every length."""
    model = ar.compile(kda_lm, preset="tiny", form="parallel").init_weights(0)
    tokens = torch.randint(0, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    shapes = {"tokens": {1: torch.export.Dim("T", min=2, max=200)}}
    program = torch.export.export(model, (tokens[:, :9].clone(),), dynamic_shapes=shapes)
    with torch.no_grad():
        for length in (4, 16, 40):
            given = tokens[:, :length].clone()
            torch.testing.assert_close(program.module()(given), model(given))
