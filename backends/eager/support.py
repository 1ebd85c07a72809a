"""What emitted eager code calls beyond torch itself. A copy lies beside the emitted files.

Letters: B batch, T tokens, R rows, P past, H heads, G key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from archir.philox import fold, philox, threshold
from archir.sequence import Rows
from backends.eager.cache import Cache, places


class Block(nn.Module):
    """One scope of the spec. Calling it runs a program on it, so hooks see every phase."""

    def forward(self, program: Callable[..., Any], *args: Any) -> Any:
        """program(self, *args)"""
        return program(self, *args)


class Scope(nn.Module):
    """A namespace of parameters and modules; it is not called."""

    def __init__(self, **members: Any) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: a namespace computes nothing."""
        raise RuntimeError(
            f"{type(self).__name__} only holds parameters ({', '.join(self._parameters)}). "
            "Shard, checkpoint or hook the block above it instead."
        )


class Float32(Scope):
    """Parameters kept in float32 whatever the model's dtype; their first op runs in `forward`."""

    def forward(self, use: Callable[[Any], Any]) -> Any:
        """use(self)"""
        return use(self)


class Linear(nn.Linear):
    """nn.Linear whose one-row product uses every core, whatever dtype its parameters are kept in;
    they are made uninitialised."""

    def reset_parameters(self) -> None:
        """Nothing: weights are drawn or loaded by name."""

    def forward(self, input: Tensor) -> Tensor:
        """x wᵀ + b"""
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, w: Tensor, b: Tensor | None = None, parts: int = 8) -> Tensor:
    """x wᵀ + b in the dtype of x; one float32 row on a CPU is split over the outputs.

    A product with a single row is bound by reading w, and F.linear does that on one core (MKL sgemm
    with M = 1). As a batch of row blocks of w, a view, it runs on all of them.
    """
    w, b = w.to(x.dtype), None if b is None else b.to(x.dtype)
    one_row = x.numel() == w.shape[1] and x.dtype == torch.float32 and not x.is_cuda
    plain = type(w) in (nn.Parameter, Tensor) and w.is_contiguous() and w.shape[0] % parts == 0
    if torch.is_grad_enabled() or not (one_row and plain) or torch.compiler.is_compiling():
        return F.linear(x, w, b)
    rows = x.reshape(1, 1, -1).expand(parts, 1, -1)
    y = torch.bmm(rows, w.view(parts, -1, w.shape[1]).mT).view(*x.shape[:-1], w.shape[0])
    return y if b is None else y + b


def parameter(*shape: int, device: Any = None, dtype: Any = None) -> nn.Parameter:
    """An uninitialised parameter."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or the dtype where that is wider."""
    return torch.promote_types(dtype, torch.float32)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """x / √(Σ x² + ε) over the last axis, in float32 at least."""
    y = x.to(wide(x.dtype))
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def dense(x: Tensor, length: tuple[int, ...] | None = None) -> Rows:
    """The sequence of a dense batch after `length[b]` tokens of past."""
    if length is not None and len(length) != x.shape[0]:
        raise ValueError(
            f"{x.shape[0]} rows of tokens meet a state of {len(length)} rows: "
            "decode with as many rows as the state was made with"
        )
    return Rows.dense(x.shape[0], x.shape[1], length)


def ragged(
    x: Tensor,
    start: tuple[int, ...],
    stop: tuple[int, ...],
    length: tuple[int, ...] | None = None,
) -> Rows:
    """The sequence of padded or packed tokens: row r is [start[r], stop[r]) of the flat grid."""
    return Rows.ragged(x.shape[0], x.shape[1], start, stop, length)


def positions(x: Tensor, seq: Rows, limit: int | None = None) -> Tensor:
    """Absolute positions, i64[B, T]."""
    if limit is not None and any(n > limit for n in seq.lengths):
        raise ValueError(f"{max(seq.lengths)} tokens do not fit the context of {limit}")
    key = ("positions", x.device)
    if key not in seq.memo:
        if seq.uniform:
            past = seq.past[0] if seq.past else 0
            one = torch.arange(past, past + seq.length, device=x.device)
            seq.memo[key] = one.expand(seq.batch, seq.length)
        else:
            seq.memo[key] = torch.from_numpy(seq.positions()).to(x.device)
    return seq.memo[key]


