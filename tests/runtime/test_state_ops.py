"""What a state can do besides decoding: rows, going back, drafts, files, layouts.

The random test at the end is the contract: any sequence of operations on any states equals running
every row from scratch, by itself.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import archir as ar
from archir.diagnostics import ArchirError, MismatchError, UnsupportedError
from backends.runtime.state import Snapshot, State, _walk
from specs.gpt2 import gpt2
from specs.llama import Llama
from tests.goldens import check_golden
from tests.specs.conv import Conv, conv_lm
from tests.specs.kda import KDA, kda_lm

VOCAB = 32
LLAMA = Llama(VOCAB, 64, 16, 24, 2, heads=4, kv_heads=2, tied=True, window=5)
CONFIGS: dict[str, tuple[Any, Any]] = {
    "gpt2": (gpt2, replace(gpt2.presets["tiny"], vocab=VOCAB, width=16, heads=2)),
    "llama": ("llama", LLAMA),
    "kda": (kda_lm, KDA(vocab=VOCAB, width=16, key=4, value=6)),
    "conv": (conv_lm, Conv(vocab=VOCAB, width=16, taps=(4, 2))),
}


def fresh(name: str, dtype: str = "float64", **options: Any) -> Any:
    spec, config = CONFIGS[name]
    return ar.compile(spec, config=config, dtype=dtype, **options).init_weights(0)


made = cache(fresh)


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    return made(request.param)


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def after(model: Any, x: torch.Tensor, **how: Any) -> State:
    return model.prefill(x, **how)[1]


def same(one: State, two: State, tolerance: float = 1e-12) -> None:
    """Equal lengths and entries."""
    assert one.lengths == two.lengths
    have, want = dict(one.items()), dict(two.items())
    assert have.keys() == want.keys()
    for path, x in want.items():
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(have[path], x, rtol=0, atol=tolerance)


def places(state: State) -> dict[str, int]:
    """Where each growing entry lies."""
    entries = _walk(state._entries or {}, "")
    return {p: x.storage.data_ptr() for p, x in entries if state._schema.growing(p)}


def caches(model: Any) -> list[Any]:
    """Every living cache of a model."""
    kind = model._support.Cache
    return [x for x in gc.get_objects() if type(x) is kind]


def test_clone_goes_on_by_itself(model: Any) -> None:
    state = after(model, tokens(2, 5))
    branch = state.clone()
    assert not set(places(state).values()) & set(places(branch).values())
    _, one = model.decode(tokens(2, 1, seed=1), state)
    model.decode(tokens(2, 1, seed=2), one)
    same(branch, after(model, tokens(2, 5)))


@pytest.mark.parametrize("rows", [[0], [2, 0], [1, 1, 1], [2, 1, 0], []])
def test_select_is_each_row_alone(model: Any, rows: list[int]) -> None:
    x, lengths = tokens(3, 6), [2, 6, 4]
    state = after(model, x, lengths=lengths)
    found = state.select(rows)
    same(found, after(model, x[rows], lengths=[lengths[r] for r in rows]))
    # its own storage: what the first goes on to write does not reach it
    model.decode(tokens(3, 2, seed=1), state)
    same(found, after(model, x[rows], lengths=[lengths[r] for r in rows]))


def test_select_takes_tensors_and_leaves_the_state_alive(model: Any) -> None:
    state = after(model, tokens(2, 3))
    same(state.select(torch.tensor([1])), after(model, tokens(2, 3)[1:]))
    same(state, after(model, tokens(2, 3)))


def test_a_reset_row_is_used_again_while_others_go_on(model: Any) -> None:
    x, more = tokens(3, 6), tokens(3, 2, seed=1)
    state = after(model, x).reset([1])
    assert state.lengths == (6, 0, 6)
    logits, state = model.decode(more, state)
    for row, past in enumerate([x[0], x[1, :0], x[2]]):
        alone = torch.cat([past, more[row]])[None]
        torch.testing.assert_close(logits[row], model(alone)[0, -2:], rtol=0, atol=1e-12)
        same(state.select([row]), after(model, alone))


WAYS: dict[str, Callable[[Any, State, Path], State]] = {
    "in place": lambda model, state, _: state,
    "moved": lambda model, state, _: model.decode(tokens(2, 12), state, lengths=[12, 0])[1],
    "gradients": lambda model, state, _: state,
    "select": lambda model, state, _: state.select([0, 1]),
    "clone": lambda model, state, _: state.clone(),
    "concat": lambda model, state, _: State.concat([state.select([0]), state.select([1])]),
    "file": lambda model, state, at: (state.save(at / "s"), model.load_state(at / "s"))[1],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_reset_row_forgets_nan_and_infinity(model: Any, way: str, tmp_path: Path) -> None:
    """What a poisoned row leaves in storage must not reach the next sequence in that row."""
    _, state = model.decode(tokens(2, 1), after(model, tokens(2, 5)))
    for path, x in state.items():
        if path != "length":
            x[1] = torch.nan
    state = WAYS[way](model, state.reset([1]), tmp_path)
    where = places(state)
    with torch.enable_grad() if way == "gradients" else torch.no_grad():
        _, state = model.decode(tokens(2, 1), state, lengths=[1, 0])  # only the other row moves on
        logits, state = model.decode(tokens(2, 2, seed=1), state)
    assert way != "in place" or places(state) == where
    want = model(tokens(2, 2, seed=1)[1:])
    torch.testing.assert_close(logits[1:].detach(), want, rtol=0, atol=1e-12)
    same(state.select([1]), after(model, tokens(2, 2, seed=1)[1:]))


def test_concat_of_unlike_lengths(model: Any) -> None:
    x = tokens(4, 6)
    parts = [after(model, x[:1]), model.empty_state(1), after(model, x[2:, :2])]
    whole = State.concat(parts)
    same(whole, after(model, x, lengths=[6, 0, 2, 2]))
    logits, _ = model.decode(tokens(4, 1, seed=1), whole)
    for row, n in enumerate([6, 0, 2, 2]):
        alone = torch.cat([x[row, :n], tokens(4, 1, seed=1)[row]])[None]
        torch.testing.assert_close(logits[row], model(alone)[0, -1:], rtol=0, atol=1e-12)
    assert not any(part.consumed for part in parts)


def test_a_snapshot_is_free_and_restores(model: Any) -> None:
    x = tokens(2, 6)
    state = after(model, x)
    _, state = model.decode(x[:, :1], state)  # moves storage, with room for more
    before, where = len(caches(model)), places(state)
    snapshot = state.snapshot()
    assert len(caches(model)) == before + len(where)
    _, state = model.decode(x[:, 1:4], state)
    assert places(state) == where, "a snapshot of a shorter past stops nobody from appending"
    state = state.restore(snapshot)
    assert places(state) == where
    same(state, after(model, torch.cat([x, x[:, :1]], 1)))
    # the snapshot needs nothing of what is now overwritten: still in place
    _, state = model.decode(x[:, 4:5], state)
    assert places(state) == where
    state = state.restore(snapshot)
    same(state, after(model, torch.cat([x, x[:, :1]], 1)))


def test_a_longer_snapshot_survives_what_is_written_below_it(model: Any) -> None:
    x = tokens(2, 6)
    _, early = model.decode(x[:, 1:2], after(model, x[:, :1]))  # storage with room for more
    first = early.snapshot()
    _, state = model.decode(x[:, 2:], early)
    late = state.snapshot()
    state = state.restore(first)
    where = places(state)
    _, state = model.decode(tokens(2, 1, seed=1), state)
    if where:
        assert not set(places(state).values()) & set(where.values()), "it writes elsewhere"
    same(state, after(model, torch.cat([x[:, :2], tokens(2, 1, seed=1)], 1)))
    same(state.restore(late), after(model, x))


def test_a_dropped_snapshot_costs_no_copy(model: Any) -> None:
    _, state = model.decode(tokens(2, 1), after(model, tokens(2, 6)))
    first = state.snapshot()
    _, state = model.decode(tokens(2, 2), state)
    late = state.snapshot()
    state = state.restore(first)
    del late
    where = places(state)
    _, state = model.decode(tokens(2, 1, seed=1), state)
    assert places(state) == where


def test_restore_into_another_state_does_not_disturb_the_owner(model: Any) -> None:
    """Two living states on one storage: whoever writes second writes elsewhere."""
    x = tokens(2, 8)
    owner = after(model, x[:, :3])
    _, owner = model.decode(x[:, 3:4], owner)
    snapshot = owner.snapshot()
    other = model.empty_state(5).restore(snapshot)
    _, owner = model.decode(x[:, 4:6], owner)
    _, other = model.decode(x[:, 6:8], other)
    same(owner, after(model, x[:, :6]))
    same(other, after(model, torch.cat([x[:, :4], x[:, 6:8]], 1)))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_truncate_equals_never_having_seen_the_rest(name: str) -> None:
    model, x = made(name), tokens(2, 6)
    state = after(model, x).truncate([2, 5])
    same(state, after(model, x, lengths=[2, 5]))
    _, state = model.decode(x[:, :2], state)
    same(state.truncate(1), after(model, x[:, :1]))


def test_truncate_where_entries_are_fixed() -> None:
    """A matrix cannot forget its newest tokens, but all of them, or none."""
    model = made("kda")
    x = tokens(2, 6)
    state = after(model, x)
    with pytest.raises(MismatchError):
        state.truncate([6, 3])
    same(state.truncate([6, 0]), after(model, x, lengths=[6, 0]))


@pytest.mark.parametrize("n", [0, 1, 2, 3, [0, 3], [1, 2], [2, 2]])
def test_accept_equals_having_decoded_n(model: Any, n: Any) -> None:
    x, draft = tokens(2, 5), tokens(2, 3, seed=1)
    logits, state = model.decode(draft, after(model, x))
    torch.testing.assert_close(logits, model(torch.cat([x, draft], 1))[:, -3:], rtol=0, atol=1e-12)
    state = state.accept(n)
    kept = [n, n] if isinstance(n, int) else n
    for row, count in enumerate(kept):
        same(state.select([row]), after(model, torch.cat([x, draft[:, :count]], 1)[row : row + 1]))
    if isinstance(n, int) and n:
        _, want = model.decode(draft[:, :n], after(model, x))
        # where the tokens ran again, the same program ran on the same shapes: bit for bit
        same(state, want, 0 if model.state_schema.fixed else 1e-12)


LAYOUTS: dict[str, dict[str, Any]] = {
    "right": {"lengths": [3, 2], "padding": "right"},
    "left": {"lengths": [3, 2], "padding": "left"},
    "packed": {"cu_seqlens": [0, 3, 5]},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_accept_of_ragged_drafts(model: Any, layout: str) -> None:
    x, draft = tokens(2, 4), tokens(2, 3, seed=1)
    given = draft.clone()
    if layout == "left":
        given[1, 1:] = draft[1, :2]
    if layout == "packed":
        given = torch.cat([draft[0], draft[1, :2]])[None]
    _, state = model.decode(given, after(model, x), **LAYOUTS[layout])
    assert state.lengths == (7, 6)
    state = state.accept([2, 1])
    assert state.lengths == (6, 5)
    for row, n in enumerate([2, 1]):
        same(state.select([row]), after(model, torch.cat([x, draft[:, :n]], 1)[row : row + 1]))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_accept_moves_nothing_where_entries_append(name: str) -> None:
    model = made(name)
    _, state = model.decode(tokens(2, 1), after(model, tokens(2, 6)))
    where = places(state)
    for seed in range(3):
        _, state = model.decode(tokens(2, 4, seed), state)
        state = state.accept([1, 2])
    assert places(state) == where


def test_a_clone_can_accept_too(model: Any) -> None:
    x, draft = tokens(2, 4), tokens(2, 3, seed=1)
    _, state = model.decode(draft, after(model, x))
    branch = state.clone()
    one, two = state.accept(1), branch.accept(2)
    same(one, after(model, torch.cat([x, draft[:, :1]], 1)))
    same(two, after(model, torch.cat([x, draft[:, :2]], 1)))


def test_drafts_do_not_hold_the_past_of_the_past(model: Any) -> None:
    state = after(model, tokens(2, 3))
    for seed in range(5):
        _, state = model.decode(tokens(2, 2, seed), state)
    entries = len(places(state))
    gc.collect()
    mine = [c for c in caches(model) if c.length >= 3]
    assert len(mine) <= 2 * entries, "the state's own, and those before the last call"


def test_frozen_keys_and_trainable_queries(model: Any) -> None:
    """In place only when gradients are off: even where keys and values need none."""
    x = tokens(2, 6)
    with torch.enable_grad():
        logits, state = model.prefill(x[:, :3], logits="all")
        for p in (frozen := [p for n, p in model.named_parameters() if "q" not in n]):
            p.requires_grad_(False)
        try:
            total = logits.sum()
            for step in range(3, 6):
                made, state = model.decode(x[:, step : step + 1], state)
                total = total + made.square().sum()
            if total.requires_grad:
                total.backward()
        finally:
            for p in frozen:
                p.requires_grad_(True)
    model.zero_grad()


def test_decoding_without_gradients_leaves_the_graph_whole(model: Any) -> None:
    """Rows of unlike lengths: the shorter has room in storage that a graph still needs."""
    x = tokens(2, 6)
    with torch.enable_grad():
        logits, state = model.prefill(x, logits="all", lengths=[2, 6])
        snapshot = state.snapshot()
        _, state = model.decode(x[:, :1], state.restore(snapshot).select([0, 1]), lengths=[1, 0])
    _, state = model.decode(x[:, :1], model.empty_state(2).restore(snapshot), lengths=[1, 0])
    with torch.enable_grad():
        logits.square().sum().backward()
    alone = torch.cat([x[:1, :2], x[:1, :1]], 1)
    same(state.select([0]), after(model, alone))
    model.zero_grad()


def test_gradients_go_through_rows_and_cuts(model: Any) -> None:
    x, more = tokens(3, 5), tokens(2, 2, seed=1)
    with torch.enable_grad():
        state = after(model, x, lengths=[5, 3, 4]).reset([0]).select([1, 0])
        logits, _ = model.decode(more, state)
        logits.square().sum().backward()
        have = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        one = model(torch.cat([x[1, :3], more[0]])[None])[:, -2:]
        two = model(more[1:])
        (one.square().sum() + two.square().sum()).backward()
    for a, p in zip(have, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-9, atol=1e-11)
    model.zero_grad()


def test_a_state_made_in_inference_mode_goes_on_outside(model: Any) -> None:
    x = tokens(2, 6)
    with torch.inference_mode():
        state = model.empty_state(2, reserve=16)
        _, state = model.prefill(x[:, :3], state)
        _, state = model.decode(x[:, 3:4], state)
    _, state = model.decode(x[:, 4:], state)
    same(state, after(model, x))


def test_bytes_per_entry() -> None:
    state = after(made("kda"), tokens(2, 5))
    found = state.nbytes()
    assert found == {
        "layers.0.kda.S": 2 * 4 * 4 * 6 * 8,
        "layers.1.kv.k": 2 * 5 * 2 * 4 * 8,
        "layers.1.kv.v": 2 * 5 * 2 * 6 * 8,
    }
    assert state.total_nbytes == sum(found.values())
    _, state = made("kda").decode(tokens(2, 1), state)
    assert state.nbytes()["layers.1.kv.k"] == 2 * 16 * 2 * 4 * 8, "the room counts"


@pytest.mark.parametrize("layout", ["fla", "transformers", "fla_v_first", "mlx", "vllm"])
def test_matrix_states_in_other_layouts(layout: str) -> None:
    model = made("kda")
    state = after(model, tokens(2, 5))
    (own,) = (x for path, x in state.items() if path == "layers.0.kda.S")
    (turned,) = state.to(layout).values()
    assert turned.is_contiguous()
    keys_first = layout in ("fla", "transformers")
    assert tuple(turned.shape) == ((2, 4, 4, 6) if keys_first else (2, 4, 6, 4))
    assert torch.equal(turned, own if keys_first else own.mT)
    back = after(model, tokens(2, 5, seed=1)).from_layout({"layers.0.kda.S": turned}, layout)
    assert torch.equal(dict(back.items())["layers.0.kda.S"], own)


@pytest.mark.parametrize("layout", ["fla", "transformers", "fla_v_first", "mlx", "vllm"])
@pytest.mark.parametrize("name", ["kda", "conv"])
def test_what_is_given_away_is_a_copy(name: str, layout: str) -> None:
    """Other libraries write into their states."""
    state = after(made(name), tokens(2, 5))
    for x in state.to(layout).values():
        x.fill_(7)
    same(state, after(made(name), tokens(2, 5)))


@pytest.mark.parametrize("layout", ["fla", "transformers", "fla_v_first", "mlx", "vllm"])
def test_windows_in_other_layouts(layout: str) -> None:
    """W columns or W − 1, channels first or last; a state made from them decodes the same."""
    model, x, path = made("conv"), tokens(2, 5), "layers.0.conv.window"
    state = after(model, x)
    own = dict(state.items())[path]
    given = state.to(layout)
    turned = given[path]
    assert turned.is_contiguous()
    whole = layout in ("fla", "transformers", "fla_v_first")
    assert tuple(turned.shape) == ((2, 3, 16) if layout == "mlx" else (2, 16, 3 + whole))
    last = turned if layout == "mlx" else turned.mT
    assert torch.equal(last[:, -3:], own)
    back = model.empty_state(2).from_layout(given, layout)
    want, _ = model.decode(tokens(2, 2, seed=1), state)
    have, _ = model.decode(tokens(2, 2, seed=1), back)
    assert torch.equal(have, want)


@ar.recurrence("S:V,K | q:K k:K v:V -> o:V")
def values_first(S, q, k, v):
    S = S + np.outer(v, k)
    return S, S @ q


@ar.recurrence("q:K k:K v:K -> o:K")
def square(S, q, k, v):
    S = S + np.outer(k, v)
    return S, q @ S


@ar.config
class Width:
    width: int = 8


def mixer(rule: Any) -> Any:
    @ar.block
    def one(x: "f[B, T, width]", c: Width):
        q, k = (ar.heads(ar.linear(x, 8, bias=False, name=n), 1, 2) for n in "qk")
        return ar.merge(rule(q, k, ar.heads(x, 1, 2), name="m"))

    return ar.compile(one, config=Width(), dtype="float64").init_weights(0)


def test_a_rule_that_keeps_values_first() -> None:
    model = mixer(values_first)
    _, state = model(torch.randn(1, 3, 8, dtype=torch.float64), phase="prefill")
    own = dict(state.items())["m.S"]
    assert torch.equal(state.to("vllm")["m.S"], own)
    assert torch.equal(state.to("fla")["m.S"], own.mT)


def test_a_square_state_that_does_not_tell() -> None:
    model = mixer(square)
    _, state = model(torch.randn(1, 3, 8, dtype=torch.float64), phase="prefill")
    with pytest.raises(UnsupportedError) as caught:
        state.to("fla")
    check_golden("state/layout_square", str(caught.value))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_state_goes_on_in_another_instance(name: str, dtype: str, tmp_path: Path) -> None:
    one, two = made(name, dtype), fresh(name, dtype)
    x = tokens(3, 6)
    state = after(one, x, lengths=[6, 0, 3])
    state.save(tmp_path / "a.safetensors")
    loaded = two.load_state(tmp_path / "a.safetensors")
    same(loaded, state, 0)
    assert not state.consumed
    have, _ = two.decode(x[:, :2], loaded)
    want, _ = one.decode(x[:, :2], state)
    assert torch.equal(have, want)
    assert [f.name for f in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_state_goes_into_an_instance_with_other_files(model: Any) -> None:
    """Another form has other files, but the same states."""
    name = next(k for k in CONFIGS if made(k) is model)
    other = fresh(name, form="recurrent")
    assert other._support is not model._support
    x = tokens(2, 6)
    _, state = other.decode(x[:, 4:], after(model, x[:, :4]))
    same(state, after(model, x))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    model = made("kda")
    after(model, tokens(1, 2)).save(tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    for size in [*range(0, len(content), 97), len(content) - 1]:
        (tmp_path / "b").write_bytes(content[:size])
        with pytest.raises(MismatchError, match="cut short"):
            model.load_state(tmp_path / "b")


def test_a_file_edited_anywhere_is_refused(tmp_path: Path) -> None:
    model = made("kda")
    after(model, tokens(1, 2)).save(tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    for at in [*range(0, len(content), 61), len(content) - 1]:
        edited = bytearray(content)
        edited[at] ^= 1
        (tmp_path / "b").write_bytes(edited)
        with pytest.raises(MismatchError):
            model.load_state(tmp_path / "b")
    (tmp_path / "b").write_bytes(content + b"\0")
    with pytest.raises(MismatchError):
        model.load_state(tmp_path / "b")


@pytest.mark.parametrize("where", ["replace", "fsync"])
def test_a_crash_while_saving_leaves_the_old_file(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made("kda")
    state = after(model, tokens(2, 3))
    state.save(tmp_path / "a")

    def crash(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, where, crash)
    with pytest.raises(OSError, match="no space"):
        after(model, tokens(2, 5)).save(tmp_path / "a")
    monkeypatch.undo()
    same(model.load_state(tmp_path / "a"), state, 0)
    assert [f.name for f in tmp_path.iterdir()] == ["a"]


def dead() -> Any:
    state = after(made("kda"), tokens(2, 3))
    made("kda").decode(tokens(2, 1), state)
    return state


def drafted(name: str = "kda") -> Any:
    return made(name).decode(tokens(2, 3), after(made(name), tokens(2, 4)))[1]


def state_of(name: str, **options: Any) -> Any:
    return after(made(name, **options), tokens(2, 3))


MESSAGES: dict[str, Callable[[Path], Any]] = {
    "dead_clone": lambda _: dead().clone(),
    "select_beyond": lambda _: state_of("kda").select([0, 2]),
    "select_negative": lambda _: state_of("kda").select([-1]),
    "select_no_integers": lambda _: state_of("kda").select([0.5]),
    "reset_beyond": lambda _: state_of("kda").reset([7]),
    "concat_nothing": lambda _: State.concat([]),
    "concat_another_spec": lambda _: State.concat([state_of("kda"), state_of("llama")]),
    "decode_another_spec": lambda _: made("llama").decode(tokens(2, 1), state_of("kda")),
    "decode_another_dtype": lambda _: made("kda").decode(
        tokens(2, 1), state_of("kda", dtype="float32")
    ),
    "restore_another_spec": lambda _: state_of("kda").restore(state_of("gpt2").snapshot()),
    "truncate_matrix": lambda _: state_of("kda").truncate(2),
    "truncate_beyond": lambda _: state_of("gpt2").truncate([3, 4]),
    "truncate_counts": lambda _: state_of("gpt2").truncate([3, 2, 1]),
    "accept_nothing": lambda _: state_of("kda").accept(1),
    "accept_too_many": lambda _: drafted().accept([3, 4]),
    "accept_counts": lambda _: drafted().accept([1]),
    "accept_twice": lambda _: drafted().accept(2).accept(1),
    "layout_unknown": lambda _: state_of("kda").to("flax"),
    "layout_shape": lambda _: state_of("kda").from_layout(state_of("kda").to("fla"), "vllm"),
    "file_missing": lambda at: made("kda").load_state(at / "none"),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages(case: str, tmp_path: Path) -> None:
    with pytest.raises(ArchirError) as caught:
        MESSAGES[case](tmp_path)
    check_golden(f"state/{case}", str(caught.value))


def test_messages_of_files(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    state_of("kda").save(file)
    content = file.read_bytes()

    def message(model: Any) -> str:
        with pytest.raises(ArchirError) as caught:
            model.load_state(file)
        return str(caught.value)

    check_golden("state/file_another_spec", message(made("llama")))
    check_golden("state/file_another_dtype", message(made("kda", dtype="float32")))
    file.write_bytes(content[: len(content) // 2])
    check_golden("state/file_cut", message(made("kda")))
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    text = message(made("kda"))
    said = [line for line in text.split("\n") if not line.startswith(("  written:", "  content:"))]
    assert len(said) == text.count("\n") - 1, "the two checksums, which depend on the platform"
    check_golden("state/file_edited", "\n".join(said))
    made("kda").save_weights(tmp_path / "weights")
    file.write_bytes((tmp_path / "weights" / "model.safetensors").read_bytes())
    check_golden("state/file_of_weights", message(made("kda")))


def test_an_error_leaves_the_state_alive() -> None:
    state = drafted()
    for wrong in (
        lambda: state.reset([9]),
        lambda: state.truncate(5),
        lambda: state.accept(9),
        lambda: state.restore(state_of("gpt2").snapshot()),
        lambda: state.from_layout({"x": torch.zeros(1)}, "fla"),
    ):
        with pytest.raises(MismatchError):
            wrong()
    state.accept(1)


LONGEST, MOST_ROWS, STATES, SNAPSHOTS = 20, 4, 3, 4


@dataclass
class Track:
    """A state and the tokens that each of its rows has seen; `new` of the last decode's are its."""

    state: State
    rows: list[list[int]]
    new: list[int] | None = None


