"""Every op of the table: documented, sampled, its shape rule and its NumPy meaning agreeing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from archir import dims, types
from archir.diagnostics import ShapeError
from archir.ir import Op, Value
from archir.ops import OPS, Sample, infer_op
from archir.sequence import Rows
from archir.types import Sequence, Tensor, Type

SIZES = {"B": 2, "R": 2, "T": 5, "J": 5, "P": 4, "S": 7, "N": 3}
PAST = (2, 2)  # of each row; at most P, and S holds it together with T

# Ops that carry functions have no samples: tests/ops/test_control.py and test_state_update.py
# give each a module of its own.
CARRY_FUNCTIONS = {"call", "scan", "by_length", "pointwise", "state_update"}

SAMPLES = [(kind, s) for kind, d in OPS.items() for s in d.samples]
INVALID = [(kind, s) for kind, d in OPS.items() for s in d.invalid]


def _op(kind: str, sample: Sample) -> Op:
    operands = tuple(
        Value(name, types.parse(text))
        for name, text in zip("abcdef", sample.operands, strict=False)
    )
    return Op(kind, operands, (), dict(sample.attrs or {}))


def _name(case: Any) -> str:
    return case if isinstance(case, str) else ",".join(case.operands)


@pytest.mark.parametrize("kind", OPS)
def test_documented_and_sampled(kind: str) -> None:
    definition = OPS[kind]
    assert definition.doc
    assert bool(definition.samples) != (kind in CARRY_FUNCTIONS)
    assert bool(definition.invalid) != (kind in CARRY_FUNCTIONS)


def _array(type_: Type, rng: np.random.Generator) -> Any:
    if isinstance(type_, Sequence):
        return Rows.dense(SIZES["B"], SIZES["T"], PAST)
    assert isinstance(type_, Tensor)
    shape = tuple(dims.evaluate(size, SIZES) for size in type_.shape)
    if types.is_float(type_.dtype):
        return rng.uniform(0.1, 1.0, shape)
    return rng.integers(0, 2, shape).astype(bool if type_.dtype == "bool" else np.int64)


@pytest.mark.parametrize("kind,sample", SAMPLES, ids=_name)
def test_meaning_has_the_inferred_type(kind: str, sample: Sample) -> None:
    op = _op(kind, sample)
    rng = np.random.default_rng(0)
    attrs = {
        k: tuple(dims.evaluate(d, SIZES) for d in v) if k == "shape" else v
        for k, v in op.attrs.items()
    }
    got = OPS[kind].meaning(*(_array(v.type, rng) for v in op.values), **attrs)
    results = got if isinstance(got, tuple) else (got,)
    inferred = infer_op(op, {})
    assert len(results) == len(inferred)
    for x, type_ in zip(results, inferred, strict=True):
        if isinstance(type_, Sequence):
            assert len(x) == dims.evaluate(type_.rows, SIZES)
            continue
        assert isinstance(type_, Tensor)
        assert np.shape(x) == tuple(dims.evaluate(size, SIZES) for size in type_.shape)
        family = "f" if types.is_float(type_.dtype) else "b" if type_.dtype == "bool" else "i"
        assert np.asarray(x).dtype.kind == family
        assert np.all(np.isfinite(x))


@pytest.mark.parametrize("kind,sample", INVALID, ids=_name)
def test_invalid_sample_is_refused(kind: str, sample: Sample) -> None:
    with pytest.raises(ShapeError) as caught:
        infer_op(_op(kind, sample), {})
    assert sample.message
    assert sample.message in str(caught.value)
    assert kind in str(caught.value)
