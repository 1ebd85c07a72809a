"""Each op's gradient: against central differences of its meaning and against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from archir import types
from archir.ir import Function, Op, Value
from archir.ops import OPS, Sample, infer_op
from archir.passes.gradient import gradient
from archir.text import parse
from tests.derivatives import (
    check_differences,
    check_text,
    check_torch,
    draw,
    is_float,
    slopes,
    torch_slopes,
)

SIZES = {"B": 2, "T": 5, "R": 2}
FAMILIES = ("elementwise", "tensor", "norm", "random", "head", "control")
# `expand` makes these, of rules and functions whose gradient was taken before.
OF_CHUNKS = {kind for kind, d in OPS.items() if d.meaning.__module__ == "archir.ops.chunk"}
WITH_GRADIENT = {
    kind: d for kind, d in OPS.items() if callable(d.vjp) and not d.made and kind not in OF_CHUNKS
}
SAMPLES = [
    (kind, sample)
    for kind, d in WITH_GRADIENT.items()
    for sample in d.samples
    if any(is_float(types.parse(text)) for text in sample.operands)
]


def function_of(kind: str, operands: tuple[str, ...], attrs: dict[str, Any]) -> Function:
    """A function that is one op."""
    given = tuple(Value(f"x{i}", types.parse(text)) for i, text in enumerate(operands))
    draft = Op(kind, given, (), attrs)
    results = tuple(Value(f"y{i}", t) for i, t in enumerate(infer_op(draft, {})))
    op = Op(kind, given, results, attrs)
    return Function(f"one_{kind}", given, (), (op,), results, "body")


def _name(case: Any) -> str:
    return case if isinstance(case, str) else ",".join(case.operands)


def test_every_op_has_a_gradient_or_a_reason() -> None:
    asked = {k: d for k, d in OPS.items() if d.family in FAMILIES and k not in OF_CHUNKS}
    silent = [k for k, d in asked.items() if isinstance(d.vjp, str) and len(d.vjp.split()) < 4]
    assert not silent, "write vjp=…, or in words why there is none"
    assert {k for k, d in asked.items() if isinstance(d.vjp, str)} == {
        "embedding", "dropout", "cross_entropy", "call", "scan", "by_length", "pointwise",
    }  # fmt: skip


@pytest.mark.parametrize("kind,sample", SAMPLES, ids=_name)
def test_gradient_of_a_sample(kind: str, sample: Sample) -> None:
    function = function_of(kind, sample.operands, dict(sample.attrs or {}))
    given = draw([v.type for v in function.inputs], SIZES, low=0.1)
    check_text(gradient(function))
    check_differences(function, given)
    check_differences(gradient(function), _with_cotangents(function, given))
    # torch has no derivative of x // y, and rounds where a cast says so
    if kind != "floor_divide" and (sample.attrs or {}).get("dtype") != "bf16":
        check_torch(function, given)


def _with_cotangents(function: Function, given: list[Any]) -> list[Any]:
    floats = [v.type for v in function.outputs if is_float(v.type)]
    return [*given, *draw(floats, SIZES, seed=3)]


EINSUMS = {
    "a letter summed alone": (("F[4, 3]",), "ij->i"),
    "two summed alone": (("F[4, 3, 2]", "F[3]"), "ijk,j->j"),
    "a transpose": (("F[4, 3]",), "ij->ji"),
    "a trace": (("F[4, 4]",), "ii->"),
    "a diagonal": (("F[4, 4, 3]",), "iij->ji"),
    "a diagonal among others": (("F[4, 4]", "F[4]"), "ii,i->i"),
    "three times": (("F[3, 3, 3]", "F[3]"), "iii,i->"),
    "three operands": (("F[4]", "F[4, 3]", "F[3]"), "i,ij,j->"),
    "an outer product": (("F[4]", "F[3]"), "i,j->ij"),
    "numbers": (("F", "F"), ",->"),
    "as it is": (("F[4]",), "i->i"),
}


@pytest.mark.parametrize("case", EINSUMS)
def test_einsum(case: str) -> None:
    operands, equation = EINSUMS[case]
    function = function_of("einsum", operands, {"equation": equation})
    given = draw([v.type for v in function.inputs], {})
    check_differences(function, given)
    check_torch(function, given)


# Beside what an op does with two values: numbers as operands, ties, edges of the domain.
EDGES = {
    "pow by 0": "pow(x, 0)",
    "pow by 1": "pow(x, 1)",
    "pow by 2": "pow(x, 2)",
    "pow by 3": "pow(x, 3)",
    "pow by a root": "pow(p, -0.5)",
    "power of 2": "pow(2, x)",
    "power of 0": "pow(0, p)",
    "power of values": "pow(p, y)",
    "power with zeros": "pow(z, p)",
    "power by zeros": "pow(p, z)",
    "mod by a number": "mod(x, 0.3)",
    "over a number": "div(x, 3)",
    "a number over": "div(1.0, p)",
    "minus": "sub(1, x)",
    "maximum of ties": "maximum(z, y)",
    "minimum of ties": "minimum(z, y)",
    "maximum with itself": "maximum(x, x)",
    "maximum with a number": "maximum(z, 0.5)",
    "minimum with a number": "minimum(0.5, z)",
    "relu": "relu(z)",
    "abs": "abs(z)",
    "softplus": "softplus(w)",
    "sigmoid": "sigmoid(w)",
    "silu": "silu(w)",
    "gelu": "gelu_tanh(w)",
    "tanh": "tanh(w)",
    "where with a number": "where(m, x, 1.0)",
    "where after a number": "where(m, 1.0, x)",
    "maximum over ties": "reduce_max(z, axes=(0,))",
    "maximum over ties, kept": "reduce_max(z, axes=(-1,), keepdims=True)",
}
EDGE_INPUTS = {
    "x": np.array([-1.3, -0.2, 0.1, 0.7, 1.9]),
    "y": np.array([0.0, 0.5, 0.5, -1.0, 2.0]),
    "z": np.array([0.0, 0.5, 0.0, 2.0, 2.0]),
    "p": np.array([0.2, 0.4, 1.0, 1.7, 2.2]),
    "w": np.array([-800.0, -40.0, 0.0, 39.0, 800.0]),
    "m": np.array([True, False, True, True, False]),
}


@pytest.mark.parametrize("case", EDGES)
def test_numbers_and_ties_as_in_torch(case: str) -> None:
    inputs = "x: F[5], y: F[5], z: F[5], p: F[5], w: F[5], m: bool[5]"
    shape = "[1]" if "keepdims" in EDGES[case] else "" if "reduce" in EDGES[case] else "[5]"
    text = f"@entry\ndef f({inputs}) -> F{shape}:\n    o: F{shape} = {EDGES[case]}\n    return o\n"
    function, given = parse(text).entry, list(EDGE_INPUTS.values())
    five = np.array([0.3, -0.7, 1.1, 0.9, -0.4])
    cotangents = [{"[5]": five, "[1]": five[:1], "": five[0]}[shape]]
    ours = slopes(function, given, cotangents)
    theirs = torch_slopes(function, given, cotangents)
    for one, two in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-15)


def test_what_torch_has_not() -> None:
    """A number modulo a tensor has no derivative there."""
    text = "@entry\ndef f(x: F[3]) -> F[3]:\n    o: F[3] = mod(3.0, x)\n    return o\n"
    check_differences(parse(text).entry, [np.array([0.7, 1.3, 4.0])])


def test_a_tie_gives_half_to_each() -> None:
    """Stated, and not only the same as this version of torch."""
    function = function_of("maximum", ("F[2]", "F[2]"), {})
    d_x, d_y = slopes(function, [np.array([1.0, 2.0]), np.ones(2)], [np.ones(2)])
    assert d_x.tolist() == [0.5, 1.0]
    assert d_y.tolist() == [0.5, 0.0]


NORMS = {
    "layer_norm": (("bf16[3, 8]", "f32[8]", "bf16[8]"), ["bf16", "f32", "bf16"]),
    "rms_norm": (("f16[3, 8]", "f32[8]"), ["f16", "f32"]),
    "l2_norm": (("bf16[3, 8]",), ["bf16"]),
}


@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_narrow_dtypes_are_computed_wide(kind: str) -> None:
    """Everything between the casts is float32; each cotangent has its operand's dtype."""
    operands, wanted = NORMS[kind]
    found = gradient(function_of(kind, operands, {"eps": 1e-6}))
    assert [str(v.type).partition("[")[0] for v in found.outputs] == wanted
    inner = [op for op in found.ops if op.kind != "cast"]
    assert {op.result.type.dtype for op in inner} == {"f32"}
