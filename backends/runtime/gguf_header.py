"""A GGUF file's header: metadata and the place of each tensor, memory-mapped.

The `gguf` library's `GGUFReader` makes a NumPy array per token and per merge, 3.7 s for a
vocabulary of 49,152; this reads the same header in a tenth of a second and can say where a file was
cut. Quantised blocks are still the library's (`gguf.quants`).
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archir.diagnostics import MismatchError, UnsupportedError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of the file: shape in torch's order, `start` and `size` in bytes of the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    size: int


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says about itself; `data` is the whole file, copy-on-write."""

    path: Path
    data: mmap.mmap
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf_header(path: str | Path) -> GGUFHeader:
    """The header of a little-endian GGUF file, version 2 or 3.

    Raises `MismatchError` for a file that is no GGUF or was cut short, `UnsupportedError` for
    another version, byte order or tensor type, or when the `gguf` library is not installed.
    """
    path = Path(path)
    size = path.stat().st_size
    if size < 24:
        raise truncated(path, "a GGUF header needs at least 24 bytes", size)
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if data[:4] != b"GGUF":
        raise MismatchError(
            f"{path} is not a GGUF file: it starts with {data[:4]!r}, not b'GGUF'",
            code="weights-format",
        )
    version, tensor_count, entry_count = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        raise UnsupportedError(
            f"{path} is GGUF version {version:#x}; archir reads little-endian versions 2 and 3",
            code="gguf-version",
            next="convert the model again with a current llama.cpp",
        )
    cursor = _Cursor(path, data, 24)
    metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(entry_count)}
    entries = [cursor.tensor() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    base = -(-cursor.place // alignment) * alignment
    kinds = {int(kind): kind for kind in require_gguf().GGML_QUANT_SIZES}
    tensors = {entry[0]: _tensor(path, kinds, base, *entry) for entry in entries}
    ends = {tensor.start + tensor.size: tensor for tensor in tensors.values()}
    if ends and max(ends) > size:
        lost = min((t for t in tensors.values() if t.start + t.size > size), key=lambda t: t.start)
        fact = f"{lost.name} {list(lost.shape)} {lost.kind} ends at byte {lost.start + lost.size:,}"
        raise truncated(path, f"its header promises {max(ends):,} bytes", size, fact)
    return GGUFHeader(path, data, metadata, tensors)


def truncated(path: Path, promise: str, size: int, *facts: str) -> MismatchError:
    """The error for a file that ends before its header says."""
    return MismatchError(
        f"{path} is cut short: {promise}, the file has {size:,}",
        code="weights-truncated",
        facts=facts,
        next="download or copy the file again",
    )


def require_gguf() -> Any:
    """The `gguf` library, which archir needs for GGUF files only."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise UnsupportedError(
            "reading GGUF weights needs the gguf library, which is not installed",
            code="gguf-missing",
            next="pip install 'archir[run]'",
        ) from None
    return gguf


def _tensor(
    path: Path,
    kinds: dict[int, Any],
    base: int,
    name: str,
    shape: tuple[int, ...],
    code: int,
    offset: int,
) -> GGUFTensor:
    if code not in kinds:
        raise UnsupportedError(
            f"{path}: {name} has tensor type {code}, which the gguf library does not know",
            code="gguf-type",
            next="pip install --upgrade gguf",
        )
    block, block_bytes = require_gguf().GGML_QUANT_SIZES[kinds[code]]
    size = math.prod(shape) // block * block_bytes
    return GGUFTensor(name, shape, kinds[code].name, base + offset, size)


@dataclass
class _Cursor:
    """Reads one thing after the other, and says so when the file ends."""

    path: Path
    data: mmap.mmap
    place: int

    def take(self, count: int) -> int:
        """The place of the next `count` bytes, which are there."""
        start, self.place = self.place, self.place + count
        if self.place > len(self.data):
            promise = f"its header goes on to byte {self.place:,} at least"
            raise truncated(self.path, promise, len(self.data))
        return start

    def scalar(self, code: str) -> Any:
        start = self.take(struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{code}", self.data, start)[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.take(length)
        return self.data[start : start + length].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(self._code(kind))
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in (_STRING, _ARRAY):
            return [self.value(inner) for _ in range(count)]
        code = f"<{count}{self._code(inner)}"
        return list(struct.unpack_from(code, self.data, self.take(struct.calcsize(code))))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        shape = tuple(self.scalar("Q") for _ in range(self.scalar("I")))
        return name, shape[::-1], self.scalar("I"), self.scalar("Q")

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise MismatchError(
                f"{self.path}: byte {self.place:,} names value type {kind}, and GGUF has 0 to 12",
                code="weights-format",
            )
        return _SCALARS[kind]
