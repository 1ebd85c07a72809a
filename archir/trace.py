"""How a spec becomes a program: it is run once, on values that record what is done to them.

Every call of a block is traced; functions that print alike are one function (D2). Values support
Python arithmetic and the NumPy functions of the table `_FUNCTIONS`; anything that would need a
number now (`if`, `float`, `np.asarray`, iteration …) is refused with the user's line.
"""

from __future__ import annotations

import inspect
import keyword
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from archir import dims, source, types
from archir.bounds import check_domains
from archir.diagnostics import ArchirError, Loc, ShapeError, SpecError
from archir.dims import Poly
from archir.ir import (
    Field,
    Function,
    Init,
    Module,
    Op,
    Operand,
    Ref,
    Value,
    callees_first,
    identifier,
    join,
)
from archir.ops import infer_op, lookup
from archir.text import print_function
from archir.types import Tensor, Type

_stack: list[Builder] = []

# Functions without a scope: of scalars, or of one head and one token. A pointwise function called
# in one of them is part of it.
SCALAR_ROLES = ("pointwise", "rule")


class Program:
    """The functions traced so far, merged by text."""

    def __init__(self) -> None:
        self.functions: dict[str, Function] = {}
        self._texts: dict[tuple[str, str], str] = {}

    def add(self, function: Function) -> str:
        """Adds a function or finds its equal; returns the name it goes by."""
        key = (function.name, print_function(function, locs=False))
        if key not in self._texts:
            name, ordinal = function.name, 0
            while name in self.functions:
                ordinal += 1
                name = f"{function.name}_{ordinal}"
            self.functions[name] = replace(function, name=name)
            self._texts[key] = name
        return self._texts[key]


class Builder:
    """One function while it is traced; `role` as in `archir.ir`."""

    def __init__(self, program: Program, name: str, loc: Loc | None, role: str = "block") -> None:
        self.program, self.name, self.loc, self.role = program, identifier(name), loc, role
        self.inputs: list[Value] = []
        self.fields: list[Field] = []
        self.ops: list[Op] = []
        self.scopes: dict[str, Loc | None] = {}
        self.states: dict[str, Loc | None] = {}
        self._places: dict[str, int] = {}
        self._taken: dict[str, int] = {}

    def fresh(self, hint: str) -> str:
        """A name not used in this function: `x`, `x_1`, …"""
        name = identifier(hint)
        count = self._taken.get(name)
        self._taken[name] = 0 if count is None else count + 1
        if count is None:
            return name
        return self.fresh(f"{name}_{count + 1}")

    def input(self, name: str, type_: Type, loc: Loc | None = None) -> Traced:
        value = Value(self.fresh(name), type_, loc)
        self.inputs.append(value)
        return Traced(value, self)

    def field(self, kind: str, path: str, type_: Type, attrs: Mapping[str, Any]) -> Traced:
        loc, _ = source.caller()
        if kind != "tap":
            _check_name(kind, path, loc)
        if self.role in SCALAR_ROLES:
            raise SpecError(
                f"{kind} {path!r} is made inside of the {self.role} function {self.name}, "
                "which has no scope to keep it in",
                code="field-inside",
                loc=loc,
                next=f"make it outside, and give it to {self.name} as an operand",
            )
        for other in self.fields:
            if other.path == path:
                raise _twice(f"{kind} {path!r}", other.value.loc, loc)
        value = Value(self.fresh(path), type_, loc)
        self.fields.append(Field(kind, path, value, dict(attrs)))
        return Traced(value, self)

    def enter_scope(self, name: str) -> None:
        loc, _ = source.caller()
        _check_name("scope", name, loc)
        if name in self.scopes:
            raise _twice(f"scope {name!r}", self.scopes[name], loc)
        self.scopes[name] = loc

    def enter_state(self, kind: str, name: str | None) -> None:
        """Takes the name of what an op keeps between calls, or draws by; None stands for the name
        that `specialize` gives: the op's place among those of its kind."""
        loc, _ = source.caller()
        what = "rule" if kind == "state_update" else kind
        if self.role in SCALAR_ROLES:
            raise SpecError(
                f"{what} is used inside of the {self.role} function {self.name}, "
                "which has no scope to keep anything in",
                code="field-inside",
                loc=loc,
                next=f"use it outside, and give {self.name} what it makes",
            )
        place = self._places.setdefault(kind, 0)
        self._places[kind] = place + 1
        if name is None:
            name = f"{kind}_{place}"
        if not isinstance(name, str) or not name:
            raise SpecError(
                f"{what} has the name {name!r}, under which nothing can be kept",
                code="state-name",
                loc=loc,
                next=f'give {what}(…, name="…") a text, or leave it out',
            )
        if name in self.states:
            raise _twice(f"{what} {name!r}", self.states[name], loc)
        self.states[name] = loc

    def finish(
        self,
        outputs: Sequence[Value],
        names: tuple[str, ...] = (),
        attrs: Mapping[str, Any] | None = None,
    ) -> Function:
        return Function(
            self.name,
            tuple(self.inputs),
            tuple(self.fields),
            tuple(self.ops),
            tuple(outputs),
            self.role,
            names,
            dict(attrs or {}),
            self.loc,
        )


