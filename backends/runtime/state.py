"""A state: what decoding carries from call to call, as a handle that is used once.

Entries are nested by scope. `prefill`, `decode` and every method that says so consume a handle and
return a new one: buffers are reused, so the old handle would show a past that has changed, and
raises instead. `clone`, `select`, `concat` and `snapshot` leave it alive.

Two sorts of entries. Growing ones (kv, latent) only append: a snapshot shares their storage and
remembers lengths, and a later write into what it needs goes into a copy (`backends.eager.cache`).
Fixed ones (matrix, conv) are tensors that no program writes in place, so sharing them is free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import torch

from archir import dims, ir
from archir.diagnostics import MismatchError, UnsupportedError, nearest
from archir.ir import Function, Module
from archir.passes.specialize import inference
from archir.text import print_module
from archir.types import Tensor

DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
}
GROWING = ("kv", "latent")


@dataclass(frozen=True)
class StateLayout:
    """How a library keeps states: a matrix as [K, V] or [V, K]; the window of a convolution with W
    taps as [C, W] or [C, W − 1], channels first or last."""

    keys_first: bool
    whole_window: bool
    channels_first: bool = True


STATE_LAYOUTS = {
    "fla": StateLayout(keys_first=True, whole_window=True),
    "transformers": StateLayout(keys_first=True, whole_window=True),
    "fla_v_first": StateLayout(keys_first=False, whole_window=True),
    "mlx": StateLayout(keys_first=False, whole_window=False, channels_first=False),
    "vllm": StateLayout(keys_first=False, whole_window=False),
}


@dataclass(frozen=True)
class Slot:
    """What a state keeps at one path: its kind, its lowered type, and what its axes are."""

    kind: str
    type: str
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.type}" + (f" as [{', '.join(self.axes)}]" if self.axes else "")


@dataclass(frozen=True)
class Schema:
    """What states of a spec look like; states go between models whose schemas are equal.

    hash: of the traced module's canonical text without dropout, so it stands for what the config
    computes, not for the weights.
    module: the prefill that declares the entries; None where a file told the schema.
    """

    spec: str
    hash: str
    slots: Mapping[str, Slot]
    module: Module | None = None

    def differences(self, other: Schema) -> list[str]:
        """What a state of `other` has otherwise, one line each."""
        found = []
        for path in {**self.slots, **other.slots}:
            mine, theirs = self.slots.get(path), other.slots.get(path)
            if mine != theirs:
                found.append(f"{path}: {theirs or 'nothing'}, where {mine or 'nothing'} is needed")
        if len(found) > 6:
            found[6:] = [f"and {len(found) - 6} more"]
        if self.hash != other.hash and not found:
            found.append(f"entries agree, programs do not: {other.hash}, {self.hash} is needed")
        return found

    def growing(self, path: str) -> bool:
        """Whether the entry at a path only appends."""
        return self.slots[path].kind in GROWING

    @property
    def fixed(self) -> dict[str, Slot]:
        """The entries that do not grow: they cannot forget their newest tokens."""
        kinds = (*GROWING, "length")
        return {path: slot for path, slot in self.slots.items() if slot.kind not in kinds}


def schema_of(spec: str, traced: Module, module: Module) -> Schema:
    """The schema of a spec, from its prefill with concrete dtypes and recurrences still whole."""
    text = print_module(inference(traced), locs=False)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    axes = _matrix_axes(module)
    slots = {"length": Slot("length", "i64[R]")}
    for path, field in ir.fields(module, "state").items():
        kind = field.attrs["kind"]
        named = ("R", "past", "channel") if kind == "conv" else axes.get(path, ())
        slots[path] = Slot(kind, str(field.value.type), named)
    return Schema(spec, digest, slots, module)


def _matrix_axes(module: Module) -> dict[str, tuple[str, ...]]:
    """Axes of every state of a rule: R, H, then "key" or "value" for what its outputs keep.

    An axis whose letter does not tell which it is keeps the letter.
    """
    found: dict[str, tuple[str, ...]] = {}
    for scope, function in ir.scopes(module):
        paths = {f.value: f.path for f in function.fields if f.kind == "state"}
        for op in function.ops:
            if op.kind == "cast" and op.values[0] in paths:
                paths[op.result] = paths[op.values[0]]
            if op.kind != "state_update":
                continue
            rule = module[op.attrs["rule"].name]
            states = rule.attrs["states"]
            outputs = {
                str(d)
                for v in rule.outputs[states:]
                if isinstance(v.type, Tensor)
                for d in v.type.shape
            }
            kept = op.values[-1 - states : -1]
            for value, declared in zip(kept, rule.inputs[:states], strict=True):
                assert isinstance(declared.type, Tensor)
                letters = [str(d) for d in declared.type.shape]
                told = len(set(letters)) == 2 and len(outputs & set(letters)) == 1
                named = ("value" if x in outputs else "key" for x in letters) if told else letters
                found[ir.join(scope, paths[value])] = ("R", "H", *named)
    return found


@dataclass(frozen=True)
class Draft:
    """The last decode of several tokens, of which `accept` may keep fewer.

    inputs: what the model was called with.  bounds: of rows on the token grid, None where dense.
    counts: new tokens per row.  before: the entries before the call, None where all only append.
    """

    inputs: tuple[torch.Tensor, ...]
    bounds: tuple[tuple[int, ...], tuple[int, ...]] | None
    counts: tuple[int, ...]
    before: dict[str, Any] | None


class Snapshot:
    """A state's content at one moment; `State.restore` goes back to it as often as wanted.

    It shares storage with the state: what is written later below its lengths is written elsewhere.
    """

    def __init__(self, entries: dict[str, Any], schema: Schema) -> None:
        self._entries, self._schema = entries, schema

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens seen, per row."""
        return self._entries["length"]


