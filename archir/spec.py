"""A spec: a traced function with its config, presets and published names; and how one is found.

A spec is given as a built-in name (`"gpt2"`), `path/to/file.py:function`, or the object itself.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from archir import source
from archir.diagnostics import ArchirError, MismatchError, SpecError, UnsupportedError, nearest
from archir.dims import symbol
from archir.dsl import Block, config_sizes, is_config
from archir.ir import Module
from archir.passes.specialize import inference
from archir.recurrence import Rule
from archir.trace import declared, trace_entry
from archir.types import Tensor, Type

TOKENS = Tensor("i64", (symbol("B"), symbol("T")))  # of an input without annotation

# Fields of any Hugging Face config that never change what a model computes.
_INERT = {
    *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "_name_or_path"),
    *("initializer_range", "return_dict", "output_hidden_states", "output_attentions"),
    *("id2label", "label2id", "problem_type", "is_encoder_decoder", "auto_map", "name_or_path"),
    *("chunk_size_feed_forward", "task_specific_params", "_attn_implementation_autoset"),
}


@dataclass(frozen=True)
class HuggingFace:
    """How a published `config.json` becomes a config, and back.

    read: config field → key, or several keys joined by `|`, which must agree; the first is written;
    `a.b` reads a nested object.  absent: key → the value its absence means.  neutral: key → the
    values under which it changes nothing.  inert: keys that never change the model.
    Any other key is an error: nothing is lost silently.
    """

    model_type: str
    read: Mapping[str, str]
    absent: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    inert: tuple[str, ...] = ()

    def config(self, cls: type, found: Mapping[str, Any]) -> Any:
        """An instance of the config class; SpecError names the field that disagrees."""
        kind = found.get("model_type")
        if kind is not None and kind != self.model_type:
            raise SpecError(
                f"config.json has model_type {kind!r}, this spec reads {self.model_type!r}",
                code="config-model-type",
                next="compile it with the spec of that family: archir list",
            )
        flat = dict(_flatten(found))
        used: set[str] = set()
        values: dict[str, Any] = {}
        for name, keys in self.read.items():
            choices = keys.split("|")
            used |= set(choices)
            present = {k: flat[k] for k in choices if flat.get(k) is not None}
            if len(set(present.values())) > 1:
                raise SpecError(
                    f"config.json gives {cls.__name__}.{name} two values",
                    code="config-twice",
                    facts=[f"{k} = {value!r}" for k, value in present.items()],
                    next="keep the one the weights were trained with",
                )
            if present:
                values[name] = next(iter(present.values()))
            elif any(k in self.absent for k in choices):
                values[name] = next(self.absent[k] for k in choices if k in self.absent)
            else:
                raise SpecError(
                    f"config.json has no {choices[0]!r}, which gives {cls.__name__}.{name}",
                    code="config-missing",
                    facts=[f"found: {', '.join(sorted(k for k in flat if flat[k] is not None))}"],
                    next=f"add {choices[0]!r}: without it {cls.__name__}.{name} is unknown",
                )
        self._refuse_others({k: v for k, v in flat.items() if k not in used})
        for name, value in values.items():
            values[name] = _typed(cls, name, value, self.read[name].split("|")[0])
        return cls(**values)

    def _refuse_others(self, rest: Mapping[str, Any]) -> None:
        """Fields that change the model come first: they say more than an unknown name."""
        for key, value in rest.items():
            allowed = self.neutral.get(key)
            if allowed is not None and value is not None and value not in allowed:
                shown = " or ".join(repr(v) for v in allowed)
                raise SpecError(
                    f"config field {key!r} = {value!r} changes the model, and is not supported",
                    code="config-unsupported",
                    facts=[f"supported: {key} = {shown}"],
                    next="use a checkpoint without it, or extend the spec",
                )
        inert = (*_INERT, *self.inert)
        for key, value in rest.items():
            known = key in self.neutral or any(key == i or key.startswith(f"{i}.") for i in inert)
            if not known and value is not None:
                raise SpecError(
                    f"config field {key!r} = {value!r} is not known to this spec, "
                    "and may change the model",
                    code="config-unknown",
                    next="remove the field if it is inert, or support it in the spec",
                )

    def publish(self, config: Any) -> dict[str, Any]:
        """The config as a published `config.json`; a field it cannot say must be at its default."""
        for f in dataclasses.fields(config):
            value = getattr(config, f.name)
            if f.name not in self.read and value != f.default:
                raise UnsupportedError(
                    f"{type(config).__name__}.{f.name} = {value!r} has no field in the config.json "
                    f"of {self.model_type!r}",
                    code="config-publish",
                    facts=[f"what is published means {f.name} = {f.default!r}"],
                    next="keep the config in code, and the weights in a file of their own",
                )
        made: dict[str, Any] = {"model_type": self.model_type}
        for name, keys in self.read.items():
            value = getattr(config, name)
            if value is None:
                continue
            *outer, last = keys.split("|")[0].split(".")
            place = made
            for part in outer:
                place = place.setdefault(part, {})
            place[last] = value
        for key, allowed in self.neutral.items():
            if allowed[0] is not None and "." not in key:
                made.setdefault(key, allowed[0])
        return made


def _typed(cls: type, name: str, value: Any, key: str) -> Any:
    """A published value as its field's type; lists become tuples, whole floats stay floats."""
    value = tuple(value) if isinstance(value, list) else value
    hint = typing.get_type_hints(cls)[name]
    kinds = [typing.get_origin(k) or k for k in (typing.get_args(hint) or (hint,))]
    if typing.get_origin(hint) is tuple:
        kinds = [tuple]
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) not in kinds:
        raise SpecError(
            f"config field {key!r} = {value!r} is a {type(value).__name__}, "
            f"{cls.__name__}.{name} is {getattr(hint, '__name__', hint)}",
            code="config-type",
            next=f"write {key!r} as {' or '.join(k.__name__ for k in kinds)}",
        )
    return value