def _twice(what: str, first: Loc | None, second: Loc | None) -> SpecError:
    return SpecError(
        f"{what} exists already",
        code="name-twice",
        loc=second,
        facts=[f"first made at {first.file}:{first.line}"] if first else [],
        next="give each its own name; to share a weight, make it once and use the value twice",
    )


def _check_name(kind: str, name: Any, loc: Loc | None) -> None:
    """Names become attributes of modules, `model.h[0].attn`: identifiers or numbers, dotted."""
    parts = str(name).split(".")
    leaf = len(parts) - 1 if kind in ("weight", "buffer") else None

    def fits(place: int, part: str) -> bool:
        if part.isdecimal():
            return str(int(part)) == part and place != leaf
        same = unicodedata.normalize("NFKC", part) == part
        return part.isidentifier() and not keyword.iskeyword(part) and same

    wrong = [(at, part) for at, part in enumerate(parts) if not fits(at, part)]
    if wrong:
        better = [p if fits(at, p) else identifier(p) for at, p in enumerate(parts)]
        raise SpecError(
            f"{kind} {str(name)!r}: {wrong[0][1]!r} cannot be the name of an attribute",
            code="name-attribute",
            loc=loc,
            next="put letters, digits and _ between the dots, and no digit first, "
            f"for example {'.'.join(better)!r}",
        )


def _refuse_unused(module: Module) -> None:
    """A weight or buffer must reach an output or a tap, through calls too (D11)."""
    table = {f.name: f for f in module.functions}
    seen: dict[tuple[str, frozenset[Value]], tuple[bool, ...]] = {}

    def visit(scope: str, function: Function, outputs: frozenset[Value]) -> tuple[bool, ...]:
        """Which inputs are needed, given the outputs that are."""
        key = (function.name, outputs)
        if key in seen:
            return seen[key]
        needed = set(outputs)
        for op in reversed(function.ops):
            if op.kind == "call":
                callee = table[op.attrs["callee"].name]
                pairs = zip(op.results, callee.outputs, strict=True)
                read = frozenset(inner for result, inner in pairs if result in needed)
                used = visit(join(scope, op.attrs["scope"]), callee, read)
                needed |= {x for x, use in zip(op.values, used, strict=True) if use}
            elif lookup(op.kind).effect or needed & set(op.results):
                needed |= set(op.values)
        for field in function.fields:
            if field.kind in ("weight", "buffer") and field.value not in needed:
                raise SpecError(
                    f"{field.kind} {join(scope, field.path)!r} reaches no output of "
                    f"{module.entry.name}",
                    code="weight-unused",
                    loc=field.value.loc,
                    next="use what is made of it, or delete the line that makes it",
                )
        seen[key] = tuple(value in needed for value in function.inputs)
        return seen[key]

    visit("", module.entry, frozenset(module.entry.outputs))


