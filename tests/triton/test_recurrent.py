"""Kernels printed from rules, run by Triton's interpreter, against `state_update` in NumPy."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from archir import types
from archir.ir import Op
from archir.ops import OPS
from archir.ops.state import rule_heads
from archir.pipeline import lower
from archir.sequence import Rows
from archir.types import Tensor
from backends.triton.body import HELPERS
from backends.triton.recurrent import Recurrent, letters
from backends.triton.render import FOLDER, kernel_file, parses
from tests.goldens import check_golden
from tests.recurrence.test_state_update import CASES, case

pytest.importorskip("triton")
B, T = 2, 5
BOUNDS = {"dense": ((0, 5), (5, 10)), "ragged": ((1, 4), (4, 4), (7, 10))}


def loaded(text: str, at: Path) -> ModuleType:
    """An emitted file as a module."""
    at.write_text(text)
    spec = importlib.util.spec_from_file_location(at.stem, at)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernel_of(op: Op, module: Any) -> Recurrent:
    rule = module[op.attrs["rule"].name]
    states = rule.attrs["states"]
    operands = [v.type for v in op.values[: len(rule.inputs) - states]]
    sizes: dict[str, Any] = {}
    for found, declared in zip(operands, rule.inputs[states:], strict=True):
        inner = Tensor(declared.type.dtype, found.shape[found.rank - declared.type.rank :])
        types.match(declared.type, inner, sizes)
    return Recurrent(rule, tuple(operands), sizes, rule_heads(operands, rule))


@pytest.mark.parametrize("layout", BOUNDS)
@pytest.mark.parametrize("name", CASES)
def test_a_rule_as_a_kernel(name: str, layout: str, tmp_path: Path) -> None:
    """From a state that has seen tokens; the split dim in parts of two, memory full of NaN."""
    rule, module, arrays = case(name)
    low = lower(module, "full", stage="precision")
    (op,) = (op for op in low.entry.ops if op.kind == "state_update")
    kernel = kernel_of(op, low)
    file = loaded(kernel_file(name, [kernel.source("kernel")]), tmp_path / "k.py")
    rng = np.random.default_rng(3)
    bounds = BOUNDS[layout]
    shapes = [(kernel.heads, *(kernel.sizes[d] for d in letters(s))) for s in kernel.states]
    before = [rng.standard_normal((len(bounds), *shape)) for shape in shapes]
    given = [torch.from_numpy(np.ascontiguousarray(x)).float() for x in arrays]
    states = [torch.from_numpy(x).float() for x in before]
    outputs = [
        torch.full((B, T, kernel.heads, *(kernel.sizes[d] for d in letters(o))), torch.nan)
        for o in kernel.outputs
    ]
    after = [torch.full_like(x, torch.nan) for x in states]
    strides = [x[0, 0].numel() if x.shape[:2] == (B, T) else 0 for x in given]
    blocks = {f"BLOCK_{d}": axis.block for d, axis in kernel.axes.items()}
    parts = 1
    if kernel.split:
        blocks[f"BLOCK_{kernel.split}"] = 2
        parts = -(-kernel.sizes[kernel.split] // 2)
    rows = None if layout == "dense" else torch.tensor(bounds)
    file.kernel[(len(bounds), kernel.heads, parts)](
        *given, *states, *outputs, *after, rows, T, *strides,
        HEADS=kernel.heads, DENSE=rows is None, **blocks,
    )  # fmt: skip

    class Body:
        function = kernel.rule

        def __call__(self, *x: Any) -> Any:
            return rule(*x)

    seq = Rows.ragged(B, T, *zip(*bounds, strict=True))
    want = OPS["state_update"].meaning(*arrays, *before, seq, rule=Body())
    real = np.zeros(B * T, bool)
    for start, stop in bounds:
        real[start:stop] = True
    for have, x in zip(outputs, want, strict=False):
        flat = have.flatten(0, 1).numpy()
        near(flat[real], x.reshape(flat.shape)[real])
        assert np.isnan(flat[~real]).all(), "nothing is written where no row has a token"
    for have, x in zip(after, want[len(outputs) :], strict=True):
        near(have.numpy(), x)


def near(have: np.ndarray, want: np.ndarray) -> None:
    assert np.max(np.abs(have - want), initial=0) <= 2e-6 * np.max(np.abs(want), initial=1)


def test_a_kernel_reads_beside_its_rule() -> None:
    _, module, _ = case("grouped keys")
    low = lower(module, "full", stage="precision")
    (op,) = (op for op in low.entry.ops if op.kind == "state_update")
    text = kernel_file("kda", [kernel_of(op, low).source("kda_recurrent")])
    check_golden("triton/kda_recurrent", text)
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda f: f.name)
def test_templates_are_python(file: Path) -> None:
    parses(file.read_text())


@pytest.mark.parametrize("name", HELPERS)
def test_helpers_are_accurate(name: str, tmp_path: Path) -> None:
    """To a few units in the last place, near zero and at the ends."""
    text = (
        "@triton.jit\ndef kernel(x_ptr, y_ptr, N: tl.constexpr):\n"
        "    at = tl.arange(0, N)\n"
        f"    tl.store(y_ptr + at, {name}(tl.load(x_ptr + at)))\n"
    )
    file = loaded(kernel_file(name, [text]), tmp_path / "k.py")
    x = np.concatenate([[0.0, 88.0, 1e-30], np.geomspace(1e-8, 30, 61)]).astype(np.float32)
    x = x if name == "_log1p" else np.concatenate([x, -x])
    y = torch.empty(len(x))
    file.kernel[(1,)](torch.from_numpy(x), y, N=len(x))
    true = x.astype(np.float64)
    want = {
        "_log1p": np.log1p, "_expm1": np.expm1, "_tanh": np.tanh,
        "_gelu_tanh": OPS["gelu_tanh"].meaning,
    }[name](true)  # fmt: skip
    floor = 1.0 if name == "_gelu_tanh" else 1e-38  # 1 + tanh cancels, as everywhere
    assert np.max(np.abs(y.numpy() - want) / np.maximum(np.abs(want), floor)) < 1e-6