def _flatten(found: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in found.items():
        if isinstance(value, Mapping) and value and key not in _INERT:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass(frozen=True)
class Spec:
    """An architecture: a function of tokens and a config (None where it takes no config).

    presets: name → config; every built-in has `tiny` and `full`.  from_hf: how `config.json` is
    read.  names: convention (`hf`, `gguf`) → function of the config → {weight: layout}.  ignore:
    patterns of published tensors that never matter.
    """

    fn: Callable[..., Any]
    config_class: type | None
    presets: Mapping[str, Any] = field(default_factory=dict)
    from_hf: HuggingFace | None = None
    names: Mapping[str, Callable[[Any], Mapping[str, Any]]] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.fn.__name__

    @property
    def doc(self) -> str:
        return (self.fn.__doc__ or "").strip()

    def configure(self, preset: str | None = None, config: Any = None) -> Any:
        """The config of a preset, of a `config.json` (a path or its content), or the defaults."""
        if self.config_class is None:
            return None
        if config is not None and preset is not None:
            raise SpecError(
                f"preset {preset!r} and a config were both given",
                code="config-both",
                next="give one of them",
            )
        if config is not None:
            if isinstance(config, self.config_class):
                return config
            if is_config(config) and _same_lines(type(config), self.config_class):
                return self.config_class(**vars(config))
            if is_config(config):
                raise SpecError(
                    f"spec {self.name} takes a {self.config_class.__name__}, "
                    f"a {type(config).__name__} was given",
                    code="config-class",
                    next=f"build a {self.config_class.__name__}",
                )
            return self.published.config(self.config_class, read_config(config))
        if preset is None:
            return self.presets.get("full") or self.config_class()
        if preset not in self.presets:
            raise SpecError(
                f"spec {self.name} has no preset {preset!r}",
                code="preset-unknown",
                next=nearest(preset, [*self.presets])
                if self.presets
                else "leave preset out, or declare presets",
            )
        return self.presets[preset]

    @property
    def published(self) -> HuggingFace:
        """How configs are read and written: `from_hf`, or this spec's own fields by their names."""
        if self.from_hf is not None or self.config_class is None:
            return self.from_hf or HuggingFace(self.name, {})
        found = dataclasses.fields(self.config_class)
        absent = {f.name: f.default for f in found if f.default is not dataclasses.MISSING}
        return HuggingFace(self.name, {f.name: f.name for f in found}, absent)

    def trace(self, config: Any) -> Module:
        """The module of this spec at a config."""
        labels = _parameters(self.fn)
        fixed = {} if self.config_class is None else {labels[-1]: config}
        inputs: dict[str, Type] = {
            label: declared(self.fn, label, config_sizes((config,))) or TOKENS
            for label in labels
            if label not in fixed
        }
        return trace_entry(self.fn, self.name, inputs, fixed)

    def check_same(self, ours: Any, theirs: Any, our_name: str, file: str) -> None:
        """Raise MismatchError unless a config and that of a weight file make the same program,
        dropout aside.

        A field counts where it changes the program: `head_dim=None` and what it stands for are the
        same, and so are floats that one file keeps in float32.
        """
        facts = [
            f"{f.name}: {a!r} in {our_name}, {b!r} in the file"
            for f in dataclasses.fields(ours)
            for a, b in [(getattr(ours, f.name), getattr(theirs, f.name))]
            if not _close(a, b) and self._changes(ours, f.name, b)
        ]
        if facts:
            raise MismatchError(
                f"{our_name} and {file} are different configs of {self.name}",
                code="config-mismatch",
                facts=facts,
                next="use the config of the weights, or the weights of this config",
            )

    def _changes(self, config: Any, name: str, value: Any) -> bool:
        try:
            other = self.trace(dataclasses.replace(config, **{name: value}))
        except ArchirError:
            return True
        return inference(other) != inference(self.trace(config))


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=2**-23)
    return a == b


def _parameters(fn: Callable[..., Any]) -> tuple[str, ...]:
    return fn.__code__.co_varnames[: fn.__code__.co_argcount]


