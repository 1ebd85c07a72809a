"""From a traced module to one a backend prints. `PASSES` is the table of contents.

After every pass the module is verified. At check level 2 the interpreter also runs it before and
after, on random inputs in float64, and the results must agree (D17).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from archir.diagnostics import PassError, UnsupportedError, nearest
from archir.ir import Module
from archir.passes.canonicalize import canonicalize
from archir.passes.choose_form import choose_form
from archir.passes.expand import expand
from archir.passes.head import head
from archir.passes.precision import precision
from archir.passes.specialize import drop_taps, specialize
from archir.verify import verify


@dataclass(frozen=True)
class Options:
    """What a module is lowered for.

    phase: full, prefill or decode.  layout: dense.  head: all, last or loss.  dtype: the model's.
    form: auto, recurrent, chunk or parallel.  taps: whether inner values are kept.
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
    return head(specialize(module, o.phase, o.layout), o.head)


PASSES: tuple[tuple[str, Callable[[Module, Options], Module]], ...] = (
    ("specialize", _specialize),
    ("canonicalize", lambda module, o: canonicalize(module)),
    ("form", lambda module, o: choose_form(module, o.form)),
    ("precision", lambda module, o: precision(module, o.dtype, o.param_dtype, o.state_dtype)),
    ("expand", lambda module, o: expand(module)),
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

    check: 1 verifies after each pass, 2 also interprets before and after.
    """
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
    return module


def compare(before: Module, after: Module, name: str) -> None:
    """Interprets both modules on the same random inputs in float64; raises where they differ."""
    import numpy as np

    from archir.check.inputs import random_inputs
    from archir.interp import interpret

    inputs, weights, state = random_inputs(before, seed=0)
    one, stored_one = interpret(before, inputs, weights, state)
    two, stored_two = interpret(after, inputs, weights, state)
    pairs = {**{k: (one[k], two[k]) for k in one}} if one.keys() == two.keys() else {}
    if not pairs:
        pairs = dict(zip(one, zip(one.values(), two.values(), strict=True), strict=True))
    pairs |= {k: (stored_one[k], stored_two[k]) for k in stored_one}
    for key, (a, b) in pairs.items():
        scale = max(float(np.max(np.abs(a), initial=0)), 1e-300)
        difference = float(np.max(np.abs(np.asarray(a) - np.asarray(b)), initial=0))
        if difference > 1e-12 * scale:
            raise PassError(
                f"{name} changed {key}: relative difference {difference / scale:.1e}",
                code="pass-changed-meaning",
                next="this is a bug of archir: report the module and this message",
            )
