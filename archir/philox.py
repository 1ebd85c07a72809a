"""Random numbers that are a function of a key and a counter: Philox-4x32-10 (Salmon et al. 2011).

Dropout draws from it, so that NumPy and every backend make the same mask, whoever computes it, and
however often (D12). Words are kept in int64, whose products wrap; so the same lines serve NumPy
arrays, torch tensors and Python integers. A copy lies beside emitted files.
"""

from __future__ import annotations

import hashlib
from typing import Any

Words = tuple[Any, Any, Any, Any]
LOW = 0xFFFFFFFF


def fold(seed: int, path: str) -> tuple[int, int]:
    """The key of one random op of one call: `seed` is the call's, `path` says which op it is."""
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def philox(key: tuple[Any, Any], counter: Words) -> Words:
    """Four 32-bit words of a 128-bit counter (four 32-bit words, low first) under a 64-bit key."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = ((b >> 32) & LOW) ^ c1 ^ k0, b & LOW
        c2, c3 = ((a >> 32) & LOW) ^ c3 ^ k1, a & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3


def threshold(rate: float) -> int:
    """A word of this value or more is kept."""
    return round(rate * 2**32)