def read_config(config: Any) -> Mapping[str, Any]:
    """The content of a `config.json`: a mapping, a file, or a folder that holds one."""
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise SpecError(
            f"there is no config at {path}", code="config-file", next="give a config.json"
        )
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise SpecError(
            f"{path} is not JSON: {error}",
            code="config-file",
            next="give the config.json of a checkpoint",
        ) from None


def spec(
    config_class: type,
    *,
    presets: Mapping[str, Any] | None = None,
    from_hf: HuggingFace | None = None,
    names: Mapping[str, Callable[[Any], Mapping[str, Any]]] | None = None,
    ignore: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Spec]:
    """Declares a spec; see `Spec`."""

    if not (isinstance(config_class, type) and getattr(config_class, "__archir_config__", False)):
        raise SpecError(
            f"@ar.spec takes a config class, {config_class!r} was given",
            code="spec-config",
            loc=source.caller()[0],
            next="write @ar.config above a class of sizes, then @ar.spec(ThatClass)",
        )
    for name, preset in (presets or {}).items():
        if not isinstance(preset, config_class):
            raise SpecError(
                f"preset {name!r} is {preset!r}, not a {config_class.__name__}",
                code="spec-preset",
                loc=source.caller()[0],
                next=f"write {name!r}: {config_class.__name__}(…)",
            )

    def declare(fn: Callable[..., Any]) -> Spec:
        return Spec(fn, config_class, presets or {}, from_hf, names or {}, ignore)

    return declare


def spec_of_block(block: Block, config: Any) -> Spec:
    """A block with typed inputs as a spec of its own; without a config all inputs are typed."""
    fn = block.fn
    labels = _parameters(fn)
    untyped = tuple(p for p in labels if source.annotation(fn, p) is None)
    if config is None and not untyped:
        return Spec(fn, None)
    if not is_config(config) or len(untyped) == len(labels) or labels[-1:] != untyped:
        raise SpecError(
            f"block {block.__name__} cannot stand alone: ({', '.join(labels)}) must be inputs "
            "annotated by types in strings, then a config",
            code="block-alone",
            loc=source.definition(fn),
            next='annotate its inputs, for example x: "f[B, T, width]", and give config=Config(…)',
        )
    return Spec(fn, type(config))


GROUP = "archir.specs"
USER_MODULE = "archir_user_"  # names of modules made from users' files begin so


def builtin_names() -> list[str]:
    """The names of the installed specs."""
    return sorted(point.name for point in importlib.metadata.entry_points(group=GROUP))


def _same_lines(one: type, other: type) -> bool:
    """Whether two config classes are one: a spec named by its path loads its file anew, and a cell
    of a notebook may run twice."""

    def place(cls: type) -> Any:
        module = sys.modules.get(cls.__module__)
        fields = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        return getattr(module, "__file__", None) or cls.__module__, cls.__qualname__, fields

    return place(one) == place(other)


def resolve(given: Any) -> Spec | Block | Rule:
    """A spec, block or rule from a name, `path.py:function`, or the object itself."""
    if isinstance(given, Spec | Block | Rule):
        return given
    if not isinstance(given, str):
        raise SpecError(
            f"{given!r} is not a spec, block or rule",
            code="spec-unknown",
            next="decorate the function with @ar.spec(Config)",
        )
    if ":" in given:
        return _from_file(given)
    points = {p.name: p for p in importlib.metadata.entry_points(group=GROUP)}
    if given not in points:
        hint = nearest(given, [*points])
        hint += "" if hint.endswith("?") else "."
        raise SpecError(
            f"there is no spec {given!r}",
            code="spec-unknown",
            next=f"{hint} A spec of yours is path/to/file.py:function",
        )
    return points[given].load()


def _from_file(given: str) -> Spec | Block | Rule:
    file, _, name = given.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise SpecError(f"there is no file {file!r}", code="spec-file", next="check the path")
    key = f"{USER_MODULE}{path.stem}"
    place = importlib.util.spec_from_file_location(key, path.resolve())
    assert place is not None and place.loader is not None
    source.refresh()
    module = importlib.util.module_from_spec(place)
    sys.modules[key] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        place.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    found = {k: v for k, v in vars(module).items() if isinstance(v, Spec | Block | Rule)}
    if name not in found:
        raise SpecError(
            f"{file} has no spec, block or rule {name!r}",
            code="spec-unknown",
            next=nearest(name, [*found]) if found else "decorate the function with @ar.spec",
        )
    return found[name]


def trace(given: Any, preset: str | None = None, config: Any = None) -> Module:
    """The module of a spec, block or rule.

    preset: a preset's name.  config: a config instance, or a `config.json` (path or content).
    A block needs a config instance where it takes one; a rule takes neither.
    """
    found = resolve(given)
    if isinstance(found, Rule):
        return found.trace()
    if isinstance(found, Block):
        found = spec_of_block(found, config)
    return found.trace(found.configure(preset, config))


__all__ = [
    "HuggingFace", "Spec", "builtin_names", "read_config", "resolve",
    "spec", "spec_of_block", "trace",
]  # fmt: skip
