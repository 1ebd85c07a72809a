"""The emitted files: readable, loaded as real modules, usable with torch alone; the module tree."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import archir as ar
from archir.diagnostics import ArchirError
from archir.ir import fields
from tests.goldens import check_golden
from tests.specs.kda import kda_lm

ALONE = """
import importlib, importlib.util, pathlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("archir", "backends", "specs", "transformers"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import torch
folder = pathlib.Path(sys.argv[1])
spec = importlib.util.spec_from_file_location(
    "alone", folder / "__init__.py", submodule_search_locations=[str(folder)])
package = importlib.util.module_from_spec(spec)
sys.modules["alone"] = package
modules = importlib.import_module("alone.modules")
program = importlib.import_module("alone.full_dense_all")
model = modules.Gpt2(device="cpu", dtype=torch.float32)
model.load_state_dict(torch.load(sys.argv[2]))
print(model(program.gpt2, torch.tensor([[1, 2, 3]])).sum().item())
"""


def test_files_are_readable() -> None:
    """What a person finds: the tree and a program of a spec with attention and a recurrence."""
    model = ar.compile(kda_lm, preset="tiny").init_weights(0)
    with torch.no_grad():
        model.prefill([[1, 2, 3]])
    by_name = {path.name: path.read_text() for path in model.files}
    check_golden("eager/kda_modules", by_name["modules.py"])
    check_golden("eager/kda_prefill_last", by_name["prefill_dense_last.py"])
    for name, text in by_name.items():
        assert max(map(len, text.splitlines()), default=0) <= 100, name


def test_files_run_with_torch_alone(tmp_path: Path) -> None:
    model = ar.compile("gpt2", preset="tiny").init_weights(0)
    with torch.no_grad():
        want = model([[1, 2, 3]]).sum().item()
    weights = tmp_path / "weights.pt"
    torch.save(model.state_dict(), weights)
    folder = model.files[0].parent
    command = [sys.executable, "-c", ALONE, str(folder), str(weights)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(want, rel=1e-5)


def test_tree_keeps_names_and_linears() -> None:
    module = ar.trace(kda_lm, preset="tiny")
    model = ar.compile(kda_lm, preset="tiny")
    assert set(model.tensors()) == {*fields(module, "weight"), *fields(module, "buffer")}
    for path, field in fields(module, "weight").items():
        assert tuple(model.tensors()[path].shape) == field.value.type.shape  # type: ignore[union-attr]
    linears = {
        fields_of[op.values[1]].rsplit(".", 1)[0]
        for f in module.functions
        for fields_of in [{item.value: item.path for item in f.fields}]
        for op in f.ops
        if op.kind == "linear" and op.values[1] in fields_of
    }
    found = {path for path, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert linears and all(any(p.endswith(name) for p in found) for name in linears)
    pinned = [n for n, f in fields(module, "weight").items() if f.attrs.get("dtype") == "float32"]
    assert pinned
    half = ar.compile(kda_lm, preset="tiny", dtype="bfloat16")
    for name, tensor in half.tensors().items():
        assert tensor.dtype == (torch.float32 if name in pinned else torch.bfloat16), name


def test_hooks_see_every_phase() -> None:
    model = ar.compile("gpt2", preset="tiny").init_weights(0)
    seen: list[str] = []
    for path, module in model.named_modules():
        if path in ("h.0", "h.1", "h.0.attn.c_attn", ""):
            module.register_forward_hook(lambda m, *_: seen.append(m.scope))
    with torch.no_grad():
        _, state = model.prefill([[1, 2]])
        model.decode([[3]], state)
        model([[1, 2]])
    model.loss([[1, 2]], [[2, 3]])
    assert seen == ["h.0.attn.c_attn", "h.0", "h.1", ""] * 4


def test_a_namespace_refuses_to_be_called() -> None:
    model = ar.compile("gpt2", preset="tiny")
    with pytest.raises(RuntimeError, match="only holds parameters"):
        model.h[0].attn(torch.zeros(1))


def test_activation_checkpointing_changes_nothing() -> None:
    from torch.utils.checkpoint import checkpoint

    tokens, targets = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])
    model = ar.compile("gpt2", preset="tiny").init_weights(0)
    model.loss(tokens, targets).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for block in model.h:
        forward = block.forward
        block.forward = lambda *a, forward=forward: checkpoint(forward, *a, use_reentrant=False)
    model.loss(tokens, targets).backward()
    for want, p in zip(plain, model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, want, rtol=0, atol=0)


def test_full_sizes_compile_fast_and_allocate_nothing() -> None:
    """Tracing, lowering and compiling `full` in under 2 s; nothing is allocated off `meta`."""
    allocated = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal allocated
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and not made.is_meta:
                allocated += made.nbytes
            return made

    for name in ("gpt2", "llama"):
        start = time.perf_counter()
        with Count():
            model = ar.compile(name)
            for phase, head in (("full", "all"), ("prefill", "last"), ("decode", "all")):
                model.program(phase, head)
        spent = time.perf_counter() - start
        assert allocated == 0
        assert spent < 2.0, f"{name}: {spent:.2f} s"
        assert all(x.is_meta for x in model.tensors().values())


def test_same_seed_same_weights_whatever_the_dtype() -> None:
    a = ar.compile("gpt2", preset="tiny").init_weights(3).tensors()
    b = ar.compile("gpt2", preset="tiny", dtype="bfloat16").init_weights(3).tensors()
    c = ar.compile("gpt2", preset="tiny").init_weights(4).tensors()
    for name in a:
        torch.testing.assert_close(a[name].bfloat16(), b[name], rtol=0, atol=0)
    assert not torch.equal(a["wte.weight"], c["wte.weight"])


def test_function_objects_compile_as_in_a_notebook() -> None:
    """Source that is in no file: as a cell of a notebook defines it."""
    scope: dict[str, Any] = {}
    cell = """
import archir as ar

@ar.config
class Tiny:
    vocab: int = 11; width: int = 8

@ar.spec(Tiny)
def bag(tokens, c):
    table = ar.weight("table", [c.vocab, c.width])
    return ar.logits(ar.relu(ar.embedding(tokens, table)), table)
"""
    exec(compile(cell, "<cell 1>", "exec"), scope)
    model = ar.compile(scope["bag"], dtype="float64").init_weights(0)
    tokens = np.array([[1, 2, 3]])
    weights = {k: v.detach().numpy() for k, v in model.tensors().items()}
    want, _ = ar.interpret(ar.trace(scope["bag"]), [tokens], weights)
    np.testing.assert_allclose(
        model(tokens).detach().numpy(), next(iter(want.values())), rtol=1e-12
    )
    assert ar.check(scope["bag"]).ok


def test_param_and_state_dtypes() -> None:
    model = ar.compile(kda_lm, preset="tiny", dtype="bfloat16", param_dtype="float32")
    model.init_weights(0)
    assert {x.dtype for x in model.tensors().values()} == {torch.float32}
    with torch.no_grad():
        logits, state = model.prefill([[1, 2, 3]])
    assert logits.dtype == torch.bfloat16
    kinds = {path: x.dtype for path, x in state.items() if isinstance(x, torch.Tensor)}
    assert torch.float32 in kinds.values() and torch.bfloat16 in kinds.values()
    narrow = ar.compile(kda_lm, preset="tiny", state_dtype="bfloat16").init_weights(0)
    with torch.no_grad():
        _, state = narrow.prefill([[1, 2, 3]])
    kinds = {path: x.dtype for path, x in state.items() if isinstance(x, torch.Tensor)}
    assert kinds.pop("layers.0.kda.S") == torch.bfloat16
    assert set(kinds.values()) == {torch.float32}


def test_taps_are_collected_by_path() -> None:
    @ar.config
    class Tiny:
        vocab: int = 11
        width: int = 8

    @ar.block
    def layer(x: "f[B, T, width]", c: Tiny) -> Any:
        return ar.tap("inner", x * 2.0)

    @ar.spec(Tiny)
    def tapped(tokens: Any, c: Tiny) -> Any:
        table = ar.weight("table", [c.vocab, c.width])
        x = layer(ar.embedding(tokens, table), c, name="a")
        return ar.logits(layer(x, c, name="b"), table)

    model = ar.compile(tapped).init_weights(0)
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad(), model.record_taps(found):
        model([[1, 2]])
    weights = {k: v.detach().numpy() for k, v in model.tensors().items()}
    _, stored = ar.interpret(ar.trace(tapped), [np.array([[1, 2]])], weights)
    assert set(found) == {"a.inner", "b.inner"} == set(stored)
    for path, x in found.items():
        np.testing.assert_allclose(x.numpy(), stored[path], rtol=1e-6)


@pytest.mark.parametrize(("out", "given", "bias"), [(48, 20, True), (96, 33, False), (7, 5, True)])
def test_one_row_products(out: int, given: int, bias: bool) -> None:
    """The split product of a single row is F.linear's, and only float32 rows alone take it."""
    model = ar.compile("gpt2", preset="tiny")
    linear = model._support.linear
    w, b = torch.randn(out, given), torch.randn(out) if bias else None
    for shape in ((given,), (1, given), (1, 1, given), (2, 1, given)):
        x = torch.randn(shape)
        with torch.no_grad():
            have = linear(x, w, b)
        assert have.shape == (*shape[:-1], out)
        want = torch.nn.functional.linear(x.double(), w.double(), None if b is None else b.double())
        torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5)
    y = linear(torch.randn(1, given, requires_grad=True), w, b)
    assert y.requires_grad


MESSAGES = {
    "uninitialised": lambda m: ar.compile("gpt2", preset="tiny")([[1]]),
    "context": lambda m: m.prefill([[0] * 257]),
    "context_after_past": lambda m: m.decode([[0] * 10], m.prefill([[0] * 250])[1]),
    "tokens_shape": lambda m: m([1, 2, 3]),
    "weights": lambda m: m.set_weights({"wte.weight": np.zeros((3, 3))}),
    "backend": lambda m: ar.compile("gpt2", backend="eagre"),
    "rule": lambda m: ar.compile(__import__("tests.specs.kda", fromlist=["kda"]).kda),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name: str) -> None:
    model = ar.compile("gpt2", preset="tiny").init_weights(0)
    with torch.no_grad(), pytest.raises(ArchirError) as caught:
        MESSAGES[name](model)
    check_golden(f"eager/messages/{name}", str(caught.value))
