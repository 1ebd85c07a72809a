"""Intervals hold what is computed, as tightly as a table says; domains that specs contradict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import archir as ar
from archir import dims
from archir.bounds import check_domains, declared, intervals, parse_domain
from archir.diagnostics import SpecError
from archir.dims import Poly, symbol
from archir.ir import Function, Module, Value
from archir.ops import OPS
from archir.ops.interval import UNKNOWN, Interval, around
from archir.spec import builtin_names, resolve
from archir.trace import Builder, Program, building, emit
from archir.types import Tensor
from tests.dsl.messages import HEAD, trace_file
from tests.ops.test_table import SAMPLES, SIZES, _array, _op

# Kinds of which nothing is known, whatever their operands: none.
DELIBERATELY_UNKNOWN: set[str] = set()
ELEMENTWISE = {kind: d for kind, d in OPS.items() if d.family == "elementwise"}
N = 64


def traced(fn: Callable[..., Any], *shapes: tuple[int | Poly, ...]) -> Function:
    """A function of tensors as IR; one output."""
    builder = Builder(Program(), "traced", None, "body")
    with building(builder):
        given = [builder.input(f"x{i}", Tensor("F", shape)) for i, shape in enumerate(shapes)]
        made = fn(*given)
    return builder.finish([made.value])


def interval(fn: Callable[..., Any], *xs: Interval, shape: tuple[int | Poly, ...] = (4,)) -> str:
    """The interval of fn(*xs), as it is shown."""
    function = traced(fn, *(shape for _ in xs))
    found = intervals(function, Module((function,)), dict(zip(function.inputs, xs, strict=True)))
    return str(found[function.outputs[0]])


def of(text: str) -> Interval:
    return UNKNOWN if text == "any number" else parse_domain(text)


TABLE = [
    # what is computed, the interval of its operand x, that of the result
    (lambda x: x + 1, "-1..2", "0..3"),
    (lambda x: 1 - x, "0..1", "0..1"),
    (lambda x: x - x, "0..1", "-1..1"),
    (lambda x: -2 * x, ">= 1", "<= -2"),
    (lambda x: 0 * x, "any number", "0"),
    (lambda x: x * x, "-3..2", "0..9"),
    (lambda x: x * x, "any number", ">= 0"),
    (lambda x: -x * x, "any number", "<= 0"),
    (lambda x: -(x * x), "-3..2", "-9..0"),
    (lambda x: -2.0 * x * x, "any number", "<= 0"),
    (lambda x: x * x * x, "-2..1", "-8..1"),
    (lambda x: (x * ar.exp(x)) * x, "any number", ">= 0"),
    (lambda x: x**2, "-3..2", "0..9"),
    (lambda x: x**3, "-2..1", "-8..1"),
    (lambda x: x**-1.0, "-2..-1", "-1..-0.5"),
    (lambda x: x**0.5, "-1..4", "any number"),
    (lambda x: x**-2.0, "-2..1", ">= 0.25"),
    (lambda x: 2.0**x, "<= 3", "0..8"),
    (lambda x: 1 / x, "2..4", "0.25..0.5"),
    (lambda x: 1 / x, ">= 2", "0..0.5"),
    (lambda x: 1 / x, "0..4", "any number"),
    (lambda x: x / (1 + x), ">= 1", ">= 0"),
    (lambda x: x % 3, "any number", "0..3"),
    (lambda x: x // 2, "1..5", "-0.5..2.5"),
    (lambda x: np.floor(x), "0.5..2.5", "0..2"),
    (lambda x: abs(x), "-3..2", "0..3"),
    (lambda x: np.maximum(x, 0), "any number", ">= 0"),
    (lambda x: np.minimum(np.maximum(x, -1), 1), "any number", "-1..1"),
    (lambda x: np.exp(x), "<= 0", "0..1"),
    (lambda x: np.exp(x), "800..900", ">= 1.797693135e+308"),
    (lambda x: np.expm1(x), "<= 0", "-1..0"),
    (lambda x: np.log(x), "-1..1", "<= 0"),
    (lambda x: np.log(x), "-2..-1", "any number"),
    (lambda x: np.log1p(x), "0..inf", ">= 0"),
    (lambda x: np.sqrt(x), "-1..4", "0..2"),
    (lambda x: ar.rsqrt(x), "4..inf", "0..0.5"),
    (lambda x: ar.rsqrt(-3.0 * x), "-3..0", ">= 0.3333333333"),
    (lambda x: np.sin(x) * np.cos(x), "any number", "-1..1"),
    (lambda x: np.tanh(x), "any number", "-1..1"),
    (lambda x: -5 * ar.sigmoid(x), "any number", "-5..0"),
    (lambda x: ar.softplus(x), "any number", ">= 0"),
    (lambda x: -ar.softplus(x), "any number", "<= 0"),
    (lambda x: ar.relu(x), "-1..2", "0..2"),
    (lambda x: ar.silu(x), "any number", ">= -0.2784645428"),
    (lambda x: ar.silu(x), "<= 0", "-0.2784645428..0"),
    (lambda x: ar.gelu_tanh(x), "any number", ">= -0.1700407506"),
    (lambda x: ar.where(x > 0, ar.sigmoid(x), 2.0), "any number", "0..2"),
    (lambda x: x.reshape(2, 2).T[:, None], "0..1", "0..1"),
    (lambda x: ar.concat([x, ar.tanh(x)]), "0..3", "0..3"),
    (lambda x: np.sum(ar.sigmoid(x)), "any number", ">= 0"),
    (lambda x: np.sum(x), "0..1", ">= 0"),
    (lambda x: np.mean(x), "0..1", "0..1"),
    (lambda x: np.max(x), "0..1", "0..1"),
    (lambda x: np.outer(x, x), "-1..2", "-2..4"),
    (lambda x: x @ x, "0..2", ">= 0"),
    (lambda x: ar.l2_norm(x), "any number", "-1..1"),
    (lambda x: ar.cast(x, "float32"), "0..1", "0..1"),
    (lambda x: ar.cast(x, "int64"), "0..1", "any number"),
    (lambda x: ar.cast(x > 0, "model"), "any number", "0..1"),
]


@pytest.mark.parametrize("fn,x,expected", TABLE)
def test_table(fn: Callable[..., Any], x: str, expected: str) -> None:
    assert interval(fn, of(x)) == expected


def test_every_elementwise_op_has_a_rule() -> None:
    unknown = {kind for kind, d in ELEMENTWISE.items() if d.bounds is None}
    assert unknown == DELIBERATELY_UNKNOWN


@pytest.mark.parametrize(
    "kind,sample", [(kind, s) for kind, s in SAMPLES if OPS[kind].bounds], ids=str
)
def test_results_of_samples_lie_inside(kind: str, sample: Any) -> None:
    op, rng = _op(kind, sample), np.random.default_rng(0)
    attrs = {
        k: tuple(dims.evaluate(d, SIZES) for d in v) if k == "shape" else v
        for k, v in op.attrs.items()
    }
    arrays = [_array(v.type, rng) for v in op.values]
    given = [around(*x.flat) if getattr(x, "size", 0) else UNKNOWN for x in arrays]
    got, rule = OPS[kind].meaning(*arrays, **attrs), OPS[kind].bounds
    assert rule is not None
    bounds = rule(*given, **attrs)
    results = got if isinstance(got, tuple) else (got,)
    bounds = bounds if isinstance(bounds, tuple) else (bounds,) * len(results)
    for x, bound in zip(results, bounds, strict=True):
        assert np.all(bound.low - 1e-12 <= x) and np.all(x <= bound.high + 1e-12)


# ---- random expressions


def _number(draw: Any) -> float:
    return draw(
        st.sampled_from([-3, -2.0, -1.0, -0.5, 0.0, 0.25, 1.0, math.pi / 2, 2, 3.0, math.pi])
    )


@st.composite
def expressions(draw: Any) -> tuple[Function, dict[Value, Interval], dict[Value, np.ndarray]]:
    """A function of elementwise ops, intervals of its inputs (the last unknown), numbers inside."""
    builder, rng = (
        Builder(Program(), "f", None, "body"),
        np.random.default_rng(draw(st.integers(0))),
    )
    with building(builder):
        floats = [builder.input(f"x{i}", Tensor("F", (N,))) for i in range(3)]
        bools = [emit("less", floats[-1], 0.0)]
        for kind in draw(st.lists(st.sampled_from([*ELEMENTWISE]), min_size=1, max_size=8)):
            op = ELEMENTWISE[kind]
            wanted = op.samples[0].operands
            operands: list[Any] = [
                draw(st.sampled_from(bools if text.startswith("bool") else floats))
                for text in wanted
            ]
            if len(operands) > 1 and "bool" not in wanted[-1] and draw(st.booleans()):
                at = draw(st.sampled_from([len(operands) - 1, len(operands) - 2]))
                operands[at] = _number(draw) if kind != "where" or at else operands[at]
            made = emit(kind, *operands)
            (bools if made.type.dtype == "bool" else floats).append(made)
    function = builder.finish([floats[-1].value])
    ends = [sorted((_number(draw), _number(draw))) for _ in function.inputs[:-1]]
    given = {v: Interval(*e) for v, e in zip(function.inputs, ends, strict=False)}
    numbers = {v: np.r_[e, rng.uniform(*e, N - 2)] for v, e in zip(given, ends, strict=True)}
    numbers[function.inputs[-1]] = 3 * rng.standard_normal(N)
    return function, given, numbers


@settings(max_examples=400, deadline=None, derandomize=True)
@given(expressions())
def test_what_is_computed_lies_inside(
    case: tuple[Function, dict[Value, Interval], dict[Value, np.ndarray]],
) -> None:
    function, given, numbers = case
    found = intervals(function, Module((function,)), given)
    real = np.ones(N, bool)  # entries at which nothing was divided by zero, and nothing overflowed
    for op in function.ops:
        operands = [numbers[x] if isinstance(x, Value) else x for x in op.operands]
        with np.errstate(all="ignore"):
            y = OPS[op.kind].meaning(*operands)
        numbers[op.result], bound = y, found[op.result]
        real &= ~np.isinf(y)
        size = np.max([np.abs(np.broadcast_to(x, N)) for x in (*operands, y)], axis=0)
        rounding = 1e-12 * np.where(np.isfinite(size), size, 1)
        inside = (bound.low - rounding <= y) & (y <= bound.high + rounding)
        assert np.all(inside | ~real | np.isnan(y)), f"{op.kind} gives {y}, not in {bound}"


# Ops of one value, but for logarithms, whose ends are too far to be tried, and of two.
ONE = ("neg", "abs", "exp", "expm1", "sqrt", "rsqrt", "sin", "tanh", "sigmoid", "silu", "relu",
       "softplus", "gelu_tanh", "floor")  # fmt: skip
TWO = ("add", "sub", "mul", "div", "maximum", "minimum", "mod")
INSIDE = ((-math.inf, math.inf), (0, math.inf), (-math.inf, -1), (0, 1), (-1, 2), (-3, -0.5))


@st.composite
def chains(draw: Any) -> tuple[Function, dict[Value, Interval]]:
    """A function of three inputs, each of which it mostly uses once, and their intervals."""
    builder = Builder(Program(), "f", None, "body")
    with building(builder):
        made, *others = [builder.input(f"x{i}", Tensor("F", (N,))) for i in range(3)]
        for kind in draw(st.lists(st.sampled_from([*ONE, *TWO, "pow", "where"]), min_size=1)):
            another = others.pop() if others and draw(st.booleans()) else _number(draw)
            another = made if draw(st.integers(0, 7)) == 7 else another
            if kind in ONE:
                made = emit(kind, made)
            elif kind == "pow":
                made = emit(kind, made, draw(st.sampled_from([-1, 0.5, 2, 3])))
            elif kind == "where":
                made = emit(kind, made > 0, another, made)
            else:
                made = emit(kind, *((made, another) if draw(st.booleans()) else (another, made)))
    function = builder.finish([made.value])
    given = {v: Interval(*draw(st.sampled_from(INSIDE))) for v in function.inputs}
    return function, given


def tried(within: Interval) -> np.ndarray:
    """Numbers of an interval: its ends, or very large ones, zero, and many between."""
    far = np.geomspace(1e-60, 1e60, 31)
    numbers = np.r_[-far, 0, far, np.linspace(-4, 4, 33), within.low, within.high]
    numbers = numbers[np.isfinite(numbers)]
    return np.unique(np.clip(numbers, within.low, within.high))


def nearest_to(end: float, function: Function, given: dict[Value, Interval]) -> float:
    """How near to an end a function comes: on a grid, then on finer ones about the best point."""
    used = [v for v in function.inputs if any(v in op.values for op in function.ops)]
    grids, best = [tried(given[v]) for v in used], math.inf
    for _ in range(6):
        points = np.meshgrid(*grids, sparse=True, indexing="ij")
        numbers: dict[Any, Any] = dict(zip(used, points, strict=True))
        with np.errstate(all="ignore"):
            for op in function.ops:
                operands = [numbers[x] if isinstance(x, Value) else x for x in op.operands]
                numbers[op.result] = OPS[op.kind].meaning(*operands)
            far = np.abs(numbers[function.outputs[0]] - end)
        far = np.where(np.isfinite(far), far, math.inf)  # what overflows is not spoken of
        best = min(best, float(np.min(far)))
        at = np.unravel_index(np.argmin(far), far.shape)
        grids = [
            np.linspace(x[max(i - 1, 0)], x[min(i + 1, len(x) - 1)], 33)
            for x, i in zip(grids, at, strict=True)
        ]
    return best


@settings(max_examples=300, deadline=None, derandomize=True)
@given(chains())
def test_an_exact_end_is_approached(case: tuple[Function, dict[Value, Interval]]) -> None:
    function, given = case
    bound = intervals(function, Module((function,)), given)[function.outputs[0]]
    for end in (bound.low, bound.high):
        if bound.uses is not None and abs(end) < 1e300:
            far = nearest_to(end, function, given)
            assert far <= 0.02 * (1 + abs(end)) or math.isinf(far), f"{function}: {bound}"


# ---- functions that are called


def test_calls_and_functions_of_scalars() -> None:
    @ar.pointwise
    def gate(z, scale):
        return -scale * ar.sigmoid(z)

    @ar.block
    def inner(x, y):
        return x * y, -y

    @ar.block
    def outer(x: "f[B, T, 4]"):
        a, b = inner(gate(x, 5.0), ar.tanh(x), name="first")
        c, d = inner(x, ar.relu(x), name="second")
        return a, b, c, d, ar.short_conv(x, 4, name="conv", activation=ar.silu)

    module = ar.trace(outer)
    found = intervals(module.entry, module)
    shown = [str(found[v]) for v in module.entry.outputs]
    assert shown == ["-5..5", "-1..1", "any number", "<= 0", ">= -0.2784645428"]


def test_of_a_rule_from_its_domain() -> None:
    """What form choice asks: how a rule's decay is bounded by what its operands are bounded by."""

    @ar.recurrence("q:K k:K v:V g:K -> o:V", domain={"g": "-5..0"})
    def decayed(S, q, k, v, g):
        S = np.exp(g)[:, None] * S + np.outer(k, v)
        return S, q @ S

    rule = decayed.function
    found = intervals(rule, Module((rule,)), declared(rule))
    (decay,) = (op.result for op in rule.ops if op.kind == "exp")
    assert found[decay] == around(math.exp(-5), 1.0)


