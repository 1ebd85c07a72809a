"""Kernels of norms and of fused elementwise ops, in Triton's interpreter, against their meaning.

Memory around what they read and write is NaN; inputs are strided from token to token.
"""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import archir as ar
from archir import types
from archir.ir import Module, Op, Ref, Value, map_types
from archir.ops import OPS
from archir.trace import Program, trace_scalars
from archir.types import Tensor, parse
from backends.triton import configurations
from backends.triton.ops import skeleton_of
from tests.triton.kernels import EMPTY, Surroundings, kernel, loaded, surrounded

DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16}
# Against float64 of the rounded inputs: units in the last place of the largest number.
UNITS = {"f64": 2e-15, "f32": 1e-6, "bf16": 2**-8}
LENGTHS = (1, 7, 64, 100, 1000)


def near(have: torch.Tensor, want: np.ndarray, dtype: str) -> None:
    assert tuple(have.shape) == want.shape
    error = np.abs(have.double().numpy() - want).max(initial=0)
    assert error <= UNITS[dtype] * max(np.abs(want).max(initial=0), 1e-30)


def run(file: Any, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The kernel, amid NaN."""
    guard = Surroundings(file.empty)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "empty", guard)
        made = file.run(*given)
    guard.check()
    return made if isinstance(made, tuple) else (made,)


def norm(kind: str, size: int, dtype: str, operands: int) -> Op:
    names = ("x", "w", "b")[:operands]
    types_ = [Tensor(dtype, parse(f"f[B, T, 3, {size}]").shape), *[Tensor(dtype, (size,))] * 2]
    values = [Value(n, t) for n, t in zip(names, types_, strict=False)]
    return Op(kind, tuple(values), (Value("y", types_[0]),), {"eps": 1e-5})


NORMS = {"layer_norm": 3, "rms_norm": 2, "l2_norm": 1}


@pytest.mark.parametrize("longest", [None, 16], ids=["whole", "in parts"])
@pytest.mark.parametrize("kind", NORMS)
def test_norms(
    kind: str, longest: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of any length, held whole or read in parts of 16."""
    if longest:
        monkeypatch.setattr(configurations, "longest_row", lambda: longest)
    for number, (size, dtype) in enumerate(itertools.product(LENGTHS, DTYPES)):
        if longest and (size > 100 or dtype == "bf16"):
            continue  # as many kernels as say something
        rng = np.random.default_rng(size)
        arrays = [rng.standard_normal((2, 5, 3, size)) + 1, *rng.standard_normal((2, size))]
        given = [torch.from_numpy(x).to(DTYPES[dtype]) for x in arrays[: NORMS[kind]]]
        made = kernel(norm(kind, size, dtype, NORMS[kind]), EMPTY)
        file = loaded(made, tmp_path / str(number))
        assert ("for first in range" in made.file) == bool(longest and size > longest)
        want = OPS[kind].meaning(*(x.double().numpy() for x in given), eps=1e-5)
        x = surrounded(given[0], 3 * size + 11)
        (have,) = run(file, [x, *map(surrounded, given[1:])])
        near(have, want, dtype)
        assert torch.equal(file.run(given[0].transpose(0, 1).contiguous().transpose(0, 1),
                                    *given[1:]), have)  # fmt: skip


def test_a_row_of_zeros_and_one_of_large_numbers(tmp_path: Path) -> None:
    """ε keeps the first finite; statistics of bfloat16 rows are float32."""
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e18)]).view(1, 2, 1, 64)
    x = x.expand(1, 2, 3, 64).to(torch.bfloat16)
    file = loaded(kernel(norm("rms_norm", 64, "bf16", 1), EMPTY), tmp_path)
    (have,) = run(file, [x])
    assert torch.equal(have[0, :, 0, 0], torch.tensor([0.0, 1.0], dtype=torch.bfloat16))


@ar.pointwise
def situ(gate, up):
    return 25 * np.tanh(gate / 25) * ar.sigmoid(gate) * 4 * np.tanh(up / 4)


