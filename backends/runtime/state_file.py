"""A state as a safetensors file: tensors by path, and in the metadata what they are.

The checksum is the SHA-256 of the whole file with the checksum's own digits as zeros, so that no
byte of it can change unseen.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from archir.diagnostics import MismatchError
from backends.runtime.state import Schema, Slot

FORMAT = "archir-state-1"
_BLANK = "0" * 64


def write(
    path: Path, schema: Schema, lengths: tuple[int, ...], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Writes aside, then renames."""
    slots = {p: [s.kind, s.type, list(s.axes)] for p, s in schema.slots.items()}
    said = {"spec": schema.spec, "hash": schema.hash, "lengths": lengths, "entries": slots}
    metadata = {"format": FORMAT, "checksum": _BLANK, "state": json.dumps(said)}
    ready = {p: x.detach().cpu().contiguous() for p, x in tensors.items()}
    content = bytearray(save(ready, metadata))
    _stamp(content, hashlib.sha256(content).hexdigest())
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise


def read(path: Path) -> tuple[Schema, tuple[int, ...], dict[str, torch.Tensor]]:
    """Schema, lengths and tensors of a file whose every byte is as it was written."""
    if not path.is_file():
        raise MismatchError(
            f"there is no file {path}", code="state-file", next="state.save(path) writes one"
        )
    content = bytearray(path.read_bytes())
    metadata = _metadata(content, path)
    told = metadata["checksum"]
    _stamp(content, _BLANK, told)
    found = hashlib.sha256(content).hexdigest()
    if found != told:
        raise MismatchError(
            f"{path} was changed after it was written: its content does not give its checksum",
            code="state-file",
            facts=[f"written:  {told}", f"content:  {found}"],
            next="take a copy that was not edited, or make the state again with prefill",
        )
    said = json.loads(metadata["state"])
    slots = {
        p: Slot(kind, type_, tuple(axes)) for p, (kind, type_, axes) in said["entries"].items()
    }
    schema = Schema(said["spec"], said["hash"], slots)
    return schema, tuple(said["lengths"]), load(bytes(content))


def _metadata(content: bytearray, path: Path) -> dict[str, Any]:
    """The metadata of a file that is as long as its header says."""
    size = len(content)
    length = struct.unpack_from("<Q", content)[0] if size >= 8 else 0
    if size < 8 or 8 + length > size:
        raise _cut(path, 8 + length, size)
    try:
        header = json.loads(content[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        promised = 8 + length + max((x["data_offsets"][1] for x in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        metadata, promised = {}, size
    if metadata.get("format") != FORMAT or len(metadata.get("checksum", "")) != 64:
        raise MismatchError(
            f"{path} is no state that archir wrote, or its header was edited",
            code="state-file",
            facts=[f"format: {metadata.get('format', 'none')}, {FORMAT} is read"],
            next="state.save(path) writes such files; model.load_weights reads weights",
        )
    if promised > size:
        raise _cut(path, promised, size)
    return metadata


def _cut(path: Path, promised: int, size: int) -> MismatchError:
    return MismatchError(
        f"{path} was cut short: {size:,} bytes are there, its header promises {promised:,}",
        code="state-file",
        next="copy it again, or make the state again with prefill",
    )


def _stamp(content: bytearray, digits: str, old: str = _BLANK) -> None:
    """Writes the checksum's digits over the old ones, in place."""
    mark = b'"checksum":"' + old.encode() + b'"'
    at = content.index(mark) + len(mark) - 65
    content[at : at + 64] = digits.encode()