@pytest.mark.parametrize("name", ["g", "f", "F", "f32", "inf", "list", "sequence"])
def test_a_domain_of_an_operand_that_ir_text_renames(name: str, tmp_path: Path) -> None:
    text = GIVEN.replace(" g: ", f" {name}: ").replace('"g"', f'"{name}"')
    text = text.replace("v, g, beta", f"v, {name}, beta").replace("np.exp(g)", f"np.exp({name})")
    with pytest.raises(SpecError, match=f"delta: {name} must be <= 0, but >= 0 is given") as caught:
        given_to_delta(tmp_path, gate="ar.softplus(z)", text=text)
    assert f'"<= 0" for {name}, at' in caught.value.facts[0]


def test_symbols_may_be_any_size() -> None:
    size = traced(lambda x: emit("size", dim=symbol("T")), (symbol("T"),))
    assert str(intervals(size, Module((size,)))[size.outputs[0]]) == ">= 0"


def test_an_op_without_a_rule_is_unknown() -> None:
    assert interval(lambda x: ar.linear(x, x), Interval(0, 1), shape=(4, 4)) == "any number"
    assert OPS["linear"].bounds is None


# ---- domains


@pytest.mark.parametrize(
    "text,low,high",
    [
        ("<= 0", -math.inf, 0), (">= -1e-3", -1e-3, math.inf), ("0..1", 0, 1), ("0...5", 0, 0.5),
        ("-1.5..-.5e1", None, None), ("-5e-1..2.", -0.5, 2), ("-inf..0", -math.inf, 0),
        ("unit", -1, 1), ("1..0", None, None), ("<= -inf", None, None), ("positive", None, None),
        ("<= nan", None, None), ("0..", None, None), ("1", None, None),
    ],
)  # fmt: skip
def test_parse_domain(text: str, low: float | None, high: float | None) -> None:
    if low is None or high is None:
        with pytest.raises(ValueError, match=r"not understood|no number"):
            parse_domain(text)
        return
    assert parse_domain(text) == Interval(low, high)


