"""In which interval each value of a program lies, and whether that contradicts a rule's domain.

    z: f[B, T, H] = softplus(x)        z is >= 0
    g: f[B, T, H] = neg(z)             g is <= 0, as domain={"g": "<= 0"} says

Each op's rule stands in its `OpDef`; this module walks a function once, and into what it calls.
Weights and inputs are unknown unless a caller gives intervals. Operands are taken as independent,
so an interval may be wider than what is reached, and then it is not exact: `x − x` is unknown.
Products are the exception: they are kept by their factors, so that `x·x` and `−x·x` have a sign.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial, reduce
from typing import Any

from archir.diagnostics import Loc, SpecError
from archir.ir import Function, Module, Op, Operand, Ref, Value, plain_name
from archir.ops import lookup
from archir.ops.interval import UNKNOWN, Interval, apart, around

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)??(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?|inf)"
_DOMAIN = re.compile(
    rf"<=\s*(?P<most>{_NUMBER})|>=\s*(?P<least>{_NUMBER})|(?P<low>{_NUMBER})\.\.(?P<high>{_NUMBER})"
)
_ROUNDING = 1e-9  # of the largest end: less than this is no contradiction


def parse_domain(text: str) -> Interval:
    """The interval of an operand's domain (D8); `unit` is its entries, −1 to 1.

    Raises ValueError, whose text ends the sentence `domain 'k': '1..0' …`.
    """
    if text == "unit":
        return Interval(-1.0, 1.0)
    found = _DOMAIN.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ValueError("is not understood")
    low = float(found["least"] or found["low"] or -math.inf)
    high = float(found["most"] or found["high"] or math.inf)
    if low > high or math.inf in (low, -high):
        raise ValueError("holds no number")
    return Interval(low, high)


def declared(rule: Function) -> dict[Value, Interval]:
    """The inputs of a rule that its domain speaks of, and their intervals."""
    texts = rule.attrs.get("domain", {})
    return {v: parse_domain(texts[v.name]) for v in rule.inputs if v.name in texts}


def intervals(
    function: Function, module: Module, given: Mapping[Value, Interval] | None = None
) -> dict[Value, Interval]:
    """The interval of every value of a function; `given` are those of inputs, all of whose numbers
    are reached."""
    free = {v: _free(v, x) for v, x in (given or {}).items()}
    return _Analysis(module).run(function, free)


def _free(value: Value, within: Interval = UNKNOWN) -> Interval:
    """That of a value which may be any number of an interval."""
    return replace(within, uses=frozenset([value]))


class _Analysis:
    """One analysis: what is called is walked once for each intervals it is called with."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.called: dict[tuple[Any, ...], Interval | tuple[Interval, ...]] = {}
        self.weights: set[Value] = set()

    def run(self, function: Function, given: Mapping[Value, Interval]) -> dict[Value, Interval]:
        found = {v: given.get(v, _free(v)) for v in function.inputs}
        weights = {f.value for f in function.fields if f.kind == "weight"}
        found |= {
            f.value: _free(f.value) if f.value in weights else UNKNOWN for f in function.fields
        }
        self.weights |= weights
        factors: dict[Operand, Counter[Operand]] = {}
        for op in function.ops:
            product = _factors(op, factors)
            if product and max(product.values()) > 1:
                found[op.result] = _product(product, found)
            else:
                found.update(zip(op.results, self.results(op, found), strict=True))
        return found

    def results(self, op: Op, found: Mapping[Value, Interval]) -> tuple[Interval, ...]:
        rule = lookup(op.kind).bounds
        if rule is None:  # a weight makes anything of other operands
            weights = [found[x] for x in op.values if x in self.weights]
            return (replace(UNKNOWN, uses=apart(*weights) or None),) * len(op.results)
        attrs = {
            k: partial(self.call, v.name) if isinstance(v, Ref) else v for k, v in op.attrs.items()
        }
        made = rule(*(_of(x, found) for x in op.operands), **attrs)
        return made if isinstance(made, tuple) else (made,) * len(op.results)

    def call(self, name: str, *xs: Interval) -> Interval | tuple[Interval, ...]:
        key = name, *_key(xs)
        if key not in self.called:
            function = self.module[name]
            found = self.run(function, dict(zip(function.inputs, xs, strict=True)))
            outputs = tuple(found[v] for v in function.outputs)
            self.called[key] = outputs[0] if len(outputs) == 1 else outputs
        return self.called[key]


def _key(xs: Iterable[Interval]) -> tuple[Any, ...]:
    """What tells intervals from others, with what they use."""
    return tuple((x, x.uses) for x in xs)


