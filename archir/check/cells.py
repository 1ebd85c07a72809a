"""The phases of a check: what a machine makes of rows, against the interpreter's of each alone.

A phase gives the distance of one cell, or None where the spec has no such thing. `PHASES` is the
table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from archir.check.batch import Batch
from archir.check.cases import SEED, Bench, Result, compare, worst
from archir.check.machines import Interpreter
from archir.check.tolerance import Distance
from archir.ir import fields


def full(b: Bench) -> Distance:
    """All tokens at once, without state."""
    return compare(b.run([b.piece()]).outputs, b.case.outputs, b.case.dtype)


def prefill(b: Bench) -> Distance | None:
    """In two pieces; ragged rows are each cut elsewhere, so that their pasts differ."""
    if not b.case.signature.states:
        return None
    made = b.run(b.batch.pieces(b.layout, _in_two(b, 3)))
    return compare(made.outputs, b.case.outputs, b.case.dtype)


def decode(b: Bench) -> Distance | None:
    """The last tokens one by one; of ragged rows, some have no more of them than a few."""
    if not b.case.signature.states:
        return None
    firsts = [max(min(n, 1), n - 6) for n in b.batch.lengths]
    if b.layout != "dense":
        firsts = [max(0, n - 2 - row % 5) for row, n in enumerate(b.batch.lengths)]
    pairs = [*zip(firsts, b.batch.lengths, strict=True)]
    steps = range(1 + max(n - first for first, n in pairs))
    cuts = [[0, *(min(first + step, n) for step in steps)] for first, n in pairs]
    made = b.run(b.batch.pieces(b.layout, cuts))
    return compare(made.outputs, b.case.outputs, b.case.dtype)


def state(b: Bench) -> Distance | None:
    """What is kept after one call of all tokens, and after two."""
    if not any(path != "length" for path in b.case.signature.states):
        return None
    cuts = ([[0, n] for n in b.batch.lengths], _in_two(b, 2))
    made = [b.run(b.batch.pieces(b.layout, cut)).state for cut in cuts]
    return worst([compare(state, b.case.states, b.case.dtype) for state in made])


def last(b: Bench) -> Distance | None:
    """The scores of each row's last token."""
    if not b.case.signature.scores:
        return None
    return compare(b.run([b.piece(head="last")]).outputs, b.case.last, b.case.dtype)


def loss(b: Bench) -> Distance | None:
    """The mean loss of all targets."""
    if not b.case.signature.scores:
        return None
    return compare(b.run([b.piece(head="loss")]).outputs[:1], b.case.loss, b.case.dtype)


def training(b: Bench) -> Distance | None:
    """With dropout, where the spec has it: the same draws as the interpreter's."""
    if not b.case.signature.drops or b.layout != "dense":
        return None
    made = b.run([b.piece(seed=SEED)])
    return compare(made.outputs, b.case.training, b.case.dtype)


def gradient(b: Bench) -> Distance | None:
    """Of ⟨c, outputs⟩ for a random c, in float64: of short dense rows against differences of the
    interpreter, of ragged ones against the sum of the rows' own, each dense and alone."""
    if not (b.in_float64 and b.machine.differentiates):
        return None
    if b.layout != "dense":
        return _gradient_of_rows(b)
    return _differences(b) if b.case.length < 16 else None


PHASES: dict[str, Callable[[Bench], Distance | None]] = {
    "full": full,
    "prefill": prefill,
    "decode": decode,
    "state": state,
    "last": last,
    "loss": loss,
    "training": training,
    "gradient": gradient,
}


def _differences(b: Bench) -> Distance:
    """Of every weight and float input in a random direction, against central differences of the
    interpreter."""
    weights, cotangent = b.case.study.weights, b.cotangent(b.case.outputs[0])
    slopes = b.run([b.piece()], cotangent).slopes
    assert slopes is not None
    request = b.case.study.request
    interpreter = Interpreter(request.module, request.options, stage="specialize")

    def value(moved: dict[str, np.ndarray], batch: Batch) -> float:
        interpreter.load(weights | moved)
        at = replace(b, machine=interpreter, batch=batch)
        pairs = zip(at.run([at.piece()]).outputs, cotangent, strict=True)
        return float(sum(np.sum(row[k] * x) for row, c in pairs for k, x in c.items()))

    rng, step = np.random.default_rng(b.case.study.seed + 18), 1e-5
    rounding = 1e-15 * abs(value({}, b.batch)) / step

    def off(name: str, slope: np.ndarray, towards: np.ndarray, ends: Sequence[float]) -> Distance:
        want, each = (ends[0] - ends[1]) / (2 * step), slope * towards
        scale = float(np.linalg.norm(each)) + abs(want)
        error = abs(float(np.sum(each)) - want)
        return Distance(error, 1e-5 * scale + 10 * rounding, name)

    found = []
    for name in fields(request.module, "weight"):
        x = weights[name]
        towards = rng.standard_normal(x.shape) * max(np.std(x), 0.05)
        ends = [value({name: x + sign * step * towards}, b.batch) for sign in (1, -1)]
        found.append(off(name, slopes.weights[name], towards, ends))
    for name in (name for name in slopes.inputs[0] if name in b.batch.lines[0]):
        slope = np.stack([row[name] for row in slopes.inputs])
        towards = rng.standard_normal(slope.shape)
        ends = [value({}, b.batch.moved(name, sign * step * towards)) for sign in (1, -1)]
        found.append(off(name, slope, towards, ends))
    return worst(found)


def _gradient_of_rows(b: Bench) -> Distance:
    """Of weights, inputs and what is looked up at tokens; none reaches padding."""
    cotangent = b.cotangent(b.case.outputs[0])
    alone = [replace(b, batch=row, layout="dense") for row in b.batch.alone()]
    pairs = zip(alone, cotangent, strict=True)
    want = Result.of_rows([one.run([one.piece()], [c]) for one, c in pairs])
    have = b.run([b.piece()], cotangent)
    assert have.slopes and want.slopes
    return worst(have.slopes.near(want.slopes, ""))


def _in_two(b: Bench, parts: int) -> list[list[int]]:
    """Where every row is cut: dense ones at a part of them, others each at another place."""
    lengths = b.batch.lengths
    if b.layout == "dense":
        return [sorted({0, n // parts, n}) for n in lengths]
    return [[0, n * (row + 1) // (len(lengths) + 1), n] for row, n in enumerate(lengths)]