GIVEN = """\
@ar.recurrence("q:K k:K v:V g: beta: -> o:V", domain={"g": "<= 0", "beta": "0..1", "k": "unit"})
def delta(S, q, k, v, g, beta):
    S = np.exp(g) * S
    S = S + np.outer(k, beta * (v - k @ S))
    return S, q @ S


@ar.block
def inner(x, z, c):
    q, k, v = ar.heads(ar.linear(x, 24, bias=False, name="qkv"), 3, c.heads)
    u = ar.linear(x, c.heads, name="u")
    w = ar.weight("w", [c.heads])
    v = v * ar.expand_dims(u + w, 3)
    return delta(q, KEY, v, GATE, STRENGTH)


@ar.block
def layer(x, c):
    z = ar.linear(x, c.heads, bias=False, name="z") + ar.weight("A_log", [c.heads])
    return inner(x, OUTER, c, name="inner")


@ar.spec(Config)
def broken(tokens, c):
    x = ar.embedding(tokens, c.vocab, c.width, name="embed")
    return ar.merge(layer(x, c, name="layer"))
"""


def given_to_delta(
    folder: Path, gate: str = "-ar.softplus(z)", strength: str = "ar.sigmoid(z)",
    key: str = "ar.l2_norm(k)", outer: str = "z", text: str = "",
) -> None:  # fmt: skip
    """Traces a spec that gives a rule these operands; `outer` is made in the caller's block."""
    places = {"GATE": gate, "STRENGTH": strength, "KEY": key, "OUTER": outer}
    text = text or GIVEN
    for place, what in places.items():
        text = text.replace(place, what)
    (folder / "spec.py").write_text(HEAD + "s = ar.sigmoid\n\n\n" + text)
    trace_file(folder / "spec.py")


