"""What emitted kernel files call: launching, and the torch op around a kernel. A copy lies beside
them.

On a GPU an op launches its kernel. On a CPU it runs the same in torch, or, where TRITON_INTERPRET=1
was set before Triton was imported, the kernel in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
Op = Callable[..., Any]
Axes = tuple[int | str, ...]
_AUTOGRAD = tuple(
    getattr(torch._C.DispatchKey, name)
    for name in (
        "AutogradFunctionality",
        "ADInplaceOrView",
        "AutogradOther",
        "AutogradNestedTensor",
    )
)


def _let_scalars_index() -> None:
    """Triton 3.6's interpreter turns a scalar into an int by way of an array of one element, which
    NumPy 2.4 refuses: the bounds of a loop could not be read."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def scalars_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    if patch.__name__ != scalars_index.__name__:  # each folder of emitted files has a copy of this
        interpreter._patch_lang_tensor = scalars_index


if INTERPRETED and triton.__version__.startswith("3.6."):
    _let_scalars_index()


def operator(
    name: str,
    schema: str,
    run: Op,
    eager: Op,
    empty: Op,
    takes: Mapping[str, Axes] = MappingProxyType({}),
) -> Op:
    """The torch op `archir::name`, which works under torch.compile and export.

    run: launches the kernel.  eager: the same in torch, which also gives the gradient.  empty:
    memory for what it makes, from the same arguments.  takes: the axes of each tensor, sizes and
    letters; a letter is any size, the same in all. Other shapes are a ValueError, for a kernel
    would read outside of them. The name ends in a hash of the file, so that an op of this name that
    is there already is this one.
    """
    if hasattr(torch.ops.archir, name):
        return getattr(torch.ops.archir, name).default

    def call(*args: Any) -> Any:
        _check_shapes(name, takes, args)
        if INTERPRETED or args[0].is_cuda:
            return run(*args)
        with _own_precision(args[0]):
            return _apart(eager(*args), args)

    def fake(*args: Any) -> Any:
        _check_shapes(name, takes, args)
        return empty(*args)

    made = torch.library.custom_op(f"archir::{name}", call, mutates_args=(), schema=schema)
    made.register_fake(fake)
    gradient = _gradient(name, schema, eager)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
        ctx.rest = [None if isinstance(x, Tensor) else (x,) for x in inputs]

    def backward(ctx: Any, *slopes: Any) -> tuple[Any, ...]:
        saved, wanted = iter(ctx.saved_tensors), list(ctx.needs_input_grad)
        args = [next(saved) if rest is None else rest[0] for rest in ctx.rest]
        found = iter(gradient(*args, list(slopes), wanted))
        return tuple(next(found) if want else None for want in wanted)

    made.register_autograd(backward, setup_context=save)
    return getattr(torch.ops.archir, name).default


def _check_shapes(name: str, takes: Mapping[str, Axes], args: Sequence[Any]) -> None:
    """Raises ValueError where an op is given other shapes than it takes, or another number of
    states than it has rows: lines of the grid (B), or those that start and stop tell."""
    sizes: dict[Any, int] = {}
    for (operand, axes), x in zip(takes.items(), args):
        fits = len(axes) == x.ndim
        for axis, n in zip(axes, x.shape):
            fits = fits and n == (axis if type(axis) is int else sizes.setdefault(axis, n))
        if not fits:
            want = ", ".join(str(sizes.get(axis, axis)) for axis in axes)
            raise ValueError(f"{operand} of {name} is {list(x.shape)}, [{want}] is needed")
    if takes and len(args) > len(takes):
        *_, start, stop = args
        count = sizes["B"] if start is None else len(start)
        if count != sizes["R"] or (start is not None and count != len(stop)):
            raise ValueError(f"{name} is given states of {sizes['R']} rows, and {count} rows")


def _own_precision(x: Tensor) -> Any:
    """Autocast would change what the torch version computes in; a kernel knows nothing of it."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _apart(made: Any, args: Sequence[Any]) -> Any:
    """Results that share no memory with arguments or each other, as torch asks of an op, and are
    contiguous, as a kernel's are."""
    seen = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
    found = []
    for y in made if isinstance(made, tuple) else (made,):
        y = y.contiguous()
        place = y.untyped_storage().data_ptr()
        found.append(y.clone() if place in seen else y)
        seen.add(place)
    return tuple(found) if isinstance(made, tuple) else found[0]