class Machine:
    """Random operations on a few states, each checked against rows run from scratch."""

    def __init__(self, model: Any, seed: int, modes: list[Any], folder: Path) -> None:
        self.model, self.rng, self.modes = model, np.random.default_rng(seed), modes
        self.path = folder / "state"
        self.tracks = [Track(model.empty_state(2), [[], []])]
        self.snapshots: list[tuple[Snapshot, list[list[int]]]] = []
        self.known: dict[tuple[int, ...], torch.Tensor] = {}
        self.counts: dict[str, int] = {}
        self.fixed = bool(model.state_schema.fixed)

    def step(self) -> None:
        """One operation."""
        names = ["decode"] * 5 + ["prefill"] * 2 + ["accept"] * 4 + ["truncate"] * 2
        names += ["select", "reset", "concat", "snapshot", "restore", "clone", "wrong", "file"]
        name = str(self.rng.choice(names))
        mode = self.modes[self.rng.integers(len(self.modes))]
        self.counts[name] = self.counts.get(name, 0) + 1
        at = int(self.rng.integers(len(self.tracks)))
        with mode():
            getattr(self, name)(at)
        track = self.tracks[at if at < len(self.tracks) else 0]
        assert track.state.lengths == tuple(len(row) for row in track.rows)

    def reference(self, row: list[int]) -> torch.Tensor:
        """Scores of a row alone, from scratch, [T, vocab]."""
        key = tuple(row)
        if key not in self.known:
            if len(self.known) > 500:
                self.known.clear()
            self.known[key] = self.model(torch.tensor([row], dtype=torch.int64))[0].detach()
        return self.known[key]

    def few(self, limit: int) -> int:
        return int(self.rng.integers(limit + 1))

    def some_rows(self, track: Track) -> list[int]:
        count = self.few(min(MOST_ROWS, len(track.rows) + 1))
        return [int(r) for r in self.rng.integers(len(track.rows), size=count)] or [0]

    # ---- operations

    def decode(self, at: int, phase: str = "decode") -> None:
        track = self.tracks[at]
        room = LONGEST - max((len(row) for row in track.rows), default=0)
        if room < 1:
            self.reset(at)
            return
        width = 1 + self.few(min(room, 4) - 1)
        layout = str(self.rng.choice(["dense", "right", "left", "packed"]))
        counts = [width if layout == "dense" else self.few(width) for _ in track.rows]
        new = [[int(t) for t in self.rng.integers(VOCAB, size=n)] for n in counts]
        noise = int(self.rng.integers(VOCAB))
        how: dict[str, Any] = {}
        if layout == "packed":
            how = {"cu_seqlens": [0, *np.cumsum(counts).tolist()]}
            grid = [[t for row in new for t in row]]
        else:
            pads = [[noise] * (width - n) for n in counts]
            left = layout == "left"
            grid = [p + r if left else r + p for p, r in zip(pads, new, strict=True)]
            how = {} if layout == "dense" else {"lengths": counts, "padding": layout}
        given = torch.tensor(grid, dtype=torch.int64).reshape(len(grid), -1)
        if phase == "decode":
            logits, state = self.model.decode(given, track.state, **how)
        else:
            logits, state = self.model.prefill(given, track.state, logits="all", **how)
        flat = logits.detach().flatten(0, 1)
        for row, tokens in enumerate(new):
            track.rows[row] = [*track.rows[row], *tokens]
            if not tokens:
                continue
            start = sum(counts[:row])
            if layout != "packed":
                start = row * width + (width - counts[row] if layout == "left" else 0)
            want = self.reference(track.rows[row])[-len(tokens) :]
            have = flat[start : start + len(tokens)]
            torch.testing.assert_close(have, want, rtol=0, atol=1e-10)
        many = phase == "decode" and max(counts) > 1
        track.state, track.new = state, counts if many else None

    def prefill(self, at: int) -> None:
        self.decode(at, "prefill")

    def accept(self, at: int) -> None:
        track = self.tracks[at]
        if track.new is None:
            with pytest.raises(MismatchError, match="no draft"):
                track.state.accept(0)
            self.decode(at)
        if track.new is None:
            return
        kept = [self.few(n) for n in track.new]
        if self.few(2) == 0:
            kept = [min(track.new)] * len(kept)
            track.state = track.state.accept(kept[0])
        else:
            track.state = track.state.accept(kept)
        lost = [n - k for n, k in zip(track.new, kept, strict=True)]
        track.rows = [row[: len(row) - n] for row, n in zip(track.rows, lost, strict=True)]
        track.new = None

    def truncate(self, at: int) -> None:
        track = self.tracks[at]
        lengths = [self.few(len(row)) for row in track.rows]
        if self.fixed:
            lengths = [len(r) if self.few(2) else 0 for r in track.rows]
        track.state, track.new = track.state.truncate(lengths), None
        track.rows = [row[:n] for row, n in zip(track.rows, lengths, strict=True)]

    def select(self, at: int) -> None:
        track = self.tracks[at]
        rows = self.some_rows(track)
        made = Track(track.state.select(rows), [track.rows[r] for r in rows])
        self.keep(at, made)

    def reset(self, at: int) -> None:
        track = self.tracks[at]
        rows = self.some_rows(track)
        track.state, track.new = track.state.reset(rows), None
        track.rows = [[] if r in rows else row for r, row in enumerate(track.rows)]

    def concat(self, at: int) -> None:
        track, other = self.tracks[at], self.tracks[self.few(len(self.tracks) - 1)]
        if len(track.rows) + len(other.rows) <= MOST_ROWS:
            made = State.concat([track.state, other.state])
            self.keep(at, Track(made, [*track.rows, *other.rows]))

    def clone(self, at: int) -> None:
        track = self.tracks[at]
        self.keep(at, Track(track.state.clone(), [*track.rows], track.new))

    def snapshot(self, at: int) -> None:
        track = self.tracks[at]
        self.snapshots.append((track.state.snapshot(), [*track.rows]))
        if len(self.snapshots) > SNAPSHOTS:
            del self.snapshots[self.few(SNAPSHOTS)]

    def restore(self, at: int) -> None:
        if self.snapshots:
            snapshot, rows = self.snapshots[self.few(len(self.snapshots) - 1)]
            assert snapshot.lengths == tuple(len(row) for row in rows)
            self.tracks[at] = Track(self.tracks[at].state.restore(snapshot), [*rows])

    def file(self, at: int) -> None:
        track = self.tracks[at]
        track.state.save(self.path)
        self.tracks[at] = Track(self.model.load_state(self.path), track.rows)

    def wrong(self, at: int) -> None:
        state = self.tracks[at].state
        with pytest.raises(MismatchError):
            state.select([len(state.lengths)])
        with pytest.raises(MismatchError):
            state.truncate(LONGEST + 1)

    def keep(self, at: int, made: Track) -> None:
        """A new state beside the others, or in place of the one it was made of."""
        if len(self.tracks) < STATES:
            self.tracks.append(made)
        else:
            self.tracks[self.few(STATES - 1)] = made
        del at

    # ---- what must stay small

    def held(self) -> int:
        """Bytes of all tensors alive, those of the reference aside."""
        gc.collect()
        stores = {id(x.store) for x in caches(self.model)}
        entries = len(places(self.tracks[0].state))
        # every state has its own entries and those before its draft; moved ones may differ
        assert len(stores) <= entries * (2 * len(self.tracks) + len(self.snapshots))
        aside = {x.untyped_storage().data_ptr() for x in self.known.values()}
        return living(aside)


