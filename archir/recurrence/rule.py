"""A recurrence rule: a few lines of NumPy for one head and one token.

    @ar.recurrence("q:K k:K v:V g:K beta: -> o:V", domain={"g": "<= 0", "beta": "0..1"})
    def kda(S, q, k, v, g, beta): …
        return S, o

The signature names the dims of the operands and outputs; parameters it does not name are states,
whose dims it may state before a bar (`"S:K,V z:K | q:K …"`) and which are found by trial otherwise.
The body is traced into an IR function, which is the program; run on arrays it is plain NumPy.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from types import FunctionType
from typing import Any

import numpy as np

from archir import dims, source
from archir.bounds import parse_domain
from archir.diagnostics import ArchirError, Loc, SpecError
from archir.ir import Function, Module, Op, Ref, Value
from archir.trace import Builder, Program, Traced, building, current, emit, finish
from archir.types import Tensor

_IMPORTS = {"np": "import numpy as np", "numpy": "import numpy", "ar": "import archir as ar"}

# Dims a rule has no say in.
_TAKEN = {"B": "batches", "T": "tokens", "H": "heads", **dims.RESERVED}


@dataclass(frozen=True)
class Rule:
    """A recurrence. Call it on traced values inside a spec, or on arrays to run its body.

    signature: dims of operands and outputs.  domain: what a graph cannot prove (D8).
    """

    fn: Callable[..., Any]
    signature: str
    domain: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.fn.__name__

    @property
    def __name__(self) -> str:
        return self.fn.__name__

    @cached_property
    def operands(self) -> dict[str, tuple[str, ...]]:
        """Operand name → its dims."""
        return _shapes(self._sides[1], self)

    @cached_property
    def outputs(self) -> dict[str, tuple[str, ...]]:
        """Output name → its dims."""
        return _shapes(self._sides[2], self)

    @cached_property
    def _sides(self) -> tuple[str, str, str]:
        left, arrow, right = self.signature.partition("->")
        states, bar, operands = left.partition("|")
        if not arrow:
            raise self._bad(f"signature {self.signature!r} has no `->`")
        for what, side in (("operand", operands if bar else left), ("output", right)):
            if not side.strip():
                raise self._bad(f"signature {self.signature!r} has no {what}")
        return (states, operands, right) if bar else ("", left, right)

    @cached_property
    def states(self) -> tuple[str, ...]:
        """Parameters that are states: those the operands do not name."""
        code = self.fn.__code__
        parameters = code.co_varnames[: code.co_argcount]
        states = tuple(p for p in parameters if p not in self.operands)
        if parameters != (*states, *self.operands):
            raise self._bad(
                f"the body takes ({', '.join(parameters)}), "
                f"the signature names operands ({', '.join(self.operands)})",
                "order the parameters: states first, then the operands as in the signature",
            )
        if not states:
            raise self._bad("no parameter is a state", "the first parameters are the states")
        return states

    def _bad(
        self, what: str, next: str = "", loc: Loc | None = None, facts: Sequence[str] = ()
    ) -> SpecError:
        return SpecError(
            f"rule {self.name}: {what}",
            code="rule-signature",
            loc=loc or source.definition(self.fn),
            facts=[*facts],
            next=next or 'write for example "q:K k:K v:V beta: -> o:V"',
        )

    @cached_property
    def function(self) -> Function:
        """The IR function: states and operands of one head and one token in, states and o out."""
        for name, text in self.domain.items():
            if name not in self.operands:
                raise self._bad(
                    f"the domain names {name!r}, which is no operand",
                    f"operands: {', '.join(self.operands)}",
                )
            try:
                parse_domain(text)
            except ValueError as error:
                raise self._bad(
                    f"domain {name!r}: {text!r} {error}",
                    "a domain names an operand and is '<= a', '>= a', 'a..b' or 'unit'",
                ) from None
        stated = _shapes(self._sides[0], self)
        if stated:
            if tuple(stated) != self.states:
                raise self._bad(
                    f"the body's states are {', '.join(self.states)}, "
                    f"the signature's {', '.join(stated)}",
                    "name the states before the bar as the body does, in the same order",
                )
            known = {d for shape in self.operands.values() for d in shape}
            lost = [(s, d) for s, shape in stated.items() for d in shape if d not in known]
            if lost:
                raise self._bad(
                    f"state {lost[0][0]} has the dim {lost[0][1]}, which no operand has",
                    f"use dims of the operands: {', '.join(sorted(known))}",
                )
            return self._trace(tuple(stated.values()), self._builder())
        if len(self.states) > 1:
            raise self._bad(
                f"{len(self.states)} states ({', '.join(self.states)}) need stated shapes",
                'state them before a bar: "S:K,V z:K | q:K …"',
            )
        names = list(dict.fromkeys(d for shape in self.operands.values() for d in shape))
        trials = [*itertools.permutations(names, 2), *((n, n) for n in names), *zip(names)]
        failed: list[tuple[int, ArchirError]] = []
        for shape in trials:
            builder = self._builder()
            try:
                return self._trace((shape,), builder)
            except ArchirError as error:
                failed.append((len(builder.ops), error))
        raise self._best(failed, trials)

    def _best(
        self, failed: list[tuple[int, ArchirError]], trials: list[tuple[str, ...]]
    ) -> ArchirError:
        """The error of the trial that got furthest, and, unless all agree, which were made."""
        furthest = max(reached for reached, _ in failed)
        error = next(error for reached, error in failed if reached == furthest)
        if all((e.what, e.loc) == (error.what, error.loc) for _, e in failed):
            return error
        (state,) = self.states
        shape = ",".join(trials[failed.index((furthest, error))])
        tried = " ".join(f"[{', '.join(trial)}]" for trial in trials)
        return type(error)(
            error.what,
            code=error.code,
            loc=error.loc,
            facts=[*error.facts, f"{state} was tried as {tried}; this is what {state}:{shape} met"],
            next=f"{error.next or 'change the body'}; or state the shape before a bar: "
            f'"{state}:{shape} | {self.signature}"',
        )

    def _builder(self) -> Builder:
        return Builder(Program(), self.name, source.definition(self.fn), "rule")

    def _trace(self, shapes: tuple[tuple[str, ...], ...], builder: Builder) -> Function:
        given = dict(zip(self.states, shapes, strict=True)) | self.operands
        with building(builder):
            values = [
                builder.input(name, Tensor("F", tuple(dims.symbol(d) for d in shape)))
                for name, shape in given.items()
            ]
            try:
                returned = _with_dims(self.fn, {d for s in given.values() for d in s})(*values)
            except NameError as error:
                raise self._undeclared(error, given) from None
        return self._check(builder, returned, given)

    def _undeclared(self, error: NameError, given: Mapping[str, tuple[str, ...]]) -> SpecError:
        """A name in the body that is neither a parameter, a dim nor defined above the rule."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        letters = dict.fromkeys(d for shape in given.values() for d in shape)
        left, arrow, right = self.signature.partition("->")
        declared = f"{left.rstrip()} {error.name}:… {arrow}{right}"
        step = f'declare an operand, "{declared}", and take it as a parameter'
        if str(error.name).isupper():
            step = "use a dim of the signature"
        if close := get_close_matches(str(error.name), [*given, *letters], 1):
            step = f"write {close[0]}"
        if error.name in _IMPORTS:
            step = f"write `{_IMPORTS[error.name]}` above the rule"
        return SpecError(
            f"rule {self.name}: {error}",
            code="rule-name",
            loc=Loc(frame.filename, frame.lineno or 1, frame.colno or 0, frame.end_colno),
            facts=[
                f"states: {', '.join(self.states)}; operands: {', '.join(self.operands)}; "
                f"dims: {', '.join(letters)}"
            ],
            next=step
            if error.name in _IMPORTS
            else f"{step}, or define {error.name} above the rule",
        )

    def _check(
        self, builder: Builder, returned: Any, given: Mapping[str, tuple[str, ...]]
    ) -> Function:
        returned = returned if isinstance(returned, tuple) else (returned,)
        wanted = {s: given[s] for s in self.states} | self.outputs
        if len(returned) != len(wanted):
            count = "nothing" if returned[0] is None else str(len(returned))
            raise self._bad(
                f"{len(wanted)} values are expected ({', '.join(wanted)}), "
                f"the body returns {count}",
                f"return {', '.join(wanted)}: the new states first, then the outputs",
                source.returned(self.fn),
            )
        outputs: list[Value] = []
        shown = ", ".join(str(x.type) if isinstance(x, Traced) else repr(x) for x in returned)
        for (name, shape), x in zip(wanted.items(), returned, strict=True):
            want = Tensor("F", tuple(dims.symbol(d) for d in shape))
            if not isinstance(x, Traced) or x.type != want:
                have = x.type if isinstance(x, Traced) else type(x).__name__
                raise self._bad(
                    f"{name} must be {want}, the body returns {have}",
                    "change the signature or the body, which returns the new states first",
                    source.returned(self.fn),
                    [f"the signature: {', '.join(wanted)}; the body returns {shown}"],
                )
            outputs.append(x.value)
        attrs: dict[str, Any] = {"states": len(self.states)}
        if self.domain:
            inputs = dict(zip(given, builder.inputs, strict=True))  # `f` is `f_` in IR text
            attrs["domain"] = {inputs[name].name: text for name, text in self.domain.items()}
        return builder.finish(outputs, tuple(wanted), attrs=attrs)

    def __call__(self, *args: Any, name: str | None = None) -> Any:
        """In a spec: outputs [B, T, H, …] of operands placed by rank (D8). On arrays: the body."""
        if not any(isinstance(a, Traced) for a in args):
            return self._literal(*args)
        current().enter_state("state_update", name)
        rule = Ref(current().program.add(self.function))
        extra = {"name": name} if name else {}
        made = emit("state_update", *args, rule=rule, hint=name or "o", **extra)
        made = made if isinstance(made, tuple) else (made,)
        narrow = tuple(emit("cast", o, dtype="f", hint=name or "o") for o in made)
        return narrow[0] if len(narrow) == 1 else narrow

    def _literal(self, *arrays: Any) -> Any:
        """The body run on arrays of one head and one token, declared dims bound to their sizes."""
        _ = self.function  # a body that changes its arrays in place, say, is refused before it does
        sizes: dict[str, int] = {}
        if len(arrays) != len(self.states) + len(self.operands):
            raise self._bad(
                f"the body takes {', '.join([*self.states, *self.operands])}, "
                f"{len(arrays)} values are given",
                f"ar.op({self.name}) is the function of operands [B, T, H, …] without states",
            )
        for (name, shape), x in zip(self.operands.items(), arrays[len(self.states) :], strict=True):
            if len(shape) != np.ndim(x):
                raise self._bad(
                    f"{name} is [{', '.join(shape)}], of one head and one token; {np.ndim(x)} axes "
                    "are given",
                    f"ar.op({self.name}) is the function of operands [B, T, H, …]",
                )
            sizes |= zip(shape, np.shape(x), strict=True)
        return _bound(self.fn, sizes)(*arrays)

    def trace(self, types: Mapping[str, Tensor] | None = None) -> Module:
        """A module that runs this rule alone over operands [B, T, H, …], or of given types.

        Its inputs stand in the order of `types`, and rows are made from the first; all of its ops
        are of the rule's line, as nobody wrote them.
        """
        program = Program()
        builder = Builder(program, f"run_{self.name}", source.definition(self.fn), "entry")
        lead = tuple(dims.symbol(d) for d in ("B", "T", "H"))
        types = types or {
            name: Tensor("f", (*lead, *(dims.symbol(d) for d in shape)))
            for name, shape in self.operands.items()
        }
        with building(builder):
            inputs = {name: builder.input(name, type_) for name, type_ in types.items()}
            made = self(*(inputs[name] for name in self.operands))
        builder.ops[:] = [replace(op, loc=builder.loc) for op in builder.ops]
        outputs = [o.value for o in (made if isinstance(made, tuple) else (made,))]
        return finish(program, builder.finish(outputs, tuple(self.outputs)))


