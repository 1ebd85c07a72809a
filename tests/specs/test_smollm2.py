"""A real model: SmolLM2-135M-Instruct from its GGUF file, token for token as `transformers`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import archir as ar
from backends.runtime.tokenizer import load_tokenizer
from tests.real import smollm2_path

# prompt → new tokens; the first ends itself
PROMPTS = {"The capital of France is": 30, "Once upon a time": 32, "def fibonacci(n):": 32}


@pytest.fixture(scope="module")
def greedy() -> dict[str, list[int]]:
    """What `transformers` generates from the same file, without end-of-text."""
    path = smollm2_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    found = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        mask = torch.ones_like(ids)
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=32, do_sample=False, pad_token_id=0
        )
        found[prompt] = made[0, ids.shape[1] :].tolist()
    return found


def test_greedy_tokens(greedy: dict[str, list[int]]) -> None:
    path = smollm2_path()
    tokenizer = load_tokenizer(path)
    model = ar.compile("llama", preset="smollm2_135m").load_weights(path)
    for prompt, count in PROMPTS.items():
        ids = tokenizer.encode(prompt)
        made = list(model.stream(ids, 32, stop=tokenizer.eos_ids))
        assert made == greedy[prompt], prompt
        assert len(made) == count
    assert made[-1] not in tokenizer.eos_ids
    assert greedy["The capital of France is"][-1] in tokenizer.eos_ids


def test_command_streams_the_same_text(greedy: dict[str, list[int]]) -> None:
    path = smollm2_path()
    prompt = "The capital of France is"
    command: list[Any] = [
        Path(sys.executable).with_name("archir"), "run", "llama", "--preset", "smollm2_135m",
        "--weights", path, "--prompt", prompt, "-n", "32",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tokenizer = load_tokenizer(path)
    want = tokenizer.decode([t for t in greedy[prompt] if t not in tokenizer.eos_ids])
    assert done.stdout.strip() == want.strip()
    assert "tokens per second" in done.stderr