@ar.pointwise
def everything(x, y):
    """Every elementwise op that numbers of both signs have."""
    z = np.where(x > y, x - y, np.minimum(x, 0.5) * np.maximum(y, -0.5))
    z = z + np.exp(-np.abs(x)) + np.expm1(x / 3) + np.log1p(np.abs(y)) + np.sqrt(np.abs(x) + 0.1)
    z = z + np.sin(x) * np.cos(y) + np.tanh(y) - np.floor(x) + np.log(np.abs(y) + 1) / (2 + x * x)
    z = z + ar.silu(x) + ar.gelu_tanh(y) + ar.softplus(x) + ar.relu(-y) + x**3 + np.exp2(-(y**2))
    both = ((x > 0) & (y < 0.3)) | ~(x >= y) | (x <= -2) | (x == y) | (x != x)
    return np.where(both, z, -z) + x % 0.7 + x // 0.9


# operand types → what is computed of them
BROADCASTS = {
    "same": ("f[B, T, 3, 5]", "f[B, T, 3, 5]"),
    "a vector": ("f[B, T, 3, 5]", "f[5]"),
    "a number": ("f[B, T, 3, 5]", "f"),
    "a column": ("f[B, T, 3, 5]", "f[3, 1]"),
    "per head": ("f[B, T, 3, 5]", "f[B, T, 3, 1]"),
    "per token": ("f[B, T, 1, 1]", "f[B, T, 3, 5]"),
    "crossed": ("f[B, T, 3, 1]", "f[B, T, 1, 5]"),
    "middle": ("f[B, T, 2, 3, 5]", "f[2, 1, 5]"),
    "outer": ("f[B, T, 2, 3, 5]", "f[B, T, 2, 1, 1]"),
    "per row": ("f[B, T, 3, 5]", "f[B, 1, 3, 5]"),
    "weights alone": ("f[3, 5]", "f[5]"),
    "no inner axis": ("f[B, T]", "f[B, T]"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BROADCASTS)
def test_pointwise(name: str, dtype: str, tmp_path: Path) -> None:
    fn = everything if name == "same" else situ
    types_ = [parse(t).with_dtype(dtype) for t in BROADCASTS[name]]
    module = traced(fn, dtype)
    sizes = {"B": 2, "T": 3}
    rng = np.random.default_rng(0)
    arrays = [2 * rng.standard_normal([sizes.get(str(d), d) for d in t.shape]) for t in types_]
    values = [Value(n, t) for n, t in zip("xy", types_, strict=True)]
    shape = max(types_, key=lambda t: t.rank).shape
    if name == "crossed":
        shape = parse("f[B, T, 3, 5]").shape
    if name == "per token":
        shape = types_[1].shape
    fn_ref = Ref(next(f.name for f in module.functions if f.role == "pointwise"))
    op = Op("pointwise", tuple(values), (Value("z", Tensor(dtype, shape)),), {"fn": fn_ref})
    made = kernel(op, module)
    file = loaded(made, tmp_path)
    given = [torch.from_numpy(np.asarray(x)).to(DTYPES[dtype]) for x in arrays]
    want = interpreted(fn, *(x.double().numpy() for x in given))
    placed = [
        surrounded(x, x[0, 0].numel() + 9 if "T" in map(str, t.shape) and x.ndim > 2 else 0)
        for x, t in zip(given, types_, strict=True)
    ]
    (have,) = run(file, placed)
    near(have, np.broadcast_to(want, have.shape), dtype)
    near(file.eager(*given), np.broadcast_to(want, have.shape), dtype)


def interpreted(fn: Any, *arrays: np.ndarray) -> Any:
    """What NumPy makes of a function of scalars."""
    function = traced(fn, "f64").functions[0]
    env: dict[Any, Any] = dict(zip(function.inputs, arrays, strict=True))
    for op in function.ops:
        env[op.result] = OPS[op.kind].meaning(*(env.get(x, x) for x in op.operands))
    return env[function.outputs[0]]


def traced(fn: Any, dtype: str) -> Module:
    """A module with a function of two scalars, for a model's dtype."""
    program = Program()
    trace_scalars(fn.fn, dict.fromkeys(inspect.signature(fn.fn).parameters, Tensor("F")), program)
    (function,) = program.functions.values()

    def concrete(type_: Any) -> Any:
        return type_.with_dtype(types.resolve(type_.dtype, dtype))

    return Module((map_types(function, concrete), EMPTY.entry))


def test_what_has_no_kernel_says_why() -> None:
    module = traced(situ, "f32")
    name = next(f.name for f in module.functions if f.role == "pointwise")
    x, y = Value("x", parse("i64[B, T]")), Value("y", parse("f32[B, T]"))
    op = Op("pointwise", (x, y), (Value("z", parse("f32[B, T]")),), {"fn": Ref(name)})
    assert skeleton_of(op, module) is None