def current() -> Builder:
    """The function being traced; a SpecError outside of tracing."""
    if not _stack:
        loc, _ = source.caller()
        raise SpecError(
            "this runs only while a spec is traced",
            code="not-tracing",
            loc=loc,
            next="call archir.trace(spec) or archir.compile(spec), not the spec itself",
        )
    return _stack[-1]


@contextmanager
def building(builder: Builder) -> Iterator[Builder]:
    """Makes `builder` the current one."""
    _stack.append(builder)
    try:
        yield builder
    finally:
        _stack.pop()


def emit(kind: str, *operands: Any, hint: str = "", **attrs: Any) -> Any:
    """Records one op and returns its results: one value, a tuple of values, or None."""
    builder = current()
    loc, names = source.caller()
    given = tuple(_operand(x, builder, kind, loc) for x in operands)
    draft = Op(kind, given, (), attrs, loc)
    inferred = infer_op(draft, builder.program.functions)
    if len(names) != len(inferred):
        names = (hint or kind,) * len(inferred)
    results = tuple(
        Value(builder.fresh(name), type_, loc) for name, type_ in zip(names, inferred, strict=True)
    )
    builder.ops.append(replace(draft, results=results))
    traced = tuple(Traced(v, builder) for v in results)
    return traced[0] if len(traced) == 1 else traced or None


def _operand(x: Any, builder: Builder, kind: str, loc: Loc | None) -> Operand:
    if isinstance(x, Traced):
        if x.builder is not builder:
            same = x.builder.name == builder.name
            owner = f"another call of {builder.name}" if same else x.builder.name
            raise SpecError(
                f"{x.value.name} belongs to {owner}, but is used inside {builder.name}",
                code="value-elsewhere",
                loc=loc,
                facts=[f"made at {x.value.loc.file}:{x.value.loc.line}"] if x.value.loc else [],
                next=f"pass it to {builder.name} as an argument",
            )
        return x.value
    if isinstance(x, bool | np.bool_):
        return bool(x)
    if isinstance(x, int | np.integer):
        return int(x)
    if isinstance(x, float | np.floating):
        return float(x)
    raise SpecError(
        f"{kind} takes traced values and numbers, not {type(x).__name__}",
        code="operand-type",
        loc=loc,
        next="make it a weight (ar.weight), a buffer (ar.buffer) or a number",
    )


_UFUNCS: dict[str, str] = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "power": "pow",
    "maximum": "maximum", "minimum": "minimum", "negative": "neg", "absolute": "abs",
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log1p": "log1p",
    "sqrt": "sqrt", "sin": "sin", "cos": "cos", "tanh": "tanh", "less": "less",
    "less_equal": "less_equal", "greater": "greater", "greater_equal": "greater_equal",
    "equal": "equal", "not_equal": "not_equal", "logical_and": "logical_and",
    "logical_or": "logical_or", "logical_not": "logical_not", "bitwise_and": "logical_and",
    "bitwise_or": "logical_or", "invert": "logical_not", "floor": "floor",
    "remainder": "mod", "floor_divide": "floor_divide",
}  # fmt: skip


def _refuse(what: str, next: str, facts: Sequence[str] = ()) -> NoReturn:
    loc, _ = source.caller()
    raise SpecError(what, code="traced-value", loc=loc, facts=[*facts], next=next)


