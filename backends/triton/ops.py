"""What the Triton backend computes itself, and what it leaves to torch, with the reason.

A kind of op stands in `KERNELS` (a skeleton that makes its kernel) or in `LEFT_TO_TORCH`. Another
package adds one with `kernel(kind)` or `left_to_torch(kind, reason)`; in the second case eager's
emission is printed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from archir.ir import Module, Op
from archir.ops import OPS
from backends.triton.kernel import Skeleton
from backends.triton.pointwise import Pointwise
from backends.triton.recurrent import Recurrent
from backends.triton.rows import RowWise

KERNELS: dict[str, Any] = {}
LEFT_TO_TORCH: dict[str, str] = {}


def kernel(*kinds: str) -> Callable[[Any], Any]:
    """Registers the class of a skeleton, made from (op, module), for some kinds of op."""

    def add(skeleton: Any) -> Any:
        KERNELS.update(dict.fromkeys(kinds, skeleton))
        return skeleton

    return add


def left_to_torch(reason: str, *kinds: str) -> None:
    """Registers why some kinds of op are printed as eager prints them."""
    LEFT_TO_TORCH.update(dict.fromkeys(kinds, reason))


kernel("pointwise")(Pointwise)
kernel("state_update")(Recurrent)
kernel("layer_norm", "rms_norm", "l2_norm")(RowWise)

left_to_torch(
    "alone it is one torch kernel already; two that follow each other become a pointwise kernel",
    "cast", *(kind for kind, definition in OPS.items() if definition.family == "elementwise"),
)  # fmt: skip
left_to_torch("torch's matrix products are the machine's own", "linear", "logits", "einsum")
left_to_torch("scaled_dot_product_attention is a fused kernel already", "attention")
left_to_torch(
    "it moves no data, or only copies",
    "heads", "merge", "split", "concat", "reshape", "broadcast_to", "repeat", "transpose",
    "expand_dims", "append", "store", "last", "steps", "unsteps", "embedding", "fill", "eye",
    "size",
)  # fmt: skip
left_to_torch(
    "a chunked recurrence has no kernel yet: torch runs its algebra",
    "cumprod", "iota", "substitute",
)  # fmt: skip
left_to_torch("torch reduces one axis in one kernel", "reduce_sum", "reduce_mean", "reduce_max")
left_to_torch(
    "it says where rows lie, on the host", "dense", "ragged", "advance", "valid", "positions",
    "mask_targets",
)  # fmt: skip
left_to_torch("it is control flow, in Python", "call", "scan", "by_length")
left_to_torch("its kernel is not written yet", "rotary", "short_conv", "dropout", "cross_entropy")


def skeleton_of(op: Op, module: Module) -> Skeleton | None:
    """What makes the kernel of an op; None where torch runs it."""
    made = KERNELS.get(op.kind)
    return made(op, module) if made is not None and not made.refusal(op, module) else None
