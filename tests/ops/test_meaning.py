"""What the ops mean, against independent references: torch in float64, or a loop written out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from archir.interp import round_bf16, to_dtype
from archir.ops import OPS
from archir.ops.elementwise import TABLE
from archir.sequence import Rows

B, T, HEADS, GROUPS, SIZE, WIDE = 2, 6, 4, 2, 8, 5
EDGES = np.array([-745.2, -88.0, -1e-3, -0.0, 0.0, 1e-8, 0.5, 3.0, 20.5, 87.0, 700.0])


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def same(ours: Any, theirs: torch.Tensor, relative: float = 1e-13) -> None:
    theirs = theirs.numpy()
    assert np.shape(ours) == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=relative, atol=1e-14)


TORCH = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "floor_divide": torch.floor_divide, "mod": torch.remainder, "floor": torch.floor,
    "pow": lambda a, b: a.abs() ** b, "maximum": torch.maximum, "minimum": torch.minimum,
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "exp2": torch.exp2,
    "expm1": torch.expm1, "log": torch.log, "log1p": torch.log1p, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "sin": torch.sin, "cos": torch.cos, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "silu": F.silu, "relu": torch.relu,
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "less": torch.lt,
    "less_equal": torch.le, "greater": torch.gt, "greater_equal": torch.ge, "equal": torch.eq,
    "not_equal": torch.ne, "logical_and": torch.logical_and, "logical_or": torch.logical_or,
    "logical_not": torch.logical_not, "where": torch.where,
}  # fmt: skip
COUNTS = {row.kind: row.operands for row in TABLE}
POSITIVE = {"log", "log1p", "sqrt", "rsqrt"}


def test_every_elementwise_op_has_a_reference() -> None:
    assert set(TORCH) == {kind for kind, d in OPS.items() if d.family == "elementwise"}


@pytest.mark.parametrize("kind", TORCH)
def test_elementwise(kind: str) -> None:
    x = np.concatenate([EDGES, draw(20)])
    y = np.concatenate([EDGES[::-1], draw(20, seed=1)])
    x = np.abs(x) + 1e-6 if kind in POSITIVE else np.abs(x) if kind == "pow" else x
    if kind in ("where", "logical_and", "logical_or", "logical_not"):
        operands = [x > 0, y if kind == "where" else y > 0, x]
    else:
        operands = [x, y]
    operands = operands[: COUNTS[kind]]
    with np.errstate(all="ignore"):
        ours = OPS[kind].meaning(*operands)
    same(ours, TORCH[kind](*map(torch.tensor, operands)))


def _attend(q: Any, k: Any, v: Any, **options: Any) -> torch.Tensor:
    """torch's attention on [B, T, H, D] arrays."""
    q, k, v = (torch.tensor(x).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).transpose(1, 2)


