"""compile, op: from a spec to an `nn.Module`, from a rule to a torch function. The one place that
looks for a backend."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from archir import dims, types
from archir.diagnostics import SpecError, UnsupportedError, nearest
from archir.dsl import Block
from archir.ir import Module
from archir.passes.specialize import only_full
from archir.pipeline import Options, lower
from archir.recurrence import Rule
from archir.spec import Spec, resolve, spec_of_block
from archir.types import Tensor

GROUP = "archir.backends"


@dataclass(frozen=True)
class Request:
    """What a backend is asked to build: a traced module, its spec and config, how to lower it."""

    name: str
    module: Module
    config: Any
    spec: Spec
    options: Options
    device: str = "cpu"

    @property
    def programs(self) -> tuple[tuple[str, str], ...]:
        """The phases it has, each with the head that is used most: only `full` where a token sees
        later ones."""
        scored = any(op.kind == "logits" for f in self.module.functions for op in f.ops)
        later = (("prefill", "last" if scored else "all"), ("decode", "all"))
        return (("full", "all"), *(later if only_full(self.module) is None else ()))


@dataclass(frozen=True)
class RuleRequest:
    """What a backend is asked to make of a rule alone: its module over operands [B, T, H, …]."""

    name: str
    module: Module
    rule: Rule
    options: Options

    def as_model(self) -> Request:
        """The same as a model whose inputs are the operands, with every phase."""
        return Request(self.name, self.module, None, Spec(self.rule.fn, None), self.options)


def require_backend(name: str) -> importlib.metadata.EntryPoint:
    """Where an installed backend is found; loads nothing."""
    points = {p.name: p for p in importlib.metadata.entry_points(group=GROUP)}
    if name not in points:
        raise UnsupportedError(
            f"there is no backend {name!r}", code="backend", next=nearest(name, [*points])
        )
    return points[name]


@cache
def find_backend(name: str) -> Any:
    """An installed backend by name."""
    return require_backend(name).load()


DTYPES = ("float32", "bfloat16", "float64")


def _float(dtype: Any) -> Any:
    """A dtype's name: `torch.bfloat16` and `bf16` are `bfloat16` too."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    name = {short: long for long, short in types.NAMES.items()}.get(name, name)
    if name not in DTYPES:
        raise UnsupportedError(
            f"dtype {dtype!r} is not one a model computes in",
            code="dtype",
            next=f"use one of {', '.join(DTYPES)}",
        )
    return name


def request_for(
    spec: Any,
    preset: str | None = None,
    config: Any = None,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    param_dtype: str | None = None,
    state_dtype: str | None = None,
    form: str = "auto",
    default: str | None = None,
) -> Request:
    """What `compile` asks a backend to build; `default` is the preset where none is named."""
    found = resolve(spec)
    if isinstance(found, Rule):
        raise SpecError(
            f"{found.name} is a rule, not a model",
            code="compile-rule",
            next="use it in a block or a spec",
        )
    if isinstance(found, Block):
        found = spec_of_block(found, config)
    if preset is None and config is None and default in found.presets:
        preset = default
    dtype, param_dtype, state_dtype = (_float(d) for d in (dtype, param_dtype, state_dtype))
    chosen = found.configure(preset, config)
    options = Options(dtype=dtype, param_dtype=param_dtype, state_dtype=state_dtype, form=form)
    return Request(found.name, found.trace(chosen), chosen, found, options, device)


def request_for_rule(
    rule: Rule, sizes: Mapping[str, int], *, dtype: str = "float32"
) -> RuleRequest:
    """A rule alone on operands [B, T, H, …] of some sizes; H is 1 unless it is given.

    Operands are in `dtype`, as in a model. Those that the domain bounds, such as decays and
    strengths, and the states are float32 at least. Raises SpecError where a size is missing.
    """
    letters = _letters(rule)
    missing = [d for d in letters if d not in sizes]
    if missing:
        raise SpecError(
            f"rule {rule.name} needs the size of {' and '.join(missing)}",
            code="sizes-missing",
            facts=[
                f"{d} is an axis of {', '.join(n for n, s in rule.operands.items() if d in s)}"
                for d in missing
            ],
            next=f"add --sizes {all_sizes(rule, sizes)}",
        )
    unknown = [d for d in sizes if d not in (*letters, "H")]
    if unknown:
        raise SpecError(
            f"rule {rule.name} has no dim {unknown[0]}",
            code="sizes-dim",
            facts=[f"dims: {', '.join(letters)}, and H, the heads"],
            next=f"write --sizes {all_sizes(rule, sizes)}",
        )
    lead = (dims.symbol("B"), dims.symbol("T"), sizes.get("H", 1))
    bounded = {name for name, text in rule.domain.items() if text != "unit"}
    operands = {
        name: Tensor("F" if name in bounded else "f", (*lead, *(sizes[d] for d in shape)))
        for name, shape in rule.operands.items()
    }
    name = _float(dtype)
    return RuleRequest(rule.name, rule.trace(operands), rule, Options(dtype=name))


def all_sizes(rule: Rule, sizes: Mapping[str, int]) -> str:
    """`K=128,V=64,H=4`: what is given of a rule's sizes, and an example of each that is missing."""
    found = {d: sizes.get(d, 128) for d in _letters(rule)}
    found |= {"H": sizes["H"]} if "H" in sizes else {}
    return ",".join(f"{d}={n}" for d, n in found.items())


def _letters(rule: Rule) -> list[str]:
    """The dims of a rule."""
    return list(dict.fromkeys(d for shape in rule.operands.values() for d in shape))


def compile(
    spec: Any,
    preset: str | None = None,
    config: Any = None,
    *,
    backend: str = "eager",
    device: str = "cpu",
    dtype: str = "float32",
    param_dtype: str | None = None,
    state_dtype: str | None = None,
    form: str = "auto",
) -> Any:
    """An `nn.Module` of a spec, its parameters on `meta`.

    spec: a name, `path.py:function`, or the object.  preset, config: which config (`full` by
    default; `config` may be an instance, or a `config.json`).  dtype: of the computation;
    param_dtype and state_dtype: of what is stored, where they differ.  form: of recurrences.
    """
    request = request_for(
        spec, preset, config, device=device, dtype=dtype, param_dtype=param_dtype,
        state_dtype=state_dtype, form=form,
    )  # fmt: skip
    return find_backend(backend).build(request)


def op(rule: Any, backend: str = "eager", form: str = "auto") -> Any:
    """A rule as a torch function, with gradients and without a model.

    rule: the object, or `path.py:name`.  form: auto, recurrent, chunk or parallel.

    `f(q, k, …, initial_state=None, lengths=None, padding="right", cu_seqlens=None,
    return_state=False)` takes the rule's operands [B, T, H, …], [B, T, …] (one for all heads),
    [H, …] (one for all tokens) or without both; H is all heads or a divisor of them, and value head
    h reads head h // (heads // H). It returns the outputs [B, T, heads, …] in the dtype of the
    first operand, a tuple where the rule has several, and with return_state also the final state.
    A state is [R, heads, K, V] in float32, or float64 where the first operand is; a tuple in the
    rule's order where it has several. Rows R are the batch, or the sequences that cu_seqlens packs
    in one line [1, T]. Programs are emitted at first use: `f.files`, `f.kernels()`.
    """
    found = resolve(rule)
    if not isinstance(found, Rule):
        kind = type(found).__name__.lower()
        raise SpecError(
            f"{found.fn.__name__} is a {kind}, not a rule",
            code="op-rule",
            next="archir.compile makes a model of it; archir.op takes what @ar.recurrence made",
        )
    place = find_backend(backend)
    lower(found.trace(), "prefill", stage="form", form=form)  # refuses a form that is not legal
    return place.operator(found, form)
