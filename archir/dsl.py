"""The words a spec is written in. `import archir as ar` gives all of them.

Functions here take traced values, record ops and return traced values. Those that make weights take
a `name`: the weight's path below the block's scope.
"""

from __future__ import annotations

import dataclasses
import inspect
import numbers
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from archir import source
from archir.diagnostics import SpecError
from archir.dims import Poly
from archir.ir import Init, Ref
from archir.trace import (
    SCALAR_ROLES,
    Traced,
    current,
    emit,
    init_of,
    trace_block,
    trace_scalars,
)
from archir.trace import expand_dims as _expand_dims
from archir.trace import where as _where
from archir.types import Tensor, is_float


def config(cls: type) -> type:
    """Declares a config: a frozen dataclass of sizes (int, float, bool, str and tuples of them)."""
    for name in cls.__annotations__:
        default = vars(cls).get(name)
        if not _is_size(default):
            raise SpecError(
                f"{cls.__name__}.{name} = {default!r} is not a size",
                code="config-field",
                loc=source.caller()[0],
                next="a config holds numbers, strings and tuples of them; write the rest as code",
            )
    made = dataclasses.dataclass(frozen=True)(cls)
    made.__archir_config__ = True  # type: ignore[attr-defined]
    return made


def _is_size(x: Any) -> bool:
    if isinstance(x, tuple):
        return all(_is_size(i) for i in x)
    return x is None or isinstance(x, int | float | str)


def is_config(x: Any) -> bool:
    """Whether x is an instance of a class made by `config`."""
    return getattr(type(x), "__archir_config__", False)


