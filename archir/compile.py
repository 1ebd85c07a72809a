"""compile: from a spec to an `nn.Module`. The one place that looks for a backend."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any

from archir import types
from archir.diagnostics import SpecError, UnsupportedError, nearest
from archir.dsl import Block
from archir.ir import Module
from archir.pipeline import Options
from archir.recurrence import Rule
from archir.spec import Spec, resolve, spec_of_block

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


def require_backend(name: str) -> importlib.metadata.EntryPoint:
    """Where an installed backend is found; loads nothing."""
    points = {p.name: p for p in importlib.metadata.entry_points(group=GROUP)}
    if name not in points:
        raise UnsupportedError(
            f"there is no backend {name!r}", code="backend", next=nearest(name, [*points])
        )
    return points[name]


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