def recurrence(
    signature: str, *, domain: Mapping[str, str] | None = None
) -> Callable[[Callable[..., Any]], Rule]:
    """Declares a recurrence rule; see `Rule`."""
    return lambda fn: Rule(fn, signature, dict(domain or {}))


def _shapes(side: str, rule: Rule) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for item in side.split():
        name, colon, shape = item.partition(":")
        sizes = tuple(d for d in shape.split(",") if d)
        if not colon or not name.isidentifier() or not all(d.isidentifier() for d in sizes):
            raise rule._bad(f"{item!r} in the signature is not `name:dims`")
        if name in found:
            raise rule._bad(f"the signature names {name} twice", "give each its own name")
        taken = [d for d in sizes if d in _TAKEN]
        if taken:
            raise rule._bad(
                f"the dim {taken[0]} of {name} stands for {_TAKEN[taken[0]]} already",
                f"use other letters, as K and V; taken are {', '.join(_TAKEN)}",
            )
        found[name] = sizes
    return found


class _NumPy:
    """NumPy inside a rule: `eye`, `zeros` and `ones` of declared dims are recorded."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def eye(dim: _Dim) -> Traced:
        return emit("eye", dim=dim.dim)

    @staticmethod
    def zeros(shape: Any) -> Traced:
        return emit("fill", shape=_sizes(shape), value=0.0)

    @staticmethod
    def ones(shape: Any) -> Traced:
        return emit("fill", shape=_sizes(shape), value=1.0)


class _Dim(Traced):
    """A declared dim inside a rule body: a number that is known only when the rule runs."""

    __slots__ = ("dim",)

    def __init__(self, name: str) -> None:
        builder = current()
        self.dim = dims.symbol(name)
        value = Value(builder.fresh(f"size_{name}"), Tensor("F"))
        builder.ops.append(Op("size", (), (value,), {"dim": self.dim}))
        super().__init__(value, builder)


def _sizes(shape: Any) -> tuple[Any, ...]:
    items = shape if isinstance(shape, tuple) else (shape,)
    return tuple(d.dim if isinstance(d, _Dim) else d for d in items)


def _with_dims(fn: Callable[..., Any], names: set[str]) -> Callable[..., Any]:
    """The same function with declared dims bound as names and NumPy recorded (D7)."""
    used = sorted(names & set(fn.__code__.co_names))
    numpy = {k: _NumPy() for k, v in fn.__globals__.items() if v is np}
    return _bound(fn, numpy | {name: _Dim(name) for name in used})


def _bound(fn: Callable[..., Any], names: Mapping[str, Any]) -> Callable[..., Any]:
    """The same function with more global names."""
    assert isinstance(fn, FunctionType)
    scope = {**fn.__globals__, **names}
    return FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, fn.__closure__)
