"""Ops that carry functions: call, scan, by_length, pointwise (D6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from archir import types
from archir.dims import Poly
from archir.ir import Function
from archir.ops.base import Site, op
from archir.ops.elementwise import broadcast
from archir.types import Tensor, Type


def match_signature(site: Site, function: Function, given: list[Type]) -> dict[str, int | Poly]:
    """Bind a function's symbols to operand types; an error names the input that disagrees."""
    if len(function.inputs) != len(given):
        raise site.fail(
            f"{function.name} takes {len(function.inputs)} inputs, {len(given)} given",
            "operand-count",
        )
    binding: dict[str, int | Poly] = {}
    for value, found in zip(function.inputs, given, strict=True):
        problem = types.match(value.type, found, binding)
        if problem:
            raise site.fail(f"input {value.name}: {value.type} of {function.name}: {problem}")
    return binding


def _infer_call(site: Site) -> tuple[Type, ...]:
    function = site.function("callee")
    binding = match_signature(site, function, _operands(site))
    return tuple(types.substitute(v.type, binding) for v in function.outputs)


def _operands(site: Site) -> list[Type]:
    """The operand types; `infer_op` has refused numbers."""
    return [found for found in site.operands if not isinstance(found, int | float)]


_BY_BACKEND = "what it runs is differentiated by the backend"


@op("control", infer=_infer_call, vjp=_BY_BACKEND, bounds=lambda *xs, callee, scope: callee(*xs))
def call(*operands: Any, callee: Callable[..., Any], scope: str) -> Any:
    """Runs a function with its fields resolved in `scope`."""
    return callee(*operands, scope=scope)


def _infer_scan(site: Site) -> tuple[Type, ...]:
    body, carry, xs = site.function("body"), site.attrs["carry"], site.attrs["xs"]
    given = _operands(site)
    lengths = []
    for index in range(carry, carry + xs):
        tensor = site.tensor(index)
        lengths.append(tensor.shape[0])
        given[index] = Tensor(tensor.dtype, tensor.shape[1:])
    if len({str(n) for n in lengths}) != 1:
        raise site.fail(f"the scanned operands have {lengths} steps", next="make them equal")
    binding = match_signature(site, body, given)
    results = [types.substitute(v.type, binding) for v in body.outputs]
    for index in range(carry):
        if results[index] != given[index]:
            raise site.fail(
                f"carry {index + 1} enters as {given[index]}, leaves as {results[index]}"
            )
    stacked = []
    for found in results[carry:]:
        assert isinstance(found, Tensor)
        stacked.append(Tensor(found.dtype, (lengths[0], *found.shape)))
    return (*results[:carry], *stacked)


@op("control", infer=_infer_scan, vjp=_BY_BACKEND)
def scan(*operands: Any, body: Callable[..., Any], carry: int, xs: int) -> Any:
    """for t: carry, y_t = body(carry, xs[t], consts); results: the last carry, then stacked y.

    Operands: `carry` carried values, `xs` tensors whose first axis is scanned, then constants.
    """
    carried: tuple[Any, ...] = operands[:carry]
    scanned, consts = operands[carry : carry + xs], operands[carry + xs :]

    def step(*at: Any) -> tuple[Any, ...]:
        got = body(*carried, *at, *consts)
        return got if isinstance(got, tuple) else (got,)

    count = scanned[0].shape[0]
    rows = []
    for index in range(count):
        got = step(*(x[index] for x in scanned))
        carried = got[:carry]
        rows.append(got[carry:])
    if not rows:  # no step: one on zeros says what the results look like
        rows.append(step(*(np.zeros(x.shape[1:], x.dtype) for x in scanned))[carry:])
    results = (*carried, *(np.stack(ys)[:count] for ys in zip(*rows, strict=True)))
    return results[0] if len(results) == 1 else results


def _infer_by_length(site: Site) -> tuple[Type, ...]:
    given = _operands(site)
    short, long = site.function("short"), site.function("long")
    found = [
        tuple(types.substitute(v.type, match_signature(site, f, given)) for v in f.outputs)
        for f in (short, long)
    ]
    if found[0] != found[1]:
        one, two = (", ".join(map(str, types_)) for types_ in found)
        raise site.fail(f"{short.name} gives {one}, {long.name} gives {two}")
    return found[0]


@op("control", infer=_infer_by_length, vjp=_BY_BACKEND)
def by_length(
    *operands: Any, size: int, below: int, short: Callable[..., Any], long: Callable[..., Any]
) -> Any:
    """short(…) where the dim `size` is less than `below`, else long(…): a choice on dims only."""
    return (short if size < below else long)(*operands)


def _infer_pointwise(site: Site) -> tuple[Type, ...]:
    function = site.function("fn")
    tensors = [site.tensor(i) for i in range(len(site.operands))]
    if len(function.inputs) != len(tensors):
        raise site.fail(
            f"{function.name} takes {len(function.inputs)} operands, {len(tensors)} given",
            "operand-count",
        )
    shape = broadcast(site, [t.shape for t in tensors])
    dtype = types.promote(*(t.dtype for t in tensors))
    made = []
    for value in function.outputs:
        assert isinstance(value.type, Tensor)
        floats = types.is_float(value.type.dtype)
        own = dtype if floats and types.is_float(dtype) else value.type.dtype
        made.append(Tensor(site.attrs.get("dtype", own) if floats else own, shape))
    return tuple(made)


@op(
    "control",
    infer=_infer_pointwise,
    vjp="`gradient` writes its function's ops in its place",
    bounds=lambda *xs, fn, **attrs: fn(*xs),
)
def pointwise(*operands: Any, fn: Callable[..., Any], dtype: str = "") -> Any:
    """A function of scalars at every element, computed in F and rounded once.

    dtype: of float results; unless given the widest of the operands.
    """
    got = fn(*operands)
    shape = np.broadcast_shapes(*(np.shape(x) for x in operands))
    if isinstance(got, tuple):
        return tuple(np.broadcast_to(y, shape) for y in got)
    return np.broadcast_to(got, shape)