def _gradient(name: str, schema: str, eager: Op) -> Op:
    """The torch op `archir::name_gradient`: of Σ ⟨slope, result⟩ with regard to the arguments that
    are wanted, by running the torch version again. As an op it is one node of a compiled graph."""
    takes = schema.partition(") ->")[0] + ", Tensor?[] slopes, bool[] wanted) -> Tensor[]"

    def call(*given: Any) -> list[Tensor]:
        *args, slopes, wanted = given
        with torch.enable_grad(), _recording(), _own_precision(args[0]):
            args = [x.detach().requires_grad_() if w else x for x, w in zip(args, wanted)]
            made = eager(*args)
            made = made if isinstance(made, tuple) else (made,)
            ends = [(y, s) for y, s in zip(made, slopes) if s is not None and y.requires_grad]
            moved = [x for x, want in zip(args, wanted) if want]
            found: Sequence[Tensor | None] = [None] * len(moved)
            if ends:
                ys, seeds = zip(*ends)
                found = torch.autograd.grad(ys, moved, seeds, allow_unused=True)
        # an op's results share no memory with anything
        return [
            torch.zeros_like(x) if g is None else g.clone(memory_format=torch.contiguous_format)
            for x, g in zip(moved, found)
        ]

    def empty(*given: Any) -> list[Tensor]:
        *args, _, wanted = given
        moved = [x for x, want in zip(args, wanted) if want]
        return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in moved]

    made = torch.library.custom_op(f"archir::{name}_gradient", call, mutates_args=(), schema=takes)
    made.register_fake(empty)
    return getattr(torch.ops.archir, f"{name}_gradient").default


def _recording() -> Any:
    """Lets an op's implementation, which torch runs below autograd, record a graph of its own."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, made: tuple[Tensor, ...], **options: Any
) -> None:
    """Runs a kernel on the device of its first argument, unless its grid has no program.

    made: what it writes, among its arguments.
    """
    if 0 in grid:
        return
    device = args[0].device
    if INTERPRETED:
        _interpret(kernel, grid, args, made, options)
    elif device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](*args, **options)
    else:
        raise RuntimeError(f"a kernel runs on a GPU or under TRITON_INTERPRET=1, not on {device}")


def _interpret(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], made: Sequence[Tensor], options: Any
) -> None:
    """As on a GPU in two respects: lanes that a mask hides may divide by zero, and what is stored
    as bfloat16 is rounded, which the interpreter would cut off. It writes float32, torch rounds."""
    wide = {id(x): x.float() for x in made if x.dtype == torch.bfloat16}
    with np.errstate(all="ignore"):
        kernel[grid](*(wide.get(id(x), x) for x in args), **options)
    for x in made:
        if id(x) in wide:
            x.copy_(wide[id(x)])


def config(configs: Mapping[str, Mapping[str, int]], x: Tensor) -> Mapping[str, int]:
    """The entry of a kernel's table for what runs it."""
    return configs.get("interpreter" if INTERPRETED else target(x.device), configs["any"])


@lru_cache
def target(device: torch.device) -> str:
    """`sm_90`, `gfx942`, … of a GPU."""
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def by_token(x: Tensor, lead: int) -> Tensor:
    """[*lead, *inner] → [tokens, *inner] with contiguous inner axes: a view wherever it can be."""
    x = x.flatten(0, lead - 1) if lead else x[None]
    inner = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != inner:
            return x.contiguous()
        inner *= size
    return x


def bounds(
    start: Sequence[int] | None, stop: Sequence[int] | None, tokens: Tensor
) -> Tensor | None:
    """First token and end of each row, i64[R, 2], where the tokens [N, …] are; None where rows are
    dense. Raises ValueError where a row has other tokens than these."""
    if start is None or stop is None:
        return None
    return _bounds(tuple(start), tuple(stop), tokens.shape[0], tokens.device)


@lru_cache(maxsize=64)
def _bounds(
    start: tuple[int, ...], stop: tuple[int, ...], tokens: int, device: torch.device
) -> Tensor:
    for row, (first, end) in enumerate(zip(start, stop, strict=True)):
        if not 0 <= first <= end <= tokens:
            raise ValueError(f"row {row} is from {first} to {end}, of {tokens} tokens")
    return torch.tensor([start, stop], dtype=torch.int64).mT.contiguous().to(device)


def rows(seq: Any) -> tuple[Any, Any]:
    """The rows of a sequence as arguments of an op: (start, stop), None where they are dense."""
    return (None, None) if seq.full else (seq.start, seq.stop)