def last(x: Tensor, seq: Rows) -> Tensor:
    """The last token of each row, [R, 1, …]; zero where a row has none."""
    if seq.full and seq.length:
        return x[:, -1:]
    found = x.new_zeros(len(seq), 1, *x.shape[2:])
    ends = [(row, stop - 1) for row, (start, stop, _) in enumerate(seq) if stop > start]
    if not ends:
        return found
    row, token = torch.tensor(ends, device=x.device).unbind(1)
    return found.index_put((row,), x.flatten(0, 1)[token][:, None])


def steps(x: Tensor, seq: Rows, chunk: int | str = 0) -> Tensor:
    """[B, T, …] → [J, R, …]: step j of row r is its j-th token; ended rows repeat their last.

    chunk: C gives [J, R, C, …], C tokens of a row at each step; "whole" [1, R, J, …].
    """
    if seq.full and not chunk:
        return x.transpose(0, 1)
    if seq.full and seq.length:
        if chunk == "whole":
            return x[None]
        more = -seq.length % int(chunk)
        if more:
            x = torch.cat([x, x[:, -1:].expand(-1, more, *x.shape[2:])], 1)
        return x.unflatten(1, (-1, int(chunk))).transpose(0, 1)
    index = torch.from_numpy(seq.grid(chunk)[0]).to(x.device)
    if not x.numel():
        return x.new_zeros(*index.shape, *x.shape[2:])
    return x.flatten(0, 1)[index]


def unsteps(y: Tensor, like: Tensor, seq: Rows, chunk: int | str = 0) -> Tensor:
    """[J, R, …] → [B, T, …], zero where no row owns the token; chunk as for `steps`."""
    if chunk:
        y = y.transpose(1, 2).flatten(0, 1)
        y = y[: seq.length] if seq.full else y
    if seq.full:
        return y.transpose(0, 1)
    row, position, token = places(seq, y.device)
    step = position - torch.tensor(seq.past, dtype=torch.int64, device=y.device)[row]
    flat = y.new_zeros(like.shape[0] * like.shape[1], *y.shape[2:])
    return flat.index_put((token,), y[step, row]).unflatten(0, like.shape[:2])


