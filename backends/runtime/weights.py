"""Published weights: opened without being read, checked before the first copy, loaded and saved.

`open_checkpoint` maps a Hugging Face folder, a `.safetensors` file or a `.gguf` file; `load` copies
one published tensor at a time into parameters that exist already; `save` writes published names.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from archir.diagnostics import MismatchError, UnsupportedError
from archir.layout import Layout, Shape, assemble, check_total, published_shapes
from backends.runtime.gguf_header import (
    GGUFHeader,
    GGUFTensor,
    read_gguf_header,
    require_gguf,
    truncated,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DEQUANTIZED_AT_ONCE = 1 << 22  # entries: 16 MiB of float32 beyond the tensor itself


@dataclass(frozen=True)
class Stored:
    """A published tensor: its shape, and `read()`, which maps or dequantises it."""

    shape: Shape
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """Published tensors by name, none read yet.

    convention: "hf" or "gguf", which of a spec's names fit.  config: the content of config.json,
    for GGUF the same fields from the header; empty where there is none.
    """

    path: Path
    convention: str
    config: dict[str, Any]
    tensors: Mapping[str, Stored]

    def keys(self) -> list[str]:
        """Names of the published tensors."""
        return list(self.tensors)

    def shape(self, name: str) -> Shape:
        """Shape of a published tensor, from the header."""
        return self.tensors[name].shape

    def get(self, name: str) -> torch.Tensor:
        """A published tensor on the CPU: mapped, or dequantised to float32. Do not write to it."""
        return self.tensors[name].read()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder, an index or `.safetensors` file, or a `.gguf` file.

    Raises `MismatchError` when there is no such file, or one was cut short.
    """
    path = Path(path)
    if path.is_dir():
        file = next((path / name for name in (SINGLE, INDEX) if (path / name).is_file()), None)
        if file is None:
            raise MismatchError(
                f"{path} holds no weights: neither {SINGLE} nor {INDEX} is there",
                code="weights-missing",
                facts=_found(path),
                next="name a folder written by save_pretrained, a .safetensors or a .gguf file",
            )
    elif path.is_file():
        file = path
    else:
        raise MismatchError(
            f"there is no file or folder {path}",
            code="weights-missing",
            facts=_found(path.parent),
            next="check the path",
        )
    if file.suffix == ".gguf":
        return _open_gguf(file)
    if file.suffix == ".safetensors":
        tensors = _open_safetensors(file)
    elif file.name.endswith(".safetensors.index.json"):
        tensors = _open_shards(file)
    else:
        raise UnsupportedError(
            f"{file} is neither .safetensors nor .gguf",
            code="weights-format",
            next="save it as safetensors; archir reads no pickles",
        )
    config = file.parent / "config.json"
    content = json.loads(config.read_text()) if config.is_file() else {}
    return Checkpoint(path, "hf", content, tensors)


def load(
    checkpoint: Checkpoint,
    targets: Mapping[str, torch.Tensor],
    names: Mapping[str, Layout],
    ignore: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
    allocate: Callable[[], Mapping[str, torch.Tensor]] | None = None,
) -> None:
    """Copy published tensors into `targets` (spec weight → tensor), cast once.

    allocate: makes the targets' memory once everything is known to fit; then `targets` may be meta.
    ignore: patterns of published tensors that hold no weight (`*.attn.bias`).
    progress: called after each weight with (bytes of targets filled, bytes of all targets).
    Raises `MismatchError`, before the first copy, for missing, unexpected and wrongly shaped ones.
    """
    shapes = {name: tuple(target.shape) for name, target in targets.items()}
    check_total(shapes, names, checkpoint.convention)
    layouts = {name: names[name].resolve(checkpoint.tensors) for name in targets}
    for name, target in targets.items():
        if target.is_meta and allocate is None:
            raise MismatchError(
                f"{name} {list(target.shape)} is a meta tensor, and load fills allocated ones",
                code="weights-unallocated",
                next="allocate the parameters first: model.to_empty(device=...)",
            )
    problems = list(_differences(checkpoint, shapes, layouts, ignore))
    if problems:
        rest = [f"and {len(problems) - 10} more"] if len(problems) > 10 else []
        raise MismatchError(
            f"{checkpoint.path} does not hold the weights of this spec: "
            f"{len(problems)} difference{'s' if len(problems) > 1 else ''}",
            code="weights-mismatch",
            facts=problems[:10] + rest,
            next="use the preset or config.json these weights were made with",
        )
    if allocate is not None:
        targets = allocate()
    done, total = 0, sum(target.nbytes for target in targets.values())
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(layouts[name].load(checkpoint.get))
            done += target.nbytes
            if progress is not None:
                progress(done, total)