QUERY, KEY = torch.arange(T)[:, None], torch.arange(T)[None, :]
SLOPE = torch.where(KEY <= QUERY, -0.1 * (QUERY - KEY).double(), -torch.inf)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"causal": False}, {}),
    "causal": ({"causal": True}, {"is_causal": True}),
    "window": ({"causal": True, "window": 3}, {"attn_mask": (KEY <= QUERY) & (KEY > QUERY - 3)}),
    "scale": ({"causal": True, "scale": 0.3}, {"is_causal": True, "scale": 0.3}),
    "mask": (
        {"causal": True, "mask": lambda i, j: (i - j) % 2 == 0},
        {"attn_mask": (KEY <= QUERY) & ((QUERY - KEY) % 2 == 0)},
    ),
    "score": (
        {"causal": True, "score": lambda s, i, j, h: s - 0.1 * (i - j) * (h + 1)},
        {"attn_mask": torch.stack([SLOPE * (h + 1) for h in range(HEADS)])},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("groups", [HEADS, GROUPS, 1])
def test_attention(name: str, groups: int) -> None:
    ours, theirs = CASES[name]
    q, k = draw(B, T, HEADS, SIZE), draw(B, T, groups, SIZE, seed=1)
    v = draw(B, T, groups, WIDE, seed=2)
    got = OPS["attention"].meaning(q, k, v, Rows.dense(B, T), **ours)
    same(got, _attend(q, k, v, **theirs), 1e-12)


@pytest.mark.parametrize("name", [name for name, (ours, _) in CASES.items() if ours["causal"]])
def test_attention_on_a_cache_is_the_end_of_the_whole(name: str) -> None:
    ours, theirs = CASES[name]
    q, k, v = (draw(B, T, HEADS, SIZE, seed=i) for i in range(3))
    past = 4
    room = np.full((B, 2, HEADS, SIZE), np.nan)  # beyond the valid part: never read
    k_all, v_all = np.concatenate([k, room], axis=1), np.concatenate([v, room], axis=1)
    seq = Rows.dense(B, T - past, (past,) * B)
    got = OPS["attention"].meaning(q[:, past:], k_all, v_all, seq, keys="cache", **ours)
    same(got, _attend(q, k, v, **theirs)[:, past:], 1e-12)


def test_a_query_that_sees_nothing_gives_zero() -> None:
    q = draw(B, T, HEADS, SIZE)
    seq = Rows.dense(B, T)
    got = OPS["attention"].meaning(q, q, q, seq, causal=True, mask=lambda i, j: (i > 0) & (j >= 0))
    assert np.all(got[:, 0] == 0)
    assert np.all(np.isfinite(got))


def test_rotary() -> None:
    """The complex form of Su et al.: pair (x_i, x_{i+D/2}) times e^{i p θ^(−2i/D)}."""
    x, p = draw(B, T, HEADS, SIZE), np.arange(B * T).reshape(B, T)
    half = SIZE // 2
    z = torch.complex(torch.tensor(x[..., :half]), torch.tensor(x[..., half:]))
    rate = 500.0 ** (-torch.arange(half, dtype=torch.float64) * 2 / SIZE)
    angle = (torch.tensor(p)[..., None] * rate)[:, :, None, :]
    turned = z * torch.polar(torch.ones_like(angle), angle)
    same(OPS["rotary"].meaning(x, p, theta=500.0), torch.cat([turned.real, turned.imag], -1))


def test_norms() -> None:
    x, w, b = draw(B, T, SIZE), draw(SIZE, seed=1), draw(SIZE, seed=2)
    tx, tw, tb = map(torch.tensor, (x, w, b))
    layer_norm, rms_norm = OPS["layer_norm"].meaning, OPS["rms_norm"].meaning
    same(layer_norm(x, w, b, eps=0.1), F.layer_norm(tx, (SIZE,), tw, tb, 0.1))
    same(layer_norm(x, w, eps=0.1), F.layer_norm(tx, (SIZE,), tw, None, 0.1))
    same(layer_norm(x, eps=1e-5), F.layer_norm(tx, (SIZE,)))
    same(rms_norm(x, w, eps=0.1), F.rms_norm(tx, (SIZE,), tw, 0.1))
    same(rms_norm(x, eps=0.1), F.rms_norm(tx, (SIZE,), None, 0.1))
    unit = OPS["l2_norm"].meaning(x, eps=0.0)
    same(unit, F.normalize(tx, dim=-1, eps=0.0))
    same(OPS["l2_norm"].meaning(x, eps=0.1), tx / (tx.square().sum(-1, True) + 0.1).sqrt())


@pytest.mark.parametrize("tail", [None, np.tanh], ids=["plain", "tail"])
def test_cross_entropy(tail: Any) -> None:
    vocab = 11
    x, w = draw(B, T, SIZE), 3 * draw(vocab, SIZE, seed=1)
    targets = np.random.default_rng(0).integers(0, vocab, (B, T))
    targets[0, 1] = targets[1, :3] = -100
    z = torch.tensor(x) @ torch.tensor(w).T
    z = z if tail is None else torch.tanh(z)
    got = OPS["cross_entropy"].meaning(x, w, targets, tail=tail)
    same(got, F.cross_entropy(z.flatten(0, 1), torch.tensor(targets).flatten()))
    assert OPS["cross_entropy"].meaning(x, w, np.full_like(targets, -100)) == 0


def test_tensor_ops() -> None:
    x, w, b = draw(B, T, 24), draw(5, 24, seed=1), draw(5, seed=2)
    tx = torch.tensor(x)
    same(OPS["linear"].meaning(x, w, b), F.linear(tx, torch.tensor(w), torch.tensor(b)))
    same(OPS["logits"].meaning(x, w), F.linear(tx, torch.tensor(w)))
    parts = OPS["heads"].meaning(x, parts=3, heads=2)
    for ours, theirs in zip(parts, tx.chunk(3, -1), strict=True):
        same(ours, theirs.unflatten(-1, (2, 4)))
    same(OPS["merge"].meaning(parts[0]), tx[..., :8])
    for ours, theirs in zip(
        OPS["split"].meaning(x, sizes=(4, 20), axis=2), tx.split([4, 20], 2), strict=True
    ):
        same(ours, theirs)
    same(OPS["repeat"].meaning(x, axis=1, times=3), tx.repeat_interleave(3, 1))
    same(OPS["transpose"].meaning(x, axes=(2, 0, 1)), tx.permute(2, 0, 1))
    same(OPS["reduce_mean"].meaning(x, axes=(0, 2), keepdims=True), tx.mean((0, 2), True))
    same(OPS["reduce_max"].meaning(x, axes=(1,)), tx.amax(1))
    equation = "btd,od->bot"
    same(
        OPS["einsum"].meaning(x, w, equation=equation), torch.einsum(equation, tx, torch.tensor(w))
    )
    tokens = np.array([[0, 4], [2, 2]])
    same(OPS["embedding"].meaning(tokens, w), F.embedding(torch.tensor(tokens), torch.tensor(w)))


def test_append_compacts_rows() -> None:
    """Row r: its own past first, then its new tokens; what was beyond the past is gone."""
    cache, x = np.arange(1, 9).reshape(2, 4, 1), np.arange(101, 105).reshape(2, 2, 1)
    got = OPS["append"].meaning(cache, x, Rows.dense(2, 2, (4, 1)))
    assert got[:, :, 0].tolist() == [[1, 2, 3, 4, 101, 102], [5, 103, 104, 0, 0, 0]]


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_short_convolution(taps: int) -> None:
    """Against torch's grouped convolution of each row alone, behind its window."""
    rng = np.random.default_rng(taps)
    x, w = rng.standard_normal((2, 7, 3)), rng.standard_normal((3, taps))
    window = rng.standard_normal((3, taps - 1, 3))
    bounds = ((0, 5), (5, 5), (7, 14))
    seq = Rows.ragged(2, 7, *zip(*bounds, strict=True))
    y, after = OPS["short_conv"].meaning(x, w, window, seq, activation=np.tanh)
    flat = x.reshape(14, 3)
    for row, (start, stop) in enumerate(bounds):
        line = np.concatenate([window[row], flat[start:stop]])
        assert np.array_equal(after[row], line[len(line) - taps + 1 :])
        if stop > start:
            channels = torch.from_numpy(line.T[None].copy())
            want = F.conv1d(channels, torch.from_numpy(w[:, None]), groups=3)[0].T.tanh()
            same(y.reshape(14, 3)[start:stop], want)


def test_positions_and_lengths_follow_the_past() -> None:
    seq = OPS["dense"].meaning(np.zeros((2, 3)), np.array([4, 0]))
    assert OPS["positions"].meaning(None, seq).tolist() == [[4, 5, 6], [0, 1, 2]]
    assert OPS["advance"].meaning(seq).tolist() == [7, 3]
    x = draw(2, 3, 5)
    assert np.array_equal(OPS["last"].meaning(x, seq), x[:, -1:])
    steps = OPS["steps"].meaning(x, seq)
    assert np.array_equal(steps, x.transpose(1, 0, 2))
    assert np.array_equal(OPS["unsteps"].meaning(steps, x, seq), x)


def test_bfloat16_rounding_is_torchs() -> None:
    """Ties to even, subnormals, infinities and NaN: all 2^16 patterns, and half a step up."""
    exact = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    below = ((np.arange(2**16, dtype=np.uint32) << 16) | 0x7FFF).view(np.float32)
    tie = ((np.arange(2**16, dtype=np.uint32) << 16) | 0x8000).view(np.float32)
    above = ((np.arange(2**16, dtype=np.uint32) << 16) | 0x8001).view(np.float32)
    for x in (exact, below, tie, above):
        theirs = torch.tensor(x).bfloat16().float().numpy()
        finite = np.isfinite(x)
        assert np.array_equal(round_bf16(x)[finite].view(np.uint32), theirs[finite].view(np.uint32))
        assert np.array_equal(round_bf16(x)[~finite], x[~finite], equal_nan=True)
    assert round_bf16(np.float32(1 + 2**-9)).shape == ()


def test_to_dtype() -> None:
    assert to_dtype(1 / 3, "f32").dtype == np.float32
    assert float(to_dtype(1 / 3, "bf16")) == float(torch.tensor(1 / 3).bfloat16())
    assert float(to_dtype(math.pi, "f16")) == float(torch.tensor(math.pi).half())
    assert to_dtype([1.9], "i64").tolist() == [1]
