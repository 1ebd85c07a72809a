"""Text to token ids and back, from a `tokenizer.json` or from a GGUF header.

A GGUF header holds vocabulary and merges, but only the *name* of the rule that cuts text into words
first (`tokenizer.ggml.pre`). archir knows a few names and refuses the others: a wrong rule gives
plausible, wrong ids. Ids are those of `transformers`' `AutoTokenizer` on the same file. It knows
three things less than the models' own tokenizers: SmolLM's sets each digit apart before anything
else (that shows in runs of spaces before a digit: "a  1"), Llama 3's takes a whole word that is in
the vocabulary without merging, and adds the first token where the header does not say. Where that
matters, pass the folder with the model's own `tokenizer.json`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from archir.diagnostics import MismatchError, UnsupportedError
from backends.runtime.gguf_header import GGUFHeader, read_gguf_header

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre → how text is cut before merging; None is GPT-2's rule, which ByteLevel has.
PRE_TOKENIZERS: dict[str, str | None] = {
    "gpt-2": None,
    "gpt2": None,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "smollm": None,
}
_CONTROL, _USER_DEFINED = 3, 4


class Tokenizer:
    """Encodes and decodes text; special tokens in a text count as such.

    bos_id, eos_id: None where the model has none.  eos_ids: every id that ends a text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        bos_id: int | None,
        eos_ids: Sequence[int],
        first: Sequence[int] = (),
        last: Sequence[int] = (),
    ) -> None:
        self._backend = backend
        self._first, self._last = list(first), list(last)
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.eos_id = self.eos_ids[0] if self.eos_ids else None

    def __len__(self) -> int:
        """Number of token ids, added ones included."""
        return self._backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the tokens the model expects before and after it."""
        return self._first + self._backend.encode(text).ids + self._last

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def stream(self) -> TextStream:
        """A decoder for ids that arrive one at a time."""
        return TextStream(self)


class TextStream:
    """Turns token ids into text as they arrive; a character cut between tokens waits for its end.

    What `put` and a last `finish` return, joined, is what `decode` gives for all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # ids already given out that the next text may depend on
        self._pending: list[int] = []

    def put(self, token: int) -> str:
        """The text that is complete now; empty in the middle of a character."""
        self._pending.append(token)
        text = self._text()
        if text.endswith("\ufffd"):
            return ""
        if text:
            self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """What is still pending at the end, broken characters as U+FFFD."""
        text = self._text()
        self._context, self._pending = [], []
        return text

    def _text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(before) :]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a `.gguf` file, a `tokenizer.json`, or the folder of a model.

    Raises `UnsupportedError` for a GGUF tokenizer archir does not know, by name, and
    `MismatchError` where there is no tokenizer.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return _from_gguf(read_gguf_header(path))
    file = path if path.name == "tokenizer.json" else _folder(path) / "tokenizer.json"
    if not file.is_file():
        raise MismatchError(
            f"{path} has no tokenizer: there is no {file}",
            code="tokenizer-missing",
            next="put the model's tokenizer.json there, or use a .gguf file, which holds one",
        )
    return _from_json(file)


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _from_json(file: Path) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.no_truncation()
    backend.no_padding()
    named = _read(file.parent / "tokenizer_config.json")
    model = _read(file.parent / "config.json")
    generation = _read(file.parent / "generation_config.json")

    def ids(kind: str) -> list[int]:
        for config in (generation, model):
            value = config.get(f"{kind}_token_id")
            if value is not None:
                return list(value) if isinstance(value, list) else [value]
        token = named.get(f"{kind}_token")
        content = token.get("content") if isinstance(token, dict) else token
        token_id = backend.token_to_id(content) if content is not None else None
        return [] if token_id is None else [token_id]

    return Tokenizer(backend, next(iter(ids("bos")), None), ids("eos"))


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _from_gguf(header: GGUFHeader) -> Tokenizer:
    def meta(key: str, default: Any = None) -> Any:
        return header.metadata.get(f"tokenizer.ggml.{key}", default)

    _refuse_unknown(header, meta("model"), meta("pre"))
    tokens, kinds = meta("tokens"), meta("token_type", ())
    letters = _byte_letters()
    alphabet = set(letters.values())
    spelled = [
        token if alphabet.issuperset(token) else "".join(letters[b] for b in token.encode())
        for token in tokens
    ]
    vocab = {token: i for i, token in enumerate(spelled)}
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in meta("merges"))]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = _pre_tokenizer(PRE_TOKENIZERS[meta("pre")])
    backend.decoder = decoders.ByteLevel()

    ends = [i for key in ("eos", "eot") if (i := meta(f"{key}_token_id")) is not None]
    bos = meta("bos_token_id")
    named = [meta(f"{key}_token_id") for key in ("bos", "eos", "unknown", "padding")]
    control = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    control += [tokens[i] for i in named if i is not None]
    plain = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in control if t in vocab]
    )
    backend.add_tokens([AddedToken(t, normalized=False) for t in plain if t in vocab])
    return Tokenizer(
        backend,
        bos,
        ends,
        first=[bos] if bos is not None and meta("add_bos_token", False) else [],
        last=ends[:1] if meta("add_eos_token", False) else [],
    )


def _refuse_unknown(header: GGUFHeader, model: str | None, pre: str | None) -> None:
    if model != "gpt2":
        raise UnsupportedError(
            f"{header.path} has a tokenizer of kind {model!r}; archir reads byte-level BPE, 'gpt2'",
            code="tokenizer-model",
            facts=[f"tokenizer.ggml.model = {model!r}"],
            next="put the model's own tokenizer.json beside the weights of a Hugging Face folder",
        )
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{header.path} cuts text by the rule {pre!r}; archir knows "
            f"{', '.join(sorted(PRE_TOKENIZERS))}",
            code="tokenizer-pre",
            facts=[f"tokenizer.ggml.pre = {pre!r}"],
            next="put the model's own tokenizer.json beside the weights of a Hugging Face folder",
        )
    for key in ("tokens", "merges"):
        if f"tokenizer.ggml.{key}" not in header.metadata:
            raise MismatchError(
                f"{header.path} names a 'gpt2' tokenizer, but holds no tokenizer.ggml.{key}",
                code="tokenizer-missing",
                next="convert the model again with a current llama.cpp",
            )


def _pre_tokenizer(split: str | None) -> pre_tokenizers.PreTokenizer:
    if split is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    cut = pre_tokenizers.Split(Regex(split), behavior="isolated")
    return pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte: printable ones stand for themselves, others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