ACCEPTED: dict[str, Mapping[str, str]] = {
    "a gate of exp and softplus": {"gate": "-ar.exp(z) * ar.softplus(z)"},
    "a bounded gate": {"gate": "-5 * ar.sigmoid(z)"},
    "a square with its sign turned": {"gate": "-z * z"},
    "a logarithm of a sigmoid": {"gate": "ar.log(ar.sigmoid(z))"},
    "a gate nothing is known of": {"gate": "z"},
    "a gate bounded on the other side only": {"gate": "ar.silu(z)"},
    "a strength nothing is known of above": {"strength": "ar.relu(z)"},
    "a strength that is constant": {"strength": "0 * z + 1.0"},
    "a strength a hair above": {"strength": "ar.sigmoid(z) * (1 + 1e-15)"},
    "a strength that is clipped": {"strength": "np.minimum(np.maximum(z, 0), 1)"},
    "a convex mix": {"strength": "s(z) * s(u) + (1 - s(z)) * s(w)"},
    "a convex mix, by its difference": {"strength": "s(u) + s(z) * (s(w) - s(u))"},
    "either of two": {"strength": "s(u) + s(z) - s(u) * s(z)"},
    "the slope of a sigmoid": {"strength": "4 * s(z) * (1 - s(z))"},
    "a difference": {"strength": "s(z) - s(z) * s(z)"},
    "sine and cosine": {"strength": "np.sin(z) ** 2 + np.cos(z) ** 2"},
    "a square, by its factors": {"strength": "s(z) * s(u) * s(z)"},
    "a unit and its square": {"strength": "np.sum(k * k, axis=-1) / (1 + np.sum(k * k, axis=-1))"},
    "a sine of what is bounded": {"strength": "np.sin(s(z))"},
    "a sum of entries": {"gate": "5 - np.sum(2 + s(k), axis=-1)"},
    "what differs by a condition": {"strength": "ar.where(z > 0, s(z), 1 - s(z)) * 2 - 1"},
    "steps": {"gate": "0.2 - np.abs(np.floor(z) - 0.5)"},
    "a key whose entries are bounded": {"key": "ar.tanh(k)"},
    "a key nothing is known of": {"key": "k"},
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_a_domain_allows(case: str, tmp_path: Path) -> None:
    given_to_delta(tmp_path, **ACCEPTED[case])


REFUSED: dict[str, tuple[Mapping[str, str], str]] = {
    "sign forgotten": ({"gate": "ar.softplus(z)"}, "g must be <= 0, but >= 0 is given"),
    "a square": ({"gate": "z * z"}, "g must be <= 0, but >= 0 is given"),
    "of an outer block": (
        {"gate": "z", "strength": "0 * z", "outer": "ar.sigmoid(z)"},
        "g must be <= 0, but 0..1 is given",
    ),
    "above": ({"strength": "2 * ar.sigmoid(z)"}, "beta must be 0..1, but 0..2 is given"),
    "below": ({"strength": "ar.tanh(z)"}, "beta must be 0..1, but -1..1 is given"),
    "of two": ({"strength": "s(z) + s(u)"}, "beta must be 0..1, but 0..2 is given"),
    "of a weight": ({"strength": "s(z) - s(w)"}, "beta must be 0..1, but -1..1 is given"),
    "of a mean": ({"strength": "2 * s(np.mean(k, axis=-1))"}, "beta must be 0..1, but 0..2 is giv"),
    "of a square": ({"strength": "2 * s(z) ** 2"}, "beta must be 0..1, but 0..2 is given"),
    "of a convolution": (
        {"gate": "ar.short_conv(z, 3, name='c', activation=s) - 0.5"},
        "g must be <= 0, but -0.5..0.5 is given",
    ),
    "apart, though it may be narrower": (
        {"strength": "s(z) + s(z) + 1.5"},
        "beta must be 0..1, but 1.5..3.5 is given",
    ),
    "a constant outside": ({"strength": "0 * z + 3"}, "beta must be 0..1, but 3 is given"),
    "apart": ({"strength": "3 + ar.relu(z)"}, "beta must be 0..1, but >= 3 is given"),
    "touching": ({"strength": "1 + ar.relu(z)"}, "beta must be 0..1, but >= 1 is given"),
    "unit": ({"key": "2 * ar.l2_norm(k)"}, "k must be unit, but -2..2 is given"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_domain_denies(case: str, tmp_path: Path) -> None:
    given, message = REFUSED[case]
    with pytest.raises(SpecError) as caught:
        given_to_delta(tmp_path, **given)
    assert caught.value.code == "domain-contradicted"
    assert message in str(caught.value)
    assert caught.value.loc is not None
    assert "return delta(" in caught.value.loc.excerpt()[0]


def test_a_value_of_an_outer_block_is_named_by_its_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        given_to_delta(tmp_path, gate="z", strength="0 * z", outer="ar.sigmoid(z)")
    line = 1 + (tmp_path / "spec.py").read_text().split("\n").index(
        '    return inner(x, ar.sigmoid(z), c, name="inner")'
    )
    assert f"made at {tmp_path}/spec.py:{line};" in caught.value.facts[1]


def test_what_parses_is_not_judged(tmp_path: Path) -> None:
    """Text is a program as it is: only what a user traces is held against its domains."""
    given_to_delta(tmp_path)
    text = str(ar.trace(f"{tmp_path}/spec.py:broken"))
    assert text.count("= neg(") == 1
    wrong = ar.parse(text.replace("= neg(", "= abs("))
    with pytest.raises(SpecError):
        check_domains(wrong)


@pytest.mark.parametrize("name", [*builtin_names(), "tests/specs/kda.py:kda_lm"])
def test_no_spec_is_refused(name: str) -> None:
    spec = resolve(name)
    for preset in spec.presets:  # type: ignore[union-attr]
        module = ar.trace(name, preset)
        assert all(isinstance(i, Interval) for i in intervals(module.entry, module).values())
