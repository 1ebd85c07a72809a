"""`archir.provide`: somebody's own kernel in models and functions, held to what the rule means."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import archir as ar
from archir import types
from archir.diagnostics import ArchirError
from archir.provide import active, mark
from archir.trace import trace_entry
from backends.eager import backend as eager
from tests.goldens import check_golden
from tests.recurrence.rules import RULES, kda, ratio
from tests.recurrence.test_state_update import KDA as SHAPES
from tests.recurrence.test_state_update import module_of
from tests.runtime.test_operator import operands

LM = f"{Path(__file__).parents[1] / 'specs/kda.py'}:kda_lm"
BACKENDS = ("eager", "triton")


def plain(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Any, cu_seqlens: Any
) -> Any:
    """KDA by hand: every row token by token."""
    ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    return _rows(q, k, v, g, beta, initial_state, ends)


def without_boundaries(*x: Tensor, initial_state: Any, cu_seqlens: Any) -> Any:
    """The first row goes on through all others."""
    ends = [0, x[0].shape[1]]
    out, state = _rows(*x, initial_state[:1] if cu_seqlens is not None else initial_state, ends)
    return out, state.expand_as(initial_state)


def without_initial_state(*x: Tensor, initial_state: Any, cu_seqlens: Any) -> Any:
    return plain(*x, initial_state=torch.zeros_like(initial_state), cu_seqlens=cu_seqlens)


def _rows(q: Any, k: Any, v: Any, g: Any, beta: Any, initial: Tensor, ends: list[int]) -> Any:
    heads, lead = initial.shape[1], q.shape[:2]

    def every(x: Tensor, inner: int) -> Tensor:
        """[B, T, heads, …] of an operand placed in any way."""
        if x.ndim - inner < 2:
            x = x.expand(*lead, *x.shape) if x.ndim > inner else x.expand(*lead, 1, *x.shape)
        elif x.ndim - inner == 2:
            x = x.unsqueeze(2)
        return x.repeat_interleave(heads // x.shape[2], 2).to(initial.dtype)

    q, k, v, g, beta = (every(x, n) for x, n in zip((q, k, v, g, beta), (1, 1, 1, 1, 0)))
    batches = len(initial) if len(ends) == 2 else 1
    rows = initial.split(batches)
    made, after = [v[:, :0]], []
    for S, (start, stop) in zip(rows, pairwise(ends), strict=True):
        for t in range(start, stop):
            S = g[:, t].exp()[..., None] * S
            read = torch.einsum("bhk,bhkv->bhv", k[:, t], S)
            new = beta[:, t, :, None] * (v[:, t] - read)
            S = S + k[:, t, :, :, None] * new[:, :, None, :]
            made.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S)[:, None])
        after.append(S)
    return torch.cat(made, 1), torch.cat(after)


@pytest.fixture(autouse=True)
def taken_back() -> Iterator[None]:
    """Nothing stays provided."""
    yield
    left = [p for backend in BACKENDS for p in active(backend)]
    for provided in left:
        provided.remove()
    assert not left


def check(**how: Any) -> Any:
    return ar.check(LM, "plain", dtypes=("float64",), lengths=(4,), **how)


def test_a_provided_kernel_passes_the_check() -> None:
    """And the laws, forward and backward."""
    seen = []

    def counted(*x: Any, **how: Any) -> Any:
        seen.append(how["cu_seqlens"])
        return plain(*x, **how)

    with ar.provide(kda, backend="eager", fn=counted):
        report = check(layouts=("left",), laws=True)
    assert report.ok, report.failures
    assert any(ends is None for ends in seen) and any(ends is not None for ends in seen)


WRONG = {
    without_boundaries: ("packed", {"full", "decode"}),
    without_initial_state: ("dense", {"decode"}),
}


@pytest.mark.parametrize("fn", WRONG, ids=lambda fn: fn.__name__)
def test_a_wrong_kernel_fails_the_check(fn: Any) -> None:
    layout, phases = WRONG[fn]
    with ar.provide(kda, backend="eager", fn=fn):
        report = check(layouts=("dense", "packed"), phases=("full", "decode"))
    failed = {(row["layout"], row["phase"]) for row in report.failures}
    assert {(layout, phase) for phase in phases} <= failed
    assert layout == "dense" or "dense" not in {where for where, _ in failed}
    assert all(row["backend"] == "eager" and row["where"] for row in report.failures)


def test_in_a_triton_model() -> None:
    with ar.provide(kda, backend="triton", fn=plain) as handle:
        model = ar.compile(LM, "tiny", backend="triton", dtype="float64").init_weights(0)
        eager = ar.compile(LM, "tiny", dtype="float64").init_weights(0)
        tokens = torch.arange(6).view(2, 3)
        rows = {"lengths": [3, 1], "padding": "left"}
        assert not model.kernels() and str(model.kernels()).startswith("nothing has run yet")
        torch.testing.assert_close(model(tokens, **rows), eager(tokens, **rows), rtol=1e-12, atol=0)
    assert handle.name == "test_provide.plain"
    (mine,) = (record for record in model.kernels() if record.name == handle.name)
    assert "kda" in mine.about and "test_provide.py" in mine.runs
    assert {r.runs for r in model.kernels() if r != mine} == {"the kernel, in Triton's interpreter"}
    assert not eager.kernels()


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_a_function(backend: str) -> None:
    """Dense, packed and padded rows, from a state, with gradients; padding never reaches it."""
    given: list[Any] = []

    def watched(*x: Tensor, **how: Any) -> Any:
        given.append((x[0].shape, how["cu_seqlens"]))
        assert not any(y.isnan().any() for y in x)
        return plain(*x, **how)

    before = ar.op(kda, backend)
    with ar.provide(kda, backend=backend, fn=watched):
        f = ar.op(kda, backend)
    q, k, v, g, beta = operands()
    ways: list[tuple[dict[str, Any], Any]] = [
        ({}, ((2, 3), None)),
        ({"lengths": [2, 1]}, ((1, 3), [0, 2, 3])),
        ({"lengths": [0, 2], "padding": "left"}, ((1, 2), [0, 0, 2])),
        ({"cu_seqlens": [0, 2, 2, 6]}, ((1, 6), [0, 2, 2, 6])),
    ]
    for rows, (shape, ends) in ways:
        xs = [x.reshape(1, 6, *x.shape[2:]) if "cu_seqlens" in rows else x for x in (q, k, v)]
        start = torch.randn(3 if "cu_seqlens" in rows else 2, 4, 3, 2, dtype=torch.float64)
        made = []
        for run in (f, before):
            leaves = [x.detach().clone().requires_grad_() for x in (*xs, g, beta, start)]
            out, state = run(*leaves[:5], initial_state=leaves[5], return_state=True, **rows)
            (out.sum() + state.square().sum()).backward()
            made.append([out, state, *(x.grad for x in leaves)])
        for x, y in zip(*made, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        (seen, packed), _ = given.pop(), given.clear()
        assert tuple(seen[:2]) == shape and (packed if packed is None else packed.tolist()) == ends
    assert [record.name.split("_1")[0] for record in f.kernels()] == ["test_provide.watched"]
    assert not [record for record in before.kernels() if "watched" in record.name]


def test_several_states() -> None:
    by_hand = partial(ar.op(ratio), return_state=True)
    with ar.provide(ratio, backend="eager", fn=by_hand):
        f = ar.op(ratio)
    x = torch.randn(3, 1, 5, 2, 4, dtype=torch.float64)
    (out, states), (want, after) = (
        run(*x, cu_seqlens=[0, 2, 5], return_state=True) for run in (f, ar.op(ratio))
    )
    assert torch.equal(out, want) and all(map(torch.equal, states, after))
    assert [record.name for record in f.kernels()] == ["functools.partial"]


def test_when() -> None:
    """Of two sizes in one program one is provided; what is asked says what is where."""
    seen: list[Any] = []

    def when(sizes: Any) -> bool:
        seen.append(sizes)
        return sizes["V"] == 6

    def both(q: Any, k: Any, v: Any, g: Any, beta: Any, w: Any) -> Any:
        return kda(q, k, v, g, beta, name="one"), kda(q, k, w, g, beta, name="other")

    shapes = {**SHAPES, "v": "B, T, 4, 6", "beta": "4", "w": "B, T, 4, 7"}
    inputs = {name: types.parse(f"f[{shape}]") for name, shape in shapes.items()}
    module = trace_entry(both, "run", inputs, {})
    with ar.provide(kda, backend="eager", fn=plain, when=when):
        marked = mark(module, active("eager"), "bfloat16")
        other = module_of(kda, {**SHAPES, "v": "B, T, 4, 7"})
        assert mark(other, active("eager"), "bfloat16") is other
        assert mark(module, active("triton"), "bfloat16") is module
    assert seen[0] == {
        "K": 8, "V": 6, "heads": 4, "dtype": "bfloat16",
        "operands": {
            "q": ("B", "T", 2, 8), "k": ("B", "T", 2, 8), "v": ("B", "T", 4, 6),
            "g": ("B", "T", 2, 8), "beta": (4,),
        },
    }  # fmt: skip
    check_golden("provide/marked", str(marked))
    assert ar.parse(str(marked)) == marked
    assert mark(module, active("eager"), "bfloat16") is module


def test_the_latest_that_can() -> None:
    def first(*x: Any, **how: Any) -> Any: ...
    def second(*x: Any, **how: Any) -> Any: ...
    def other(*x: Any, **how: Any) -> Any: ...

    module = module_of(kda, SHAPES)

    def chosen() -> str | None:
        marked = mark(module, active("eager"), "float32")
        found = [f.attrs.get("provided") for f in marked.functions if f.role == "rule"]
        assert len(found) == 1
        return found[0]

    with ar.provide(kda, backend="eager", fn=first) as one:
        with ar.provide(kda, backend="eager", fn=second) as two:
            assert chosen() == two.name == "test_provide.second"
            with ar.provide(kda, backend="eager", fn=other, when=lambda sizes: sizes["K"] > 8):
                assert chosen() == two.name
        assert chosen() == one.name
        with ar.provide(RULES["matrices"], backend="eager", fn=second):
            assert chosen() == one.name
    assert chosen() is None


def test_names() -> None:
    """Another function of the same name has another; the same, or its file run again, has not."""

    def made(scale: float) -> Callable[..., Any]:
        def scaled(*x: Any, **how: Any) -> Any:
            return scale

        return scaled

    def name(fn: Any, backend: str = "eager") -> str:
        with ar.provide(kda, backend=backend, fn=fn) as handle:
            return handle.name

    one = made(1.0)
    assert [name(one), name(made(2.0)), name(one), name(one, "triton")] == [
        "test_provide.scaled", "test_provide.scaled_1", "test_provide.scaled",
        "test_provide.scaled",
    ]  # fmt: skip
    again = [{"__name__": "kernels"} for _ in range(2)]
    for scope in again:
        exec("def fast(*x, **how): ...", scope)
    assert again[0]["fast"] is not again[1]["fast"]
    assert name(again[0]["fast"]) == name(again[1]["fast"]) == "kernels.fast"


def test_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each way has a folder of its own; what was compiled stays what it is; a program is found
    again without lowering; and without archir it says what is missing."""
    monkeypatch.setenv("ARCHIR_CACHE", str(tmp_path))
    calls: list[int] = []

    def counted(*x: Any, **how: Any) -> Any:
        calls.append(1)
        return plain(*x, **how)

    tokens = torch.arange(4)[None]
    handle = ar.provide(kda, backend="eager", fn=counted)
    model = ar.compile(LM, "plain").init_weights(0)
    handle.remove()
    handle.remove()
    without = ar.compile(LM, "plain").init_weights(0)
    assert model._folder != without._folder
    torch.testing.assert_close(model(tokens), without(tokens), rtol=2e-6, atol=2e-6)
    assert len(calls) == 2 and not [f for f in without.files if f.name == "provided.py"]
    (program,) = (file for file in model.files if file.name == "full_dense_all.py")
    assert f'provided["{handle.name}"](' in program.read_text()
    model.prefill(tokens)
    assert len(calls) == 4
    with ar.provide(kda, backend="eager", fn=counted), monkeypatch.context() as patch:
        again = ar.compile(LM, "plain").init_weights(0)
        patch.setattr(eager.Eager, "emit_program", lambda *_: pytest.fail("emitted"))
        assert torch.equal(again(tokens), model(tokens))
        assert again.kernels() == model.kernels()[:1]
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import importlib\n"
        f"table = importlib.import_module('{program.parent.name}.provided').provided\n"
        "import pytest\nwith pytest.raises(LookupError, match='archir.provide it'): table['x']"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_refused() -> None:
    shown = []
    wrong: dict[str, Callable[[], Any]] = {
        "a spec": lambda: ar.provide("gpt2", backend="eager", fn=plain),
        "a backend": lambda: ar.provide(kda, backend="numba", fn=plain),
        "a function": lambda: ar.provide(kda, backend="eager", fn="plain"),  # type: ignore[arg-type]
        "when": lambda: ar.provide(kda, backend="eager", fn=plain, when=True),  # type: ignore[arg-type]
        "outputs alone": lambda: _run(lambda out, _: out),
        "a state turned": lambda: _run(lambda out, state: (out, state.mT)),
        "outputs of one head": lambda: _run(lambda out, state: (out[:, :, :1], state)),
        "nothing": lambda: _run(lambda *_: None),
    }
    for name, run in wrong.items():
        with pytest.raises(ArchirError) as caught:
            run()
        shown.append(re.sub(r"changed_\d", "changed", f"# {name}\n{caught.value}\n"))
    check_golden("provide/refused", "\n".join(shown))


def _run(change: Callable[..., Any]) -> Any:
    def changed(*x: Any, **how: Any) -> Any:
        return change(*plain(*x, **how))

    with ar.provide(kda, backend="eager", fn=changed):
        return ar.op(kda)(*operands())


def test_a_state_goes_between_a_provided_and_a_plain_model() -> None:
    """What runs a rule is no part of what its state is."""
    mine = ar.compile(LM, "tiny").init_weights(0)
    with ar.provide(kda, backend="eager", fn=plain):
        other = ar.compile(LM, "tiny").init_weights(0)
    with torch.no_grad():
        _, state = mine.prefill(torch.arange(10).view(2, 5))
        one, _ = mine.decode([[1], [2]], state.clone())
        two, _ = other.decode([[1], [2]], state)
    assert len(other.kernels()) == 1 and not mine.kernels()
    torch.testing.assert_close(one, two)
