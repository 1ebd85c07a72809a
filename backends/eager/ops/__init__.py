"""How eager prints each op: one file per family, mirroring `archir/ops`."""

from backends.eager.ops import attention, control, elementwise, head, norm, random, state, tensor
from backends.eager.ops.base import EMIT, UNSUPPORTED

__all__ = [
    "EMIT",
    "UNSUPPORTED",
    "attention",
    "control",
    "elementwise",
    "head",
    "norm",
    "random",
    "state",
    "tensor",
]
