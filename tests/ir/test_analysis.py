"""Questions about the graph, on programs small enough to answer by hand."""

from __future__ import annotations

import pytest

import archir as ar
from archir.analysis import alike, can_fuse, dataflow, reaches
from archir.ir import Function, Module
from archir.text import parse
from tests.specs.kda import kda_lm

TEXT = """\
@entry
def model(x: f[B, 4], y: f[B, 4], *,
    w: f[4, 4] = weight("w", init=zeros(), decay=True),
) -> f[B, 4]:
    a: f[B, 4] = exp(x)
    b, c = split(a, sizes=(2, 2), axis=-1) @ (f[B, 2], f[B, 2])
    d: f[B, 2] = neg(b)
    e: f[B, 4] = concat(d, c, axis=-1)
    g: f[B, 4] = linear(y, w)
    h: f[B, 4] = mul(e, 2)
    return h
"""


def entry() -> Function:
    return parse(TEXT).entry


def names(function: Function, of: str) -> set[str]:
    values = {v.name: v for op in function.ops for v in op.results}
    values |= {v.name: v for v in function.inputs}
    return {v.name for v in reaches(function, values[of])}


@pytest.mark.parametrize(
    "value,want",
    [("x", ""), ("a", "x"), ("d", "x a b c"), ("h", "x a b c d e"), ("g", "y w"), ("c", "x a")],
)
def test_reaches(value: str, want: str) -> None:
    assert names(entry(), value) == set(want.split())


@pytest.mark.parametrize(
    "group,fits",
    [
        ("exp split", True),
        ("exp neg", False),  # split stands between them
        ("split concat", False),  # neg is computed from one and for the other
        ("split neg concat", True),
        ("exp linear", True),  # they have nothing to do with each other
        ("exp split neg concat mul", True),
        ("exp mul", False),
        ("neg", True),
        ("", True),
    ],
)
def test_can_fuse(group: str, fits: bool) -> None:
    function = entry()
    assert can_fuse(function, [op for op in function.ops if op.kind in group.split()]) == fits


def test_dataflow_names_places() -> None:
    graph = dataflow(entry())
    split = next(n for n in graph if getattr(n, "kind", "") == "split")
    concat = next(n for n in graph if getattr(n, "kind", "") == "concat")
    assert [place for _, _, place in graph.edges(split, data="place")] == [(0, 0), (1, 1)]
    assert graph.has_edge(split, concat)


SAME = {
    "renamed values": lambda text: text.replace(" e:", " k:").replace("mul(e", "mul(k"),
    "renamed function": lambda text: text.replace("def model", "def other"),
    "another order": lambda text: text.replace("    g: f[B, 4] = linear(y, w)\n", "").replace(
        "    a: f", "    g: f[B, 4] = linear(y, w)\n    a: f"
    ),
}
DIFFERENT = {
    "another op": ("exp(x)", "tanh(x)"),
    "another number": ("mul(e, 2)", "mul(e, 3)"),
    "another attribute": ("concat(d, c, axis=-1)", "concat(d, c, axis=1)"),
    "another operand": ("neg(b)", "neg(c)"),
    "operands exchanged": ("concat(d, c", "concat(c, d"),
    "another input": ("exp(x)", "exp(y)"),
    "inputs exchanged": ("(x: f[B, 4], y: f[B, 4]", "(y: f[B, 4], x: f[B, 4]"),
    "another path": ('weight("w"', 'weight("v"'),
    "another init": ("zeros()", "ones()"),
    "another output": ("return h", "return e"),
    "one op less": ("    g: f[B, 4] = linear(y, w)\n", ""),
    "a named output": ("return h", 'return {"h": h}'),
}


@pytest.mark.parametrize("name", SAME)
def test_alike(name: str) -> None:
    module, other = parse(TEXT), parse(SAME[name](TEXT))
    assert alike(module, other) and alike(other, module)


@pytest.mark.parametrize("name", DIFFERENT)
def test_not_alike(name: str) -> None:
    old, new = DIFFERENT[name]
    assert TEXT.count(old) == 1
    module, other = parse(TEXT), parse(TEXT.replace(old, new))
    assert not alike(module, other) and not alike(other, module)


def test_which_of_two_equal_ops_is_read_counts() -> None:
    text = """\
@entry
def model(x: f[4]) -> f[4]:
    a: f[4] = exp(x)
    b: f[4] = exp(x)
    c: f[4] = add(a, {})
    return c
"""
    assert not alike(parse(text.format("a")), parse(text.format("b")))


def test_callees_are_compared() -> None:
    tiny, plain = ar.trace(kda_lm, "tiny"), ar.trace(kda_lm, "plain")
    assert alike(tiny, ar.trace(kda_lm, "tiny"))
    assert not alike(tiny, plain)
    text = str(tiny).replace("layer_1", "second").replace("layer(", "first(")
    renamed = parse(text.replace("call(layer,", "call(first,"))
    assert renamed != tiny
    assert alike(renamed, tiny)
    broken = str(tiny).replace("sigmoid(", "tanh(", 1)
    assert not alike(parse(broken), tiny)


def test_order_of_functions_does_not_count() -> None:
    tiny = ar.trace(kda_lm, "tiny")
    rule, one, two, main = tiny.functions
    assert alike(Module((two, rule, one, main)), tiny)