def living(aside: set[int]) -> int:
    """Bytes of the memory of all tensors that Python sees."""
    found = {}
    for x in gc.get_objects():
        if type(x) is torch.Tensor:
            memory = x.untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
    return sum(n for at, n in found.items() if at not in aside)


def run(model: Any, seed: int, steps: int, modes: list[Any], folder: Path) -> Machine:
    gc.collect()
    start = living(set())
    machine = Machine(model, seed, modes, folder)
    per_row = 2 * LONGEST + 16
    token = sum(x.nbytes for p, x in after(model, tokens(1, 1)).items() if p != "length")
    limit = token * MOST_ROWS * per_row * (2 * STATES + SNAPSHOTS)
    for step in range(steps):
        machine.step()
        if step % 100 == 99:
            assert machine.held() - start <= limit
    for track in machine.tracks:
        for row, seen in enumerate(track.rows):
            given = torch.tensor([seen], dtype=torch.int64).reshape(1, -1)
            same(track.state.select([row]), after(model, given), 1e-10)
    assert all(machine.counts.values())
    return machine


MODES = {
    "plain": [torch.no_grad],
    "inference": [torch.no_grad, torch.inference_mode],
    "gradients": [torch.no_grad, torch.no_grad, torch.enable_grad],
}


@pytest.mark.parametrize("modes", MODES)
def test_random_operations(model: Any, modes: str, tmp_path: Path) -> None:
    run(model, 0, 60, MODES[modes], tmp_path)


@pytest.mark.slow
def test_10000_random_operations(model: Any, tmp_path: Path) -> None:
    run(model, 1, 10_000, MODES["inference"], tmp_path)