class Traced(np.lib.mixins.NDArrayOperatorsMixin):
    """A value of the program being traced. It has a type and a shape, but no numbers."""

    __slots__ = ("builder", "value")

    def __init__(self, value: Value, builder: Builder) -> None:
        self.value, self.builder = value, builder

    @property
    def type(self) -> Type:
        return self.value.type

    @property
    def shape(self) -> tuple[int | Poly, ...]:
        """Sizes: ints, or polynomials over symbols such as B and T."""
        return _tensor(self).shape

    @property
    def ndim(self) -> int:
        return _tensor(self).rank

    @property
    def T(self) -> Traced:
        """All axes reversed."""
        return emit("transpose", self, axes=tuple(reversed(range(self.ndim))))

    def __repr__(self) -> str:
        return f"<traced {self.value}>"

    # ---- arithmetic: NDArrayOperatorsMixin turns operators into ufuncs

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            _refuse(
                f"np.{ufunc.__name__}(out=…) would change a traced value in place",
                "assign the result to a name instead",
            )
        if method != "__call__" or kwargs:
            called = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
            options = f" with {', '.join(sorted(kwargs))}" if kwargs else ""
            _refuse(
                f"np.{called}{options} is not traced",
                f"use np.{ufunc.__name__} alone, or np.sum, np.mean and np.max over an axis",
            )
        if ufunc.__name__ == "matmul":
            return matmul(*inputs)
        if ufunc.__name__ == "square":
            return emit("mul", inputs[0], inputs[0])
        zero = isinstance(inputs[0], int | float) and inputs[0] == 0
        if ufunc.__name__ == "logaddexp" and zero:
            return emit("softplus", inputs[1])
        kind = _UFUNCS.get(ufunc.__name__)
        if kind is None:
            _refuse(f"np.{ufunc.__name__} has no op", f"traced functions: {_known()}")
        if current().role == "rule":
            _refuse_turned(kind, inputs)
        return emit(kind, *inputs)

    def __array_function__(self, func: Any, kinds: Any, args: Any, kwargs: Any) -> Any:
        handler = _FUNCTIONS.get(func.__name__)
        if handler is None:
            home = func.__module__.replace("numpy", "np", 1)
            _refuse(f"{home}.{func.__name__} has no op", f"traced functions: {_known()}")
        extra = kwargs.keys() - inspect.signature(handler).parameters.keys()
        if extra:
            usage = ", ".join(inspect.signature(handler).parameters)
            _refuse(
                f"np.{func.__name__} with {', '.join(sorted(extra))}= is not traced",
                f"write np.{func.__name__}({usage}); ar.cast changes a dtype",
            )
        return handler(*args, **kwargs)

    def __getitem__(self, index: Any) -> Traced:
        items = index if isinstance(index, tuple) else (index,)
        traced = [i for i in items if isinstance(i, Traced)]
        if traced:
            _refuse(
                f"{traced[0].value} cannot index {self.value}: a traced value has no number",
                "ar.embedding(tokens, table) takes rows of a table",
            )
        whole = (isinstance(i, slice) and i == slice(None) for i in items)
        if not all(i is None or i is Ellipsis or w for i, w in zip(items, whole, strict=True)):
            _refuse(
                "only `:`, `...` and `None` index a traced value",
                "ar.split(x, sizes, axis) takes pieces of an axis",
            )
        if sum(isinstance(i, slice) for i in items) > self.ndim:
            _refuse(
                f"{self.value} has {self.ndim} axes, more are indexed",
                "leave some `:` out; `...` stands for all that are not written",
            )
        places = items
        if Ellipsis in items:
            at = items.index(Ellipsis)
            named = sum(i is not None and i is not Ellipsis for i in items)
            middle = (slice(None),) * (self.ndim - named)
            places = (*items[:at], *middle, *items[at + 1 :])
        places = (*places, *(slice(None),) * (self.ndim - sum(i is not None for i in places)))
        axes = tuple(i for i, item in enumerate(places) if item is None)
        return emit("expand_dims", self, axes=axes) if axes else self

    def sum(self, axis: Any = None, keepdims: bool = False) -> Traced:
        """Σ over an axis, several, or all."""
        return _reduce("reduce_sum", self, axis, keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Traced:
        """Mean over an axis, several, or all."""
        return _reduce("reduce_mean", self, axis, keepdims)

    def reshape(self, *shape: Any) -> Traced:
        """The same elements under another shape: sizes, or one tuple of them."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        return emit("reshape", self, shape=tuple(sizes))

    # ---- traps: each would need a number now

    def __bool__(self) -> NoReturn:
        _refuse(
            f"{self.value} has no truth value while a spec is traced: "
            "`if`, `while`, `and`, `not`, max() and min() need one now",
            "use ar.where(condition, a, b), np.maximum or np.minimum",
        )

    def __float__(self) -> NoReturn:
        _refuse(
            f"float({self.value.name}): a traced value has no number; "
            "float() and the functions of `math` need one",
            f"leave float() out, {self.value.name} computes as it is; for a function of `math` use "
            "NumPy's (np.exp, np.sqrt …)",
        )

    def __int__(self) -> NoReturn:
        _refuse(
            f"int({self.value.name}): a traced value has no number",
            "use sizes of the config; in a rule, compute with the dims as they are (K**-0.5)",
        )

    def __index__(self) -> NoReturn:
        _refuse(
            f"{self.value.name} cannot index or count: a traced value has no number",
            "use sizes of the config",
        )

    def __len__(self) -> NoReturn:
        _refuse(
            f"len({self.value.name}): a size may be a symbol, which has no number yet",
            "use x.shape or the config; in a rule, the dims of its signature are names in the body",
        )

    def __iter__(self) -> NoReturn:
        _refuse(
            f"{self.value.name} cannot be iterated or unpacked: it is one value",
            "ar.split(x, sizes, axis) or ar.heads(x, parts, heads) gives several",
        )

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(
            f"{self.value.name} cannot become a NumPy array: it has no numbers yet",
            "keep it as it is; np.stack and np.concatenate join values",
        )

    def __setitem__(self, index: Any, item: Any) -> NoReturn:
        _refuse(
            f"{self.value.name}[…] = … would change {self.value} in place",
            "build a new value (ar.where, ar.concat)",
        )

    def __iadd__(self, other: Any) -> NoReturn:
        _refuse_in_place(self, "+")

    def __isub__(self, other: Any) -> NoReturn:
        _refuse_in_place(self, "-")

    def __imul__(self, other: Any) -> NoReturn:
        _refuse_in_place(self, "*")

    def __itruediv__(self, other: Any) -> NoReturn:
        _refuse_in_place(self, "/")

    def __imatmul__(self, other: Any) -> NoReturn:
        _refuse_in_place(self, "@")

    def __ipow__(self, other: Any) -> NoReturn:
        _refuse_in_place(self, "**")

    __hash__ = object.__hash__  # type: ignore[assignment]


def _refuse_in_place(x: Traced, sign: str) -> NoReturn:
    name, builder = x.value.name, current()
    silently = f"run on arrays, it would change the {name} of whoever calls {builder.name}"
    _refuse(
        f"{name} would be changed in place by {sign}=",
        f"write {name} = {name} {sign} …, which makes a new value",
        [silently] if builder.role == "rule" else (),
    )


def _known() -> str:
    return ", ".join(sorted({*_UFUNCS, *_FUNCTIONS, "matmul", "square"}))


def _tensor(x: Traced) -> Tensor:
    if not isinstance(x.value.type, Tensor):
        _refuse(f"{x.value} is not a tensor", "only tensors have a shape")
    return x.value.type


def _reduce(kind: str, x: Traced, axis: Any, keepdims: bool) -> Traced:
    axes = tuple(range(x.ndim)) if axis is None else axis
    axes = (axes,) if isinstance(axes, int) else tuple(axes)
    extra: dict[str, Any] = {"keepdims": True} if keepdims else {}
    if kind == "reduce_mean" and not types.is_float(_tensor(x).dtype):
        x = emit("cast", x, dtype="F")
    return emit(kind, x, axes=tuple(_from_start(a, x.ndim) for a in axes), **extra)


def _from_start(axis: int, rank: int) -> int:
    """An axis counted from the first; one that is outside stays as it is, for the op to refuse."""
    return axis % rank if -rank <= axis < rank else axis


def expand_dims(x: Traced, axis: int | tuple[int, ...]) -> Traced:
    """New axes of size 1 at these places of the result."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    rank = x.ndim + len(axes)
    return emit("expand_dims", x, axes=tuple(_from_start(a, rank) for a in axes))


def where(condition: Traced, a: Any, b: Any) -> Traced:
    """a where the condition holds, else b; of two numbers one becomes a value: an integer, else in
    the dtype of what is traced, F in functions of scalars and the model's anywhere else."""
    if not isinstance(a, Traced) and not isinstance(b, Traced):
        floats = "F" if current().role in SCALAR_ROLES else "f"
        dtype = "i64" if isinstance(a, int) and isinstance(b, int) else floats
        a = emit("fill", shape=(), value=a if dtype == "i64" else float(a), dtype=dtype)
    return emit("where", condition, a, b)


def transpose(x: Traced, axes: Sequence[int] | None = None) -> Traced:
    """Axes in another order; reversed where none is given."""
    order = tuple(reversed(range(x.ndim))) if axes is None else axes
    return emit("transpose", x, axes=tuple(_from_start(a, x.ndim) for a in order))


def matmul(a: Traced, b: Traced) -> Traced:
    """a @ b for vectors and matrices, as NumPy defines it."""
    if not (isinstance(a, Traced) and isinstance(b, Traced)):
        _refuse("@ needs two traced values", "make the other side a weight or a buffer")
    left = {1: "i", 2: "hi"}.get(a.ndim)
    right = {1: "i", 2: "ij"}.get(b.ndim)
    if left is None or right is None:
        _refuse(
            f"@ of {a.type} and {b.type}: only vectors and matrices",
            "ar.linear multiplies [..., in] by a weight; np.einsum says any other product",
        )
    if a.shape[-1] != b.shape[0]:
        _refuse_product(a, b)
    return emit("einsum", a, b, equation=f"{left},{right}->{(left + right).replace('i', '')}")


def _refuse_product(a: Traced, b: Traced) -> NoReturn:
    """An `a @ b` whose sizes disagree; it may be the other way round, or one side turned."""
    one, two = a.value, b.value
    steps = ["transpose a matrix (.T)"]
    if current().role == "rule":
        steps.insert(0, "swap the sides of the np.outer that makes the matrix")
    if b.shape[-1] == a.shape[0]:
        steps.insert(0, f"swap the sides of @, which then sums over {b.shape[-1]}")
    raise ShapeError(
        f"{one.name} @ {two.name} sums over the last axis of {one.name}, which is {a.shape[-1]}, "
        f"and the first of {two.name}, which is {b.shape[0]}",
        code="shape-mismatch",
        loc=source.caller()[0],
        facts=[str(one), str(two)],
        next=", or ".join(steps),
    )


def _refuse_turned(kind: str, xs: Sequence[Any]) -> None:
    """Refuses a matrix beside its transpose: the sides of an outer product were swapped."""
    shapes = [x.shape for x in xs if isinstance(x, Traced) and isinstance(x.type, Tensor)]
    if len(shapes) != 2 or any(len(s) != 2 or 1 in s for s in shapes):
        return
    (one, two), (a, b) = (x.value for x in xs), shapes
    if a == b or a != b[::-1]:
        return
    raise ShapeError(
        f"{kind} of {one.name} and {two.name}: one is {a[0]}×{a[1]}, the other {b[0]}×{b[1]}",
        code="shape-mismatch",
        loc=source.caller()[0],
        facts=[str(one), str(two)],
        next="swap the sides of the np.outer that makes one of them, or transpose it (.T); to "
        "scale rows by a vector x write x[:, None]",
    )


def _einsum(equation: str, *xs: Traced) -> Traced:
    equation = equation.replace(" ", "")
    if "->" not in equation or "." in equation:
        _refuse(
            f"np.einsum({equation!r}) must name every axis and its result",
            "write for example 'bkv,bv->bk'",
        )
    return emit("einsum", *xs, equation=equation)


def _diag(x: Traced) -> Traced:
    if x.ndim != 1:
        _refuse(f"np.diag of {x.type}: only a vector makes a matrix", "give it a vector")
    (size,) = x.shape
    dtype = _tensor(x).dtype
    eye = emit("eye", dim=size, **({} if dtype == "F" else {"dtype": dtype}))
    return emit("mul", emit("expand_dims", x, axes=(1,)), eye)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "outer": lambda a, b: emit("einsum", a, b, equation="i,j->ij"),
    "dot": matmul,
    "diag": _diag,
    "sum": lambda x, axis=None, keepdims=False: _reduce("reduce_sum", x, axis, keepdims),
    "mean": lambda x, axis=None, keepdims=False: _reduce("reduce_mean", x, axis, keepdims),
    "max": lambda x, axis=None, keepdims=False: _reduce("reduce_max", x, axis, keepdims),
    "where": where,
    "einsum": _einsum,
    "transpose": transpose,
    "reshape": lambda x, shape: x.reshape(shape),
    "stack": lambda xs, axis=0: emit("concat", *(expand_dims(x, axis) for x in xs), axis=axis),
    "concatenate": lambda xs, axis=0: emit("concat", *xs, axis=axis),
    "expand_dims": expand_dims,
}


