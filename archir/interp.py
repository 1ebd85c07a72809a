"""Runs IR in NumPy. This says what every program means.

dtype "float64": every float is float64 (the reference). "float32" and "bfloat16": abstract floats
take that dtype (`F` is float32 at least), concrete ones stay, and every op's result is rounded to
its type; bf16 numbers are held in float32 arrays. That run is the anchor of tolerances (D16).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from archir import dims, types
from archir.diagnostics import ArchirError, MismatchError
from archir.dims import Poly
from archir.ir import Function, Module, Op, Ref, Value, fields, join
from archir.ops import lookup
from archir.philox import fold
from archir.types import Sequence, Tensor

_NUMPY = {"f64": np.float64, "f32": np.float32, "bf16": np.float32, "f16": np.float16}


def round_bf16(x: np.ndarray) -> np.ndarray:
    """float32 numbers rounded to the nearest bfloat16, ties to even."""
    bits = np.asarray(x, np.float32, order="C").view(np.uint32)
    rounded = bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))
    out = (rounded & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isfinite(x), out, x).astype(np.float32)


def to_dtype(x: Any, dtype: str) -> Any:
    """An array rounded to a concrete dtype."""
    if dtype == "bool":
        return np.asarray(x, bool)
    if dtype in ("i32", "i64"):
        return np.asarray(x, np.int64 if dtype == "i64" else np.int32)
    array = np.asarray(x, _NUMPY[dtype])
    return round_bf16(array) if dtype == "bf16" else array


def interpret(
    module: Module,
    inputs: Mapping[str, Any] | list[Any] | tuple[Any, ...],
    weights: Mapping[str, Any] | None = None,
    state: Mapping[str, Any] | None = None,
    seed: int | None = None,
    dtype: str = "float64",
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs the entry of a module.

    inputs: by name or in order.  weights: weights and buffers by path.  state: states by path
    (`empty_state` where None).  seed: of what is drawn at random (dropout).  dtype: see above.
    A module that was only traced is first made the phase `full`, for training where there is a
    seed. Returns (outputs by name, stored fields by path: states and taps).
    """
    from archir.passes.specialize import is_specialized, specialize

    if not is_specialized(module):
        module = specialize(module, "full", "dense", training=seed is not None)
    run = _Run(module, types.short_dtype(dtype), seed)
    entry = module.entry
    given = inputs if isinstance(inputs, Mapping) else _by_position(entry, inputs)
    args = [run.enter(_get(given, v.name, "input"), v) for v in entry.inputs]
    run.weights = dict(weights or {})
    run.states = dict(state) if state is not None else {}
    if state is None and args:
        run.states = empty_state(module, len(args[0]), types.short_dtype(dtype))
    outputs = run.function(entry, args, "")
    return dict(zip(entry.output_names, outputs, strict=True)), run.stored


def call(function: Function, inputs: list[Any], dtype: str = "float64") -> tuple[Any, ...]:
    """Runs one function that names no other and has no fields, as of a rule; its outputs."""
    run = _Run(Module((function,)), types.short_dtype(dtype), None)
    args = [run.enter(x, v) for x, v in zip(inputs, function.inputs, strict=True)]
    return run.function(function, args, "")


def _by_position(entry: Function, inputs: list[Any] | tuple[Any, ...]) -> dict[str, Any]:
    names = [v.name for v in entry.inputs]
    if len(inputs) != len(names):
        raise MismatchError(
            f"{entry.name} takes {len(names)} inputs ({', '.join(names)}), {len(inputs)} given",
            code="input-count",
            next="give them in this order, or by name",
        )
    return dict(zip(names, inputs, strict=True))


