"""A prompt read in pieces, with a snapshot after each, is the prompt read at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

import archir as ar
from archir.diagnostics import ArchirError, MismatchError, UnsupportedError
from backends.runtime.state import State, _walk
from tests.goldens import check_golden
from tests.runtime import test_layouts
from tests.runtime.test_layouts import LENGTHS, SPECS, laid_out, rows
from tests.runtime.test_state_ops import same

made = cache(test_layouts.made)
close = torch.testing.assert_close
ROWS = len(LENGTHS)


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(params=SPECS)
def model(request: pytest.FixtureRequest) -> Any:
    return made(request.param)


def words(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 90, (ROWS, length), generator=torch.Generator().manual_seed(seed))


# What a prompt may follow: nothing, room, rows of unlike lengths, rows that were cleared.
BEFORE: dict[str, Callable[[Any], State | None]] = {
    "nothing": lambda model: None,
    "room": lambda model: model.empty_state(ROWS, reserve=40),
    "past": lambda model: model.prefill(words(7, 1), lengths=[4, 7, 0, 1, 2])[1],
    "cleared": lambda model: model.prefill(words(7, 1))[1].reset(range(ROWS)),
}


def prompt(layout: str) -> tuple[torch.Tensor, dict[str, Any], list[torch.Tensor], list[slice]]:
    """Tokens, how they are laid out, and for each row its own and their places on the flat grid."""
    if layout != "dense":
        tokens, where, places = laid_out(layout)
        return tokens, where, rows(), places
    tokens = words(9, 2)
    return tokens, {}, [*tokens], [slice(a, b) for a, b in pairwise(range(0, 9 * ROWS + 1, 9))]


def first(lines: list[torch.Tensor], n: int) -> dict[str, Any]:
    """Arguments for a prefill with the first n tokens of each row."""
    short = [line[:n] for line in lines]
    padded = torch.nn.utils.rnn.pad_sequence(short, batch_first=True)
    return {"tokens": padded, "lengths": [len(line) for line in short]}


@pytest.mark.parametrize("n", [1, 2, 4, 100])
@pytest.mark.parametrize("before", ["nothing", "past"])
@pytest.mark.parametrize("layout", ["dense", "left", "right", "packed"])
def test_pieces_are_the_whole(model: Any, layout: str, before: str, n: int) -> None:
    """Logits, state, and what is decoded after each snapshot."""
    tokens, where, lines, places = prompt(layout)
    start = BEFORE[before]
    for logits in ("last", "all"):
        want, end = model.prefill(tokens, start(model), logits=logits, **where)
        have, state = model.prefill(tokens, start(model), logits=logits, snapshot_every=n, **where)
        assert have.shape == want.shape and torch.isfinite(have).all()
        if logits == "all":
            have, want = ([x.flatten(0, 1)[p] for p in places] for x in (have, want))
        close(have, want, rtol=1e-12, atol=1e-13)
        same(state, end)
    snapshots = state.snapshots
    assert len(snapshots) == -(-max(map(len, lines)) // n)
    assert snapshots[-1].lengths == state.lengths
    # each in turn: what one goes on to write must not reach a later one
    for index, snapshot in enumerate(snapshots):
        have, state = model.decode([[3, 4]] * ROWS, state.restore(snapshot))
        _, known = model.prefill(state=start(model), **first(lines, (index + 1) * n))
        want, known = model.decode([[3, 4]] * ROWS, known)
        close(have, want, rtol=1e-12, atol=1e-13)
        same(state, known)


@pytest.mark.parametrize("logits", ["last", "all"])
@pytest.mark.parametrize(
    "grid, where",
    [((2, 0), {}), ((2, 3), {"lengths": [0, 0]}), ((1, 0), {"cu_seqlens": [0, 0, 0]})],
)
def test_no_tokens(model: Any, grid: Any, where: dict[str, Any], logits: str) -> None:
    """One snapshot, of the state before."""
    tokens, past = torch.zeros(grid, dtype=torch.int64), model.prefill([[1, 2]] * 2)[1]
    want, end = model.prefill(tokens, past.clone(), logits=logits, **where)
    have, state = model.prefill(tokens, past, logits=logits, snapshot_every=2, **where)
    assert have.shape == want.shape and not have.any()
    same(state, end)
    assert [x.lengths for x in state.snapshots] == [(2, 2)]


@pytest.mark.parametrize("grid, where", [((0, 3), {}), ((1, 0), {"cu_seqlens": [0]})])
def test_no_rows(model: Any, grid: Any, where: dict[str, Any]) -> None:
    tokens = torch.zeros(grid, dtype=torch.int64)
    want, _ = model.prefill(tokens, **where)
    have, state = model.prefill(tokens, snapshot_every=2, **where)
    assert have.shape == want.shape
    assert [x.lengths for x in state.snapshots] == [()]


def test_gradients_go_through_pieces(model: Any) -> None:
    tokens, where, _, places = prompt("left")
    found = []
    for n in (None, 2):
        model.zero_grad()
        with torch.enable_grad():
            _, past = model.prefill(words(3, 1))
            last, state = model.prefill(tokens, past, snapshot_every=n, **where)
            _, past = model.prefill(words(3, 1))
            whole, _ = model.prefill(tokens, past, logits="all", snapshot_every=n, **where)
            after, _ = model.decode(words(1, 3), state)
            parts = [last, after, *(whole.flatten(0, 1)[p] for p in places)]
            sum(x.square().sum() for x in parts).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    model.zero_grad()
    close(*found, rtol=1e-9, atol=1e-11)


@ar.config
class Small:
    vocab: int = 96
    width: int = 8


def outputs(c: Small, tokens: Any) -> dict[str, Any]:
    """Of every sort: per row where only the last is asked for, per token, and of neither."""
    table, scale = ar.weight("embed.weight", [c.vocab, c.width]), ar.weight("scale", [c.width])
    x = ar.embedding(tokens, table)
    q, k, v = (ar.heads(ar.linear(x, c.width, bias=False, name=n), 1, 2) for n in "qkv")
    x = x + ar.merge(ar.attention(q, k, v, causal=True, name="kv"))
    return {"hidden": x, "scores": ar.logits(x, table), "at": ar.positions(tokens), "scale": scale}


@ar.spec(Small, presets={"tiny": Small()})
def named(tokens, c):
    return outputs(c, tokens)


@ar.spec(Small, presets={"tiny": Small()})
def listed(tokens, c):
    return tuple(outputs(c, tokens).values())


@pytest.mark.parametrize("logits", ["last", "all"])
@pytest.mark.parametrize("layout", ["dense", "left", "right", "packed"])
@pytest.mark.parametrize("spec", [named, listed])
def test_every_output_of_several(spec: Any, layout: str, logits: str) -> None:
    several = ar.compile(spec, preset="tiny", dtype="float64").init_weights(0)
    tokens, where, _, places = prompt(layout)
    want, _ = several.prefill(tokens, logits=logits, **where)
    have, _ = several.prefill(tokens, logits=logits, snapshot_every=2, **where)
    assert type(have) is type(want)
    if isinstance(want, dict):
        assert [*have] == [*want]
        have, want = have.values(), want.values()
    for one, two in zip(have, want, strict=True):
        assert one.shape == two.shape and one.dtype == two.dtype
        if one.shape[:2] == tokens.shape:
            one, two = (torch.cat([x.flatten(0, 1)[p] for p in places]) for x in (one, two))
        close(one, two, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("layout, seen", [("dense", 9 * ROWS), ("left", 18), ("packed", 18)])
def test_every_piece_is_a_call_without_padding(model: Any, layout: str, seen: int) -> None:
    tokens, where, *_ = prompt(layout)
    sizes = []
    hook = model.register_forward_pre_hook(lambda _, given: sizes.append(given[0].numel()))
    try:
        model.prefill(tokens, snapshot_every=4, **where)
    finally:
        hook.remove()
    assert len(sizes) == 3
    assert sum(sizes) == seen


def growing(state: State) -> dict[str, Any]:
    entries = state._entries or {}
    return {path: x for path, x in _walk(entries, "") if state._schema.growing(path)}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("where", [{}, {"lengths": [40, 3, 0, 17, 8]}])
def test_snapshots_of_growing_entries_are_free(model: Any, where: Any, before: str) -> None:
    """The same memory, and no more moves of it, than without snapshots."""
    tokens = words(40, 2)
    _, plain = model.prefill(tokens, BEFORE[before](model), **where)
    _, state = model.prefill(tokens, BEFORE[before](model), snapshot_every=2, **where)
    assert state.nbytes() == plain.nbytes()
    mine, theirs = growing(state), growing(plain)
    for path, entry in mine.items():
        assert (entry.moves, entry.copied) == (theirs[path].moves, theirs[path].copied)
    for snapshot in state.snapshots:
        entries = dict(_walk(snapshot._entries, ""))
        assert all(entries[path].store is entry.store for path, entry in mine.items())


def test_a_prefix_is_read_once(model: Any) -> None:
    """What a server does: prompts that begin alike go on from the snapshot where they part."""
    one, two = words(9, 1)[:1], words(9, 2)[:1]
    two[:, :6] = one[:, :6]
    _, state = model.prefill(one, snapshot_every=3)
    known = state.snapshots
    _, other = model.prefill(two[:, 6:], model.empty_state(1).restore(known[1]), snapshot_every=2)
    same(other, model.prefill(two)[1])
    same(state, model.prefill(one)[1])
    assert [x.lengths for x in other.snapshots] == [(8,), (9,)]
    for index, snapshot in enumerate(known):
        other = other.restore(snapshot)
        same(other, model.prefill(one[:, : 3 * index + 3])[1])


def test_snapshots_belong_to_one_handle(model: Any) -> None:
    tokens = words(4, 1)
    assert model.empty_state(1).snapshots == ()
    assert model.prefill(tokens)[1].snapshots == ()
    _, state = model.prefill(tokens, snapshot_every=2)
    kept = state.snapshots
    assert [x.lengths for x in kept] == [(2,) * ROWS, (4,) * ROWS]
    assert state.clone().snapshots == state.select([0]).snapshots == ()
    _, after = model.decode(tokens, state)
    assert after.snapshots == after.restore(kept[0]).snapshots == ()
    with pytest.raises(MismatchError, match="consumed"):
        _ = state.snapshots


@pytest.mark.parametrize("n", [0, -4, 2.0, True, "2"])
def test_pieces_need_a_size(n: Any) -> None:
    with pytest.raises(MismatchError) as caught:
        made("gpt2").prefill([[1, 2]], snapshot_every=n)
    assert caught.value.code == "snapshot-every"
    if n == 0:
        check_golden("state/snapshot_every", str(caught.value))


def test_an_error_leaves_the_state_alive() -> None:
    """Also where only a later piece would meet it."""
    model = made("gpt2")
    limit = model.config.context
    state = model.prefill([[1, 2], [3, 4]])[1]
    wrong: list[tuple[type[ArchirError], dict[str, Any]]] = [
        (MismatchError, {"tokens": [[1] * (limit - 1)] * 2}),
        (MismatchError, {"tokens": [[1, 2]] * 3}),
        (MismatchError, {"tokens": [[1, 2]] * 2, "lengths": [3, 3]}),
        (UnsupportedError, {"tokens": [[1, 2]] * 2, "logits": "first"}),
    ]
    for kind, given in wrong:
        with pytest.raises(kind):
            model.prefill(state=state, snapshot_every=1, **given)
    same(state, model.prefill([[1, 2], [3, 4]])[1])
