"""torch.compile without a graph break, and torch.export: what they make equals the plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.exc import InternalTorchDynamoError
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import archir as ar
from archir.diagnostics import MismatchError
from backends.eager import support
from backends.runtime.model import _untraced
from tests.specs.kda import kda_lm

SPECS = {"gpt2": "gpt2", "llama": "llama", "kda": kda_lm}
# Python's `for` over the tokens of a recurrence is unrolled: on eager kda has one graph per length.
# On Triton it is a kernel.
DYNAMIC = ("gpt2", "llama")
WITHOUT_LOOP = [
    ("eager", "gpt2"),
    ("triton", "kda"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("eager", "llama"), ("triton", "gpt2"), ("triton", "llama"))
    ),
]
# With plain aot_eager, torch 2.13 takes the gradient of softplus for contiguous, so that kda's
# backward pass, where it is transposed, raises. Inductor's decompositions have no such mistake.
CASES = [
    ("eager", "gpt2", "eager"),
    ("eager", "llama", "aot_eager"),
    ("triton", "kda", "aot_eager_decomp_partition"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("eager", "gpt2", "aot_eager"),
            ("eager", "llama", "eager"),
            ("eager", "kda", "eager"),
            ("eager", "kda", "aot_eager_decomp_partition"),
            ("triton", "gpt2", "aot_eager_decomp_partition"),
            ("triton", "llama", "aot_eager_decomp_partition"),
        )
    ),
    *(
        pytest.param(on, name, "inductor", marks=pytest.mark.slow)
        for on in ("eager", "triton")
        for name in SPECS
    ),
]
# torch's own: Inductor's decompositions still define TorchScript
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def made(name: str, on: str = "eager") -> Any:
    return ar.compile(SPECS[name], preset="tiny", backend=on).init_weights(0)


def random_tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 90, (rows, length), generator=torch.Generator().manual_seed(seed))


def compiled(run: Any, backend: Any) -> Any:
    return torch.compile(run, fullgraph=True, backend=backend)


def check(got: torch.Tensor, want: torch.Tensor, exact: bool) -> None:
    """Equal, or within 1e-5 of the largest value: kernels sum float32 in another order."""
    if exact:
        assert torch.equal(got, want)
    else:
        assert float((got - want).detach().abs().max()) <= 1e-5 * float(want.detach().abs().max())


def with_gradients(model: Any, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """What `run` gives, and the gradients of its sum by every parameter."""
    model.zero_grad()
    y = run()
    y.sum().backward()
    return [y, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("on, name, backend", CASES)
def test_logits(on: str, name: str, backend: str) -> None:
    model, tokens = made(name, on), random_tokens(2, 5)
    with torch.no_grad():
        check(compiled(model, backend)(tokens), model(tokens), exact=backend == "eager")


@pytest.mark.parametrize("on, name, backend", CASES)
def test_gradients(on: str, name: str, backend: str) -> None:
    model, tokens, targets = made(name, on), random_tokens(2, 3), random_tokens(2, 3, seed=1)
    targets[1, :2] = -100
    run, loss = compiled(model, backend), compiled(model.loss, backend)
    pairs = zip(
        with_gradients(model, lambda: run(tokens)),
        with_gradients(model, lambda: model(tokens)),
        strict=True,
    )
    for got, want in pairs:
        check(got, want, exact=backend == "eager")
    got = with_gradients(model, lambda: loss(tokens, targets))
    want = with_gradients(model, lambda: model.loss(tokens, targets))
    for one, other in zip(got, want, strict=True):
        check(one, other, exact=False)  # its chunks are differentiated in another order


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("on, name", WITHOUT_LOOP)
def test_one_graph_for_every_length(on: str, name: str, backend: str) -> None:
    model, counter = made(name, on), CompileCounterWithBackend(backend)
    run = compiled(model, counter)
    for length in (9, 12, 40):
        tokens = random_tokens(2, length)
        torch._dynamo.mark_dynamic(tokens, 1)
        got, want = (with_gradients(model, lambda r=r, x=tokens: r(x)) for r in (run, model))
        for one, other in zip(got, want, strict=True):
            check(one, other, exact=False)
    assert counter.frame_count == 1


def test_one_graph_of_the_loss_per_number_of_chunks() -> None:
    model, counter = made("llama"), CompileCounterWithBackend("eager")
    run = compiled(model.loss, counter)
    for length, graphs in ((9, 1), (40, 1), (130, 2)):
        tokens = random_tokens(4, length)
        torch._dynamo.mark_dynamic(tokens, 1)
        check(run(tokens, tokens), model.loss(tokens, tokens), exact=False)
        assert counter.frame_count == graphs  # 512 tokens are a chunk


def test_later_programs_and_weights_need_no_new_graph() -> None:
    model, tokens, counter = made("gpt2"), random_tokens(2, 5), CompileCounterWithBackend("eager")
    run = compiled(model, counter)
    run(tokens)
    model.loss(tokens, tokens)
    model.prefill(tokens)
    model.init_weights(1)
    check(run(tokens), model(tokens), exact=True)
    assert counter.frame_count == 1


@pytest.mark.parametrize("layout", [{"lengths": [5, 3]}, {"cu_seqlens": [0, 2, 5]}], ids=str)
def test_layouts(layout: dict[str, list[int]]) -> None:
    model, tokens = made("llama"), random_tokens(2 if "lengths" in layout else 1, 5)
    for run in (model, lambda x, **layout: model.loss(x, x, **layout)):
        check(compiled(run, "eager")(tokens, **layout), run(tokens, **layout), exact=False)


@pytest.mark.parametrize("tail", [None, lambda z: 5 * torch.tanh(z / 5)], ids=["plain", "capped"])
@pytest.mark.parametrize("count", [8, 11])
def test_chunks_of_the_loss(count: int, tail: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 6, generator=generator).requires_grad_() for n in (count, 32))
    targets = torch.randint(0, 32, (count,), generator=generator)
    targets[:5] = -100  # the first chunk has none, and a part of the second

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return support.cross_entropy(x, w, targets, tail, chunk=4)

    z = F.linear(x, w)
    want = F.cross_entropy(z if tail is None else tail(z), targets)
    got = compiled(loss, "aot_eager")(x, w)
    check(got, want, exact=False)
    pairs = zip(torch.autograd.grad(got, (x, w)), torch.autograd.grad(want, (x, w)), strict=True)
    for one, other in pairs:
        check(one, other, exact=False)


@pytest.mark.parametrize("on, name", WITHOUT_LOOP)
def test_export(on: str, name: str) -> None:
    model = made(name, on)
    length = torch.export.Dim("T", min=2, max=200)
    program = torch.export.export(
        model, (random_tokens(2, 9),), dynamic_shapes={"tokens": {1: length}}
    )
    with torch.no_grad():
        for other in (4, 33):
            tokens = random_tokens(2, other)
            check(program.module()(tokens), model(tokens), exact=True)


def test_checks() -> None:
    model, tokens = ar.compile("gpt2", preset="tiny"), random_tokens(2, 5)
    run = compiled(model, "eager")
    with pytest.raises(MismatchError, match="weights-uninitialised"):
        model(tokens)
    with pytest.raises(InternalTorchDynamoError, match="weights-uninitialised"):
        run(tokens)
    model.init_weights(0)
    run(tokens)
    with pytest.raises(MismatchError, match="outside the vocabulary"):
        model(tokens + 300)
    with pytest.raises(IndexError):
        run(tokens + 300)


def test_untraced_marks_as_torch_does() -> None:
    def one() -> None: ...

    def other() -> None: ...

    assert vars(_untraced(one)) == vars(torch.compiler.assume_constant_result(other))


def test_a_kernel_s_torch_version_is_laid_out_as_its_kernel(monkeypatch: Any) -> None:
    """Without an interpreter, several rows of several tokens: what a fake tensor promises holds."""
    model = made("kda", "triton")
    tokens = random_tokens(3, 5)
    with torch.no_grad():
        want = model(tokens)
        launch = model._backend.load(model._folder, "launch")
        monkeypatch.setattr(launch, "INTERPRETED", False)
        got = compiled(model, "aot_eager_decomp_partition")(tokens)
    check(got, want, exact=False)
