"""The laws of the IR: for each a module that breaks it, and what is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from archir.diagnostics import ArchirError, VerifyError
from archir.ir import Field, Function, Module, Op, Value
from archir.text import parse_unverified
from archir.types import Tensor
from archir.verify import verify
from tests.goldens import check_golden

GOOD = """\
def layer(x: f[B, T, 4], *,
    w: f[4, 4] = weight("w", init=normal(0.02), decay=True),
    cache: f[R, P, 4] = state("k", kind="kv"),
    seen: f[B, T, 4] = tap("seen"),
) -> f[B, T, 4]:
    seq: sequence[B] = dense(x)
    y: f[B, T, 4] = linear(x, w)    # model.py:3
    store(y, path="seen")
    store(cache, path="k")
    return y

@entry
def model(tokens: i64[B, T], *,
    table: f[16, 4] = weight("table", init=normal(0.02), decay=True),
) -> f[B, T, 4]:
    x: f[B, T, 4] = embedding(tokens, table)    # model.py:7
    y: f[B, T, 4] = call(layer, x, scope="h.0")    # model.py:8
    z: f[B, T, 4] = call(layer, y, scope="h.1")    # model.py:8
    return z
"""

# name → (replacements, stage)
BROKEN: dict[str, tuple[dict[str, str], str | None]] = {
    "no entry": ({"@entry\n": ""}, None),
    "two entries": ({"def layer": "@entry\ndef layer"}, None),
    "an unknown op": ({"linear(x, w)": "liner(x, w)"}, None),
    "a result of another type": ({"x: f[B, T, 4] = embedding": "x: F[B, T, 4] = embedding"}, None),
    "a result of another size": (
        {"x: f[B, T, 4] = embedding": "x: f[B, T, 5] = embedding"}, None,
    ),
    "operands that disagree": ({"w: f[4, 4]": "w: f[4, 5]"}, None),
    "too many operands": ({"linear(x, w)": "linear(x, w, w, w)"}, None),
    "a symbol that nothing binds": ({"cache: f[R, P, 4]": "cache: f[R, 2*P, 4]"}, None),
    "a field twice": ({'weight("w"': 'weight("k"'}, None),
    "a field of no kind": ({'weight("w"': 'cache("w"'}, None),
    "a store without a field": ({'store(y, path="seen")': 'store(y, path="sen")'}, None),
    "a field stored twice": (
        {'store(cache, path="k")': 'store(cache, path="k")\n    store(y, path="k")'}, None,
    ),
    "a state read twice": (
        {'store(cache, path="k")': "z: f[R, P, 4] = neg(cache)\n    store(cache, path=\"k\")"},
        None,
    ),
    "a scope entered twice": ({'scope="h.1"': 'scope="h.0"'}, None),
    "a field that two scopes own": (
        {'weight("table"': 'weight("h.0.w"'}, None,
    ),
    "names that are not as many as outputs": ({"return z": 'return {"a": z}'}, None),
    "an abstract dtype after precision": ({}, "precision"),
    "several problems at once": (
        {"linear(x, w)": "liner(x, w)", "cache: f[R, P, 4]": "cache: f[R, 2*P, 4]",
         "x: f[B, T, 4] = embedding": "x: F[B, T, 4] = embedding"},
        None,
    ),
}  # fmt: skip


def broken(changes: dict[str, str]) -> Module:
    text = GOOD
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return parse_unverified(text)


def test_good() -> None:
    verify(parse_unverified(GOOD))


def test_messages() -> None:
    parts = []
    for name, (changes, stage) in BROKEN.items():
        module = broken(changes)
        if name.startswith("names"):
            entry = replace(module.entry, names=("a", "b"))
            module = Module((*module.functions[:-1], entry))
        with pytest.raises(ArchirError) as caught:
            verify(module, stage)
        parts.append(f"## {name}\n\n{caught.value}\n")
    check_golden("ir/verify", "\n".join(parts))


F = Tensor("f", (4,))


def entry(*ops: Op, inputs: tuple[Value, ...] = (), outputs: tuple[Value, ...] = ()) -> Module:
    return Module((Function("model", inputs, (), ops, outputs, "entry"),))


X, Y, STRANGER = Value("x", F), Value("y", F), Value("x", F)
RECORDS = {
    "an operand of another function": entry(Op("neg", (STRANGER,), (Y,)), inputs=(X,)),
    "an operand that is defined later": entry(
        Op("exp", (Y,), (Value("z", F),)), Op("neg", (X,), (Y,)), inputs=(X,)
    ),
    "a result that has the name of an input": entry(Op("neg", (X,), (Value("x", F),)), inputs=(X,)),
    "two inputs of one name": entry(inputs=(X, STRANGER), outputs=(X,)),
    "an output that nothing makes": entry(inputs=(X,), outputs=(Y,)),
    "a number where values stand": entry(Op("l2_norm", (1.0,), (Y,), {"eps": 0.1}), inputs=(X,)),
    "two functions of one name": Module(
        (Function("model", (X,), (), (), (X,)), Function("model", (X,), (), (), (X,), "entry"))
    ),
    "a callee after its caller": parse_unverified(
        "@entry\ndef model(x: f[4]) -> f[4]:\n"
        '    y: f[4] = call(late, x, scope="h")\n    return y\n\n'
        "def late(x: f[4]) -> f[4]:\n    return x\n"
    ),
}


def test_records_that_no_text_can_say() -> None:
    parts = []
    for name, module in RECORDS.items():
        with pytest.raises(ArchirError) as caught:
            verify(module)
        parts.append(f"## {name}\n\n{caught.value}\n")
    check_golden("ir/verify_records", "\n".join(parts))


def test_problems_are_collected_up_to_ten() -> None:
    wrong = tuple(Op("neg", (X,), (Value(f"y{i}", Tensor("F", (4,))),)) for i in range(14))
    with pytest.raises(VerifyError) as caught:
        verify(entry(*wrong, inputs=(X,)))
    assert len(caught.value.problems) == 10
    assert str(caught.value).count("type-stated") == 10
    with pytest.raises(VerifyError) as one:
        verify(entry(*wrong[:1], inputs=(X,)))
    assert one.value.code == "type-stated"


def test_a_tap_that_is_only_written_is_no_problem() -> None:
    tap = Field("tap", "a.b", Value("t", F))
    verify(
        Module(
            (
                Function(
                    "model", (X,), (tap,), (Op("store", (X,), (), {"path": "a.b"}),), (X,), "entry"
                ),
            )
        )
    )
