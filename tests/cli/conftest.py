"""The command line inside this process, and a small published model for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from archir import cli

LETTERS = [chr(32 + i) if i < 95 else chr(256 + i) for i in range(255)]
END = 255


class Result(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def archir(capsys, monkeypatch) -> Callable[..., Result]:
    """Runs `archir` with arguments."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["archir", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
        found = capsys.readouterr()
        assert "Traceback" not in found.err
        return Result(code, found.out, found.err)

    return run


@pytest.fixture(scope="session")
def published(tmp_path_factory) -> Path:
    """A folder with a tiny Llama of random weights and a tokenizer of single letters."""
    from archir import compile as compile_model

    folder = tmp_path_factory.mktemp("published")
    compile_model("llama", preset="tiny").init_weights(1).save_weights(folder)
    vocab = {letter: i for i, letter in enumerate(LETTERS)} | {"<end>": END}
    end = {"id": END, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{**end, "normalized": False, "special": True}],
        "pre_tokenizer": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "fuse_unk": False},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder
