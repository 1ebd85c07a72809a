"""Laws: what must not matter to a machine, whatever the spec. `LAWS` is the table.

A law compares a machine with itself on the same rows, padded, cut, ordered or continued in another
way. What is the same arithmetic must agree bit for bit, in every dtype; what is computed in another
order, or by products of another shape, is asked in float64 only, with a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from archir.check.cases import Bench, Result, same
from archir.check.signature import Lines
from archir.check.tolerance import Distance

ROOM = 3  # columns of padding beyond the longest row


def padding(b: Bench) -> Iterator[Distance]:
    """Padding of any content and length changes no output, state, loss or gradient, and gets none.

    Exact where only the content differs. Outputs at padding are finite where the inputs are.
    """
    if b.layout not in ("left", "right"):
        return
    for name, how in _calls(b).items():
        cotangent = b.cotangent(b.run([b.piece(**how)]).outputs)
        plain, other = (b.run([b.piece(**how, filler=x)], cotangent) for x in (0, 1))
        yield plain.finite(f"{name}: ")
        yield from other.same(plain, f"{name}, other padding: ")
        if b.in_float64:
            longer = b.run([b.piece(**how, filler=2, room=ROOM)], cotangent)
            yield from longer.near(plain, f"{name}, more padding: ")


def split(b: Bench) -> Iterator[Distance]:
    """Tokens cut into calls anywhere are the whole: outputs, the state, and the gradients that go
    through the state between the calls."""
    if not (b.in_float64 and b.case.signature.states):
        return
    cotangent = b.cotangent(b.run([b.piece()]).outputs)
    state = b.run([b.piece(phase="prefill")]).state
    whole = replace(b.run([b.piece()], cotangent), state=state)
    for size in (1, 2):
        ends = range(0, max(b.batch.lengths) + size, size)
        cuts = [[min(end, n) for end in ends] for n in b.batch.lengths]
        pieces = b.batch.pieces(b.layout, cuts, "decode")
        yield from b.run(pieces, cotangent).near(whole, f"pieces of {size}: ")
    pieces = b.batch.pieces(b.layout, _drawn(b), "prefill")
    yield from b.run(pieces, cotangent).near(whole, "drawn pieces: ")


def _drawn(b: Bench) -> list[list[int]]:
    """Every row cut three times at random, and once more at the last of these: an empty piece."""
    cuts = []
    for row, n in enumerate(b.batch.lengths):
        rng = np.random.default_rng([b.case.study.seed, 0 if b.layout == "dense" else row])
        inner = sorted(rng.integers(0, n + 1, 3).tolist())
        cuts.append([0, *inner, inner[-1], n])
    return cuts


def rows(b: Bench) -> Iterator[Distance]:
    """Rows know nothing of each other: their order says nothing, each is as alone, and calls of no
    tokens, which are exact, change nothing."""
    if b.case.signature.states:
        yield from _calls_of_no_tokens(b)
    if not b.in_float64:
        return
    yield from _in_reverse(b)
    if b.case.signature.states:
        yield from _after_unlike_pasts(b)
    if b.layout != "dense":
        yield from _batch_of_one(b)


def _calls_of_no_tokens(b: Bench) -> Iterator[Distance]:
    piece = b.piece(phase="prefill")
    whole = b.run([piece])
    cotangent = b.cotangent(whole.outputs)
    before, after = (
        b.piece(spans=[(at, at) for at in places], phase="prefill", room=ROOM)
        for places in ([0] * len(b.batch.lengths), b.batch.lengths)
    )
    made = b.run([before, piece, after], cotangent)
    yield from made.same(b.run([piece], cotangent), "between calls of no tokens: ")


def _in_reverse(b: Bench) -> Iterator[Distance]:
    how = {"phase": "prefill"} if b.case.signature.states else {}
    order = range(len(b.batch.lengths))[::-1]
    turned = replace(b, batch=b.batch.take(order))
    whole = b.run([b.piece(**how)]).take(order)
    yield from turned.run([turned.piece(**how)]).near(whole, "rows in reverse: ")


def _after_unlike_pasts(b: Bench) -> Iterator[Distance]:
    """All but the last token of each row, then one dense step."""
    some = replace(b, batch=b.batch.take([r for r, n in enumerate(b.batch.lengths) if n]))
    past = some.piece(spans=[(0, n - 1) for n in some.batch.lengths], phase="prefill")
    step = some.batch.piece("dense", [(n - 1, n) for n in some.batch.lengths], phase="decode")
    alone = [replace(b, batch=row, layout="dense") for row in some.batch.alone()]
    each = Result.of_rows([one.run([one.piece(phase="prefill")]) for one in alone])
    yield from some.run([past, step]).near(each, "a step after unlike pasts: ")


def _batch_of_one(b: Bench) -> Iterator[Distance]:
    lengths = b.batch.lengths
    one = replace(b, batch=b.batch.take([lengths.index(max(lengths))]))
    plain = replace(one, layout="dense")
    for name, how in _calls(b).items():
        cotangent = one.cotangent(plain.run([plain.piece(**how)]).outputs)
        want = plain.run([plain.piece(**how)], cotangent)
        have = one.run([one.piece(**how, room=ROOM)], cotangent)
        yield from have.near(want, f"{name}, a batch of one: ")


def causality(b: Bench) -> Iterator[Distance]:
    """Later tokens change nothing, and get no gradient of what came before; exact, at one shape."""
    if not b.case.signature.states:
        return
    owners = b.case.signature.outputs

    def by_token(bench: Bench, phase: str) -> Lines:
        outputs = bench.run([bench.piece(phase=phase)]).outputs
        return [{k: x for k, x in row.items() if owners[k] == "tokens"} for row in outputs]

    for phase in ("full", "prefill"):
        whole = by_token(b, phase)
        for known in (lambda n: min(n, 1), lambda n: n // 2, lambda n: max(n - 1, 0)):
            ends = [known(n) for n in b.batch.lengths]
            other = replace(b, batch=b.batch.changed(ends, b.case.study.seed))
            made, want = (_until(x, ends) for x in (by_token(other, phase), whole))
            yield same(made, want, f"{phase}, later tokens changed: ")
            slopes = b.run([b.piece(phase=phase)], _until(b.cotangent(whole), ends)).slopes
            if slopes:
                none = _until(slopes.inputs, ends)
                yield same(slopes.inputs, none, f"{phase}, later tokens: d/d ")


def _until(lines: Lines, ends: Sequence[int]) -> Lines:
    """What is per token, with zeros from token `ends[r]` of row r on."""
    return [
        {k: np.concatenate([x[:end], np.zeros_like(x[end:])]) for k, x in row.items()}
        for row, end in zip(lines, ends, strict=True)
    ]


def _calls(b: Bench) -> dict[str, dict[str, str]]:
    """What the rows can be run as in one call: arguments of `Bench.piece`."""
    found = {"full": {}}
    if b.case.signature.states:
        found["prefill"] = {"phase": "prefill"}
    if b.case.signature.scores:
        phase = "prefill" if b.case.signature.states else "full"
        found |= {"last": {"phase": phase, "head": "last"}, "loss": {"head": "loss"}}
    return found


LAWS: dict[str, Callable[[Bench], Iterator[Distance]]] = {
    "padding": padding,
    "split": split,
    "rows": rows,
    "causality": causality,
}
