"""`archir.op`: a rule as a torch function, on both backends, against `state_update` in NumPy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import archir as ar
from archir import dims
from archir.diagnostics import ArchirError
from archir.ops import OPS
from archir.recurrence import Rule
from archir.sequence import Rows
from archir.types import Tensor
from backends.runtime import cache
from tests.goldens import check_golden
from tests.recurrence.forms import chunks_of
from tests.recurrence.rules import RULES, kda, ratio
from tests.recurrence.test_state_update import CASES, case
from tests.specs.kda import kda_lm

BACKENDS = ("eager", "triton")
ENDS = [0, 0, 3, 4, 4, 10]  # of rows packed in one line, the first and another without tokens
_OPS: dict[tuple[str, str], Any] = {}


def function(rule: Rule, backend: str) -> Any:
    """The operator of a rule, one for all tests: a program is emitted once."""
    key = rule.name, backend
    return _OPS.setdefault(key, ar.op(rule, backend))


def meant(rule: Rule, arrays: list[Any], states: list[Any], seq: Rows) -> tuple[np.ndarray, ...]:
    """Outputs and final states as `state_update` means them."""

    class Body:
        function = rule.function

        def __call__(self, *x: Any) -> Any:
            return rule(*x)

    return OPS["state_update"].meaning(*arrays, *states, seq, rule=Body())


def start(rule: Rule, arrays: list[np.ndarray], rows: int) -> list[np.ndarray]:
    """States of rows that have seen tokens."""
    sizes: dict[str, int] = {}
    heads = 1
    for x, shape in zip(arrays, rule.operands.values(), strict=True):
        lead = x.ndim - len(shape)
        sizes |= zip(shape, x.shape[lead:], strict=True)
        heads = max(heads, x.shape[lead - 1] if lead in (1, 3) else 1)
    rng = np.random.default_rng(3)
    declared = rule.function.inputs[: len(rule.states)]
    return [
        rng.standard_normal((rows, heads, *(sizes[str(d)] for d in v.type.shape)))  # type: ignore[union-attr]
        for v in declared
    ]


def flat(made: Any) -> list[torch.Tensor]:
    return [x for part in made for x in (part if isinstance(part, tuple) else (part,))]


# Interpreting every token takes long, and tests/triton has kernels of every case.
INTERPRETED = ("grouped keys", "a decay per head", "two states", "a transposed state", "everything")
BY_BACKEND = [
    pytest.param(name, on, marks=[pytest.mark.slow] * (on == "triton" and name not in INTERPRETED))
    for name in CASES
    for on in BACKENDS
]


@pytest.mark.parametrize("name, backend", BY_BACKEND)
def test_a_rule_as_a_function(name: str, backend: str) -> None:
    """Dense from nothing and from a state, and packed with empty rows from a state; fewer of both
    where every token is interpreted."""
    rule, _, arrays = case(name)
    f = function(rule, backend)
    ranks = [len(shape) for shape in rule.operands.values()]
    line = [
        x.reshape(1, -1, *x.shape[2:]) if x.ndim - r >= 2 else x
        for x, r in zip(arrays, ranks, strict=True)
    ]
    dense, packed = Rows.dense(2, 5), Rows.ragged(1, 10, tuple(ENDS[:-1]), tuple(ENDS[1:]))
    ways = [(arrays, dense, True), (arrays, dense, False), (line, packed, False)]
    for dtype, allowed in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        chosen = ways if backend == "eager" else ways[1:] if dtype == torch.float64 else ways[2:]
        for given, seq, zero in chosen:
            states = start(rule, arrays, len(seq))
            before = [0 * s for s in states] if zero else states
            want = meant(rule, given, before, seq)
            xs = [torch.tensor(np.ascontiguousarray(x), dtype=dtype) for x in given]
            initial = tuple(torch.tensor(s, dtype=dtype) for s in states)
            have = f(
                *xs,
                initial_state=None if zero else initial if len(initial) > 1 else initial[0],
                cu_seqlens=ENDS if seq is packed else None,
                return_state=True,
            )
            for y, x in zip(flat(have), want, strict=True):
                assert y.dtype == dtype
                error = np.max(np.abs(y.numpy() - x), initial=0)
                assert error <= allowed * np.max(np.abs(x), initial=1)


def operands(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Of KDA: grouped, shared, per head, constant."""
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 3, 2, 3), "k": (2, 3, 3), "v": (2, 3, 4, 2), "g": (4, 3), "beta": ()}
    drawn = {name: torch.tensor(rng.standard_normal(s)) for name, s in shapes.items()}
    drawn |= {"g": -drawn["g"].abs(), "beta": drawn["beta"].sigmoid()}
    return [x.to(dtype) for x in drawn.values()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients(backend: str) -> None:
    """To every operand and the initial state, through outputs and final state."""
    f = function(kda, backend)
    q, k, v, g, beta = operands()
    given = [q[:1], k[:1], v[:1], g, beta, torch.randn(2, 4, 3, 2, dtype=torch.float64)]
    given = [x.detach().clone().requires_grad_() for x in given]

    def run(*x: torch.Tensor) -> Any:
        return f(*x[:5], initial_state=x[5], cu_seqlens=[0, 1, 3], return_state=True)

    assert torch.autograd.gradcheck(run, given, fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_several_states(backend: str) -> None:
    f = function(ratio, backend)
    x = torch.randn(3, 1, 3, 2, 2, dtype=torch.float64)
    given = [a.detach().clone().requires_grad_() for a in (*x, torch.randn(1, 2, 2, 2).double())]
    given.append(torch.randn(1, 2, 2, dtype=torch.float64).requires_grad_())

    def run(*x: torch.Tensor) -> Any:
        return flat(f(*x[:3], initial_state=x[3:], return_state=True))

    assert torch.autograd.gradcheck(run, given, fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_operands_as_they_lie(backend: str) -> None:
    """Without contiguous axes, one tensor given twice, or expanded."""
    f = function(kda, backend)
    q, k, v, g, beta = operands()
    want = f(q, k, v, g, beta)
    spread = torch.randn(2, 3, 4, 2, 2, dtype=torch.float64)[..., 1]
    spread.copy_(v)
    turned = (q.transpose(0, 3).contiguous().transpose(0, 3), k.mT.contiguous().mT, spread)
    assert not any(x.is_contiguous() for x in turned)
    assert torch.equal(f(*turned, g, beta), want)
    twice = torch.randn(2, 3, 1, 3, dtype=torch.float64)
    wide = twice.expand(2, 3, 4, 3)
    apart = f(wide.clone(), twice.clone(), v, g, beta)
    assert torch.equal(f(wide, twice, v, g, beta), apart)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("padding", ("left", "right"))
def test_padding(padding: str, backend: str) -> None:
    """Rows padded with NaN are the rows packed, gradients too; padding gives zeros."""
    f = function(kda, backend)
    q, k, v, g, beta = operands()
    lengths = [2, 0]
    keep = torch.zeros(2, 3, dtype=torch.bool)
    keep[0, slice(0, 2) if padding == "right" else slice(1, 3)] = True
    given = [x.detach().clone() for x in (q, k, v)]
    for x in given:
        x[~keep] = torch.nan
    leaves = [x.requires_grad_() for x in given]
    out, state = f(*leaves, g, beta, lengths=lengths, padding=padding, return_state=True)
    packed = [x[keep][None].detach().requires_grad_() for x in leaves]
    want, after = f(*packed, g, beta, cu_seqlens=[0, 2, 2], return_state=True)
    assert torch.equal(out[keep][None], want) and not out[~keep].any()
    assert torch.equal(state, after) and not state[1].any()
    out.sum().backward()
    want.sum().backward()
    for x, y in zip(leaves, packed, strict=True):
        assert x.grad is not None and y.grad is not None
        torch.testing.assert_close(x.grad[keep][None], y.grad, rtol=1e-12, atol=1e-12)
        assert not x.grad[~keep].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rule_whose_first_operand_has_no_tokens(backend: str) -> None:
    @ar.recurrence("a:K k:K v:V -> o:V")
    def fading(S: Any, a: Any, k: Any, v: Any) -> Any:
        S = a[:, None] * S + np.outer(k, v)
        return S, k @ S

    f = ar.op(fading, backend)
    given = [torch.randn(s, dtype=torch.float64) for s in ((2, 3), (2, 4, 2, 3), (2, 4, 2, 5))]
    zeros = [np.zeros((2, 2, 3, 5))]
    want, _ = meant(fading, [x.numpy() for x in given], zeros, Rows.dense(2, 4))
    torch.testing.assert_close(f(*given), torch.tensor(want), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes(backend: str) -> None:
    """Outputs are in the dtype of the first operand, the state is float32 at least; operands may be
    wider than the first, up to what is computed in."""
    f = function(kda, backend)
    q, k, v, g, beta = operands(torch.float32)
    low = [x.bfloat16() for x in (q, k, v)]
    start = torch.randn(2, 4, 3, 2).bfloat16()
    out, state = f(*low, g, beta, initial_state=start, return_state=True)
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    same = [x.float() for x in low]
    want, after = f(*same, g, beta, initial_state=start.float(), return_state=True)
    assert torch.equal(state, after)
    assert torch.all((out.float() - want).abs() <= want.abs() * 2**-8)


def test_files_and_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program is lowered once for what it is given, whatever B and T, and is found again."""
    monkeypatch.setenv("ARCHIR_CACHE", str(tmp_path))
    path = f"{Path(__file__).parents[1] / 'specs/kda.py'}:kda"
    f = ar.op(path, "triton")
    q, k, v, g, beta = operands()
    f(q, k, v, g, beta)
    f(q[:1, :2], k[:1, :2], v[:1, :2], g, beta)
    names = [file.name for file in f.files]
    assert "kda_dense.py" in names and "kda_ragged.py" not in names
    assert len({file.parent for file in f.files}) == 1 == len([*tmp_path.iterdir()])
    check_golden("operator/kernels", masked(str(f.kernels())))
    text = f.files[names.index("kda_dense.py")].read_text()
    assert "o, state_update_state = kda_1(q, k, v, g, beta, " in text
    assert "# kda.py:LINE" in masked(text)
    monkeypatch.setattr("backends.runtime.operator.lower", lambda *_, **__: pytest.fail("lowered"))
    again = ar.op(path, "triton")
    assert torch.equal(again(q, k, v, g, beta), f(q, k, v, g, beta))
    assert again.kernels() == f.kernels() and again.files == f.files
    assert all(cache.intact(file) for file in f.files)


def test_the_cache_knows_the_size_of_chunks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A program with chunks of another size is another program, of an operator and of a model."""
    monkeypatch.setenv("ARCHIR_CACHE", str(tmp_path))
    for size in (16, 8):
        with chunks_of(size):
            f, model = ar.op(kda, form="chunk"), ar.compile(kda_lm, preset="tiny", form="chunk")
            f(*operands())
            model.init_weights(0)(torch.zeros(1, 1, dtype=torch.int64))
        (text,) = (x.read_text() for x in f.files if x.name == "kda_dense.py")
        texts = [text, *(x.read_text() for x in model.files if x.name.startswith("full"))]
        assert all(f"chunk={size})" in x for x in texts) and len(texts) == 2
        assert all(f"chunk={24 - size})" not in x for x in texts)


CATTY = """
import archir as ar
import numpy as np


@ar.recurrence("q:K k:K v:V -> o:V")
def catty(S, q, k, v):
    S = S + np.outer(k, v)
    return S, np.sum(np.concatenate([q, k])) * v + q @ S
"""


def test_kernels_say_what_was_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rule without a kernel, and one whose form has none, with the reason; also where programs
    come from the cache. Before the first call nothing is known."""
    monkeypatch.setenv("ARCHIR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cc.py").write_text(CATTY)
    q, k, v, g, beta = operands(torch.float32)
    ways: dict[str, tuple[Any, str, tuple[torch.Tensor, ...]]] = {
        "a rule without a kernel": (f"{tmp_path}/cc.py:catty", "auto", (q, k, v)),
        "in chunks": (kda, "chunk", (q, k, v, g, beta)),
        "by a kernel": (kda, "auto", (q, k, v, g, beta)),
    }
    shown = [f"# before the first call\n{ar.op(kda, 'triton').kernels()}\n"]
    for name, (rule, form, given) in ways.items():
        f = ar.op(rule, "triton", form)
        assert not f.kernels()
        f(*given)
        f(*given, lengths=[3, 1])
        with monkeypatch.context() as patch:
            patch.setattr("backends.runtime.operator.lower", lambda *_, **__: pytest.fail("again"))
            again = ar.op(rule, "triton", form)
            again(*given)
        assert again.kernels() == f.kernels() and len(f.kernels()) == 1
        shown.append(f"# {name}\n{masked(str(f.kernels()))}\n")
    check_golden("operator/left_to_torch", "\n".join(shown))
    eager = function(kda, "eager")
    eager(q, k, v, g, beta)
    assert str(eager.kernels()) == "every op is a torch call"


def test_a_traced_rule_is_of_its_own_line() -> None:
    """Whoever traces it; its inputs stand as their types do."""
    lead = dims.symbol("B"), dims.symbol("T"), 2
    types = {name: Tensor("f", (*lead, *(3 for _ in s))) for name, s in kda.operands.items()}
    entry = kda.trace({name: types[name] for name in reversed(types)}).entry
    assert [value.name for value in entry.inputs] == [*reversed(kda.operands)]
    assert entry.loc is not None and {op.loc for op in entry.ops} == {entry.loc}


def masked(text: str) -> str:
    """Without hashes, and lines of kda's file."""
    text = re.sub(r"\b([a-z_]+_)[0-9a-f]{12}\b", r"\1HASH", text)
    return re.sub(r"\bkda\.py:\d+", "kda.py:LINE", text)


@pytest.mark.parametrize("backend", BACKENDS)
def test_under_a_compiler(backend: str) -> None:
    """In one graph, gradients too; programs are emitted while it traces. Eager's rows of unlike
    length still break its graph."""
    rows = {"lengths": [3, 1]} if backend == "triton" else {}
    compiled = torch.compile(ar.op(kda, backend), fullgraph=True, backend="eager")
    made = []
    for f in (compiled, function(kda, backend)):
        given = [x.requires_grad_() for x in operands(torch.float32)]
        out, state = f(*given, **rows, return_state=True)
        (out.sum() + state.square().sum()).backward()
        made.append([out, state, *(x.grad for x in given)])
    for x, y in zip(*made, strict=True):
        torch.testing.assert_close(x, y)


Q, K, V, G, BETA = operands(torch.float32)
REFUSED: dict[str, Callable[[Any], Any]] = {
    "count": lambda f: f(Q, K),
    "a dim": lambda f: f(Q, K[..., :2], V, G, BETA),
    "tokens": lambda f: f(Q, K, V[:, :2], G, BETA),
    "the batch": lambda f: f(Q, K[:1], V, G, BETA),
    "heads": lambda f: f(Q, K, V[:, :, :3], G, BETA),
    "a rank": lambda f: f(Q, K, V, G, V[..., None]),
    "no tokens": lambda f: f(Q[0, 0], G, V[0, 0], G, BETA),
    "a number": lambda f: f(Q, K, V, G, 0.5),
    "integers": lambda f: f(Q, K, V, G, BETA.long()),
    "a wider dtype": lambda f: f(Q, K, V, G.double(), BETA),
    "devices": lambda f: f(Q, K.to("meta"), V, G, BETA),
    "a state": lambda f: f(Q, K, V, G, BETA, initial_state=torch.zeros(2, 4, 2, 3)),
    "rows of a state": lambda f: f(
        *(x[:1] for x in (Q, K, V)), G, BETA, initial_state=torch.zeros(1, 4, 3, 2),
        cu_seqlens=[0, 1, 3],
    ),
    "states": lambda f: f(Q, K, V, G, BETA, initial_state=(torch.zeros(2, 4, 3, 2),) * 2),
    "a state of integers": lambda f: f(
        Q, K, V, G, BETA, initial_state=torch.zeros(2, 4, 3, 2, dtype=torch.int64)
    ),
    "lines": lambda f: f(Q, K, V, G, BETA, cu_seqlens=[0, 3, 6]),
    "a spec": lambda _: ar.op("gpt2"),
    "a backend": lambda _: ar.op(kda, "numba"),
    "a form": lambda _: ar.op(kda, form="quadratic"),
}  # fmt: skip


def test_refused() -> None:
    f, shown = function(kda, "eager"), []
    for name, run in REFUSED.items():
        with pytest.raises(ArchirError) as caught:
            run(f)
        assert caught.value.next
        shown.append(f"# {name}\n{caught.value}\n")
    check_golden("operator/refused", "\n".join(shown))


def test_every_rule_has_a_case() -> None:
    assert {rule for rule, _, _ in CASES.values()} == {*RULES}
