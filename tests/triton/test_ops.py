"""The ops around kernels: every kind has a kernel or a reason, torch accepts each as its own, and
another package adds one with a definition and one line per backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import archir as ar
from archir.check import check
from archir.diagnostics import UnsupportedError
from archir.ir import Op, Ref, Value
from archir.ops import OPS
from archir.ops.base import Sample, op
from archir.trace import emit
from archir.types import parse
from backends.eager.ops import EMIT
from backends.eager.ops.base import emits
from backends.triton.backend import TRITON
from backends.triton.ops import KERNELS, LEFT_TO_TORCH, kernel
from backends.triton.rows import RowWise
from tests.recurrence.test_state_update import CASES, case
from tests.triton import kernels
from tests.triton.test_elementwise import NORMS, norm, situ, traced


def test_every_op_has_a_kernel_or_a_reason() -> None:
    assert KERNELS.keys().isdisjoint(LEFT_TO_TORCH)
    assert KERNELS.keys() | LEFT_TO_TORCH.keys() == OPS.keys()
    assert all(len(reason) > 20 for reason in LEFT_TO_TORCH.values())
    assert all(kind in EMIT and TRITON.supports(Op(kind, (), ())) is None for kind in LEFT_TO_TORCH)


def accepted(file: Any, given: list[Any]) -> None:
    """torch's own checks of the op, and of its gradient."""
    leaves = [x.clone().requires_grad_() if torch.is_tensor(x) else x for x in given]
    torch.library.opcheck(file.call, tuple(leaves))
    made = file.call(*leaves)
    made = made if isinstance(made, tuple) else (made,)
    slopes, wanted = [torch.ones_like(y) for y in made], [torch.is_tensor(x) for x in given]
    gradient = getattr(torch.ops.archir, f"{file.call.name().split('::')[1]}_gradient").default
    torch.library.opcheck(gradient, (*given, slopes, wanted))
    inputs = [x for x in (*given, *slopes) if torch.is_tensor(x)]
    before = [x.clone() for x in inputs]
    found = gradient(*given, slopes, wanted)
    assert all(map(torch.equal, inputs, before))
    memory = [x.untyped_storage().data_ptr() for x in (*inputs, *found)]
    assert len(memory) == len(set(memory))
    for x, want in zip(found, torch.autograd.grad(made, [x for x in leaves if torch.is_tensor(x)],
                                                  slopes), strict=True):  # fmt: skip
        assert torch.equal(x, want)


@pytest.mark.parametrize("kind", NORMS)
def test_torch_accepts_norms(kind: str, tmp_path: Path) -> None:
    made = kernels.kernel(norm(kind, 7, "f32", NORMS[kind]), kernels.EMPTY)
    x = torch.randn(2, 3, 3, 7)
    accepted(kernels.loaded(made, tmp_path), [x, torch.randn(7), torch.randn(7)][: NORMS[kind]])


@pytest.mark.parametrize("layout", ["dense", "ragged"])
def test_torch_accepts_a_recurrence(layout: str, tmp_path: Path) -> None:
    name = next(iter(CASES))
    found, low = kernels.lowered(case(name)[1], "state_update")
    made = kernels.kernel(found, low)
    rows = [[0, 3], [2, 9]] if layout == "ragged" else [None, None]
    sizes = {"B": 2, "T": 5, "R": 2}
    given = [
        torch.rand([sizes.get(str(d), d) for d in v.type.shape])
        for v in made.skeleton.op.values[:-1]
    ]
    accepted(kernels.loaded(made, tmp_path), [*given, *rows])


def test_a_name_that_is_there_is_not_registered_again(tmp_path: Path) -> None:
    made = kernels.kernel(norm("l2_norm", 5, "f32", 1), kernels.EMPTY)
    first, second = (kernels.loaded(made, tmp_path / x) for x in "ab")
    assert first is not second and first.call is second.call


@ar.config
class Width:
    width: int = 24


@pytest.fixture
def soft_norm() -> Iterator[Any]:
    """What another package would write: an op, and how each backend runs it."""

    @op("norm", "x: f[*A, D] -> f[*A, D]", samples=(Sample(("f[B, T, 8]",), {"eps": 1e-5}),))
    def soft_norm(x: Any, *, eps: float) -> Any:
        """x / (ε + mean |x|)"""
        return x / (eps + np.mean(np.abs(x), axis=-1, keepdims=True))

    @emits("soft_norm")
    def print_eager(p: Any, op: Op) -> str:
        x, eps = p(op.operands[0]), op.attrs["eps"]
        return f"{x} / ({eps} + {x}.abs().mean(-1, keepdim=True))"

    kernel("soft_norm")(RowWise)
    yield lambda x: emit("soft_norm", x, eps=1e-5)
    for table in (OPS, EMIT, KERNELS):
        del table["soft_norm"]


