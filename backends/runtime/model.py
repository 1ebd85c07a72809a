"""What every compiled model offers, whatever backend emitted its code.

The root of the emitted module tree is mixed with `Model`. Every phase goes through `__call__`, so
that hooks, sharding and checkpointing see it; programs are lowered and emitted at first use.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from archir import ir
from archir.compile import Request
from archir.diagnostics import MismatchError, UnsupportedError
from archir.draw import draw
from archir.inputs import context, vocabulary
from archir.ir import Module
from archir.layout import Layout, check_total, tensor
from archir.passes.specialize import drops, only_full
from archir.pipeline import lower
from archir.types import Tensor, is_float
from backends.api import KernelRecords
from backends.runtime import pieces
from backends.runtime import state as states
from backends.runtime.layout import Bounds, bounds
from backends.runtime.state import DTYPES, State


def _untraced(method: Callable[..., None]) -> Callable[..., None]:
    """Marks a method that torch.compile calls where it meets it, and does not trace.

    That is all `torch.compiler.assume_constant_result` does, but calling it imports the compiler,
    which takes as long as importing torch.
    """
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method


class Model(nn.Module):
    """A compiled model. Parameters are on `meta` until `init_weights` or `load_weights`."""

    _request: Request
    _backend: Any
    _folder: Path

    def _attach(self, request: Request, marked: Module, backend: Any, folder: Path) -> None:
        """marked: the request's module with what `archir.provide` changes in it; it is lowered."""
        self._request, self._backend, self._folder = request, backend, folder
        self._module = marked
        self._programs: dict[tuple[str, str, str, bool], Callable[..., Any]] = {}
        self._lowered: dict[tuple[str, str, str, bool], Module] = {}
        self._drops = drops(request.module)
        self.eval()
        self._filled: bool | None = None  # None: by whoever loads the state dict
        self._checked: tuple[Any, ...] | None = None
        self._limit = context(request.module)
        self._vocabulary = vocabulary(request.module, 0)
        for path, module in self.named_modules():
            module.scope = path  # type: ignore[assignment]

    @property
    def _support(self) -> Any:
        """The support file beside the emitted ones."""
        return self._backend.load(self._folder, "support")

    # ---- running

    def forward(
        self,
        tokens: Any,
        *inputs: Any,
        lengths: Any = None,
        padding: str = "right",
        cu_seqlens: Any = None,
        phase: str = "full",
        head: str = "all",
        state: State | None = None,
        targets: Any = None,
        rows: Bounds | None = None,
        seed: int | None = None,
        drop: bool = True,
    ) -> Any:
        """Logits [B, T, vocab] of tokens [B, T], or what `phase` and `head` ask for.

        lengths: tokens of each row, the rest is `padding`.  cu_seqlens: ends of sequences packed in
        one line [1, T].  rows: (start, stop) of every row on the grid read line by line, where they
        are known already.  seed: of dropout, which `train()` of the whole model turns on (`eval()`
        of a part does not turn it off there); each call draws one from torch's generator unless it
        is given.  drop: False leaves dropout out. Outputs at padding are finite and otherwise
        unspecified.
        """
        self._check_ready()
        x = self._input(tokens)
        rows = rows or bounds(x.shape[0], x.shape[1], lengths, padding, cu_seqlens)
        new = [x.shape[1]] * x.shape[0]
        if rows is not None:
            new = [b - a for a, b in zip(*rows, strict=True)]
            x, *inputs = self._without_padding([x, *inputs], rows)  # type: ignore[assignment]
        given = [x, *inputs, *(rows or ())]
        given += [] if targets is None else [self._targets(targets, x)]
        layout = "dense" if rows is None else "ragged"
        drawn = self._seed(seed, (phase, head, layout)) if drop else []
        program = phase, head, layout, bool(drawn)
        if phase == "full":
            self._check_context(new, [0] * len(new))
            return self.program(*program)(self, *given, *drawn)
        if state is None:
            state = self.empty_state(len(new))
        state.check(self)
        if len(state.lengths) != len(new):
            raise MismatchError(
                f"{len(new)} rows of tokens meet a state of {len(state.lengths)} rows",
                code="state-rows",
                next="decode with as many rows as the state was made with",
            )
        self._check_context(new, state.lengths)
        run = self.program(*program)
        entries, draft = state.take(self), None
        if phase == "decode" and not (drawn and self.state_schema.fixed):  # nothing is drawn again
            draft = states.draft(entries, self.state_schema, [x, *inputs], rows, new)
        made = run(self, *given, *drawn, entries)
        return made, State(entries, self, draft)

    def _without_padding(self, inputs: Sequence[Any], rows: Bounds) -> list[torch.Tensor]:
        """Inputs with zeros where no row has a token: not even NaN there reaches a gradient.
        Integers, which are looked up, stay as they are."""
        batch, length = inputs[0].shape[:2]
        floats = any(torch.is_tensor(x) and x.is_floating_point() for x in inputs)
        if not floats or sum(b - a for a, b in zip(*rows, strict=True)) == batch * length:
            return [*inputs]
        place = torch.arange(batch * length, device=self.device)
        owned = torch.zeros_like(place, dtype=torch.bool)
        for start, stop in zip(*rows, strict=True):
            owned[start:stop] = True
        owned = owned.view(batch, length)

        def clear(x: Any) -> Any:
            if not torch.is_tensor(x) or not x.is_floating_point() or x.shape[:2] != owned.shape:
                return x
            return torch.where(owned[(...,) + (None,) * (x.ndim - 2)], x, 0)

        return [clear(x) for x in inputs]

    def _seed(self, given: int | None, program: tuple[str, str, str]) -> list[int]:
        """The seed of this call's dropout as an argument; none where its program draws nothing."""
        if given is not None and not isinstance(given, numbers.Integral):
            raise MismatchError(
                f"seed={given!r} is no integer", code="seed", next="give an integer, or None"
            )
        if given is not None and not self.training:
            raise MismatchError(
                f"seed={given} is of dropout, and the model is in evaluation mode",
                code="seed-eval",
                next="call model.train() to drop, or leave seed out",
            )
        if not (self.training and self._drops):
            return []
        if not ir.fields(self.lowered(*program, training=True), "key"):
            return []
        return [int(torch.randint(2**63 - 1, (), device="cpu")) if given is None else int(given)]

    def prefill(
        self,
        tokens: Any,
        state: State | None = None,
        *,
        logits: str = "last",
        snapshot_every: int | None = None,
        seed: int | None = None,
        **layout: Any,
    ) -> tuple[Any, State]:
        """(logits, state) after tokens [B, T]; consumes `state`.

        logits: "last" [R, 1, vocab], of each row's last token, or "all" [B, T, vocab].
        snapshot_every: n reads the prompt in pieces of n tokens per row and keeps a snapshot after
        each: `state.restore(state.snapshots[i])` has seen min((i + 1) · n, all) new tokens of every
        row. There are ⌈longest row / n⌉, one at least, and the last is of the state returned. What
        comes back is otherwise the same, but each piece has draws of its own while training.
        Raises `MismatchError` where n is no positive integer.
        """
        if snapshot_every is None:
            return self(tokens, phase="prefill", head=logits, state=state, seed=seed, **layout)
        whole = isinstance(snapshot_every, numbers.Integral) and snapshot_every is not True
        if not whole or snapshot_every < 1:
            raise MismatchError(
                f"snapshot_every={snapshot_every!r}, but a piece of a prompt has 1 token or more",
                code="snapshot-every",
                next="give a positive integer, or None for no snapshots",
            )
        self._check_ready()
        x = self._input(tokens)
        rows = bounds(x.shape[0], x.shape[1], **layout)
        return pieces.read(self, x, rows, int(snapshot_every), state, logits, seed)

    def decode(self, tokens: Any, state: State, **layout: Any) -> tuple[Any, State]:
        """(logits [B, n, vocab], state) after n more tokens per row; consumes `state`."""
        return self(tokens, phase="decode", head="all", state=state, **layout)

    def loss(self, tokens: Any, targets: Any, **layout: Any) -> torch.Tensor:
        """Mean cross entropy in float32; `targets` are already shifted, −100 is ignored."""
        return self(tokens, targets=targets, head="loss", **layout)

    def stream(
        self,
        ids: Sequence[int] | torch.Tensor,
        n: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[int] = (),
    ) -> Iterator[int]:
        """Up to n new ids, one by one; greedy at temperature 0, ends after an id of `stop`.

        ids: of one prompt, a sequence or a tensor [T] or [1, T]. Nothing is dropped, in training
        mode either.
        """
        ids = _one_row(ids)
        if not ids:
            raise MismatchError(
                "there is no token to go on from: the prompt is empty",
                code="prompt-empty",
                next="give at least one id, for example the tokenizer's bos_id",
            )
        generator = torch.Generator().manual_seed(seed) if seed is not None else None
        with torch.inference_mode():
            state = self.empty_state(1, reserve=len(ids) + n)
            logits, state = self.prefill([list(ids)], state, drop=False)
            for index in range(n):
                token = _sample(_scores(logits)[0, -1], temperature, top_p, generator)
                yield token
                if token in stop or index + 1 == n:
                    return
                logits, state = self.decode([[token]], state, drop=False)

    def generate(self, tokens: Any, n: int, **options: Any) -> torch.Tensor:
        """Prompts [B, T] and up to n greedy or sampled new tokens, [B, T + n]; nothing drops."""
        temperature, top_p = options.pop("temperature", 0.0), options.pop("top_p", 1.0)
        seed = options.pop("seed", None)
        if options:
            raise UnsupportedError(f"generate does not know {sorted(options)}", code="generate")
        generator = torch.Generator().manual_seed(seed) if seed is not None else None
        found = self._input(tokens)
        with torch.inference_mode():
            state = self.empty_state(found.shape[0], reserve=found.shape[1] + n)
            logits, state = self.prefill(found, state, drop=False)
            for index in range(n):
                new = [_sample(row[-1], temperature, top_p, generator) for row in _scores(logits)]
                step = torch.tensor(new, device=found.device)[:, None]
                found = torch.cat([found, step], 1)
                if index + 1 < n:
                    logits, state = self.decode(step, state, drop=False)
        return found.clone()

    def record_taps(self, into: dict[str, torch.Tensor]) -> Any:
        """Context manager: inner values marked by `ar.tap` are collected in `into` by path."""
        return self._support.record_taps(into)

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one, so that prefill and decode exist."""
        return only_full(self._request.module) is None

    # ---- programs

    def lowered(
        self, phase: str = "full", head: str = "all", layout: str = "dense", training: bool = False
    ) -> Module:
        """The lowered module of a phase."""
        key = (phase, head, layout, training)
        if key not in self._lowered:
            o = self._request.options
            self._lowered[key] = lower(
                self._module, phase, layout, dtype=o.dtype, form=o.form, head=head,
                param_dtype=o.param_dtype, state_dtype=o.state_dtype, training=training,
                backend=self._backend.name,
            )  # fmt: skip
        return self._lowered[key]

    def program(
        self, phase: str = "full", head: str = "all", layout: str = "dense", training: bool = False
    ) -> Callable[..., Any]:
        """The emitted entry function of a phase."""
        key = (phase, head, layout, training)
        self._emit(*key)
        return self._programs[key]

    @_untraced
    def _emit(self, *key: Any) -> None:
        """Lowers, prints and loads a program unless it is there."""
        if key not in self._programs:
            self._programs[key] = self._backend.program(self, *key)

    @property
    def files(self) -> list[Path]:
        """The emitted files so far."""
        shared = (p for p in self._folder.glob("*.py") if p.name[0] != ".")
        phases = {f"{program_name(*key)}.py" for key in self._programs}
        known = ("full_", "prefill_", "decode_")
        return sorted(p for p in shared if p.name in phases or not p.name.startswith(known))

    def kernels(self) -> KernelRecords:
        """What runs beyond torch calls in the programs used so far: printed, it says of each kernel
        what it computes, what runs it here, and what gives its gradient; of a recurrence that the
        backend has no kernel for, why."""
        programs = [program_name(*key) for key in self._programs]
        return self._backend.kernels(self._folder, programs, self.device)

    def empty_state(self, rows: int, reserve: int = 16) -> State:
        """The state of `rows` rows before any token, with storage for `reserve` tokens each."""
        entries = states.empty(self.state_schema, rows, self.device, self._support, reserve)
        return State(entries, self)

    def load_state(self, path: str | Path) -> State:
        """A state that `State.save` wrote for this spec, config and dtype."""
        return State.load(path, self)

    @cached_property
    def state_schema(self) -> states.Schema:
        """What states of this model look like: they go between models with equal schemas."""
        request, o = self._request, self._request.options
        module = lower(
            request.module, "prefill", stage="precision", dtype=o.dtype,
            param_dtype=o.param_dtype, state_dtype=o.state_dtype,
        )  # fmt: skip
        return states.schema_of(request.name, request.module, module)

    # ---- weights

    @property
    def device(self) -> torch.device:
        """Where the parameters are, or will be."""
        first = next(self.parameters(), None)
        if first is None or first.is_meta:
            return torch.device(self._request.device)
        return first.device

    @property
    def config(self) -> Any:
        """The config this model was compiled for."""
        return self._request.config

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and buffers by the spec's names."""
        found = [*self.named_parameters(), *self.named_buffers()]
        return {name.replace(".float32.", ".").removeprefix("float32."): x for name, x in found}

    def init_weights(self, seed: int = 0) -> Model:
        """Draws every weight from (seed, name), whatever the device (D18). Returns the model."""
        module = self._request.module
        made = self._filling()
        with torch.no_grad():
            for path, field in (ir.fields(module, "weight") | ir.fields(module, "buffer")).items():
                target = made[path]
                values = draw(path, seed, field.attrs["init"], tuple(target.shape))
                target.copy_(torch.from_numpy(values))
        self._filled = True
        return self

    def set_weights(self, weights: Mapping[str, Any]) -> Model:
        """Copies tensors or arrays by the spec's names; every weight and buffer must be given."""
        mine = self.tensors()
        missing, extra = sorted(mine.keys() - weights.keys()), sorted(weights.keys() - mine.keys())
        shaped = [
            f"{n}: {list(mine[n].shape)} in the model, {list(weights[n].shape)} given"
            for n in mine.keys() & weights.keys()
            if tuple(mine[n].shape) != tuple(weights[n].shape)
        ]
        if missing or extra or shaped:
            facts = [f"missing: {n}" for n in missing] + [f"unknown: {n}" for n in extra] + shaped
            raise MismatchError(
                "the weights given are not those of this model",
                code="weights-mismatch",
                facts=facts[:10],
                next="model.tensors() lists names and shapes",
            )
        with torch.no_grad():
            for name, target in self._filling().items():
                target.copy_(torch.as_tensor(weights[name]))
        self._filled = True
        return self

    def load_weights(
        self, path: str | Path, progress: Callable[[int, int], None] | None = None
    ) -> Model:
        """Loads a Hugging Face folder, a `.safetensors` or a `.gguf` file. Returns the model."""
        from backends.runtime import weights

        checkpoint = weights.open_checkpoint(path)
        self._check_config(checkpoint.config, str(path))
        names, ignore = self.names(checkpoint.convention), self._request.spec.ignore
        weights.load(checkpoint, self.tensors(), names, ignore, progress, self._filling)
        self._filled = True
        return self

    def save_weights(self, folder: str | Path) -> None:
        """Writes published names and shapes, `config.json`, and the IR text."""
        from backends.runtime import weights

        self._check_ready()
        spec = self._request.spec
        config = spec.published.publish(self.config) if spec.config_class else {}
        weights.save(folder, self.tensors(), self.names("hf"), config, str(self._request.module))

    def names(self, convention: str) -> Mapping[str, Layout]:
        """Weight → published layout; a spec without names publishes its own."""
        spec, shapes = self._request.spec, {n: tuple(x.shape) for n, x in self.tensors().items()}
        if not spec.names:
            return {name: tensor(name) for name in shapes}
        if convention not in spec.names:
            raise UnsupportedError(
                f"spec {spec.name} has no names for the convention {convention!r}",
                code="names-convention",
                facts=[f"it has: {', '.join(spec.names)}"],
                next=f"give @ar.spec(…, names={{{convention!r}: …}})",
            )
        names = spec.names[convention](self.config)
        check_total(shapes, names, convention)
        return names

    def _check_config(self, found: Mapping[str, Any], path: str) -> None:
        spec = self._request.spec
        if not found or spec.config_class is None:
            return
        spec.check_same(self.config, spec.configure(config=found), "the model", path)

    def _filling(self) -> dict[str, torch.Tensor]:
        """Weights and buffers with memory, about to be filled: until then no call may use them."""
        self._filled = False
        if any(x.is_meta for x in self.tensors().values()):
            self.to_empty(device=self._request.device)
        return self.tensors()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As in nn.Module; parameters still on `meta` are given memory first."""
        if not assign:
            self._filling()
        made = super().load_state_dict(state_dict, strict=strict, assign=assign)
        self._filled = True
        return made

    def parameter_groups(self, weight_decay: float = 0.1) -> list[dict[str, Any]]:
        """Groups for an optimizer: weights the spec says decay, and those that do not."""
        decays = {
            path: bool(field.attrs["decay"])
            for path, field in ir.fields(self._request.module, "weight").items()
        }
        mine = self.tensors()
        return [
            {"params": [mine[p] for p, d in decays.items() if d], "weight_decay": weight_decay},
            {"params": [mine[p] for p, d in decays.items() if not d], "weight_decay": 0.0},
        ]

    # ---- checks

    @_untraced
    def _check_ready(self) -> None:
        first = next(self.parameters(), None)
        seen = (id(first), first.dtype, first.is_meta) if first is not None else ()
        if self._filled is not False and self._checked == seen:
            return
        empty = [n for n, x in self.tensors().items() if x.is_meta or self._filled is False]
        if empty:
            raise MismatchError(
                f"{len(empty)} parameters have no values yet, {empty[0]!r} among them",
                code="weights-uninitialised",
                next="call model.init_weights(seed) or model.load_weights(path) first",
            )
        self._check_dtypes()
        self._checked = seen

    def _check_dtypes(self) -> None:
        """Refuses parameters whose dtype was changed behind the emitted code's back."""
        declared = ir.fields(self.lowered(), "weight")
        for name, x in self.tensors().items():
            field = declared.get(name)
            if field is None or not isinstance(field.value.type, Tensor):
                continue
            want = DTYPES[field.value.type.dtype]
            if x.dtype != want:
                raise MismatchError(
                    f"{name} is {x.dtype}, the model was compiled for {want}",
                    code="weights-dtype",
                    next="compile(…, dtype=…) chooses the dtype; model.to() moves devices only",
                )

    def _check_context(self, new: Sequence[int], past: Sequence[int]) -> None:
        limit = self._limit
        if limit is None or all(n + seen <= limit for n, seen in zip(new, past, strict=True)):
            return
        row = max(range(len(new)), key=lambda r: new[r] + past[r])
        raise MismatchError(
            f"{new[row] + past[row]} tokens do not fit the context of {limit}",
            code="context-exceeded",
            facts=[f"{new[row]} new tokens after {past[row]} of past"],
            next=f"shorten the prompt to {limit} tokens, or use a longer context",
        )

    def _input(self, tokens: Any) -> torch.Tensor:
        """The first input on the device: tokens [B, T], or what the spec declares."""
        x = tokens if isinstance(tokens, torch.Tensor) else torch.as_tensor(tokens)
        declared = self._request.module.entry.inputs[0].type
        assert isinstance(declared, Tensor)
        floats = is_float(declared.dtype)
        if x.ndim != declared.rank or x.is_floating_point() != floats:
            hint = "write tokens[None] for a single row" if x.ndim + 1 == declared.rank else ""
            raise MismatchError(
                f"the input is {x.dtype} of shape {list(x.shape)}, {declared} is needed",
                code="tokens-shape",
                next=hint or "give one integer per token, a row for each sequence",
            )
        x = x.to(self.device) if floats else x.to(self.device, torch.int64)
        # A compiler that traces this call knows no values, and a GPU would have to be waited for:
        # there the lookup itself finds a wrong token.
        known = x.device.type == "cpu" and not torch.compiler.is_compiling()
        if not floats and self._vocabulary and known and x.numel():
            low, high = int(x.min()), int(x.max())
            if low < 0 or high >= self._vocabulary:
                raise MismatchError(
                    f"token {low if low < 0 else high} is outside the vocabulary of "
                    f"{self._vocabulary}",
                    code="tokens-range",
                    next="use the tokenizer that belongs to this vocabulary",
                )
        return x

    def _targets(self, targets: Any, tokens: torch.Tensor) -> torch.Tensor:
        found = targets if isinstance(targets, torch.Tensor) else torch.as_tensor(targets)
        if found.shape != tokens.shape[:2]:
            raise MismatchError(
                f"targets have shape {list(found.shape)}, tokens {list(tokens.shape[:2])}",
                code="targets-shape",
                next="give one target per token: the next token, or -100 to ignore it",
            )
        return found.to(self.device, torch.int64)


