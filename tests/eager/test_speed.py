"""Speed and memory beside `transformers`: one process, alternating, medians; -m slow -s."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import archir as ar
from specs.gpt2 import GPT2
from tests import oracle
from tests.real import smollm2_path

pytestmark = pytest.mark.slow


def ratio(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> float:
    """Median of theirs / median of ours, run in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 2):
        for run, found in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            run()
            if turn >= 2:
                found.append(time.perf_counter() - start)
    return statistics.median(times[1]) / statistics.median(times[0])


def peak(run: Callable[[], Any]) -> int:
    """Peak live bytes above those before, by the profiler's record of every allocation."""
    run()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    live = most = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_gpt2_full_forward(two_threads: None) -> None:
    config = GPT2()
    twin, weights = oracle.twin("gpt2", config)
    twin = twin.float()
    model = ar.compile("gpt2", config=config).set_weights(weights)
    tokens = torch.from_numpy(oracle.tokens_and_targets(config, 512, batch=1)[0])

    def ours() -> Any:
        return model(tokens)

    def theirs() -> Any:
        return twin(tokens, use_cache=False).logits

    with torch.no_grad():
        torch.testing.assert_close(ours(), theirs(), rtol=1e-3, atol=1e-3)
        found = ratio(ours, theirs, 12)
        bytes_ = peak(ours), peak(theirs)
    print(f"\nGPT-2 T=512: {found:.3f} of transformers' speed; peak bytes {bytes_}")
    assert found >= 0.95
    assert bytes_[0] <= bytes_[1]


def test_smollm2_greedy_decode(two_threads: None) -> None:
    path = smollm2_path()
    twin = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    twin.generation_config.eos_token_id = None  # both make n tokens
    model = ar.compile("llama", preset="smollm2_135m").load_weights(path)
    prompt = torch.from_numpy(np.random.default_rng(0).integers(0, 49152, (1, 32)))
    n = 64

    def ours() -> Any:
        return model.generate(prompt, n)

    def theirs() -> Any:
        return twin.generate(
            prompt,
            max_new_tokens=n,
            do_sample=False,
            attention_mask=torch.ones_like(prompt),
            pad_token_id=0,
        )

    assert torch.equal(ours(), theirs())
    found = ratio(ours, theirs, 7)
    print(f"\nSmolLM2 greedy decode: {found:.3f} times transformers' tokens per second")
    assert found >= 1.3
    bytes_ = peak(ours), peak(theirs)
    print(f"peak bytes {bytes_}")
    assert bytes_[0] <= bytes_[1]
