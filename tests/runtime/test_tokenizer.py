"""The GGUF tokenizer against `transformers` on the same file, streams against whole decoding."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from archir.diagnostics import ArchirError
from backends.runtime.tokenizer import Tokenizer, load_tokenizer
from tests.goldens import check_golden
from tests.real import smollm2_path

TEXTS = [
    "",
    " ",
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "It's we'll they've I'd CAN'T",
    "3.14159 1,000,000 2024-02-29 0x1F 1e-5",
    "a 1 b 22 c 333 d 4444",
    "a  1\n\n2\t3",
    "½ ² Ⅷ ٣ ४ 一二三",
    "\t\tif x:\n\t\t\treturn  y\r\n\r\n",
    "trailing spaces   ",
    "   leading spaces",
    "\u00a0\u200b\u2028 \ufeff",
    "café cafe\u0301 naïve Ünïcödé",
    "Привет, мир! Καλημέρα κόσμε",
    "你好，世界。日本語のテキスト 한국어",
    "שלום עולם مرحبا بالعالم हिन्दी ไทย",
    "🙂👍🏽 👩‍👩‍👧‍👦 🇫🇷 ❤️",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><repo_name>x<file_sep>y<gh_stars>",
    "<|im_start <|im_end| > |endoftext|>",
    "x" * 300,
    "\x00\x01\x7f\x85\ufffd",
]
PIECES = [
    *"0 7 12 345 2024 3.5 ½ ² Ⅷ ٣ a word Hello 's 'll ! ... {} __init__ CamelCase é Ж".split(),
    *"中文 日本 한국 العربية हिन्दी ไทย 🙂 👩‍👩‍👧 🇫🇷 e\u0301 \ufffd \x00 \u200b".split(),
    *"<|im_start|> <|im_end|> <|endoftext|> <repo_name>".split(),
    *(" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "\u00a0", " the", " 1", " x"),
]


def texts() -> list[str]:
    """200 texts: those above, and pieces joined at random."""
    draw = random.Random(2)
    mixed = ["".join(draw.choices(PIECES, k=draw.randint(1, 14))) for _ in range(200 - len(TEXTS))]
    return TEXTS + mixed


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(smollm2_path())


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    file = smollm2_path()
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def test_equals_transformers_on_200_texts(smollm2, reference):
    assert len(set(texts())) >= 195
    for text in texts():
        ids = smollm2.encode(text)
        assert ids == reference(text).input_ids, text
        assert smollm2.decode(ids) == reference.decode(ids), text
    assert (smollm2.bos_id, smollm2.eos_id) == (reference.bos_token_id, reference.eos_token_id)
    assert (len(smollm2), smollm2.eos_ids) == (49152, (2,))


def test_a_saved_folder_gives_the_same_ids(smollm2, reference, tmp_path):
    reference.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json", tmp_path / "model.safetensors"):
        loaded = load_tokenizer(path)
        assert all(loaded.encode(text) == smollm2.encode(text) for text in TEXTS)
        assert (loaded.bos_id, loaded.eos_ids) == (smollm2.bos_id, smollm2.eos_ids)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0], "bos_token_id": 1}')
    assert load_tokenizer(tmp_path).eos_ids == (2, 0)


def test_stream_gives_whole_characters_only(smollm2):
    for text in texts():
        ids, stream = smollm2.encode(text), smollm2.stream()
        parts = [stream.put(token) for token in ids]
        assert "".join(parts) + stream.finish() == smollm2.decode(ids) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in part for part in parts)


def test_stream_of_broken_bytes_loses_nothing(smollm2):
    draw = random.Random(3)
    for _ in range(50):
        ids = [draw.randrange(len(smollm2)) for _ in range(12)]
        stream = smollm2.stream()
        assert "".join(map(stream.put, ids)) + stream.finish() == smollm2.decode(ids)


TOKENS = [
    *(chr(c) for c in range(33, 127)),
    "Ġ",
    "Ċ",
    "Ġthe",
    "th",
    "the",
    "12",
    "123",
    "<s>",
    "</s>",
]
MERGES = ["t h", "th e", "Ġ the", "1 2", "12 3"]


def small_gguf(file: Path, **changes: object) -> Path:
    """A GGUF file with a tokenizer of a hundred tokens and no weights."""
    writer = gguf.GGUFWriter(file, "llama")
    entries = {"model": "gpt2", "pre": "gpt-2", "tokens": TOKENS, "merges": MERGES} | changes
    kinds = [3 if token in ("<s>", "</s>") else 1 for token in TOKENS]
    ids = {"bos_token_id": TOKENS.index("<s>"), "eos_token_id": TOKENS.index("</s>")}
    for key, value in ({"token_type": kinds} | ids | entries).items():
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_string(f"tokenizer.ggml.{key}", str(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pre": "llama-bpe"},
        {"add_bos_token": True},
        {"pre": "llama-bpe", "add_bos_token": True, "add_eos_token": True},
    ],
    ids=str,
)
def test_small_files_equal_transformers(tmp_path, changes):
    file = small_gguf(tmp_path / "small.gguf", **changes)
    ours = load_tokenizer(file)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in ("the the 1234 12 123", "a<s>b</s> the\n\nthe", " \n the", ""):
        assert ours.encode(text) == theirs(text).input_ids


REFUSED = {
    "model": {"model": "llama"},
    "pre": {"pre": "qwen2"},
    "pre_default": {"pre": "default"},
    "pre_missing": {"pre": None},
    "merges": {"merges": None},
}


@pytest.mark.parametrize("case", REFUSED)
def test_unknown_tokenizers_are_refused_by_name(tmp_path, case):
    with pytest.raises(ArchirError) as error:
        load_tokenizer(small_gguf(tmp_path / "small.gguf", **REFUSED[case]))
    check_golden(f"weights/tokenizer_{case}", str(error.value))


def test_no_tokenizer(tmp_path):
    with pytest.raises(ArchirError) as error:
        load_tokenizer(tmp_path)
    check_golden("weights/tokenizer_missing", str(error.value))


def test_user_defined_tokens_stay_whole(tmp_path):
    tokens = [*TOKENS, "<think>"]
    kinds = [3 if token in ("<s>", "</s>") else 1 for token in TOKENS] + [4]
    loaded = load_tokenizer(small_gguf(tmp_path / "s.gguf", tokens=tokens, token_type=kinds))
    assert loaded.encode("a<think>b") == [TOKENS.index("a"), len(TOKENS), TOKENS.index("b")]
    assert loaded.decode([len(TOKENS)]) == "<think>"