def trace_block(
    fn: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    sizes: Mapping[str, int | Poly],
) -> Any:
    """Traces one call of a block as a function of its own and records the call."""
    caller = current()
    loc, _ = source.caller()
    caller.enter_scope(name)
    builder = Builder(caller.program, fn.__name__, source.definition(fn))
    given: list[Traced] = []

    def enter(label: str, x: Any) -> Any:
        if not isinstance(x, Traced):
            return x
        _operand(x, caller, fn.__name__, loc)
        _check_annotation(fn, label, x, sizes, loc)
        given.append(x)
        return builder.input(label, x.type, x.value.loc)

    labels = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    with building(builder):
        inner = [enter(label, x) for label, x in zip(labels, args, strict=False)]
        inner += args[len(labels) :]
        named = {label: enter(label, x) for label, x in kwargs.items()}
        returned = fn(*inner, **named)
        names, outputs = _returned(returned, fn, builder)
    callee = caller.program.add(builder.finish(outputs, names))
    result = emit("call", *given, callee=Ref(callee), scope=name, hint=fn.__name__)
    if names:
        return dict(zip(names, result if isinstance(result, tuple) else (result,), strict=True))
    return result


def declared(
    fn: Callable[..., Any], label: str, sizes: Mapping[str, int | Poly] | None = None
) -> Type | None:
    """The type a parameter is annotated with, as a string; None where it has none."""
    note = source.annotation(fn, label)
    if note is None:
        return None
    try:
        found = types.parse(note, sizes)
    except ArchirError as error:
        raise error.at(source.parameter(fn, label)) from None
    taken = sorted(types.symbols(found) & dims.RESERVED.keys())
    if taken:
        raise SpecError(
            f"{label}: {taken[0]} in {note!r} cannot be a size of its own: "
            f"{taken[0]} is {dims.RESERVED[taken[0]]}",
            code="symbol-reserved",
            loc=source.parameter(fn, label),
            next=f"use another letter; reserved are {', '.join(dims.RESERVED)}",
        )
    return found