class State:
    """A state of `model`: `lengths` says how many tokens each row has seen."""

    def __init__(self, entries: dict[str, Any], model: Any, draft: Draft | None = None) -> None:
        self._entries: dict[str, Any] | None = entries
        self._model, self._draft = model, draft
        self._schema: Schema = model.state_schema
        self._lengths = tuple(entries["length"])
        self._snapshots: tuple[Snapshot, ...] = ()

    def __copy__(self) -> State:
        """A copy is a clone: two handles on one storage would each change the other's past."""
        return self.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        return self.clone()

    def __repr__(self) -> str:
        if self._entries is None:
            return f"State(consumed, lengths={list(self._lengths)})"
        return f"State(lengths={list(self._lengths)}, bytes={self.total_nbytes})"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens seen, per row."""
        return self._lengths

    @property
    def consumed(self) -> bool:
        """Whether a call has taken this handle."""
        return self._entries is None

    def check(self, model: Any) -> None:
        """Raises where this handle is dead, or a state of another spec, config or dtype."""
        self._alive()
        _require_same(model.state_schema, self._schema, "this state")

    def take(self, model: Any = None) -> dict[str, Any]:
        """The entries, for `model` to go on with; this handle is dead afterwards."""
        entries = self._alive()
        self._entries, self._draft, self._snapshots = None, None, ()
        if model is None or model is self._model:
            return entries
        # files emitted into another folder have a class of their own
        cache = model._support.Cache
        return _map(
            entries,
            lambda path, x: cache.adopt(x) if self._schema.growing(path) else x,
        )

    def _alive(self) -> dict[str, Any]:
        if self._entries is not None:
            return self._entries
        raise MismatchError(
            "this state was consumed by an earlier call",
            code="state-consumed",
            facts=[f"it had seen {list(self._lengths)} tokens"],
            next="go on with the state that call returned, or clone() a state to branch",
        )

    # ---- reading

    def items(self) -> Iterator[tuple[str, Any]]:
        """Every entry by path: [R, longest, …] with zeros behind shorter rows where it grows,
        [R, …] where it is fixed, and `length`, a tuple. What is yielded must not be written."""
        for path, entry in _walk(self._alive(), ""):
            yield path, entry.values if self._schema.growing(path) else entry

    def nbytes(self) -> dict[str, int]:
        """Bytes of memory that each entry holds, room for more tokens included."""
        return {
            path: (entry.storage if self._schema.growing(path) else entry).nbytes
            for path, entry in _walk(self._alive(), "")
            if self._schema.slots[path].kind != "length"
        }

    @property
    def total_nbytes(self) -> int:
        """Bytes of memory of all entries together."""
        return sum(self.nbytes().values())

    def to(self, layout: str) -> dict[str, torch.Tensor]:
        """The matrix states and convolution windows by path as another library keeps them.

        layout: "fla" or "transformers", matrices [R, H, K, V] and windows [R, C, W];
        "fla_v_first", [R, H, V, K] and [R, C, W]; "vllm", [R, H, V, K] and [R, C, W − 1]; "mlx",
        [R, H, V, K] and [R, W − 1, C]. Of W columns the oldest is zero: no next step reads it.
        Other states of rules come as they are; all are copies. Raises `UnsupportedError` for
        another layout, or for a square state whose rule does not tell keys from values.
        """
        theirs = _layout(layout)
        return {
            path: self._exported(x, path, theirs).clone(memory_format=torch.contiguous_format)
            for path, x in self.items()
            if path in self._schema.fixed
        }

    def from_layout(self, tensors: Mapping[str, torch.Tensor], layout: str) -> State:
        """This state with some entries as another library made them, the inverse of `to`.

        tensors: by path, in the shapes `to(layout)` gives. Consumes this handle.
        """
        theirs, mine, own = _layout(layout), self.to(layout), dict(self.items())
        problems = [
            f"{path}: {list(x.shape)} given, {list(mine[path].shape) if path in mine else 'no'} "
            "matrix or window here"
            for path, x in tensors.items()
            if path not in mine or x.shape != mine[path].shape
        ]
        if problems:
            raise MismatchError(
                f"{len(problems)} of the tensors given are no such states of {self._schema.spec}",
                code="state-layout",
                facts=problems[:6],
                next=f"state.to({layout!r}) lists paths and shapes",
            )
        made = {
            path: self._imported(x.to(own[path].device, own[path].dtype, copy=True), path, theirs)
            for path, x in tensors.items()
        }
        return self._next(lambda path, x: made.get(path, x))

    def _exported(self, x: torch.Tensor, path: str, theirs: StateLayout) -> torch.Tensor:
        """An entry as a library keeps it."""
        if self._schema.slots[path].kind != "conv":
            return self._swapped(x, path, theirs)
        x = torch.nn.functional.pad(x, (0, 0, 1, 0)) if theirs.whole_window else x
        return x.transpose(1, 2) if theirs.channels_first else x

    def _imported(self, x: torch.Tensor, path: str, theirs: StateLayout) -> torch.Tensor:
        """The inverse of `_exported`."""
        if self._schema.slots[path].kind != "conv":
            return self._swapped(x, path, theirs)
        x = x.transpose(1, 2) if theirs.channels_first else x
        return (x[:, 1:] if theirs.whole_window else x).contiguous()

    def _swapped(self, x: torch.Tensor, path: str, theirs: StateLayout) -> torch.Tensor:
        """A state of a rule with its last axes in the other order where a library has it so; the
        same function goes back, as a swap is its own inverse."""
        *_, first, second = self._schema.slots[path].axes
        if len(self._schema.slots[path].axes) != 4:
            return x
        if {first, second} != {"key", "value"}:
            raise UnsupportedError(
                f"{path} is [R, H, {first}, {second}]: nothing says which axis is that of keys",
                code="state-layout",
                next='name the axes of keys and values apart in the rule: "q:K k:K v:V -> o:V"',
            )
        return x if (first == "key") == theirs.keys_first else x.transpose(2, 3)

    # ---- rows

    def clone(self) -> State:
        """A second handle with storage of its own."""
        entries = _map(self._alive(), lambda path, x: x if path == "length" else x.clone())
        draft = self._draft
        if draft and draft.before:
            draft = Draft(draft.inputs, draft.bounds, draft.counts, _shared(draft.before))
        return State(entries, self._model, draft)

    def select(self, rows: Any) -> State:
        """A new state of some rows, in any order, repeats allowed, with storage of its own.

        Raises `MismatchError` where a row is not in 0 … R − 1.
        """
        entries = self._alive()
        chosen = self._rows(rows)

        def pick(path: str, x: Any) -> Any:
            if path == "length":
                return tuple(x[r] for r in chosen)
            if self._schema.growing(path):
                return x.select(chosen)
            return x.index_select(0, torch.tensor(chosen, dtype=torch.int64, device=x.device))

        return State(_map(entries, pick), self._model)

    def reset(self, rows: Any) -> State:
        """These rows back to empty, to be used by another sequence. Consumes this handle.

        Raises `MismatchError` where a row is not in 0 … R − 1.
        """
        self._alive()
        cleared = set(self._rows(rows))
        return self._kept([0 if r in cleared else n for r, n in enumerate(self._lengths)])

    @staticmethod
    def concat(states: Sequence[State]) -> State:
        """The rows of several states one after another, with storage of their own.

        Raises `MismatchError` for no states, dead ones, or states of unlike specs.
        """
        if not states:
            raise MismatchError(
                "concat needs one state at least, none is given",
                code="state-concat",
                next="model.empty_state(0) is a state without rows",
            )
        first = states[0]
        entries = [dict(_walk(state._alive(), "")) for state in states]
        for state in states[1:]:
            _require_same(first._schema, state._schema, "a state to concat")

        def join(path: str, x: Any) -> Any:
            parts = [found[path] for found in entries]
            if path == "length":
                return tuple(n for part in parts for n in part)
            return x.concat(parts) if first._schema.growing(path) else torch.cat(parts)

        return State(_map(first._alive(), join), first._model)

    def _rows(self, rows: Any) -> list[int]:
        chosen = _ints(rows, "rows")
        for r in chosen:
            if not 0 <= r < len(self._lengths):
                raise MismatchError(
                    f"row {r} is not in a state of {len(self._lengths)} rows",
                    code="state-rows",
                    facts=[f"rows: {chosen}"],
                    next="rows are counted from 0",
                )
        return chosen

    # ---- going back

    def snapshot(self) -> Snapshot:
        """This moment, to `restore` later. Nothing is copied, and this handle stays alive."""
        return Snapshot(_shared(self._alive()), self._schema)

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """What `prefill(…, snapshot_every=n)` kept: the i-th is of the first (i + 1) · n new tokens
        of every row, or of all that it has. They belong to the handle that prefill returned, others
        have none; read them before a call consumes it, a dead handle raises."""
        self._alive()
        return self._snapshots

    def restore(self, snapshot: Snapshot) -> State:
        """The state at the moment of `snapshot`. Consumes this handle, not the snapshot.

        Raises `MismatchError` for a snapshot of another spec.
        """
        self._alive()
        _require_same(self._schema, snapshot._schema, "this snapshot")
        self.take()
        return State(_shared(snapshot._entries), self._model)

    def truncate(self, length: Any) -> State:
        """Only the first `length` tokens of every row (an integer, or one per row).

        Consumes this handle. Raises `MismatchError` where a row has fewer tokens, and where a row
        would have to lose some, but not all, of what a fixed entry has taken in.
        """
        self._alive()
        kept = self._per_row(length, "length")
        for row, (n, have) in enumerate(zip(kept, self._lengths, strict=True)):
            if not 0 <= n <= have:
                raise MismatchError(
                    f"row {row} has {have} tokens, it cannot be cut to {n}",
                    code="state-truncate",
                    facts=[f"tokens seen: {list(self._lengths)}"],
                    next=f"give lengths between 0 and {have}" if have else "leave the row at 0",
                )
        fixed = self._schema.fixed
        partly = [r for r, n in enumerate(kept) if 0 < n < self._lengths[r]]
        if fixed and partly:
            facts = [f"{path} ({slot.kind})" for path, slot in fixed.items()]
            raise MismatchError(
                f"row {partly[0]} cannot be cut from {self._lengths[partly[0]]} to "
                f"{kept[partly[0]]} tokens: {len(fixed)} entries do not remember single tokens",
                code="state-truncate",
                facts=facts[:6] + [f"and {len(facts) - 6} more"] * (len(facts) > 6),
                next="take snapshot() where you may want to return to, or accept() part of a draft",
            )
        return self._kept(kept)

    def accept(self, n: Any) -> State:
        """Only the first n tokens of the decode that made this state (an integer, or one per row).

        Equal to having decoded n tokens. Entries that only append forget the others; where there
        are fixed ones too, the n tokens run again from the state before the call. Consumes this
        handle. Raises `MismatchError` where this state does not come right from a decode of
        several tokens, or where a row had fewer than n.
        """
        self._alive()
        draft = self._draft
        if draft is None:
            raise MismatchError(
                "there is no draft to accept a part of: this state does not come from a decode "
                "of several tokens",
                code="state-accept",
                next="accept right after the decode that scored the draft",
            )
        kept = self._per_row(n, "n")
        for row, (new, have) in enumerate(zip(kept, draft.counts, strict=True)):
            if not 0 <= new <= have:
                raise MismatchError(
                    f"row {row} decoded {have} tokens, {new} of them cannot be accepted",
                    code="state-accept",
                    facts=[f"tokens of the last decode: {list(draft.counts)}"],
                    next=f"accept between 0 and {have}",
                )
        model = self._model
        if tuple(kept) == draft.counts:
            return State(self.take(), model)
        if draft.before is None:
            have = zip(self._lengths, draft.counts, kept, strict=True)
            return self._kept([length - new + keep for length, new, keep in have])
        self.take()
        before = State(_shared(draft.before), model)
        return _again(model, before, draft, kept) if any(kept) else before

    def _kept(self, lengths: Sequence[int]) -> State:
        """Rows with fewer tokens; a row that loses some has none left, or only entries that grow.

        Cut entries keep their storage, so that what follows is written in place.
        """
        empty = [r for r, n in enumerate(lengths) if n == 0]

        def cut(path: str, x: Any) -> Any:
            if path == "length":
                return tuple(lengths)
            if self._schema.growing(path):
                return x.cut(tuple(lengths))
            if not empty:
                return x
            return x.index_fill(0, torch.tensor(empty, device=x.device), 0)

        return self._next(cut)

    def _next(self, change: Callable[[str, Any], Any]) -> State:
        """The handle after this one."""
        return State(_map(self.take(), change), self._model)

    def _per_row(self, given: Any, name: str) -> list[int]:
        if not hasattr(given, "__len__") or getattr(given, "ndim", 1) == 0:
            return [index(given)] * len(self._lengths)
        found = _ints(given, name)
        if len(found) != len(self._lengths):
            raise MismatchError(
                f"{len(found)} values of {name} for a state of {len(self._lengths)} rows",
                code="state-rows",
                next="give one integer for all rows, or one per row",
            )
        return found

    # ---- files

    def save(self, path: str | Path) -> None:
        """Writes a `.safetensors` file that `model.load_state` reads.

        Written aside and renamed: after a crash, an older file is still whole.
        """
        from backends.runtime.state_file import write

        tensors = {p: x for p, x in self.items() if self._schema.slots[p].kind != "length"}
        write(Path(path), self._schema, self._lengths, tensors)

    @staticmethod
    def load(path: str | Path, model: Any) -> State:
        """A state that `save` wrote, on the device of `model`.

        Raises `MismatchError` for no state file, one cut short or edited, or one of another spec,
        config or dtype.
        """
        from backends.runtime.state_file import read

        saved, lengths, tensors = read(Path(path))
        _require_same(model.state_schema, saved, f"the state in {path}")
        state = model.empty_state(len(lengths))
        cache = model._support.Cache

        def fill(at: str, x: Any) -> Any:
            if at == "length":
                return lengths
            found = tensors[at].to(model.device)
            return cache.of(found, lengths) if model.state_schema.growing(at) else found

        return state._next(fill)


def draft(
    state_before: dict[str, Any], schema: Schema, inputs: Sequence[Any], bounds: Any, counts: Any
) -> Draft | None:
    """What `accept` will need after a decode; made before the call, as it writes the entries."""
    if max(counts, default=0) < 2:
        return None
    before = _shared(state_before) if schema.fixed else None
    return Draft(tuple(inputs), bounds, tuple(counts), before)


def _again(model: Any, before: State, draft: Draft, counts: Sequence[int]) -> State:
    """The state after the first `counts[r]` tokens of each row of a draft."""
    x, *others = draft.inputs
    how: dict[str, Any] = {"phase": "decode", "head": "last", "state": before, "drop": False}
    if draft.bounds is None and not others and len(set(counts)) == 1:
        _, after = model(x[:, : counts[0]], **how)
    else:
        lines = range(0, x.shape[0] * x.shape[1], max(x.shape[1], 1))
        start = draft.bounds[0] if draft.bounds else tuple(lines)
        stop = tuple(a + n for a, n in zip(start, counts, strict=True))
        _, after = model(x, *others, rows=(start, stop), **how)
    after._draft = None
    return after


def _require_same(mine: Schema, theirs: Schema, what: str) -> None:
    """Raises unless two schemas agree."""
    if mine is theirs or (mine.hash == theirs.hash and mine.slots == theirs.slots):
        return
    other = f"{mine.spec} cannot go on with it"
    if mine.spec == theirs.spec:
        other = "of another config or dtype"
    raise MismatchError(
        f"{what} is one of {theirs.spec}, {other}",
        code="state-model",
        facts=mine.differences(theirs),
        next="go on with the spec, config and dtype that made it; weights may differ",
    )


def _layout(name: str) -> StateLayout:
    if name not in STATE_LAYOUTS:
        raise UnsupportedError(
            f"there is no state layout {name!r}",
            code="state-layout",
            next=nearest(name, [*STATE_LAYOUTS]),
        )
    return STATE_LAYOUTS[name]


def _ints(given: Any, name: str) -> list[int]:
    values = given.tolist() if hasattr(given, "tolist") else [*given]
    if not all(isinstance(v, int) for v in values):
        raise MismatchError(
            f"{name} must be a flat list of integers, {values!r} given",
            code="state-rows",
            next="give integers, one for each row that is meant",
        )
    return values


def _shared(entries: dict[str, Any]) -> dict[str, Any]:
    """The same entries in dicts of their own; caches share their storage."""
    return _map(entries, lambda _, x: x.share() if hasattr(x, "share") else x)


def _map(entries: dict[str, Any], change: Callable[[str, Any], Any], scope: str = "") -> Any:
    """Entries with every leaf replaced by `change(path, leaf)`."""
    made = {}
    for key, value in entries.items():
        path = ir.join(scope, key)
        made[key] = _map(value, change, path) if isinstance(value, dict) else change(path, value)
    return made


def _walk(entries: dict[str, Any], scope: str) -> Iterator[tuple[str, Any]]:
    for key, value in entries.items():
        path = ir.join(scope, key)
        if isinstance(value, dict):
            yield from _walk(value, path)
        else:
            yield path, value


def empty(schema: Schema, rows: int, device: Any, support: Any, reserve: int) -> dict[str, Any]:
    """The entries of a schema's module before any token, nested by scope."""
    module = schema.module
    assert module is not None
    table = {f.name: f for f in module.functions}
    binding = {"R": rows, "P": 0}
    nothing = (0,) * rows

    def build(function: Function) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for field in function.fields:
            if field.kind != "state":
                continue
            type_ = field.value.type
            assert isinstance(type_, Tensor)
            kind = field.attrs["kind"]
            if kind == "length":
                made[field.path] = nothing
                continue
            shape = tuple(dims.evaluate(d, binding) for d in type_.shape)
            zeros = torch.zeros(shape, dtype=DTYPES[type_.dtype], device=device)
            grows = kind in GROWING
            made[field.path] = support.Cache.of(zeros, nothing, reserve) if grows else zeros
        for op in function.ops:
            if op.kind == "call":
                inner = build(table[op.attrs["callee"].name])
                if inner:
                    made[op.attrs["scope"]] = inner
        return made

    return {"length": nothing, **build(module.entry)}
