"""Derivatives of IR functions: by central differences, by torch through the eager emission, and by
`gradient`, each as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from archir import dims, types
from archir.interp import interpret
from archir.ir import Function, Module, callees_first
from archir.passes.choose_form import CHUNK
from archir.passes.expand import expand
from archir.passes.gradient import gradient
from archir.passes.precision import precision
from archir.text import parse
from archir.types import Tensor
from backends.eager import support
from backends.eager.emit import print_plain, printed

Arrays = list[Any]
NOTHING = Function("nothing", (), (), (), (), "entry")
STEP = 2**-17  # near the cube root of float64's u, where both errors of a central difference meet


def module_of(function: Function, functions: Mapping[str, Function] | None = None) -> Module:
    """A module whose entry is the function."""
    table = {**(functions or {}), function.name: replace(function, role="entry", attrs={})}
    return Module(callees_first(table, function.name))


def check_text(function: Function, functions: Mapping[str, Function] | None = None) -> None:
    """The function verifies, prints, and parses to the same text."""
    reached = callees_first({**(functions or {}), function.name: function}, function.name)
    text = str(Module((*reached, NOTHING)))
    assert str(parse(text)) == text


def is_float(type_: Any) -> bool:
    return isinstance(type_, Tensor) and types.is_float(type_.dtype)


def draw(found: Sequence[Any], sizes: Mapping[str, int], seed: int = 0, low: float = -1) -> Arrays:
    """Arrays of tensor types: floats from `low` to 1, integers and bools of 0 and 1."""
    rng = np.random.default_rng(seed)
    arrays = []
    for type_ in found:
        shape = tuple(dims.evaluate(size, sizes) for size in type_.shape)
        if types.is_float(type_.dtype):
            arrays.append(np.asarray(rng.uniform(low, 1.0, shape)))
        else:
            whole = bool if type_.dtype == "bool" else np.int64
            arrays.append(np.asarray(rng.integers(0, 2, shape)).astype(whole))
    return arrays


def run(
    function: Function, given: Arrays, functions: Mapping[str, Function] | None = None
) -> Arrays:
    """What the interpreter gives, in float64."""
    made, _ = interpret(module_of(function, functions), given, state={})
    return list(made.values())


def slopes(
    function: Function,
    given: Arrays,
    cotangents: Arrays,
    functions: Mapping[str, Function] | None = None,
) -> Arrays:
    """What `gradient` gives for each float input."""
    return run(gradient(function, functions), [*given, *cotangents], functions)


def cotangents_of(outputs: Arrays, function: Function, seed: int = 1) -> Arrays:
    """A random cotangent for each float output."""
    rng = np.random.default_rng(seed)
    floats = [o for o, v in zip(outputs, function.outputs, strict=True) if is_float(v.type)]
    return [np.asarray(rng.uniform(-1, 1, np.shape(o))) for o in floats]


def check_differences(
    function: Function,
    given: Arrays,
    functions: Mapping[str, Function] | None = None,
    relative: float = 1e-6,
) -> None:
    """`gradient` equals central differences along one random direction of each float input."""

    def total(at: Arrays) -> float:
        made = zip(run(function, at, functions), function.outputs, strict=True)
        floats = [o for o, v in made if is_float(v.type)]
        return float(sum(np.sum(c * o) for c, o in zip(cotangents, floats, strict=True)))

    cotangents = cotangents_of(run(function, given, functions), function)
    found = iter(slopes(function, given, cotangents, functions))
    rng = np.random.default_rng(2)
    for index, value in enumerate(function.inputs):
        if not is_float(value.type):
            continue
        slope, direction = next(found), rng.uniform(-1, 1, np.shape(given[index]))
        assert np.shape(slope) == np.shape(given[index])
        sides = [[*given], [*given]]
        sides[0][index], sides[1][index] = (given[index] + s * direction for s in (STEP, -STEP))
        want = (total(sides[0]) - total(sides[1])) / (2 * STEP)
        scale = np.sum(np.abs(slope * direction)) + 1
        assert abs(np.sum(slope * direction) - want) <= relative * scale, value.name
    assert next(found, None) is None


def load(function: Function, functions: Mapping[str, Function] | None = None) -> Any:
    """The function as eager prints it, in float64."""
    module = expand(precision(module_of(function, functions), "float64"), CHUNK)
    names = {f.name: f.name for f in printed(module)}
    scope: dict[str, Any] = {"torch": torch, "F": F, "ar": support}
    exec("\n\n".join(print_plain(module, names)), scope)
    return scope[function.name]


def torch_slopes(
    function: Function,
    given: Arrays,
    cotangents: Arrays,
    functions: Mapping[str, Function] | None = None,
) -> Arrays:
    """What torch's autograd gives through the eager emission for each float input."""
    tensors = [torch.tensor(x) for x in given]
    floats = [t.requires_grad_() for t in tensors if t.is_floating_point()]
    made = load(function, functions)(*tensors)
    made = made if isinstance(made, tuple) else (made,)
    pairs = [o for o, v in zip(made, function.outputs, strict=True) if is_float(v.type)]
    ends = [(o, torch.tensor(c)) for o, c in zip(pairs, cotangents, strict=True) if o.requires_grad]
    if not ends:
        return [np.zeros(t.shape) for t in floats]
    outputs, weights = zip(*ends, strict=True)
    found = torch.autograd.grad(outputs, floats, weights, materialize_grads=True)
    return [g.numpy() for g in found]


def check_torch(
    function: Function,
    given: Arrays,
    functions: Mapping[str, Function] | None = None,
    relative: float = 1e-9,
) -> None:
    """`gradient`, interpreted and as eager prints it, equals torch's autograd."""
    cotangents = cotangents_of(run(function, given, functions), function)
    wanted = torch_slopes(function, given, cotangents, functions)
    ours = slopes(function, given, cotangents, functions)
    emitted = load(gradient(function, functions), functions)
    printed = emitted(*(torch.tensor(x) for x in (*given, *cotangents)))
    printed = printed if isinstance(printed, tuple) else (printed,)
    for want, one, two in zip(wanted, ours, printed, strict=True):
        allowed = relative * (1 + np.max(np.abs(want), initial=0))
        np.testing.assert_allclose(one, want, rtol=0, atol=allowed)
        np.testing.assert_allclose(two.numpy(), want, rtol=0, atol=allowed)