def program_name(phase: str, head: str, layout: str, training: bool) -> str:
    """The name of the file with a program."""
    return f"{phase}_{layout}_{head}" + "_training" * training


def _scores(made: Any) -> torch.Tensor:
    """The logits among a model's outputs: the only one, or the one so named."""
    if not isinstance(made, dict):
        return made
    if "logits" not in made:
        raise MismatchError(
            f"none of the outputs {', '.join(made)} is called 'logits'",
            code="outputs-logits",
            next='return {"logits": …, …} from the spec to generate with it',
        )
    return made["logits"]


def _one_row(ids: Any) -> list[int]:
    """The ids of one prompt, given as a sequence, [T] or [1, T]."""
    found = torch.as_tensor(ids)
    found = found[0] if found.dim() == 2 and len(found) == 1 else found
    if found.dim() != 1:
        raise MismatchError(
            f"stream goes on from one prompt, and ids of shape {list(found.shape)} are given",
            code="prompt-rows",
            next="give one row, or model.generate(ids, n) several",
        )
    return [int(i) for i in found.tolist()]


def _sample(
    logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator | None
) -> int:
    """One token id: the largest score at temperature 0, else a draw from the top-p nucleus."""
    if temperature <= 0:
        return int(logits.argmax())
    p = torch.softmax(logits.double().cpu() / temperature, -1)
    if top_p < 1:
        sorted_p, order = p.sort(descending=True)
        beyond = sorted_p.cumsum(-1) - sorted_p >= top_p
        p = p.index_fill(0, order[beyond], 0.0)
    return int(torch.multinomial(p, 1, generator=generator))