def _get(found: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in found:
        raise MismatchError(
            f"{what} {name!r} is missing",
            code="input-missing",
            facts=[f"given: {', '.join(sorted(found)) or 'nothing'}"],
            next=f"give a {what} of this name",
        )
    return found[name]


def empty_state(module: Module, rows: int, dtype: str = "f64") -> dict[str, np.ndarray]:
    """The state before any token: zeros, with no past."""
    made = {}
    for path, field in fields(module, "state").items():
        assert isinstance(field.value.type, Tensor)
        shape = tuple(
            size if isinstance(size, int) else dims.evaluate(size, {"R": rows, "P": 0})
            for size in field.value.type.shape
        )
        made[path] = to_dtype(np.zeros(shape), types.resolve(field.value.type.dtype, dtype))
    return made


class _Run:
    """One run: the dtype it runs in, the seed it draws with, the fields it reads and writes."""

    def __init__(self, module: Module, dtype: str, seed: int | None) -> None:
        self.table = {f.name: f for f in module.functions}
        self.dtype, self.seed = dtype, seed
        self.weights: dict[str, Any] = {}
        self.states: dict[str, Any] = {}
        self.stored: dict[str, Any] = {}

    def enter(self, x: Any, value: Value) -> Any:
        """A result or input rounded to its type."""
        if not isinstance(value.type, Tensor):
            return x
        dtype = value.type.dtype
        if types.is_float(dtype):
            dtype = "f64" if self.dtype == "f64" else types.resolve(dtype, self.dtype)
        return to_dtype(x, dtype)

    def function(self, function: Function, args: list[Any], scope: str) -> tuple[Any, ...]:
        env: dict[Value, Any] = {}
        binding: dict[str, int] = {}
        for value, x in zip(function.inputs, args, strict=True):
            env[value] = x
            if function.role != "pointwise":
                _bind(value, x, binding)
        for field in function.fields:
            if field.kind == "tap":
                continue
            path = join(scope, field.path)
            env[field.value] = self.enter(self.read(field.kind, path), field.value)
            _bind(field.value, env[field.value], binding)
        for op in function.ops:
            self.op(op, env, binding, scope)
            if function.role not in ("rule", "pointwise"):
                for value in op.results:
                    _bind(value, env[value], binding)
        return tuple(env[v] for v in function.outputs)

    def read(self, kind: str, path: str) -> Any:
        """What a field holds."""
        if kind == "key":
            if self.seed is None:
                raise MismatchError(
                    f"{path} draws at random, and no seed is given",
                    code="seed-missing",
                    next="give interpret(…, seed=0), or lower with training=False",
                )
            return fold(self.seed, path)
        return _get(self.states if kind == "state" else self.weights, path, kind)

    def op(self, op: Op, env: dict[Value, Any], binding: dict[str, int], scope: str) -> None:
        operands = [env[x] if isinstance(x, Value) else x for x in op.operands]
        if op.kind == "store":
            self.stored[join(scope, op.attrs["path"])] = operands[0]
            return
        attrs = {k: self.attr(v, binding, scope) for k, v in op.attrs.items()}
        with np.errstate(all="ignore"):
            try:
                got = lookup(op.kind).meaning(*operands, **attrs)
            except ArchirError as error:
                raise error.at(op.loc) from None
            results = got if isinstance(got, tuple) else (got,)
            for value, x in zip(op.results, results, strict=True):
                env[value] = self.enter(x, value)

    def attr(self, value: Any, binding: dict[str, int], scope: str) -> Any:
        match value:
            case Ref(name=name):
                return _Callable(self, self.table[name], scope)
            case Poly():
                return dims.evaluate(value, binding)
            case tuple():
                return tuple(self.attr(v, binding, scope) for v in value)
        return value


class _Callable:
    """A function of the module as an op's meaning sees it."""

    def __init__(self, run: _Run, function: Function, scope: str) -> None:
        self.run, self.function, self.scope = run, function, scope

    def __call__(self, *args: Any, scope: str = "") -> Any:
        values = zip(args, self.function.inputs, strict=True)
        entered = [
            self.run.enter(x, v) if self.function.role in ("rule", "pointwise") else x
            for x, v in values
        ]
        got = self.run.function(self.function, entered, join(self.scope, scope))
        single = len(got) == 1 and self.function.role != "rule"
        return got[0] if single else got


def _bind(value: Value, x: Any, binding: dict[str, int]) -> None:
    """Bind the bare symbols of a value's type to an array's sizes; check the others."""
    if isinstance(value.type, Sequence):
        sizes, shape = (value.type.rows,), (len(x),)
    elif isinstance(value.type, Tensor):
        sizes, shape = value.type.shape, np.shape(x)
    else:
        sizes, shape = (value.type.count, *value.type.element.shape), np.shape(x)
    if len(shape) != len(sizes):
        raise MismatchError(
            f"{value} has {len(sizes)} axes, the array given has shape {list(shape)}",
            code="array-rank",
            next=f"give an array of {len(sizes)} axes",
        )
    for size, have in zip(sizes, shape, strict=True):
        name = dims.bare(size)
        want = binding.setdefault(name, have) if name else dims.substitute(size, binding)
        if want != have and not isinstance(want, Poly):
            raise MismatchError(
                f"{value.name} has shape {list(shape)}, its type is {value.type}",
                code="array-shape",
                facts=[f"{want if size == want else f'{size} = {want}'} expected, {have} given"],
            )