def _check_annotation(
    fn: Callable[..., Any], label: str, x: Traced, sizes: Mapping[str, int | Poly], loc: Loc | None
) -> None:
    """An annotated input must match what it is given; its symbols take the caller's sizes."""
    want = declared(fn, label, sizes)
    if want is None:
        return
    problem = types.match(want, x.type, {})
    if problem:
        raise ShapeError(
            f"{fn.__name__}: {label} is declared {want}, {x.type} was given",
            code="shape-mismatch",
            loc=loc,
            facts=[f"declared: {source.annotation(fn, label)}", f"given: {x.value}", problem],
            next=_cast_hint(want, x.type)
            or f"give {fn.__name__} an input of {want}, or change the annotation",
        )


def _cast_hint(want: Type, have: Type) -> str:
    if not (isinstance(want, Tensor) and isinstance(have, Tensor)):
        return ""
    if {want.dtype, have.dtype} == {"f", "F"}:
        word = "model" if want.dtype == "f" else "float32"
        return f"ar.cast(x, {word!r}): f is the model's dtype, F is float32 at least"
    return ""


def _returned(
    returned: Any, fn: Callable[..., Any], builder: Builder
) -> tuple[tuple[str, ...], tuple[Value, ...]]:
    """Names and values of what a traced function returned."""
    name, loc = fn.__name__, source.returned(fn)
    names: tuple[str, ...] = ()
    if isinstance(returned, Mapping):
        names, returned = tuple(returned), tuple(returned.values())
    found = returned if isinstance(returned, tuple | list) else (returned,)
    for x in found:
        if not isinstance(x, Traced):
            what = "nothing" if x is None else f"{type(x).__name__}, not a traced value"
            raise SpecError(
                f"{name} returns {what}",
                code="return-type",
                loc=loc,
                next="return one value, a tuple of values, or a dict of named values",
            )
    values = tuple(_operand(x, builder, "return", loc) for x in found)
    return names, tuple(v for v in values if isinstance(v, Value))


