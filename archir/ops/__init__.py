"""The ops: one file per family. `OPS` maps a kind to its definition."""

from archir.ops import attention, chunk, control, elementwise, head, norm, random, state, tensor
from archir.ops.base import OPS, OpDef, Sample, Site, infer_op, lookup, op, register

__all__ = [
    "OPS",
    "OpDef",
    "Sample",
    "Site",
    "attention",
    "chunk",
    "control",
    "elementwise",
    "head",
    "infer_op",
    "lookup",
    "norm",
    "op",
    "random",
    "register",
    "state",
    "tensor",
]
