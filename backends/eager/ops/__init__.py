"""How eager prints each op: one file per family, mirroring `archir/ops`."""

from backends.eager.ops import (
    attention,
    chunk,
    control,
    elementwise,
    head,
    norm,
    random,
    state,
    tensor,
)  # fmt: skip
from backends.eager.ops.base import EMIT, UNSUPPORTED

__all__ = [
    "EMIT",
    "UNSUPPORTED",
    "attention",
    "chunk",
    "control",
    "elementwise",
    "head",
    "norm",
    "random",
    "state",
    "tensor",
]
