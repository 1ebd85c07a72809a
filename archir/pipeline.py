"""From a traced module to one a backend prints. `PASSES` is the table of contents.

After every pass the module is verified. At check level 2 the interpreter also runs it before and
after, on random inputs in float64, and the results must agree; for `specialize` this means that
prefill, in one piece or several, and decode equal the full forward (D17), and that rows padded on
either side or packed equal each row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from archir.diagnostics import UnsupportedError, nearest
from archir.ir import Module, Op
from archir.passes import choose_form as forms
from archir.passes.canonicalize import canonicalize
from archir.passes.expand import expand
from archir.passes.fuse import fuse
from archir.passes.head import head
from archir.passes.laws import compare, compare_layouts, compare_phases
from archir.passes.precision import precision
from archir.passes.specialize import drop_taps, specialize
from archir.verify import verify


@dataclass(frozen=True)
class Options:
    """What a module is lowered for.

    phase: full, prefill or decode.  layout: dense or ragged.  head: all, last or loss.
    dtype: the model's.  form: auto, recurrent, chunk or parallel.  chunk: tokens of one.  taps:
    whether inner values are kept.  training: whether dropout draws.  backend: who will print it;
    without one, ops that every backend has.
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
    backend: str | None = None
    chunk: int = field(default_factory=lambda: forms.CHUNK)

    def keeps(self, op: Op, module: Module) -> bool:
        """Whether the backend takes an op as it is, and needs it neither fused nor expanded."""
        from archir.compile import find_backend

        return self.backend is not None and find_backend(self.backend).supports(op, module) is None


def _specialize(module: Module, o: Options) -> Module:
    module = module if o.taps else drop_taps(module)
    return head(specialize(module, o.phase, o.layout, o.training), o.head)


PASSES: tuple[tuple[str, Callable[[Module, Options], Module]], ...] = (
    ("specialize", _specialize),
    ("canonicalize", lambda module, _: canonicalize(module)),
    ("form", lambda module, o: forms.choose_form(module, o.chunk, o.form, o.keeps)),
    ("precision", lambda module, o: precision(module, o.dtype, o.param_dtype, o.state_dtype)),
    ("fuse", lambda module, o: fuse(module, o.keeps)),
    ("expand", lambda module, o: expand(module, o.chunk, o.keeps)),
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
    chunk: int | None = None,
    check: int = 1,
) -> Module:
    """A traced module after the passes up to `stage` (all of them by default).

    backend: who will print it; it must be installed. What it has kernels for is fused and kept.
    training: dropout draws by keys made from a seed; without it, dropout is nothing.
    chunk: tokens of a chunk of a recurrence; the default is right for any decay.
    check: 1 verifies after each pass, 2 also interprets before and after.
    """
    if backend is not None:
        from archir.compile import require_backend

        require_backend(backend)
    options = Options(
        phase, layout, head, dtype, param_dtype, state_dtype, form, taps, training, backend
    )
    options = options if chunk is None else replace(options, chunk=chunk)
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
        if check > 1 and name == "specialize" and layout == "ragged":
            compare_layouts(before, phase)
    return module