def valid(seq: Rows, device: torch.device, chunk: int | str = 0) -> Tensor:
    """Whether row r still has a j-th token, bool[J, R], or as `steps` arranges them."""
    if seq.full and chunk and seq.length:
        size = seq.length if chunk == "whole" else int(chunk)
        count = -(-seq.length // size)
        token = torch.arange(count * size, device=device).view(count, 1, size)
        return (token < seq.length).expand(-1, len(seq), -1)
    return torch.from_numpy(seq.grid(chunk)[1]).to(device)


def cumprod(x: Tensor, axis: int) -> Tensor:
    """y_i = x_0 · … · x_i, one product after another.

    torch's own divides by its factors to make gradients, which loses a subnormal one; products
    have the product rule.
    """
    made: list[Tensor] = []
    for factor in x.unbind(axis):
        made.append(made[-1] * factor if made else factor)
    return torch.stack(made, axis) if made else x


class _Cumprod(torch.autograd.Function):
    """y_i = x_0 · … · x_i, for compilers. Its gradient is y_{i−1} r_i with r_i = dy_i +
    x_{i+1} r_{i+1}, made by doubling: r takes in what lies 1, 2, 4, … places ahead."""

    @staticmethod
    def forward(x: Tensor, axis: int) -> Tensor:
        return x.cumprod(axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.axis = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x, y), axis, r, step = ctx.saved_tensors, ctx.axis, grad, 1
        n = x.shape[axis]
        if n < 2:
            return grad, None
        factors = x.narrow(axis, 1, n - 1)  # of r_{i+step} in r_i
        while step < n - 1:  # r_0 comes last: compilers fix a length that a slice takes to 1
            near, end = r.split([n - step, step], axis)
            ahead = r.narrow(axis, step, n - step)
            r = torch.cat([torch.addcmul(near, factors, ahead), end], axis)
            if 2 * step < n - 1:
                left = n - 2 * step
                factors = factors.narrow(axis, 0, left) * factors.narrow(axis, step, left)
            step *= 2
        later = r.narrow(axis, 1, n - 1)
        first = grad.narrow(axis, 0, 1) + x.narrow(axis, 1, 1) * later.narrow(axis, 0, 1)
        return torch.cat([first, y.narrow(axis, 0, n - 1) * later], axis), None


def long_cumprod(x: Tensor, axis: int) -> Tensor:
    """`cumprod` along an axis whose length a compiler need not know, so that it cannot unroll."""
    return _Cumprod.apply(x, axis) if torch.compiler.is_compiling() else cumprod(x, axis)


def substitute(lower: Tensor, b: Tensor, e: Tensor | None = None) -> Tensor:
    """u_i = e_i ⊙ (b_i + Σ_{j<i} L_ij u_j): L [*A, N, N] below its diagonal, b [*A, N, V], and e
    [*A, N, 1], one triangular system for all values, or [*A, N, V], row by row."""
    if e is None or e.shape[-1] == 1:
        lower, b = (lower, b) if e is None else (e * lower, e * b)
        return torch.linalg.solve_triangular(-lower, b, upper=False, unitriangular=True)
    rows: list[Tensor] = []
    for i in range(b.shape[-2]):
        row = b[..., i, :]
        if rows:
            seen = torch.stack(rows, -2)
            row = row + torch.einsum("...j,...jv->...v", lower[..., i, :i], seen)
        rows.append(e[..., i, :] * row)
    return torch.stack(rows, -2) if rows else b


def mask_targets(targets: Tensor, seq: Rows) -> Tensor:
    """Targets, −100 (ignored) where no row owns the token."""
    _, _, token = places(seq, targets.device)
    flat = torch.full_like(targets, -100).flatten()
    return flat.index_put((token,), targets.flatten()[token]).view_as(targets)


def stack(steps: list[Tensor], shape: tuple[int, ...], dtype: Any, device: Any) -> Tensor:
    """Steps stacked on a new first axis; also where there is none."""
    return torch.stack(steps) if steps else torch.zeros((0, *shape), dtype=dtype, device=device)


def rotary(x: Tensor, positions: Tensor, seq: Rows, theta: float) -> Tensor:
    """Turns the pairs (x_i, x_{i+D/2}) by position · θ^(−2i/D); tables are made once per call."""
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    key = ("rotary", id(positions), theta, x.shape[-1], dtype)
    if key not in seq.memo:
        size = x.shape[-1]
        exponent = torch.arange(0, size, 2, dtype=torch.float64, device=x.device) / -size
        angles = (positions[..., None] * theta**exponent)[:, :, None]
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        # `positions` is kept beside the tables, so that its id stays its own
        seq.memo[key] = (torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1), positions)
    cos, sin, _ = seq.memo[key]
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def short_conv(
    x: Tensor,
    w: Tensor,
    seq: Rows,
    window: Tensor | None = None,
    activation: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """φ(Σ_j w[:, j] · x_{t−W+1+j}) per row of x [B, T, C], and the last W − 1 inputs of each row.

    Before a row's first token lies its window [R, W − 1, C], zeros where there is none. Padded and
    packed tokens are convolved as one line; the first W − 1 of each row are then done again, as
    their window and the row before them meet there.
    """
    past = w.shape[1] - 1
    if window is None:
        window = x.new_zeros(len(seq), past, x.shape[2])
    if seq.full:
        line = torch.cat([window, x], 1)
        y, after = _convolved(line, w), line[:, line.shape[1] - past :].clone()
    elif not x.numel():
        y, after = x, window
    else:
        head, inputs, last = _windows(seq, past, x.device)
        flat = x.flatten(0, 1)
        y = _convolved(F.pad(flat, (0, 0, past, 0))[None], w)[0]
        y[head] = _convolved(_inputs(flat, window, inputs), w)[:, 0]
        y, after = y.view_as(x), _inputs(flat, window, last)
    return (y if activation is None else activation(y)).to(x.dtype), after


def _inputs(x: Tensor, window: Tensor, place: Tensor) -> Tensor:
    """Inputs of convolutions by place: a token of x [N, C], or from −1 downwards one of the windows
    [R, W − 1, C] read line by line."""
    old = window.flatten(0, 1)[(-1 - place).clamp(min=0)]
    return torch.where(place[..., None] < 0, old, x[place.clamp(min=0)])


def _windows(seq: Rows, past: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens among the first `past` of their row [m], the places of their inputs [m, past + 1], and
    those of the last `past` inputs of every row [R, past]; made once per sequence."""
    key = ("windows", past, device)
    if key not in seq.memo:
        head: list[int] = []
        inputs: list[list[int]] = []
        last: list[list[int]] = []
        for row, (start, stop, _) in enumerate(seq):
            window = [*range(-1 - row * past, -1 - (row + 1) * past, -1)]
            head += range(start, min(start + past, stop))
            line = [*window, *range(start, min(start + past, stop))]
            inputs += [line[i : i + past + 1] for i in range(len(line) - past)]
            line = [*window, *range(max(start, stop - past), stop)]
            last.append(line[len(line) - past :])
        shapes = ((-1,), (-1, past + 1), (len(seq), past))
        seq.memo[key] = tuple(
            torch.tensor(found, dtype=torch.int64, device=device).view(shape)
            for found, shape in zip((head, inputs, last), shapes, strict=True)
        )
    return seq.memo[key]


def _convolved(line: Tensor, w: Tensor) -> Tensor:
    """Σ_j w[:, j] · line[t + j] for the L − W + 1 places t of [R, L, C], in float32 at least."""
    dtype = torch.promote_types(wide(line.dtype), w.dtype)
    first, *taps = w.to(dtype).unbind(1)
    line, n = line.to(dtype), line.shape[1] - len(taps)
    y = first * line[:, :n]
    for j, tap in enumerate(taps, 1):
        y = y + tap * line[:, j : j + n]
    return y


def key(module: nn.Module, name: str, seed: int) -> tuple[int, int]:
    """The key of a random op of a scope, from the seed of the call."""
    return fold(seed, path(module, name))


def path(module: nn.Module, name: str) -> str:
    """The absolute path of a field of a scope."""
    scope = getattr(module, "scope", "")
    return f"{scope}.{name}" if scope else name


def keep_mask(key: tuple[int, int], rows: Tensor, count: int, rate: float) -> Tensor:
    """Which of `count` elements of each row [*rows] stay, bool[*rows, count].

    Element i of row r is kept where word i mod 4 of counter (i // 4, r) reaches rate · 2³². On a
    CPU counters are taken in parts that stay in the cache.
    """
    blocks = -(-count // 4)
    size = blocks if rows.is_cuda else max(1, 2**16 // max(rows.numel(), 1))
    zero, least, made = torch.zeros_like(rows)[..., None], threshold(rate), []
    for start in range(0, max(blocks, 1), max(size, 1)):
        block = torch.arange(start, min(start + size, blocks), device=rows.device)
        words = philox(key, (block, rows[..., None], zero, zero))
        made.append((torch.stack(torch.broadcast_tensors(*words), -1) >= least).flatten(-2))
    return torch.cat(made, -1)[..., :count]


def dropout(x: Tensor, key: tuple[int, int], rate: float) -> Tensor:
    """x / (1 − rate) with each element zero at this rate, as the interpreter draws it."""
    keep = keep_mask(key, torch.zeros((), dtype=torch.int64, device=x.device), x.numel(), rate)
    return torch.where(keep.view(x.shape), x / (1 - rate), 0)


def attention(
    q: Tensor,
    k: Tensor | Cache,
    v: Tensor | Cache,
    seq: Rows,
    dropout_key: tuple[int, int] | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    score: Callable[..., Tensor] | None = None,
    mask: Callable[..., Tensor] | None = None,
    keys: str = "tokens",
    first: int = 0,
) -> Tensor:
    """softmax(scale · q kᵀ) v; q is [B, T, H, D], k and v [B, S, G, ·] with G dividing H.

    Padded or packed rows are computed one by one, each as if it were alone. A mask is materialised
    only where neither "no mask" nor "causal square" says it: with fewer queries than keys,
    is_causal aligns at the top left, which is not what a past means. Scores are materialised where
    a function changes them, and where probabilities are dropped; `first` is the place of the first
    query on the token grid.
    """
    k = k.rows if isinstance(k, Cache) else k
    v = v.rows if isinstance(v, Cache) else v
    if not seq.full:
        how = {
            "causal": causal, "window": window, "scale": scale, "score": score, "mask": mask,
            "dropout_key": dropout_key, "dropout": dropout,
        }  # fmt: skip
        return _row_by_row(q, k, v, seq, keys, how)
    n, m, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    if window is not None and not torch.compiler.is_compiling():  # there it would split lengths
        window = None if window >= m else window
    if score is not None or dropout_key is not None:
        keep = None
        if dropout_key is not None:
            token = first + torch.arange(q.shape[0] * n, device=q.device).view(q.shape[0], 1, n)
            rows = token * q.shape[2] + torch.arange(q.shape[2], device=q.device)[:, None]
            keep = keep_mask(dropout_key, rows, m, dropout), 1 - dropout
        return _scored(q, k, v, seq, causal, window, scale, score, mask, keep)
    hidden = (causal and n > 1) or window is not None or mask is not None
    hidden = hidden or not seq.uniform
    square = causal and 1 < n == m and window is None and mask is None
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    seen = None if square or not hidden else _seen(q.device, n, m, seq, causal, window, mask)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=square, scale=scale, enable_gqa=group > 1
    )
    return out.transpose(1, 2)


def _row_by_row(
    q: Tensor, k: Tensor, v: Tensor, seq: Rows, keys: str, how: dict[str, Any]
) -> Tensor:
    """Attention of padded or packed rows: zero where no row owns the token."""
    flat = q.flatten(0, 1)
    made, at = [], 0
    for row, (start, stop, past) in enumerate(seq):
        if stop == start:
            continue
        if keys == "cache":
            row_k, row_v = (x[row : row + 1, : past + stop - start] for x in (k, v))
        else:
            row_k, row_v = (x.flatten(0, 1)[None, start:stop] for x in (k, v))
        made.append(flat.new_zeros(start - at, *q.shape[2:3], v.shape[3]))
        alone = attention(flat[None, start:stop], row_k, row_v, seq.single(row), first=start, **how)
        made.append(alone[0])
        at = stop
    made.append(flat.new_zeros(flat.shape[0] - at, *q.shape[2:3], v.shape[3]))
    return torch.cat(made).unflatten(0, q.shape[:2])


def _seen(
    device: torch.device,
    n: int,
    m: int,
    seq: Rows,
    causal: bool,
    window: int | None,
    mask: Callable[..., Tensor] | None,
) -> Tensor:
    """Which keys a query sees, bool[n, m] or, for rows of unlike pasts, bool[R, 1, n, m]; made
    once per sequence and kind of attention."""
    key = ("seen", causal, window, mask, device)  # a sequence says n and m
    if key not in seq.memo:
        i, j = _query_key(device, n, m, seq)
        # of rows with unlike pasts, the shorter have no key at the last positions
        seen = torch.ones_like(i < j) if seq.uniform else j <= i[..., -1:, :]
        if causal:
            seen = seen & (j <= i)
        if window is not None:
            seen = seen & (j > i - window)
        if mask is not None:
            seen = seen & mask(i, j)
        seq.memo[key] = seen
    return seq.memo[key]


def _query_key(device: torch.device, n: int, m: int, seq: Rows) -> tuple[Tensor, Tensor]:
    """Absolute positions of queries [n, 1] (or [R, 1, n, 1]) and of keys [1, m]."""
    j = torch.arange(m, device=device)[None, :]
    if seq.uniform:
        return torch.arange(m - n, m, device=device)[:, None], j
    past = torch.tensor(seq.past, device=device)[:, None, None, None]
    return past + torch.arange(n, device=device)[:, None], j


def _scored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: Rows,
    causal: bool,
    window: int | None,
    scale: float | None,
    score: Callable[..., Tensor] | None,
    mask: Callable[..., Tensor] | None,
    keep: tuple[Tensor, float] | None,
) -> Tensor:
    """Attention that materialises its scores [B, H, n, m], in float32 at least: a function changes
    them, or probabilities are dropped (which are kept, and how many)."""
    n, m, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    w = wide(q.dtype)
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    s = torch.einsum("bihd,bjhd->bhij", q.to(w), k.to(w))
    s = s * (q.shape[3] ** -0.5 if scale is None else scale)
    if score is not None:
        i, j = _query_key(q.device, n, m, seq)
        s = score(s, i, j, torch.arange(q.shape[2], device=q.device)[:, None, None])
    if causal or window is not None or mask is not None or not seq.uniform:
        seen = _seen(q.device, n, m, seq, causal, window, mask)
        s = torch.where(seen, s, -torch.inf)
    # a query that sees nothing gives zero, as the meaning says
    p = torch.softmax(s, -1).nan_to_num(0.0)
    if keep is not None:
        p = torch.where(keep[0], p / keep[1], 0)
    return torch.einsum("bhij,bjhd->bihd", p, v.to(w)).to(q.dtype)


def _chunk_loss(x: Tensor, w: Tensor, targets: Tensor, tail: Any) -> Tensor:
    """Σ cross entropy of one chunk, in float32 at least."""
    z = F.linear(x, w.to(x.dtype)).to(wide(x.dtype))
    z = tail(z) if tail is not None else z
    return F.cross_entropy(z, targets, reduction="sum")


def _traced_loss(x: Tensor, w: Tensor, targets: Tensor, tail: Any, size: int) -> Tensor:
    """What `_ChunkedLoss` makes, for a compiler, which cannot trace gradients made by hand: a
    chunk's scores are made again for them, so that no more than one chunk is ever held here too."""
    total, start = x.new_zeros((), dtype=wide(x.dtype)), 0
    w = w.to(total.dtype)  # gradients of chunks are summed in it
    while start < x.shape[0]:  # a `range` would fix the number of tokens
        part = slice(start, start + size)
        inputs = x[part], w, targets[part], tail
        total = total + checkpoint(_chunk_loss, *inputs, use_reentrant=False)
        start += size
    return total


class _ChunkedLoss(torch.autograd.Function):
    """Σ cross entropy over chunks of tokens. Gradients are made in the forward pass, chunk by
    chunk, so that no more than one chunk of scores is ever held."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, targets: Tensor, tail: Any, size: int) -> Tensor:
        w32 = wide(x.dtype)
        total = x.new_zeros((), dtype=w32)
        needs = [bool(n) for n in ctx.needs_input_grad[:2]]
        dx = torch.zeros_like(x) if needs[0] else None
        dw = torch.zeros_like(w, dtype=w32) if needs[1] else None
        for start in range(0, x.shape[0], size):
            part = slice(start, start + size)
            with torch.enable_grad():
                xs = x[part].detach().requires_grad_(needs[0])
                ws = w.detach().requires_grad_(needs[1])
                loss = _chunk_loss(xs, ws, targets[part], tail)
            wanted = [t for t, n in zip((xs, ws), needs, strict=True) if n]
            made = iter(torch.autograd.grad(loss, wanted) if wanted else ())
            if dx is not None:
                dx[part] = next(made)
            if dw is not None:
                dw += next(made)
            total += loss.detach()
        ctx.save_for_backward(dx, dw.to(w.dtype) if dw is not None else None)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph=True; once_differentiable would give zeros
            raise RuntimeError(
                "the gradients of model.loss are made chunk by chunk and have no graph of their "
                "own. Use cross_entropy(model(tokens), targets) for a penalty on gradients."
            )
        dx, dw = ctx.saved_tensors
        return (
            None if dx is None else dx * grad.to(dx.dtype),
            None if dw is None else dw * grad.to(dw.dtype),
            None,
            None,
            None,
        )


def cross_entropy(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    tail: Callable[[Tensor], Tensor] | None = None,
    chunk: int = 512,
) -> Tensor:
    """Mean of logsumexp(z) − z[target] over targets ≠ −100, z = tail(x wᵀ); 0 without targets."""
    keep = (targets != -100).reshape(-1)
    if torch.compiler.is_compiling():
        # how many stay is not known there, so the others run too
        total = _traced_loss(x.reshape(-1, x.shape[-1]), w, targets.reshape(-1), tail, chunk)
        return total / keep.sum().clamp(min=1)
    x = x.reshape(-1, x.shape[-1])[keep]
    total = _ChunkedLoss.apply(x, w, targets.reshape(-1)[keep], tail, chunk)
    return total / max(1, x.shape[0])


_taps: list[dict[str, Tensor]] = []


def tap(module: nn.Module, name: str, x: Tensor) -> None:
    """Hands an inner value to whoever records taps now."""
    if _taps:
        _taps[-1][path(module, name)] = x


def record_taps(into: Mapping[str, Tensor]) -> Any:
    """Context manager: taps of the calls inside are collected in `into`."""
    from contextlib import contextmanager

    @contextmanager
    def recording() -> Any:
        _taps.append(into)  # type: ignore[arg-type]
        try:
            yield into
        finally:
            _taps.pop()

    return recording()
