"""provide: somebody's own kernel runs a rule.

    ar.provide(kda, backend="triton", fn=my_kda, when=lambda sizes: sizes["K"] == 128)

Compiling marks the rule in the traced module, so that its text, and with it the name of the cache
folder, says what was provided:

    o = state_update(q, k, v, g, beta, rule=kda)
  → o = state_update(q, k, v, g, beta, rule=kda_provided)

    @rule(states=1, domain=…, provided="kernels.my_kda")
    def kda_provided(S: F[K, V], q: F[K], …): …

The rule stays what it means: NumPy runs it, and `archir check` holds what was provided against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

from archir import types
from archir.compile import require_backend
from archir.diagnostics import SpecError
from archir.ir import Function, Module, Op, Ref, callees_first
from archir.ops.state import placed, rule_heads
from archir.recurrence import Rule
from archir.spec import resolve
from archir.text import print_function
from archir.types import Tensor

Sizes = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Provided:
    """What `provide` returns: `remove()` takes it back, and so does the end of a `with`.

    name: what emitted files and IR text call it by.
    """

    rule: Rule
    backend: str
    fn: Callable[..., Any]
    when: Callable[[Sizes], bool] | None
    name: str

    def remove(self) -> None:
        """What is compiled from now on runs without it; what was compiled with it stays."""
        if self in _ACTIVE:
            _ACTIVE.remove(self)

    def __enter__(self) -> Provided:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


_ACTIVE: list[Provided] = []
# Programs that were compiled call their kernels by name, also after those were taken back.
_NAMED: dict[str, Provided] = {}


def provide(
    rule: Any,
    *,
    backend: str,
    fn: Callable[..., Any],
    when: Callable[[Sizes], bool] | None = None,
) -> Provided:
    """Programs compiled from now on, in models and by `archir.op`, run a rule by `fn`.

    rule: the object, or `path.py:name`; rules of equal IR text are one.  backend: whose programs.
    when: of sizes, whether fn can: `{"K": 128, "V": 128, "heads": 8, "dtype": "bfloat16",
    "operands": {"q": ("B", "T", 4, 128), "beta": (8,), …}}`, the rule's dims, the heads of its
    states, the dtype of the model, and the shape of each operand; always unless given. Of several
    that can, the latest does.

    `fn(*operands, initial_state=, cu_seqlens=) → (outputs, state)` as `archir.op` with
    return_state=True. Rows are dense (cu_seqlens None), or packed in one line [1, T] with their
    running ends as an int64 tensor, empty rows among them; padding never reaches it. Operands are
    as they stand in the spec: grouped, shared, or without tokens. initial_state is [R, H, K, V] in
    float32 at least, a tuple of them where the rule has several states, and is always given; fn
    writes into none of what it takes. Its gradient is its own.
    """
    found = resolve(rule)
    if not isinstance(found, Rule):
        raise SpecError(
            f"{found.fn.__name__} is a {type(found).__name__.lower()}, not a rule",
            code="provide-rule",
            next="give what @ar.recurrence made, or 'path.py:name' of it",
        )
    require_backend(backend)
    if not callable(fn) or not (when is None or callable(when)):
        name, given = ("fn", fn) if not callable(fn) else ("when", when)
        raise SpecError(
            f"{name}={given!r} cannot be called",
            code="provide-callable",
            next="give a function: fn(*operands, initial_state=, cu_seqlens=) → (outputs, state)"
            if name == "fn"
            else "give a function of sizes, or leave it out",
        )
    made = Provided(found, backend, fn, when, _name(found, fn))
    _ACTIVE[:] = [old for old in _ACTIVE if (old.name, old.backend) != (made.name, backend)]
    _ACTIVE.append(made)
    _NAMED[made.name] = made
    return made


def active(backend: str) -> tuple[Provided, ...]:
    """What is provided for a backend now, the latest first."""
    return tuple(p for p in reversed(_ACTIVE) if p.backend == backend)


def named() -> Mapping[str, Provided]:
    """Everything that was provided in this process, by name."""
    return _NAMED


def provided_name(op: Op, module: Module) -> str | None:
    """The name of what runs a state update in a marked module; None where nothing is provided."""
    if op.kind != "state_update":
        return None
    return module[op.attrs["rule"].name].attrs.get("provided")


def mark(module: Module, provided: Sequence[Provided], dtype: str) -> Module:
    """A traced module whose state updates say what was provided for them; see the top.

    provided: those to choose from, by preference.  dtype: of the model.
    """
    if not provided:
        return module
    text_of = {p: _text(p.rule.function) for p in provided}
    table = {f.name: f for f in module.functions}
    found: dict[tuple[str, str], str] = {}  # (rule, what is provided) → the rule marked

    def visit(op: Op) -> Op:
        if op.kind != "state_update":
            return op
        rule = module[op.attrs["rule"].name]
        fitting = [p for p, text in text_of.items() if text == _text(rule)]
        sizes = _sizes(op, rule, dtype) if fitting else {}
        chosen = next((p for p in fitting if p.when is None or p.when(sizes)), None)
        if chosen is None:
            return op
        key = rule.name, chosen.name
        if key not in found:
            found[key] = _free(f"{rule.name}_provided", table)
            attrs = {**rule.attrs, "provided": chosen.name}
            table[found[key]] = replace(rule, name=found[key], attrs=attrs)
        return replace(op, attrs={**op.attrs, "rule": Ref(found[key])})

    for function in module.functions:
        table[function.name] = replace(function, ops=tuple(visit(op) for op in function.ops))
    return Module(callees_first(table, module.entry.name)) if found else module


def _text(rule: Function) -> str:
    """What a rule is, whatever it is called and wherever it is written."""
    return print_function(replace(rule, name="rule"), locs=False)


def _sizes(op: Op, rule: Function, dtype: str) -> dict[str, Any]:
    """What `when` is asked of; see `provide`."""
    states = rule.attrs["states"]
    sizes: dict[str, Any] = {}
    shapes: dict[str, tuple[Any, ...]] = {}
    given: list[Tensor] = []
    for value, declared in zip(op.values, rule.inputs[states:], strict=True):
        assert isinstance(value.type, Tensor) and isinstance(declared.type, Tensor)
        given.append(value.type)
        lead = placed(value.type, declared.type.rank)
        inner = value.type.shape[len(lead) :]
        sizes |= {str(d): n for d, n in zip(declared.type.shape, inner, strict=True)}
        rest = value.type.shape[2:] if "T" in lead else value.type.shape
        shapes[declared.name] = (*(("B", "T") if "T" in lead else ()), *rest)
    long = {short: name for name, short in types.NAMES.items()}[types.short_dtype(dtype)]
    return {**sizes, "heads": rule_heads(given, rule), "dtype": long, "operands": shapes}


def _name(rule: Rule, fn: Callable[..., Any]) -> str:
    """`module.function` of what is provided; `module.function_1` for another of the same name."""
    place = getattr(fn, "__module__", None) or type(fn).__module__
    label = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    words = (place.rpartition(".")[2], label.rpartition(".")[2])
    base = ".".join(word.strip("<>") for word in words)
    name, ordinal = base, 0
    while name in _NAMED and not _same(_NAMED[name], rule, fn):
        ordinal += 1
        name = f"{base}_{ordinal}"
    return name


def _same(old: Provided, rule: Rule, fn: Callable[..., Any]) -> bool:
    """Whether this was provided before: the same function, or the same code of a file run again."""
    if _text(old.rule.function) != _text(rule.function):
        return False
    if old.fn is fn:
        return True
    if not (isinstance(fn, FunctionType) and isinstance(old.fn, FunctionType)):
        return False
    bound = [(f.__closure__, f.__defaults__, f.__kwdefaults__) for f in (fn, old.fn)]
    return fn.__code__ == old.fn.__code__ and all(x == (None, None, None) for x in bound)


def _free(hint: str, taken: Mapping[str, Any]) -> str:
    name, ordinal = hint, 0
    while name in taken:
        ordinal += 1
        name = f"{hint}_{ordinal}"
    return name