def save(
    folder: str | Path,
    tensors: Mapping[str, torch.Tensor],
    names: Mapping[str, Layout],
    config: Mapping[str, Any],
    ir_text: str,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write published tensors, config.json and model.archir; `load` gives the same bits back.

    All files are written aside, then renamed: until then, an older model in `folder` stays whole.
    """
    folder = Path(folder)
    check_total({name: tuple(t.shape) for name, t in tensors.items()}, names)
    pieces = {}
    for name, value in tensors.items():
        pieces |= names[name].save(value.detach())
    folder.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        _write_shards(aside, _shards(assemble(pieces), max_shard_bytes))
        (aside / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
        (aside / "model.archir").write_text(ir_text)
        _replace(folder, aside)
    finally:
        shutil.rmtree(aside)


def _open_safetensors(file: Path) -> dict[str, Stored]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if len(start) < 8 or 8 + length > size:
            raise truncated(file, f"its header alone needs {8 + length:,} bytes", size)
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in header.items()}
    promised = max(ends.values(), default=8 + length)
    if promised > size:
        name = min((n for n in ends if ends[n] > size), key=lambda n: ends[n])
        entry = header[name]
        fact = f"{name} {entry['shape']} {entry['dtype']} ends at byte {ends[name]:,}"
        raise truncated(file, f"its header promises {promised:,} bytes", size, fact)
    mapped = safe_open(file, framework="pt")

    def reader(name: str) -> Callable[[], torch.Tensor]:
        return lambda: mapped.get_tensor(name)

    return {n: Stored(tuple(entry["shape"]), reader(n)) for n, entry in header.items()}


def _open_shards(index: Path) -> dict[str, Stored]:
    where: dict[str, str] = json.loads(index.read_text())["weight_map"]
    lost = sorted({name for name in where.values() if not (index.parent / name).is_file()})
    if lost:
        raise MismatchError(
            f"{index} names {len(set(where.values()))} files, and {', '.join(lost)} is not there",
            code="weights-missing",
            next="download or copy the folder again",
        )
    files = {name: _open_safetensors(index.parent / name) for name in sorted(set(where.values()))}
    absent = [f"{name}: not in {file}" for name, file in where.items() if name not in files[file]]
    if absent:
        raise MismatchError(
            f"{index} and its files disagree about where tensors are",
            code="weights-index",
            facts=absent[:10],
            next="download or copy the folder again",
        )
    return {name: stored for shard in files.values() for name, stored in shard.items()}


def _open_gguf(file: Path) -> Checkpoint:
    header = read_gguf_header(file)

    def reader(tensor: GGUFTensor) -> Callable[[], torch.Tensor]:
        return lambda: _read_gguf(header, tensor)

    tensors = {name: Stored(t.shape, reader(t)) for name, t in header.tensors.items()}
    return Checkpoint(file, "gguf", _gguf_config(header), tensors)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def _read_gguf(header: GGUFHeader, tensor: GGUFTensor) -> torch.Tensor:
    if tensor.kind in _PLAIN:
        count = math.prod(tensor.shape)
        dtype = _PLAIN[tensor.kind]
        values = torch.frombuffer(header.data, dtype=dtype, count=count, offset=tensor.start)
        return values.reshape(tensor.shape)
    gguf = require_gguf()
    kind = gguf.GGMLQuantizationType[tensor.kind]
    raw = np.frombuffer(header.data, np.uint8, tensor.size, tensor.start)
    raw = raw.reshape(-1, tensor.size // max(1, math.prod(tensor.shape[:-1])))
    values = torch.empty(raw.shape[0], tensor.shape[-1])
    step = max(1, DEQUANTIZED_AT_ONCE // tensor.shape[-1])
    for row in range(0, raw.shape[0], step):
        try:
            part = gguf.quants.dequantize(raw[row : row + step], kind)
        except NotImplementedError:
            raise UnsupportedError(
                f"{header.path}: {tensor.name} is quantised as {tensor.kind}, "
                f"which the gguf library cannot dequantise",
                code="gguf-type",
                next="pip install --upgrade gguf, or use a file of another quantisation",
            ) from None
        values[row : row + step] = torch.from_numpy(part)
    return values.reshape(tensor.shape)


_GGUF_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_GGUF_SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
}


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """The header in the words of a Hugging Face config.json; defaults are llama.cpp's."""
    meta = header.metadata
    family = meta.get("general.architecture", "")
    get = {key.removeprefix(f"{family}."): value for key, value in meta.items()}.get
    config: dict[str, Any] = {hf: get(k) for k, hf in _GGUF_FIELDS.items() if get(k) is not None}
    config |= {"model_type": family, "tie_word_embeddings": "output.weight" not in header.tensors}
    config.setdefault("vocab_size", len(meta.get("tokenizer.ggml.tokens", ())))
    for end in ("bos", "eos"):
        if (token := meta.get(f"tokenizer.ggml.{end}_token_id")) is not None:
            config[f"{end}_token_id"] = token
    heads, width = get("attention.head_count"), get("embedding_length")
    if heads and width:
        config.setdefault("num_key_value_heads", heads)
        head_dim = config.setdefault("head_dim", width // heads)
        rotated = get("rope.dimension_count", head_dim)
        if rotated != head_dim:
            config["partial_rotary_factor"] = rotated / head_dim
    if family == "llama":
        config.setdefault("rope_theta", 10000.0)
    if get("rope.scaling.type", "none") != "none":
        scaling = {hf: get(f"rope.scaling.{key}") for key, hf in _GGUF_SCALING.items()}
        config["rope_scaling"] = {k: v for k, v in scaling.items() if v is not None}
    elif _scales_frequencies(header):
        config["rope_scaling"] = {"rope_type": "rope_freqs.weight"}
    return config


def _scales_frequencies(header: GGUFHeader) -> bool:
    """Llama 3.1 files hold a divisor per rotary frequency; only all ones change nothing."""
    tensor = header.tensors.get("rope_freqs.weight")
    return tensor is not None and not bool((_read_gguf(header, tensor) == 1).all())


def _found(folder: Path) -> list[str]:
    if not folder.is_dir():
        return [f"{folder} is not a folder"]
    files = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    return [f"found: {', '.join(files[:8]) or 'nothing'}{' …' if len(files) > 8 else ''}"]


def _differences(
    checkpoint: Checkpoint,
    shapes: Mapping[str, Shape],
    layouts: Mapping[str, Layout],
    ignore: Sequence[str],
) -> Iterator[str]:
    """What the file lacks, has too much, or has in another shape: one line each."""
    expected = published_shapes(shapes, layouts)
    wanted: dict[str, list[str]] = {name: [] for name in expected}
    for weight, layout in layouts.items():
        for name in layout.names:
            wanted[name].append(f"{weight} {list(shapes[weight])}")
    spare = [n for n in checkpoint.keys() if n not in expected and not _matches(n, ignore)]
    for name, shape in expected.items():
        needed = ", ".join(wanted[name])
        if name not in checkpoint.tensors:
            near = get_close_matches(name, spare, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield f"missing: {name} {list(shape)}, for {needed}{hint}"
        elif checkpoint.shape(name) != shape:
            have = list(checkpoint.shape(name))
            yield f"shape: {name} is {have} in the file, and {list(shape)} for {needed}"
    for name in spare:
        yield f"unexpected: {name} {list(checkpoint.shape(name))} belongs to no weight"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _shards(tensors: Mapping[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    """Tensors in order, as many to a shard as fit; a larger one has a shard of its own."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, value in tensors.items():
        if shards[-1] and size + value.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    return shards


def _write_shards(folder: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [SINGLE]
    for file, shard in zip(files, shards, strict=True):
        ready = {name: value.cpu().contiguous() for name, value in shard.items()}
        save_file(ready, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(value.nbytes for shard in shards for value in shard.values())
        where = {name: f for f, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _replace(folder: Path, aside: Path) -> None:
    """Move the files of `aside` into `folder`, then remove what is left of an older model.

    The file that makes weights readable moves last, and an index goes before its shards do, so a
    crash in between leaves a folder that does not load, never one that mixes two models.
    """
    files = {file.name for file in aside.iterdir()}
    entry = SINGLE if SINGLE in files else INDEX
    if entry == INDEX:
        (folder / SINGLE).unlink(missing_ok=True)
        (folder / INDEX).unlink(missing_ok=True)
    for name in sorted(files, key=lambda name: name == entry):
        os.replace(aside / name, folder / name)
    shards = {file.name for file in folder.glob("model-*-of-*.safetensors")}
    for name in (shards | {SINGLE, INDEX}) - files:
        (folder / name).unlink(missing_ok=True)
