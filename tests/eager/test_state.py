"""State handles: used once, branched by clone, grown without copying the past."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch

import archir as ar
from archir.diagnostics import MismatchError
from specs.llama import Llama
from tests.goldens import check_golden
from tests.specs.kda import kda_lm

SPECS = {"gpt2": "gpt2", "llama": "llama", "kda": kda_lm}


def made(name: str, **options: Any) -> Any:
    return ar.compile(SPECS[name], preset="tiny", **options).init_weights(0)


@pytest.mark.parametrize("name", SPECS)
def test_a_consumed_state_raises_and_a_clone_goes_on(name: str) -> None:
    model = made(name, dtype="float64")
    tokens = torch.randint(0, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, state = model.prefill(tokens[:, :6])
        branch = state.clone()
        first, after = model.decode(tokens[:, 6:7], state)
        with pytest.raises(MismatchError) as caught:
            model.decode(tokens[:, 6:7], state)
        check_golden("eager/messages/consumed", str(caught.value))
        # the branch has storage of its own: what the first went on to write does not reach it
        model.decode(tokens[:, 7:8], after)
        second, _ = model.decode(tokens[:, 6:7], branch)
    assert torch.equal(first, second)
    assert state.consumed and after.consumed and state.lengths == (6, 6)


def test_copies_of_a_state_are_clones() -> None:
    model = made("kda", dtype="float64")
    tokens = torch.randint(0, 90, (2, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, state = model.prefill(tokens[:, :4])
        others = [copy.copy(state), copy.deepcopy(state)]
        assert "lengths=[4, 4]" in repr(state)
        want, after = model.decode(tokens[:, 4:5], state)
        model.decode(tokens[:, 5:], after)
        for other in others:
            assert torch.equal(model.decode(tokens[:, 4:5], other)[0], want)
    assert "consumed" in repr(state)


def test_copies_of_a_model_are_models() -> None:
    model = made("llama")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        want = model([[1, 2, 3]])
        model.embed_tokens.weight.zero_()
        assert torch.equal(twin([[1, 2, 3]]), want)
        assert twin.init_weights(1).generate([[1]], 3).shape == (1, 4)


def test_a_stream_takes_what_generate_takes() -> None:
    model, prompt = made("llama"), torch.tensor([[1, 2, 3]])
    want = model.generate(prompt, 4)[0, 3:].tolist()
    for ids in (prompt, prompt[0], [1, 2, 3]):
        assert list(model.stream(ids, 4)) == want
    with pytest.raises(MismatchError, match="one prompt"):
        next(model.stream([[1], [2]], 4))


def test_an_error_before_the_run_leaves_the_state_alive() -> None:
    model = made("gpt2")
    with torch.no_grad():
        _, state = model.prefill([[1] * 250])
        with pytest.raises(MismatchError, match="context"):
            model.decode([[1] * 10], state)
        with pytest.raises(MismatchError) as caught:
            model.decode([[1], [2]], state)
        check_golden("eager/messages/state_rows", str(caught.value))
        model.decode([[1]], state)


def test_a_state_belongs_to_its_spec() -> None:
    one, two = made("gpt2"), made("llama")
    with torch.no_grad():
        _, state = one.prefill([[1, 2]])
        with pytest.raises(MismatchError) as caught:
            two.decode([[3]], state)
    check_golden("eager/messages/state_model", str(caught.value))


@pytest.mark.parametrize("name", SPECS)
def test_gradients_through_the_state(name: str) -> None:
    """Prefill, then more tokens with gradients on: equal to the full forward's gradients."""
    model = made(name, dtype="float64")
    tokens = torch.randint(0, 90, (2, 7), generator=torch.Generator().manual_seed(1))
    model(tokens).square().sum().backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    first, state = model.prefill(tokens[:, :4], logits="all")
    second, _ = model.decode(tokens[:, 4:], state)
    (first.square().sum() + second.square().sum()).backward()
    for a, p in zip(want, model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, a, rtol=1e-9, atol=1e-11)


def test_4096_decodes_move_storage_at_most_12_times() -> None:
    config = Llama(100, 4096, width=16, inner=16, layers=1, heads=2, kv_heads=1)
    model = ar.compile("llama", config=config).init_weights(0)
    with torch.inference_mode():
        state = model.empty_state(1)
        place: dict[str, int] = {}
        moves: Counter[str] = Counter()
        copied: Counter[str] = Counter()
        for step in range(4096):
            before = {path: x.nbytes for path, x in state.items() if isinstance(x, torch.Tensor)}
            _, state = model.decode([[step % 100]], state)
            # seen from outside: where each entry lies, and what lay there when it moved
            for path, x in state.items():
                if isinstance(x, torch.Tensor) and x.data_ptr() != place.get(path):
                    moves[path] += bool(before[path])
                    copied[path] += before[path]
                    place[path] = x.data_ptr()
    final = {path: x for path, x in state.items() if isinstance(x, torch.Tensor)}
    assert len(final) == 2 * config.layers
    for path, x in final.items():
        assert x.shape[1] == 4096
        assert moves[path] <= 12, moves
        assert copied[path] <= 2 * x.nbytes, copied
