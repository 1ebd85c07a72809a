"""IR text: what is read back, and what is said when text is not IR."""

from __future__ import annotations

import pytest

import archir as ar
from archir.diagnostics import ArchirError
from archir.pipeline import STAGES, lower
from archir.text import WIDTH, parse, parse_unverified, print_module
from tests.goldens import check_golden
from tests.specs.kda import kda_lm

GOOD = """\
@entry
def model(tokens: i64[B, T], *,
    w: f[16, 4] = weight("w", init=normal(0.02), decay=True),
) -> f[B, T, 4]:
    x: f[B, T, 4] = embedding(tokens, w)    # model.py:7
    a, b = split(x, sizes=(2, 2), axis=-1) @ (f[B, T, 2], f[B, T, 2])
    y: f[B, T, 4] = concat(a, b, axis=-1)
    return y
"""

BROKEN = {
    "syntax": ("x: f[B, T, 4] = ", "x f[B, T, 4] = "),
    "a statement that is no op": ("    return y", "    z = 3\n    return y"),
    "something else at the top": ("@entry\n", "import os\n\n@entry\n"),
    "a role that is none": ("@entry", "@main"),
    "no return": ("    return y\n", ""),
    "an empty return": ("return y", "return"),
    "a use before its definition": ("concat(a, b", "concat(a, c"),
    "a name defined twice": ("y: f[B, T, 4] = concat", "x: f[B, T, 4] = concat"),
    "an input twice": ("def model(tokens: i64[B, T], *,", "def model(tokens: i64[B, T], w: f, *,"),
    "a result without a type": ("y: f[B, T, 4] = concat", "y = concat"),
    "two results, one type": ("@ (f[B, T, 2], f[B, T, 2])", "@ (f[B, T, 2],)"),
    "an input without a type": ("tokens: i64[B, T]", "tokens"),
    "a type that is none": ("tokens: i64[B, T]", "tokens: int64[B, T]"),
    "a size that is none": ("w: f[16, 4]", "w: f[16, 4.5]"),
    "a field that is none": ('= weight("w", init=normal(0.02), decay=True)', "= 3"),
    "an attribute that is none": ("axis=-1)\n", "axis=x @ x)\n"),
    "an op by attribute": ("embedding(tokens, w)", "ar.embedding(tokens, w)"),
    "an unknown op": ("embedding(tokens, w)", "embeding(tokens, w)"),
    "a call of nothing": ("embedding(tokens, w)", 'call(layer, tokens, scope="h")'),
    "a call without a function": ("embedding(tokens, w)", 'call("layer", tokens, scope="h")'),
    "another result type": ("y: f[B, T, 4] = concat", "y: f[B, T, 5] = concat"),
    "another return type": (") -> f[B, T, 4]:", ") -> f[B, T, 5]:"),
    "a text as operand": ("embedding(tokens, w)", 'embedding(tokens, "w")'),
}


def test_broken() -> None:
    assert print_module(parse(GOOD), locs=False).count("model.py") == 0
    parts = []
    for name, (old, new) in BROKEN.items():
        assert GOOD.count(old) >= 1, name
        with pytest.raises(ArchirError) as caught:
            parse(GOOD.replace(old, new, 1), file="model.ir")
        text = str(caught.value)
        parts.append(f"## {name}\n\n{text}\n")
    check_golden("ir/parse", "\n".join(parts))


def test_lines_of_the_spec_are_read_back_but_do_not_count() -> None:
    module = parse(GOOD)
    loc = module.entry.ops[0].loc
    assert loc is not None and loc.short == "model.py:7"
    assert parse(str(module)).entry.ops[0].loc == loc
    assert module == parse(GOOD.replace("  # model.py:7", ""))
    assert hash(module) == hash(parse(GOOD.replace("  # model.py:7", "")))


@pytest.mark.parametrize("preset", [p for p in kda_lm.presets if p != "full"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("phase", ["full", "decode"])
def test_every_stage_prints_and_parses(preset: str, stage: str, phase: str) -> None:
    module = lower(ar.trace(kda_lm, preset), phase, stage=stage, dtype="bfloat16")
    text = print_module(module)
    assert parse(text) == module
    assert max(map(len, text.splitlines())) <= WIDTH
    assert parse_unverified(text) == module
