"""From a traced module to one a backend prints. `PASSES` is the table of contents.

After every pass the module is verified. At check level 2 the interpreter also runs it before and
after, on random inputs in float64, and the results must agree; for `specialize` this means that
prefill, in one piece or several, and decode equal the full forward (D17).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from archir.diagnostics import PassError, UnsupportedError, nearest
from archir.dims import bare
from archir.inputs import random_inputs
from archir.interp import interpret
from archir.ir import Module, fields
from archir.passes.canonicalize import canonicalize
from archir.passes.choose_form import choose_form
from archir.passes.expand import expand
from archir.passes.head import head
from archir.passes.precision import precision
from archir.passes.specialize import drop_taps, specialize
from archir.types import List, Tensor, Type
from archir.verify import verify


@dataclass(frozen=True)
class Options:
    """What a module is lowered for.

    phase: full, prefill or decode.  layout: dense.  head: all, last or loss.  dtype: the model's.
    form: auto, recurrent, chunk or parallel.  taps: whether inner values are kept.
    training: whether dropout draws.
    """

    phase: str = "full"
    layout: str = "dense"
    head: str = "all"
    dtype: str = "float32"
    param_dtype: str | None = None
    state_dtype: str | None = None
    form: str = "auto"
    taps: bool = True
    training: bool = False


def _specialize(module: Module, o: Options) -> Module:
    module = module if o.taps else drop_taps(module)
    return head(specialize(module, o.phase, o.layout, o.training), o.head)


PASSES: tuple[tuple[str, Callable[[Module, Options], Module]], ...] = (
    ("specialize", _specialize),
    ("canonicalize", lambda module, _: canonicalize(module)),
    ("form", lambda module, o: choose_form(module, o.form)),
    ("precision", lambda module, o: precision(module, o.dtype, o.param_dtype, o.state_dtype)),
    ("expand", lambda module, _: expand(module)),
)
STAGES = ("trace", *(name for name, _ in PASSES))


def lower(
    module: Module,
    phase: str = "full",
    layout: str = "dense",
    backend: str | None = None,
    stage: str | None = None,
    dtype: str = "float32",
    form: str = "auto",
    training: bool = False,
    *,
    head: str = "all",
    param_dtype: str | None = None,
    state_dtype: str | None = None,
    taps: bool = True,
    check: int = 1,
) -> Module:
    """A traced module after the passes up to `stage` (all of them by default).

    backend: who will print it; it must be installed. Every backend gets the same module so far.
    training: dropout draws by keys made from a seed; without it, dropout is nothing.
    check: 1 verifies after each pass, 2 also interprets before and after.
    """
    if backend is not None:
        from archir.compile import require_backend

        require_backend(backend)
    options = Options(phase, layout, head, dtype, param_dtype, state_dtype, form, taps, training)
    stage = stage or STAGES[-1]
    if stage not in STAGES:
        raise UnsupportedError(
            f"there is no stage {stage!r}", code="stage", next=nearest(stage, STAGES)
        )
    for name, run in PASSES[: STAGES.index(stage)]:
        before, module = module, run(module, options)
        verify(module, name)
        if check > 1 and name != "specialize":
            compare(before, module, name)
        elif check > 1 and phase != "full":
            compare_phases(before)
    return module


def compare(before: Module, after: Module, name: str) -> None:
    """Interprets both modules on the same random inputs in float64; raises where they differ."""
    inputs, weights, state = random_inputs(before, seed=0)
    one, stored_one = interpret(before, inputs, weights, state, seed=0)
    two, stored_two = interpret(after, inputs, weights, state, seed=0)
    pairs = zip(one, one.values(), two.values(), strict=True)
    for key, a, b in (*pairs, *((k, x, stored_two.get(k, np.nan)) for k, x in stored_one.items())):
        _require_equal(a, b, f"{name} changed {key}")


def compare_phases(module: Module, length: int = 5) -> None:
    """Full = prefill from an empty state = prefill in pieces = decode of all tokens (D17)."""
    full, step = specialize(module, "full"), specialize(module, "decode")
    inputs, weights, _ = random_inputs(full, seed=0, sizes={"T": length})
    types = {v.name: v.type for v in full.entry.inputs}
    names = full.entry.names or tuple(v.name for v in full.entry.outputs)
    pairs = zip(names, full.entry.outputs, strict=True)
    by_token = [name for name, value in pairs if _token_axis(value.type) == 1]
    want, _ = interpret(full, inputs, weights)
    for cuts in ((0, length), (0, length // 2, length), range(length + 1)):
        pieces: list[dict[str, Any]] = []
        state = None
        for start, stop in itertools.pairwise(cuts):
            given = {k: _tokens(x, types[k], start, stop) for k, x in inputs.items()}
            got, stored = interpret(step, given, weights, state)
            state = {path: stored[path] for path in fields(step, "state")}
            pieces.append(got)
        for key in by_token:
            got = np.concatenate([piece[key] for piece in pieces], axis=1)
            _require_equal(want[key], got, f"{key} read in pieces {list(cuts)} is not the whole")


def _token_axis(type_: Type) -> int | None:
    """The axis of tokens of a type [B, T, …] or of a list of them, stacked."""
    if isinstance(type_, List):
        return 2 if _token_axis(type_.element) else None
    by_token = isinstance(type_, Tensor) and type_.rank > 1 and bare(type_.shape[1]) == "T"
    return 1 if by_token else None


def _tokens(x: np.ndarray, type_: Type, start: int, stop: int) -> np.ndarray:
    """The part of an input that holds tokens start … stop − 1; all of it where it holds none."""
    axis = _token_axis(type_)
    return x if axis is None else x[(slice(None),) * axis + (slice(start, stop),)]


def _require_equal(a: Any, b: Any, what: str) -> None:
    """Raises a PassError unless two results agree to 1e-12 of the largest finite number."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        what = f"{what}: shapes {list(a.shape)} and {list(b.shape)}"
    else:
        both = np.isfinite(a) & np.isfinite(b)
        scale = max(float(np.max(np.abs(a), where=both, initial=0)), 1e-300)
        worst = float(np.max(np.abs(a - b), where=both, initial=0)) / scale
        if worst <= 1e-12 and np.array_equal(a[~both], b[~both], equal_nan=True):
            return
        what = f"{what}: relative difference {worst:.1e}"
    raise PassError(
        what,
        code="pass-changed-meaning",
        next="this is a bug of archir: report the module and this message",
    )