def _of(x: Operand, found: Mapping[Value, Interval]) -> Interval:
    return found[x] if isinstance(x, Value) else around(x)


def _factors(op: Op, known: dict[Operand, Counter[Operand]]) -> Counter[Operand]:
    """The factors of a product and how often each stands in it; none for another op."""
    if op.kind not in ("mul", "neg"):
        return Counter()
    made = sum((known.get(x, Counter([x])) for x in op.operands), Counter[Operand]())
    if op.kind == "neg":
        made[-1] += 1
    known[op.result] = made
    return made


def _product(factors: Counter[Operand], found: Mapping[Value, Interval]) -> Interval:
    powers = (_of(x, found) ** around(count) for x, count in factors.items())
    return reduce(operator.mul, powers)


def check_domains(module: Module) -> None:
    """Raises SpecError where a rule is given what its domain denies.

    A bound that is reached must lie inside the domain. What is not known is trusted, as that is
    what a domain is for: a side without a bound, or with one that may be wider than what is given.
    """
    if not any(f.role == "rule" and "domain" in f.attrs for f in module.functions):
        return
    for op, found, made in _updates(module, module.entry, {}, {}, set()):
        rule = module[op.attrs["rule"].name]
        limits = declared(rule)
        for value, x in zip(rule.inputs[rule.attrs["states"] :], op.values, strict=False):
            if value in limits and _contradict(limits[value], found[x]):
                raise _contradiction(op, rule, value, made.get(x, x), limits[value], found[x])


def _updates(
    module: Module,
    function: Function,
    given: dict[Value, Interval],
    made: dict[Value, Value],
    seen: set[tuple[Any, ...]],
) -> Iterator[tuple[Op, dict[Value, Interval], dict[Value, Value]]]:
    """The state updates of a function and of those it calls, each with the intervals of the values
    there; made: for an input the value of an outer function that was passed in."""
    if (key := (function.name, *_key(given.values()))) in seen:
        return
    seen.add(key)
    found = _Analysis(module).run(function, given)
    for op in function.ops:
        if op.kind == "state_update":
            yield op, found, made
        if op.kind == "call":
            callee = module[op.attrs["callee"].name]
            inner = {v: found[x] for v, x in zip(callee.inputs, op.values, strict=True)}
            origin = {v: made.get(x, x) for v, x in zip(callee.inputs, op.values, strict=True)}
            yield from _updates(module, callee, inner, origin, seen)


def _contradict(domain: Interval, derived: Interval) -> bool:
    """Whether a bound that is reached lies outside, or no number or only one is left of many."""
    ends = [abs(x) for i in (domain, derived) for x in (i.low, i.high) if math.isfinite(x)]
    slack = _ROUNDING * max(ends, default=0.0)
    exact = derived.uses is not None
    above = exact and math.isfinite(derived.high) and derived.high > domain.high + slack
    below = exact and math.isfinite(derived.low) and derived.low < domain.low - slack
    shared = min(domain.high, derived.high) - max(domain.low, derived.low)
    touch = shared <= slack < min(domain.width, derived.width)
    return above or below or touch or shared < -slack


def _contradiction(
    op: Op, rule: Function, value: Value, origin: Value, domain: Interval, derived: Interval
) -> SpecError:
    name, text = plain_name(value, rule), rule.attrs["domain"][value.name]
    return SpecError(
        f"rule {rule.name}: {name} must be {text}, but {derived} is given",
        code="domain-contradicted",
        loc=op.loc,
        facts=[
            f'declared: "{text}" for {name}{_place(", at ", rule.loc)}',
            f"given: {origin}{_place(', made at ', origin.loc)}; its ops bound it to {derived}",
        ],
        next=_step(rule.name, name, text, domain, derived),
    )


def _place(words: str, loc: Loc | None) -> str:
    return f"{words}{loc.file}:{loc.line}" if loc else ""


def _step(rule: str, name: str, text: str, domain: Interval, derived: Interval) -> str:
    """What the user may have meant: another sign, another scale, or another domain."""
    wide = domain | derived
    change = f'widen the domain of {name} in {rule} to "{wide}"'
    if text == "unit" or wide == UNKNOWN:
        change = f"leave {name} out of the domain of {rule}"
    if text == "unit":
        return f"unit is within -1..1: normalise it, as ar.l2_norm does, or {change}"
    if not _contradict(domain, -derived):
        return f"negate it, as in -{name}, or {change}"
    bound = name
    if derived.high > domain.high:
        bound = f"np.minimum({bound}, {domain.high:.10g})"
    if derived.low < domain.low:
        bound = f"np.maximum({bound}, {domain.low:.10g})"
    return f"{change}, or bound what it is given: {bound}"