def test_an_op_from_outside_runs_on_both_backends(
    soft_norm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its definition and one emitter per backend are all: the kernel comes from its meaning."""
    monkeypatch.setenv("ARCHIR_CACHE", str(tmp_path))

    @ar.block
    def block(x: "f[B, T, 24]", c):
        return soft_norm(ar.linear(soft_norm(x), 24, name="mix"))

    report = check(
        block,
        config=Width(),
        backends=("eager", "triton"),
        dtypes=("float64", "bfloat16"),
        lengths=(5,),
    )
    assert report.ok and {"eager", "triton"} <= {row["backend"] for row in report.rows}
    model = ar.compile(block, config=Width(), backend="triton").init_weights(0)
    model(torch.randn(1, 2, 24))
    (file,) = (f for f in model.files if f.name.startswith("soft_norm_"))
    assert "tl.abs(x)" in file.read_text()


def test_an_op_without_a_word_from_triton_is_refused(
    soft_norm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @ar.block
    def block(x: "f[B, T, width]", c):
        return soft_norm(ar.linear(x, c.width, name="mix"))

    monkeypatch.delitem(KERNELS, "soft_norm")
    model = ar.compile(block, config=Width(), backend="triton").init_weights(0)
    with pytest.raises(UnsupportedError, match="triton has no kernel for soft_norm"):
        model(torch.randn(1, 2, 24))


@pytest.mark.parametrize("interpreted", [True, False], ids=["kernel", "torch"])
def test_torch_accepts_a_fused_op(
    interpreted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = traced(situ, "f32")
    name = next(f.name for f in module.functions if f.role == "pointwise")
    values = [Value(n, parse("f32[B, T, 6]")) for n in "xyz"]
    found = Op("pointwise", tuple(values[:2]), (values[2],), {"fn": Ref(name)})
    file = kernels.loaded(kernels.kernel(found, module), tmp_path)
    monkeypatch.setattr(file.at, "INTERPRETED", interpreted)
    accepted(file, [torch.randn(2, 3, 6), torch.randn(2, 3, 6)])


@ar.recurrence("p:K q:K | x:K a: -> o:K")
def shift(p, q, x, a):
    """Each state takes over what the one before it was."""
    return x, p, a * q + x


@ar.recurrence("z: | x: a: -> o:")
def numbers(z, x, a):
    """Numbers alone, without a dim."""
    z = a * z + x**5 - x**-2 + x**0
    return z, z


@ar.recurrence("q:K k:K v:V out_0: stride_q: β: -> o:V")
def odd_names(S, q, k, v, out_0, stride_q, β):
    """Operands called as a file calls its own, or not in ASCII; conditions on sizes."""
    S = (
        np.tanh(out_0) * S
        + np.outer(k, β * v) * np.where((k > 0) & (K > 2), 3.0, stride_q)[:, None]
    )
    return S, q @ S


@ar.recurrence("q:K k:K v:V -> o:V")
def held(S, q, k, v):
    """A state that nothing changes: what comes out is what went in."""
    return S, q @ S + np.sum(k) * v


@ar.recurrence("q:K k:K v:V -> o:V")
def powers(S, q, k, v):
    """Powers of both signs, and a base that is a number."""
    S = 0.5 * S + np.outer(k**5 + np.abs(k) ** 1.5, 2.1**v)
    return S, (q**-1) @ S


@pytest.mark.parametrize("interpreted", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("rule", [shift, numbers, odd_names, held, powers], ids=lambda r: r.name)
def test_rules_that_were_wrong_once(
    rule: Any, interpreted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On kernels and on their torch version, also of no token, beside eager in float64."""
    sizes = {"K": 5, "V": 3}
    rng = np.random.default_rng(0)
    for length in (4, 0):
        given = [
            torch.from_numpy(rng.standard_normal((2, length, 2, *(sizes[d] for d in shape))))
            for shape in rule.operands.values()
        ]
        want = ar.op(rule, "eager")(*given, return_state=True)
        run = ar.op(rule, "triton")
        run(*given)
        for file in run.files:
            if file.name == "launch.py":
                monkeypatch.setattr(TRITON.load(file.parent, "launch"), "INTERPRETED", interpreted)
        have = run(*given, return_state=True)
        for x, y in zip(flat(have), flat(want), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def flat(made: Any) -> list[torch.Tensor]:
    return [x for y in made for x in flat(y)] if isinstance(made, tuple) else [made]


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_casts_of_truth_values_stay(backend: str) -> None:
    """They count, and choose."""

    @ar.block
    def block(x: "f[B, T, width]", c):
        count = ar.cast(x > 0, "float32") + ar.cast(x > 0.5, "float32")
        return ar.where(ar.cast(x - 0.5, "bool"), x, -x) * count

    x = torch.tensor([[[-1.0, 0.25, 1.0, 0.5]]])
    model = ar.compile(block, config=Width(4), backend=backend)
    assert torch.equal(model(x), torch.tensor([[[-0.0, 0.25, 2.0, -0.5]]]))
