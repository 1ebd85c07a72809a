"""How a spec, a preset or a config is found, and what is said when it is not."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import archir as ar
from archir.diagnostics import ArchirError
from archir.spec import Spec
from tests.dsl.messages import HEAD, spec_of
from tests.goldens import check_golden


@ar.config
class Sizes:
    vocab: int = 16
    width: int = 8
    layers: int = 2
    tied: bool = True


@ar.spec(
    Sizes,
    presets={"tiny": Sizes(), "full": Sizes(width=64)},
    from_hf=ar.HuggingFace(
        "small",
        read={
            "vocab": "vocab_size",
            "width": "hidden_size|n_embd",
            "layers": "num_layers",
            "tied": "tie_word_embeddings",
        },
        absent={"tie_word_embeddings": True},
        neutral={"hidden_act": ("gelu", "gelu_new"), "rope.scaling": (None, "default")},
        inert=("attention_dropout",),
    ),
)
def small(tokens: Any, c: Any) -> Any:
    return ar.embedding(tokens, c.vocab, c.width, name="embed")


@ar.spec(Sizes)
def bare(tokens: Any, c: Any) -> Any:
    return ar.embedding(tokens, c.vocab, c.width, name="embed")


PUBLISHED = {
    "model_type": "small", "vocab_size": 32, "hidden_size": 4, "num_layers": 3,
    "hidden_act": "gelu", "rope": {"scaling": "default"}, "attention_dropout": 0.1,
    "torch_dtype": "bfloat16", "architectures": ["Small"], "use_cache": False, "bos_token_id": None,
}  # fmt: skip


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in PUBLISHED.items() if k != key}


MESSAGES: dict[str, Callable[[Path], object]] = {
    "unknown spec, close": lambda _: ar.trace("gpt3"),
    "unknown spec, far": lambda _: ar.trace("zzz"),
    "no spec at all": lambda _: ar.trace(42),
    "a function without decorator": lambda _: ar.trace(str.upper),
    "no such file": lambda folder: ar.trace(f"{folder}/none.py:model"),
    "no such function, close": lambda folder: ar.trace(f"{folder}/spec.py:brokn"),
    "no such function in an empty file": lambda folder: ar.trace(f"{folder}/empty.py:model"),
    "unknown preset, close": lambda _: ar.trace(small, "tinny"),
    "unknown preset, far": lambda _: ar.trace(small, "8b"),
    "no presets": lambda _: ar.trace(bare, "tiny"),
    "a config that a spec cannot read": lambda _: ar.trace(bare, config={"model_type": "x"}),
    "no such config": lambda folder: ar.trace(small, config=folder / "none"),
    "a config that is not JSON": lambda folder: ar.trace(small, config=folder / "spec.py"),
    "another model": lambda _: ar.trace(small, config=PUBLISHED | {"model_type": "large"}),
    "a field that changes the model": lambda _: ar.trace(
        small, config=PUBLISHED | {"hidden_act": "relu"}
    ),
    "a nested field that changes the model": lambda _: ar.trace(
        small, config=PUBLISHED | {"rope": {"scaling": "yarn"}}
    ),
    "an unknown field": lambda _: ar.trace(small, config=PUBLISHED | {"sliding_window": 128}),
    "a missing field": lambda _: ar.trace(small, config=without("num_layers")),
    "one size under two names": lambda _: ar.trace(small, config=PUBLISHED | {"n_embd": 8}),
}


def test_messages(tmp_path: Path) -> None:
    (tmp_path / "spec.py").write_text(HEAD + spec_of("return x"))
    (tmp_path / "empty.py").write_text("")
    parts = []
    for name, run in MESSAGES.items():
        with pytest.raises(ArchirError) as caught:
            run(tmp_path)
        text = str(caught.value)
        assert "\nnext: " in text, f"{name} names no next step:\n{text}"
        parts.append(f"## {name}\n\n{text}\n")
    check_golden("dsl/find", "\n".join(parts))


def test_published_config_there_and_back() -> None:
    assert isinstance(small, Spec) and small.from_hf is not None
    config = small.configure(config=PUBLISHED)
    assert config == Sizes(vocab=32, width=4, layers=3, tied=True)
    assert small.configure(config=small.from_hf.publish(config)) == config
    assert small.configure(config=PUBLISHED | {"n_embd": 4}) == config


def test_config_from_a_file_or_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    assert small.configure(config=tmp_path) == small.configure(config=tmp_path / "config.json")
    assert small.configure(config=str(tmp_path)) == small.configure(config=PUBLISHED)


def test_a_spec_by_path_name_or_object(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + spec_of("return x"))
    module = ar.trace(f"{file}:broken")
    assert module.entry.name == "broken"
    file.write_text(HEAD + spec_of("y = ar.exp(x)\nreturn y"))
    again = ar.trace(f"{file}:broken")
    assert [op.results[0].name for op in again.entry.ops] == ["x", "y"]
    assert (
        ar.trace(small, "full").entry.outputs[0].type
        != ar.trace(small, "tiny").entry.outputs[0].type
    )
    assert ar.trace(small) == ar.trace(small, config=Sizes(width=64)) == ar.trace(small, "full")


def test_a_config_of_the_file_that_a_path_names(tmp_path: Path, monkeypatch: Any) -> None:
    """Imported and named by its path, a file is two modules with two classes of the same lines."""
    (tmp_path / "sized.py").write_text(
        "import archir as ar\n\n\n@ar.config\nclass Sizes:\n    width: int = 16\n\n\n"
        "@ar.spec(Sizes)\ndef net(tokens, c):\n"
        '    table = ar.weight("table", [32, c.width])\n'
        "    return ar.logits(ar.embedding(tokens, table), table)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sized = importlib.import_module("sized")
    module = ar.trace(f"{tmp_path / 'sized.py'}:net", config=sized.Sizes(width=8))
    assert "table: f[32, 8]" in str(module)