class Block:
    """A function traced at each call. With `name=` the call is a scope; without, it is inlined."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = fn.__name__
        self.__doc__ = fn.__doc__

    def __call__(self, *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        if name is None:
            return self.fn(*args, **kwargs)
        return trace_block(self.fn, name, args, kwargs, config_sizes((*args, *kwargs.values())))


def block(fn: Callable[..., Any]) -> Block:
    """Declares a block; inputs may be annotated by types in strings, `x: "f[B, T, width]"`."""
    return Block(fn)


def config_sizes(args: tuple[Any, ...]) -> dict[str, int | Poly]:
    """The integer fields of every config among the arguments, by name."""
    found: dict[str, int | Poly] = {}
    for arg in args:
        if is_config(arg):
            found |= {k: v for k, v in vars(arg).items() if isinstance(v, int)}
    return found


def normal(std: float = 0.02) -> Init:
    """Drawn from N(0, std²)."""
    return Init("normal", (float(std),))


def uniform(low: float, high: float) -> Init:
    """Drawn uniformly from [low, high)."""
    return Init("uniform", (float(low), float(high)))


def log_uniform(low: float, high: float) -> Init:
    """The logarithm of a uniform draw from [low, high): `A_log` of decay gates."""
    return Init("log_uniform", (float(low), float(high)))


def inverse_softplus(low: float, high: float) -> Init:
    """x with softplus(x) drawn log-uniformly from [low, high): `dt_bias` of decay gates."""
    return Init("inverse_softplus", (float(low), float(high)))


def constant(value: float) -> Init:
    """Every element the same."""
    return Init("constant", (float(value),))


def zeros() -> Init:
    """Zeros."""
    return Init("zeros")


def ones() -> Init:
    """Ones."""
    return Init("ones")


def weight(
    name: str,
    shape: list[Any] | tuple[Any, ...],
    *,
    init: Init | None = None,
    dtype: str | None = None,
    decay: bool | None = None,
) -> Traced:
    """A trained tensor of this scope.

    dtype="float32" means at least float32 (D10).  decay: whether weight decay applies (by default
    where it has two axes or more).  init: N(0, 0.02²) by default.
    """
    return _field("weight", name, shape, init or normal(0.02), dtype, decay)


def buffer(
    name: str,
    shape: list[Any] | tuple[Any, ...],
    *,
    init: Init | None = None,
    dtype: str | None = None,
) -> Traced:
    """A tensor of this scope that is saved but not trained."""
    return _field("buffer", name, shape, init or zeros(), dtype, None)


def _field(
    kind: str, name: str, shape: Any, init: Init, dtype: str | None, decay: bool | None
) -> Traced:
    _named(name, kind)
    if dtype not in (None, "float32"):
        raise SpecError(
            f"{kind} {name!r} has dtype={dtype!r}; only 'float32' may be pinned",
            code="weight-dtype",
            loc=source.caller()[0],
            next="leave dtype out: the model's dtype is chosen when it is compiled",
        )
    sizes = tuple(_size(s, kind, name) for s in shape)
    attrs: dict[str, Any] = {"init": init_of(init)}
    if kind == "weight":
        attrs["decay"] = len(sizes) > 1 if decay is None else decay
    if dtype:
        attrs["dtype"] = dtype
    return current().field(kind, name, Tensor("F" if dtype else "f", sizes), attrs)


def _size(size: Any, kind: str, name: str) -> int:
    if isinstance(size, int | np.integer) and size > 0:
        return int(size)
    what = (
        f"{size} is a symbol" if isinstance(size, Poly) else f"{size!r} is not a whole number > 0"
    )
    raise SpecError(
        f"{kind} {name!r} cannot have the size {size}: {what}",
        code="weight-size",
        loc=source.caller()[0],
        next="give sizes of the config, divided by // where they are divided",
    )


def _named(name: Any, what: str) -> None:
    if isinstance(name, str) and name:
        return
    first = what in ("weight", "buffer", "tap")
    usage = f'{what}("…", …)' if first else f'{what}(…, name="…")'
    reason = "found" if what == "tap" else "saved"
    raise SpecError(
        f"{what} has no name, under which it could be {reason}",
        code="weight-unnamed",
        loc=source.caller()[0],
        next=f"write {usage}: a path below this scope, unique in it",
    )


def linear(
    x: Traced,
    size: int | Traced,
    bias: bool | Traced | None = None,
    *,
    name: str | None = None,
    init: Init | None = None,
    bias_init: Init | None = None,
) -> Traced:
    """x wᵀ + b on the last axis; weight [size, in] and bias [size] at `name.weight`, `name.bias`.

    `size` may be a weight value, and `bias` a bias value; where both are, no name is needed. A bias
    is made unless `bias=False`, or `size` is a value.
    """
    if not (bias is None or isinstance(bias, bool | Traced)):
        raise SpecError(
            f"linear: bias={bias!r} is neither True, False nor a value",
            code="linear-bias",
            loc=source.caller()[0],
            next="for a bias that starts at a number, give bias_init=ar.constant(x)",
        )
    own = not isinstance(size, Traced)
    if own or bias is True:
        _named(name, "linear")
    w = weight(f"{name}.weight", [size, x.shape[-1]], init=init) if own else size
    if bias is True or (bias is None and own):
        bias = weight(f"{name}.bias", [w.shape[0]], init=bias_init or zeros())
    rest = (bias,) if isinstance(bias, Traced) else ()
    return emit("linear", x, w, *rest, hint=_last(name) if own else "")


def _last(name: str | None) -> str:
    return (name or "x").rsplit(".", 1)[-1]


def embedding(
    tokens: Traced,
    table: int | Traced,
    size: int | None = None,
    *,
    name: str | None = None,
    init: Init | None = None,
) -> Traced:
    """Rows of a table: a weight value, or `embedding(tokens, rows, size, name=…)`."""
    if not isinstance(table, Traced):
        _named(name, "embedding")
        table = weight(f"{name}.weight", [table, size], init=init)
    return emit("embedding", tokens, table, hint=_last(name))


def layer_norm(
    x: Traced, *, name: str | None = None, bias: bool = True, eps: float = 1e-5
) -> Traced:
    """Layer norm over the last axis with weight and bias at `name.weight`, `name.bias`."""
    _named(name, "layer_norm")
    given = [weight(f"{name}.weight", [x.shape[-1]], init=ones())]
    if bias:
        given.append(weight(f"{name}.bias", [x.shape[-1]], init=zeros()))
    return emit("layer_norm", x, *given, eps=eps, hint=_last(name))


def rms_norm(
    x: Traced, *, name: str | None = None, eps: float = 1e-6, dtype: str | None = None
) -> Traced:
    """RMS norm over the last axis with weight at `name.weight`; `name=""` leaves the weight out."""
    if name == "":
        return emit("rms_norm", x, eps=eps)
    _named(name, "rms_norm")
    w = weight(f"{name}.weight", [x.shape[-1]], init=ones(), dtype=dtype)
    return emit("rms_norm", x, w, eps=eps, hint=_last(name))


def l2_norm(x: Traced, *, eps: float = 1e-6) -> Traced:
    """x / √(Σ x² + ε) over the last axis."""
    return emit("l2_norm", x, eps=eps)


def heads(x: Traced, parts: int, heads: int) -> Any:
    """[…, parts·H·D] → `parts` values [..., H, D] (one value where parts is 1)."""
    return emit("heads", x, parts=parts, heads=heads)


def merge(x: Traced) -> Traced:
    """[…, H, D] → […, H·D]."""
    return emit("merge", x)


def positions(tokens: Traced, limit: int | None = None) -> Traced:
    """Absolute positions, i64[B, T]; more than `limit` tokens in a row are refused."""
    attrs: dict[str, Any] = {} if limit is None else {"limit": limit}
    return emit("positions", tokens, **attrs)


def rotary(x: Traced, positions: Traced, *, theta: float = 10000.0) -> Traced:
    """Rotary position embedding of x: [B, T, H, D] (halves, as in Llama)."""
    return emit("rotary", x, positions, theta=float(theta))


def attention(
    q: Traced,
    k: Traced,
    v: Traced,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    score: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | None = None,
    name: str | None = None,
) -> Traced:
    """Softmax attention of q: [B, T, H, D] over k, v: [B, T, G, ·], H a multiple of G.

    window: how many positions a query sees, itself included.  scale: D^−½ by default.
    score(s, i, j, h) → s changes a score; mask(i, j) → bool keeps one; both are functions of
    scalars (query position i, key position j, head h).  name: of the KV cache in the state.
    dropout: the rate at which probabilities are dropped while training; every score is then held
    in memory, which training without it does not need.
    causal=False has only the phase `full`: prefill and decode cannot see later tokens, and whether
    a mask hides them is not proven, so a mask that does is written beside causal=True.
    """
    program = current().program
    current().enter_state("attention", name)
    attrs: dict[str, Any] = {"causal": causal}
    if window is not None:
        attrs["window"] = window
    if scale is not None:
        attrs["scale"] = float(scale)
    _rate("attention", dropout)
    if dropout:
        attrs["dropout"] = float(dropout)
    place = {"i": Tensor("i64"), "j": Tensor("i64")}
    if score is not None:
        given = {"s": Tensor("F"), **place, "h": Tensor("i64")}
        attrs["score"] = Ref(trace_scalars(_taking(score, "score", given), given, program))
    if mask is not None:
        attrs["mask"] = Ref(trace_scalars(_taking(mask, "mask", place), place, program))
    if name is not None:
        attrs["name"] = name
    return emit("attention", q, k, v, hint=name or "attention", **attrs)


def short_conv(
    x: Traced,
    width: int | Traced,
    *,
    activation: Callable[..., Any] | None = None,
    name: str | None = None,
    init: Init | None = None,
    dtype: str | None = None,
) -> Traced:
    """Causal convolution of each channel of x: [B, T, C] with its own `width` taps.

    y_t = φ(Σ_j w[:, j] · x_{t−width+1+j}), the last tap on the current token; no bias. The weight
    [C, width] is made at `name.weight` (drawn from ±width^−½, `dtype` as in `weight`), or `width`
    is a weight value. activation: φ, a function of a scalar such as `ar.silu`.  name: also of the
    window in the state, the last width − 1 inputs.
    """
    program = current().program
    if isinstance(width, Traced):
        if init is not None or dtype is not None:
            raise SpecError(
                "short_conv is given a weight, which has an init and a dtype of its own",
                code="weight-given",
                loc=source.caller()[0],
                next="give init= and dtype= to ar.weight, or the number of taps to short_conv",
            )
        w = width
    else:
        _named(name, "short_conv")
        size = _size(width, "short_conv", str(name))
        init = init or uniform(-(size**-0.5), size**-0.5)
        w = weight(f"{name}.weight", [x.shape[-1], size], init=init, dtype=dtype)
    current().enter_state("short_conv", name)
    attrs: dict[str, Any] = {} if name is None else {"name": name}
    if activation is not None:
        given = {"x": Tensor("F")}
        fn = _taking(activation, "activation", given)
        attrs["activation"] = Ref(trace_scalars(fn, given, program))
    return emit("short_conv", x, w, hint=_last(name or "conv"), **attrs)


def dropout(x: Traced, rate: float, *, name: str | None = None) -> Traced:
    """While training, each element zero at this rate, the others divided by 1 − rate; else x.

    The mask is a function of the call's seed, the scope, `name` (by default the op's place among
    the dropouts of its block) and the element's index in x; the interpreter draws the same. So it
    depends on how rows are laid out, and calls that share a seed share masks.
    """
    _rate("dropout", rate)
    if not rate:
        return x
    current().enter_state("dropout", name)
    attrs: dict[str, Any] = {} if name is None else {"name": name}
    return emit("dropout", x, rate=float(rate), hint=name or "dropout", **attrs)


def _rate(what: str, rate: Any) -> None:
    if not isinstance(rate, numbers.Real) or not 0 <= float(rate) < 1:
        raise SpecError(
            f"{what}: {rate!r} is no rate at which elements are dropped",
            code="dropout-rate",
            loc=source.caller()[0],
            next="give a number from 0 (nothing is dropped) to below 1",
        )


def logits(
    x: Traced, table: Traced | int, *, name: str | None = None, init: Init | None = None
) -> Traced:
    """Scores over the vocabulary: x wᵀ with a tied weight value, or `logits(x, vocab, name=…)`."""
    if not isinstance(table, Traced):
        _named(name, "logits")
        table = weight(f"{name}.weight", [table, x.shape[-1]], init=init)
    return emit("logits", x, table, hint="logits")


class Pointwise:
    """A function of scalars used on whole tensors; see `pointwise`."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = fn.__name__
        self.__doc__ = fn.__doc__

    def __call__(self, *args: Any) -> Any:
        if not any(isinstance(a, Traced) for a in args):
            return self.fn(*args)
        labels = [*inspect.signature(self.fn).parameters]
        if len(args) != len(labels):
            _refuse_arguments(self.fn, f"it is given {len(args)}", f"give it ({', '.join(labels)})")
        if current().role in SCALAR_ROLES:
            return self.fn(*(_float(a) for a in args))
        given = {k: Tensor("F") if isinstance(a, Traced) else a for k, a in zip(labels, args)}
        fn = Ref(trace_scalars(self.fn, given, current().program))
        values = (a for a in args if isinstance(a, Traced))
        return emit("pointwise", *values, fn=fn, hint=self.__name__)


