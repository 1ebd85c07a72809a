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
from specs.llama import Llama
from tests import oracle
from tests.real import smollm2_path
from tests.specs.conv import Conv, conv_lm

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


PACKED: dict[str, tuple[Any, Any]] = {
    "gpt2": ("gpt2", GPT2(vocab=4096, width=256, layers=4, heads=4)),
    "llama": ("llama", Llama(4096, 1024, 256, 688, 4, heads=4, kv_heads=2, head_dim=64)),
    "conv": (conv_lm, Conv(vocab=4096, width=256, taps=(4, 4, 4, 4))),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_prefill(name: str, two_threads: None) -> None:
    """32 sequences of 16 to 512 tokens in one line, beside a dense batch of as many tokens in
    which as many pairs of tokens meet."""
    spec, config = PACKED[name]
    model = ar.compile(spec, config=config).init_weights(0)
    rng = np.random.default_rng(0)
    lengths = [16, 512, *rng.integers(16, 513, 30)]
    total, pairs = sum(lengths), sum(n * n for n in lengths)
    length = round(pairs / total)
    rows = round(total / length)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    line = torch.from_numpy(rng.integers(0, 4096, (1, total)))
    batch = torch.from_numpy(rng.integers(0, 4096, (rows, length)))
    assert abs(rows * length / total - 1) < 0.03 and abs(rows * length**2 / pairs - 1) < 0.03
    with torch.no_grad():
        found = 1 / ratio(
            lambda: model.prefill(line, cu_seqlens=ends), lambda: model.prefill(batch), 7
        )
    print(f"\n{name}: packed [1, {total}] takes {found:.3f} of the time of [{rows}, {length}]")
    assert found <= 1.2