def trace_entry(
    fn: Callable[..., Any],
    name: str,
    inputs: Mapping[str, Type],
    fixed: Mapping[str, Any],
) -> Module:
    """A module whose entry is `fn` called with traced `inputs` and ordinary `fixed` arguments."""
    program = Program()
    builder = Builder(program, name, source.definition(fn), "entry")
    with building(builder):
        given = {label: builder.input(label, type_) for label, type_ in inputs.items()}
        returned = fn(**given, **fixed)
        names, outputs = _returned(returned, fn, builder)
    entry = builder.finish(outputs, names)
    return finish(program, entry)


def finish(program: Program, entry: Function) -> Module:
    """The verified module of an entry and the functions it reaches."""
    from archir.verify import verify

    entry = replace(entry, name=_free(entry.name, program))
    module = Module(callees_first({**program.functions, entry.name: entry}, entry.name))
    _refuse_unused(module)
    verify(module, "trace")
    check_domains(module)
    return module


def _free(name: str, program: Program) -> str:
    while name in program.functions:
        name += "_"
    return name


def trace_scalars(
    fn: Callable[..., Any], given: Mapping[str, Tensor | int | float], program: Program
) -> str:
    """Traces a function of scalars (a pointwise op, a score or a mask) into the program; a number
    among its arguments becomes a constant of it."""
    builder = Builder(program, fn.__name__, source.definition(fn), "pointwise")
    with building(builder):
        args = [
            builder.input(label, x) if isinstance(x, Tensor) else x for label, x in given.items()
        ]
        returned = fn(*args)
        _, outputs = _returned(returned, fn, builder)
    return program.add(builder.finish(outputs))