def _float(x: Any) -> Any:
    """What a pointwise function computes on: integers and bools as floats."""
    exact = isinstance(x, Traced) and isinstance(x.type, Tensor) and not is_float(x.type.dtype)
    return emit("cast", x, dtype="F") if exact else x


def pointwise(fn: Callable[..., Any]) -> Pointwise:
    """Turns a NumPy function of scalars into an op with meaning and emissions.

    It is computed in float32 at least and rounded once. A number given to it is a constant of it.
    """
    return Pointwise(fn)


def _taking(fn: Callable[..., Any], what: str, given: Any) -> Callable[..., Any]:
    """A function of an op (a score, a mask, an activation) that takes what it will be given."""
    bare = fn.fn if isinstance(fn, Pointwise) else fn
    if not inspect.isfunction(bare):
        raise SpecError(
            f"{what}={bare!r} is no Python function",
            code="argument-function",
            loc=source.caller()[0],
            next=f"give a function of ({', '.join(given)}), such as ar.silu or a lambda",
        )
    try:
        inspect.signature(bare).bind(*given)
    except TypeError:
        wanted = f"({', '.join(given)})"
        _refuse_arguments(bare, f"its {what} is given {wanted}", f"let it take {wanted}")
    return bare


def _refuse_arguments(fn: Callable[..., Any], what: str, next: str) -> NoReturn:
    taken = ", ".join(inspect.signature(fn).parameters)
    raise SpecError(
        f"{fn.__name__} takes ({taken}), {what}",
        code="argument-count",
        loc=source.caller()[0],
        facts=[f"{fn.__name__} is defined at {place.file}:{place.line}"]
        if (place := source.definition(fn))
        else [],
        next=next,
    )


