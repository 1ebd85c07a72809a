"""What eager prints for each op, against the op's meaning; whole random modules, against NumPy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, note

from archir import dims, ir, types
from archir.compile import Request
from archir.diagnostics import UnsupportedError
from archir.fuzz.modules import modules
from archir.inputs import random_inputs
from archir.interp import interpret, to_dtype
from archir.ir import Field, Function, Module, Op, Value
from archir.ops import OPS, Sample, infer_op
from archir.passes.rewrite import Rewriter
from archir.pipeline import Options
from archir.sequence import Rows
from archir.text import parse
from archir.types import Sequence, Tensor, Type
from backends.api import refuse_unsupported
from backends.eager import support
from backends.eager.backend import EAGER, Eager
from backends.eager.emit import Printer, Program
from backends.eager.ops import EMIT, UNSUPPORTED
from backends.runtime import cache
from backends.triton.backend import TRITON
from tests.goldens import check_golden
from tests.ir.test_laws import cases
from tests.ops.test_table import PAST, SAMPLES, SIZES


def test_every_op_is_printed_or_has_a_reason() -> None:
    assert EMIT.keys().isdisjoint(UNSUPPORTED)
    assert EMIT.keys() | UNSUPPORTED.keys() == OPS.keys()
    assert all(EAGER.supports(Op(kind, (), ())) == UNSUPPORTED.get(kind) for kind in OPS)


def test_an_op_without_emission_is_refused_by_name() -> None:
    def double(x: Any) -> Any:
        return 2 * x

    x, y = Value("x", Tensor("f64", (3,))), Value("y", Tensor("f64", (3,)))
    loc = ir.Loc(__file__, double.__code__.co_firstlineno + 1, 15, 20)
    for kind in ("double", "pointwise"):
        body = (Op(kind, (x,), (y,), {}, loc),)
        function = Function("f", (x,), (), body, (y,), "entry")
        with pytest.raises(UnsupportedError) as caught:
            refuse_unsupported(EAGER, [function], Module((function,)))
        message = re.sub(r"\.py:\d+", ".py:LINE", str(caught.value))
        check_golden(f"eager/messages/no_emission_{kind}", message)


def _run(folder: Path, function: Function) -> Callable[..., Any]:
    """The emitted entry of a module of one function."""
    module = Module((function,))
    cache.write(folder, EAGER.emit_tree(module, "one op"))
    cache.write(folder, EAGER.emit_program(module, module, "one op", "program"))
    return getattr(EAGER.load(folder, "program"), function.name)


def _concrete(type_: Type) -> Type:
    if not isinstance(type_, Tensor):
        return type_
    return type_.with_dtype(types.resolve(type_.dtype, "f64"))


def _entry(kind: str, sample: Sample) -> Function:
    """A function of one op: what the sample takes and gives, in float64."""
    # eager memoises the tables of `rotary` in the sequence, which a lowered program always gives
    operands = (*sample.operands, *(("sequence[R]",) if kind == "rotary" else ()))
    inputs = tuple(
        Value(name, _concrete(types.parse(text)))
        for name, text in zip("abcd", operands, strict=False)
    )
    attrs = dict(sample.attrs or {})
    if kind in ("cast", "size", "eye", "fill", "iota"):
        attrs["dtype"] = types.resolve(attrs.get("dtype", "F"), "f64")
    draft = Op(kind, inputs, (), attrs)
    results = tuple(Value(n, t) for n, t in zip("xyz", infer_op(draft, {}), strict=False))
    fields: tuple[Field, ...] = ()
    if kind == "store":
        fields = (Field("state", attrs["path"], Value("old", inputs[0].type), {"kind": "matrix"}),)
    return Function("f", inputs, fields, (replace(draft, results=results),), results, "entry")


def _draw(function: Function) -> list[Any]:
    """NumPy operands: numbers a power can take, lengths and bounds where an op wants those."""
    rng, found = np.random.default_rng(0), []
    (op,) = function.ops
    length = SIZES["T"]
    rows = {
        "dense": [None, PAST],
        "ragged": [None, (0, length + 1), (length - 1, 2 * length), PAST],
    }.get(op.kind, [])
    for index, value in enumerate(function.inputs):
        if isinstance(value.type, Sequence):
            found.append(Rows.dense(SIZES["B"], length, PAST))
        elif index < len(rows) and rows[index] is not None:
            found.append(np.array(rows[index]))
        else:
            assert isinstance(value.type, Tensor)
            shape = tuple(dims.evaluate(size, SIZES) for size in value.type.shape)
            integer = not types.is_float(value.type.dtype)
            x = rng.integers(0, 2, shape) if integer else rng.uniform(0.1, 1.0, shape)
            found.append(to_dtype(x, value.type.dtype))
    return found


def _given(op: Op, index: int, x: Any) -> Any:
    """An operand as emitted code takes it."""
    if isinstance(x, Rows):
        return Rows.dense(x.batch, x.length, x.past)
    if op.kind in ("dense", "ragged") and index > 0:
        return tuple(int(n) for n in x)
    tensor = torch.from_numpy(np.array(x))
    if op.kind == "append" and index == 0:
        return support.Cache.of(tensor[:, : max(PAST)], PAST)
    return tensor


def _same(have: Any, want: Any, value: Value) -> None:
    if isinstance(want, Rows):
        assert (have.batch, have.length, list(have)) == (want.batch, want.length, list(want))
        return
    assert isinstance(value.type, Tensor)
    want = to_dtype(want, value.type.dtype)
    if isinstance(have, support.Cache):
        have, want = have.rows, want[:, : max(PAST) + SIZES["T"]]
    have = have if isinstance(have, torch.Tensor) else torch.tensor(have)
    names = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "i64": "int64", "bool": "bool"}
    assert str(have.dtype) == f"torch.{names[value.type.dtype]}"
    have = have.double().numpy()
    assert have.shape == np.shape(want)
    np.testing.assert_allclose(have, np.asarray(want, np.float64), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind,sample", SAMPLES, ids=lambda c: getattr(c, "kind", None))
def test_printed_op_is_its_meaning(kind: str, sample: Sample, tmp_path: Path) -> None:
    function = _entry(kind, sample)
    (op,) = function.ops
    arrays = _draw(function)
    attrs = {
        k: dims.evaluate(v, SIZES) if k in ("dim", "times") else
        tuple(dims.evaluate(d, SIZES) for d in v) if k in ("shape", "sizes") else v
        for k, v in op.attrs.items()
    }  # fmt: skip
    want = OPS[kind].meaning(*arrays, **attrs)
    state: dict[str, Any] = {}
    given = [_given(op, i, x) for i, x in enumerate(arrays)]
    made = _run(tmp_path, function)(None, *given, *([state] if function.fields else []))
    if kind == "store":
        made, want, results = state[op.attrs["path"]], arrays[0], function.inputs
    else:
        results = op.results
    made = made if len(results) > 1 else (made,)
    want = want if len(results) > 1 else (want,)
    for have, expected, value in zip(made, want, results, strict=True):
        _same(have, expected, value)


X = torch.tensor([-2.0, 0.0, 1.5, 3.0], dtype=torch.float64)
NUMBERS = (-2.0, -1, 0.0, 2, 1e-300, float("inf"), float("-inf"))
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "less", "not_equal")


@pytest.mark.parametrize("kind", [*BINARY, "pow", "where"])
@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_as_operands(kind: str, number: float, tmp_path: Path) -> None:
    """A number on either side of an operator, negative and infinite ones too."""
    x, m = Value("x", Tensor("f64", (4,))), Value("m", Tensor("bool", (4,)))
    sides = {"where": [(m, x, number), (m, number, x)], "pow": [(number, x), (x, number)]}
    for index, operands in enumerate(sides.get(kind, [(number, x), (x, number)])):
        draft = Op(kind, operands, ())
        (type_,) = infer_op(draft, {})
        y = Value("y", type_)
        run = _run(
            tmp_path / str(index),
            Function("f", (x, m), (), (replace(draft, results=(y,)),), (y,), "entry"),
        )
        # powers: of whole numbers, where a negative number has one
        x_now = X.round() if kind == "pow" else X
        arrays = [v if not isinstance(v, Value) else (X > 0 if v is m else x_now) for v in operands]
        plain = [v.numpy() if isinstance(v, torch.Tensor) else v for v in arrays]
        with np.errstate(all="ignore"):
            want = OPS[kind].meaning(*plain)
        np.testing.assert_array_equal(run(None, x_now, X > 0).numpy(), want)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), -0.5])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_fill(value: float, shape: tuple[int, ...], tmp_path: Path) -> None:
    y = Value("y", Tensor("f64", shape))
    op = Op("fill", (), (y,), {"shape": shape, "value": value, "dtype": "f64"})
    made = _run(tmp_path, Function("f", (), (), (op,), (y,), "entry"))(None)
    np.testing.assert_array_equal(made.numpy(), np.full(shape, value))


B, T = dims.symbol("B"), dims.symbol("T")
RANKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "reshape_to_scalar": ("reshape", "f64[1]", {"shape": ()}),
    "reshape_scalar": ("reshape", "f64", {"shape": (1,)}),
    "broadcast_scalar": ("broadcast_to", "f64", {"shape": (3, 2)}),
    "broadcast_to_scalar": ("broadcast_to", "f64", {"shape": ()}),
    "sum_over_nothing": ("reduce_sum", "f64[2, 3]", {"axes": ()}),
    "max_of_scalar": ("reduce_max", "f64", {"axes": ()}),
    "transpose_scalar": ("transpose", "f64", {"axes": ()}),
    "flatten": ("reshape", "f64[B, T, 4]", {"shape": (4 * B * T,)}),
    "blocks": ("broadcast_to", "f64[1, B, T]", {"shape": (dims.ceildiv(T + 1, 2), B, T)}),
    "product": ("broadcast_to", "f64[1, B, T]", {"shape": (2 * dims.ceildiv(T, 2), B, T)}),
    "difference": ("broadcast_to", "f64[1, B, T]", {"shape": (2 * T - B, B, T)}),
}


@pytest.mark.parametrize("name", RANKS)
def test_shapes(name: str, tmp_path: Path) -> None:
    kind, operand, attrs = RANKS[name]
    function = _entry(kind, Sample((operand,), attrs))
    (x,) = _draw(function)
    sizes = {k: tuple(dims.evaluate(d, SIZES) for d in v) for k, v in attrs.items()}
    made = _run(tmp_path, function)(None, torch.from_numpy(np.array(x)))
    np.testing.assert_array_equal(made.numpy(), OPS[kind].meaning(x, **sizes))


def test_sizes_print_as_python() -> None:
    x = Value("x", Tensor("f64", (B, T)))
    function = Function("f", (x,), (), (), (x,), "entry")
    p = Printer(function, Program({"f": "f"}, (), (), {}, EMIT))
    said = [p.dim(d) for d in (3, T, 2 * B * T - T + 1, dims.ceildiv(T, 64), -1 * T + B)]
    assert said == ["3", "T", "2 * B * T - T + 1", "-(-T // 64)", "B - T"]
    assert p.dim(3 * dims.ceildiv(T + 1, 64)) == "3 * -(-(T + 1) // 64)"
    assert [p.shape(s) for s in ((), (3,), (T, 4))] == ["()", "(3,)", "(T, 4)"]


def _tame(module: Module) -> Module:
    """The module with weights that can be attributes, in one float dtype, its scopes from 0."""
    module = parse(re.sub(r"\b(f32|bf16|f16)\b", "F", str(module)))

    def change(function: Function) -> Function:
        new = Rewriter(function, {f.name: f for f in module.functions})
        new.keep_signature()
        for op in function.ops:
            attrs = dict(op.attrs)
            if op.kind == "call":
                attrs["scope"] = f"s.{int(attrs['scope'].split('.')[1]) - 1}"
            new.copy(op, attrs=attrs)
        kinds = ("weight", "buffer")
        new.fields = [
            replace(f, path=f"w{i}") if f.kind in kinds else f for i, f in enumerate(new.fields)
        ]
        return new.finish()

    return ir.rebuild(module, change)


@pytest.mark.parametrize("backend", [EAGER, TRITON], ids=lambda b: b.name)
@cases(20)
@given(drawn=modules("smooth"))
def test_random_modules(backend: Eager, drawn: Module) -> None:
    """Emitted code in float64 is the interpreter, to 1e-12 of an output's largest number."""
    module = _tame(drawn)
    note(str(module))
    inputs, weights, _ = random_inputs(module)
    want, _ = interpret(module, inputs, weights)
    spec: Any = SimpleNamespace(name="drawn", doc="")
    model = backend.build(Request("drawn", module, None, spec, Options(dtype="float64")))
    model.set_weights(weights)
    with torch.no_grad():
        made: Any = model.program("full", "all", "dense")(
            model, *(torch.from_numpy(np.array(x)) for x in inputs.values())
        )
    outputs: Any = made.values() if isinstance(made, dict) else made
    outputs = outputs if len(module.entry.outputs) > 1 else (made,)
    for have, (name, expected) in zip(outputs, want.items(), strict=True):
        scale = max(1e-12, float(np.max(np.abs(expected), initial=0)))
        np.testing.assert_allclose(have, expected, rtol=0, atol=1e-12 * scale, err_msg=name)