def trace_meaning(kind: str, operands: Mapping[str, Tensor], attrs: Mapping[str, Any]) -> Function:
    """An op's NumPy meaning as an IR function of operands by name: its meaning run on tracers."""
    builder = Builder(Program(), kind, None, "body")
    with building(builder):
        given = [builder.input(name, type_) for name, type_ in operands.items()]
        returned = lookup(kind).meaning(*given, **attrs)
        outputs = returned if isinstance(returned, tuple) else (returned,)
    made = builder.finish([x.value for x in outputs])
    return replace(made, ops=tuple(replace(op, loc=None) for op in made.ops))


def init_of(init: Any) -> Init:
    """An Init, or an error that says what an init is."""
    if isinstance(init, Init):
        return init
    raise SpecError(
        f"init={init!r} is not an init",
        code="weight-init",
        loc=source.caller()[0],
        next="use ar.normal(std), ar.uniform(low, high), ar.zeros(), ar.ones() or ar.constant(x)",
    )


__all__ = [
    "SCALAR_ROLES", "ArchirError", "Builder", "Program", "Traced", "building", "current", "dims",
    "emit", "expand_dims", "finish", "init_of", "matmul", "trace_block", "trace_entry",
    "trace_meaning", "trace_scalars", "where",
]  # fmt: skip