def _unary(kind: str) -> Callable[[Any], Traced]:
    def apply(x: Any) -> Traced:
        return emit(kind, x)

    apply.__name__ = kind
    apply.__doc__ = f"Elementwise {kind}."
    return apply


exp, log, tanh, sqrt, rsqrt = (_unary(k) for k in ("exp", "log", "tanh", "sqrt", "rsqrt"))
sigmoid, silu, relu, softplus = (_unary(k) for k in ("sigmoid", "silu", "relu", "softplus"))
gelu_tanh = _unary("gelu_tanh")


def where(condition: Traced, a: Any, b: Any) -> Traced:
    """a where the condition holds, else b; each a value or a number."""
    return _where(condition, a, b)


def split(x: Traced, sizes: list[int] | tuple[int, ...], axis: int = -1) -> Any:
    """Pieces of the given sizes along an axis."""
    return emit("split", x, sizes=tuple(sizes), axis=axis)


def concat(xs: list[Traced] | tuple[Traced, ...], axis: int = -1) -> Traced:
    """Values one after another along an axis."""
    return emit("concat", *xs, axis=axis)


def expand_dims(x: Traced, *axes: int) -> Traced:
    """New axes of size 1 at these places of the result."""
    return _expand_dims(x, axes)


_CASTS = {"model": "f", "float32": "F", "int32": "i32", "int64": "i64", "bool": "bool"}


def cast(x: Traced, dtype: str) -> Traced:
    """`"model"` (the model's dtype), `"float32"` (at least float32), or an exact type by its name.

    No other float: in float64 a cast between floats is the identity, so that float64 is exact.
    """
    if dtype not in _CASTS:
        raise SpecError(
            f"cast to {dtype!r}: a spec does not fix how a float is rounded, and knows "
            f"{', '.join(map(repr, _CASTS))}",
            code="cast-dtype",
            loc=source.caller()[0],
            next="ar.cast(x, 'model') rounds to the dtype the model is compiled for",
        )
    return emit("cast", x, dtype=_CASTS[dtype])


def tap(name: str, x: Traced) -> Traced:
    """Marks an inner value for comparison; returns it unchanged."""
    _named(name, "tap")
    current().field("tap", name, x.type, {})
    emit("store", x, path=name)
    return x
