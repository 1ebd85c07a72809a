"""Random affine rules, drawn from the rule language as Python text.

    @ar.recurrence("S1:K,V z2:K | g1: b1: k1:K v1:V q1:K … -> o:V", domain={"g1": "<= 0", …})
    def rule(S1, z2, g1, b1, k1, v1, q1, …):
        S1 = np.exp(g1) * S1
        S1 = S1 + np.outer(k1, b1 * (v1 - k1 @ S1))
        …
        return S1, z2, (q1 @ S1) / (0.1 + np.exp(q2) @ z2)

Two families (D16): contracting, where gates are ≤ 0 and factors in 0..1, and growing, where both go
beyond. Keys of delta steps are unit vectors. Denominators are 0.1 at least. Where a state grows,
functions that make a small number of large ones are left out: they lose the digits of any form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from archir.recurrence import Rule

WANTED = ("rank 2", "value-side factor", "two states", "cascade", "value × key")


@dataclass(frozen=True)
class Drawn:
    """A rule as text, what it has of `WANTED`, and how its operands are placed: the arguments of
    `archir.check.recurrence.Placed`."""

    text: str
    features: frozenset[str]
    sizes: dict[str, int]
    heads: dict[str, int]
    axes: dict[str, str]

    def rule(self, folder: Path) -> Rule:
        """The rule, from a file of its own, so that its lines have places."""
        file = folder / "rule.py"
        file.write_text(self.text)
        scope: dict[str, Any] = {"__name__": "drawn"}
        exec(compile(self.text, str(file), "exec"), scope)
        return scope["rule"]


@st.composite
def rules(draw: Callable[..., Any]) -> Drawn:
    """A rule of one or two states, and its operands' sizes, heads and leading axes."""
    made = _Rule(draw, growing=draw(st.booleans()))
    made.body()
    names = [*made.operands]
    heads = draw(st.sampled_from([1, 2, 4]))
    own = {n: draw(st.sampled_from([h for h in (1, 2, 4) if h <= heads])) for n in names}
    axes = {n: draw(st.sampled_from(["BTH"] * 5 + ["BT", "H", ""])) for n in names}
    full = draw(st.sampled_from(names))
    own[full], axes[full] = heads, "BTH"
    sizes = {"K": draw(st.sampled_from([3, 5, 6])), "V": draw(st.sampled_from([2, 4, 7]))}
    return Drawn(made.text(), frozenset(made.features), sizes, own, axes)


@dataclass
class _Rule:
    """A rule being written: operands by name with dims and domain, states with dims, lines."""

    draw: Callable[..., Any]
    growing: bool
    operands: dict[str, tuple[str, str]] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    features: set[str] = field(default_factory=set)

    def one_of(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def operand(self, letter: str, dims: str, domain: str = "") -> str:
        """An operand, new, or at times one of its kind that is there."""
        like = [n for n, x in self.operands.items() if n[0] == letter and x == (dims, domain)]
        if like and self.draw(st.integers(0, 3)) == 0:
            return self.one_of(*like)
        name = f"{letter}{len(self.operands) + 1}"
        self.operands[name] = dims, domain
        return name

    def key(self) -> str:
        return self.operand("k", "K", "unit")

    def value(self) -> str:
        return self.operand("v", "V")

    def text(self) -> str:
        shapes = " ".join(f"{n}:{d}" for n, d in self.states.items())
        given = " ".join(f"{n}:{d}" for n, (d, _) in self.operands.items())
        domain = {n: d for n, (_, d) in self.operands.items() if d}
        outputs = " ".join(f"o{i}:V" for i in range(len(self.outputs)))
        names = ", ".join([*self.states, *self.operands])
        body = "\n".join(f"    {line}" for line in self.lines)
        returned = ", ".join([*self.states, *self.outputs])
        signature = f"{shapes} | {given} -> {outputs}"
        head = f"@ar.recurrence(\n    {signature!r},\n    domain={domain!r},\n)"
        top = "import numpy as np\n\nimport archir as ar\n\n\n"
        return f"{top}{head}\ndef rule({names}):\n{body}\n    return {returned}\n"

    # ---- the whole

    def body(self) -> None:
        kind = self.one_of("one", "ratio", "apart", "cascade", "cascade", "values")
        self.outputs: list[str] = []
        first = self.matrix("S1")
        read, *more = self.reads("S1", first)
        if kind == "one":
            self.output(read)
        elif kind == "ratio":
            self.ratio(read)
        elif kind == "apart":
            second = self.matrix("S2")
            self.output(" + ".join([read, *self.reads("S2", second)]))
        elif kind == "cascade":
            self.cascade(read)
        else:
            self.values(read)
        for other in more:
            self.output(other)
        if kind != "one":
            self.features.add("two states")

    def ratio(self, read: str) -> None:
        """A normaliser: a vector state of positive numbers."""
        self.states["z2"] = "K"
        decay, per_key = self.decay()
        positive = f"np.exp(0.5 * {self.operand('x', 'K')})"
        self.lines += self.scaled("z2", decay, per_key, vector=True)
        self.lines.append(f"z2 = z2 + {positive}")
        query = f"np.exp(0.5 * {self.operand('q', 'K')})"
        self.outputs.append(f"({read}) / ({self.one_of('0.1', '1')} + {query} @ z2)")

    def cascade(self, read: str) -> None:
        """A second state that what is read from the first is written to, or says how to."""
        self.features.add("cascade")
        self.lines.append(f"r = {read}")
        ways = ["values"] if self.growing else ["values", "keys", "strength", "decay"]
        way = self.one_of(*ways)
        if way == "values":
            second = self.matrix("S2", y="r")
        elif way == "keys":
            self.states["S2"] = "V,V"
            self.lines += ["p = 0.3 * np.tanh(r)", f"S2 = {self.one_of('0.9', '0.5')} * S2"]
            self.lines.append(
                self.one_of(
                    f"S2 = S2 + np.outer(p, {self.value()} - p @ S2)",
                    f"S2 = S2 + np.outer(p, {self.value()})",
                )
            )
            self.output("p @ S2")
            return
        else:
            size = f"np.tanh(np.sum(r * {self.value()}))"
            self.lines.append(f"s = 0.5 + 0.4 * {size}")
            second = self.matrix("S2", **({"strength": "s"} if way == "strength" else {"by": "s"}))
        self.output(self.one_of("", "r + ") + self.reads("S2", second)[0])

    def values(self, read: str) -> None:
        """A vector over values, of which nothing is summed, before or after what it feeds."""
        self.states["z2"] = "V"
        self.features.add("vector")
        kept = self.one_of(self.factor()[0], self.operand("d", "V", "0..1"))
        written = self.one_of(self.value(), read, f"(1 - {kept}) * {self.value()}")
        self.lines.append(f"z2 = {kept} * z2 + {written}")
        self.output(f"{read} + {self.one_of('z2', '0.5 * z2')}")

    def output(self, read: str) -> None:
        v, k = self.value(), self.operand("q", "K")
        forms = ["{r}", "({r}) * {v}", "{r} + ({k} @ ({k} * {k})) * {v}"]
        if not self.growing:
            forms += [
                "np.tanh({r})",
                "({r}) / (1 + np.sum(({r}) ** 2))",
                "{r} * np.exp(-({r}) ** 2)",
            ]
        self.outputs.append(self.one_of(*forms).format(r=f"({read})", v=v, k=k))

    # ---- a state

    def matrix(self, name: str, y: str = "", strength: str = "", by: str = "") -> bool:
        """Lines that update a K×V state, or V×K: a decay, delta steps, writes, in any order.

        y: what is written.  strength: of its delta steps.  by: a decay.
        """
        turned = self.one_of(False, False, True)
        self.states[name] = "V,K" if turned else "K,V"
        if turned:
            self.features.add("value × key")
        if self.draw(st.integers(0, 2)) == 0:
            self.lines.append(f"b_{name} = {self.read(name, turned)}")
        decay, per_key = (by, False) if by else self.decay()
        parts = [self.scaled(name, decay, per_key, turned)] if decay else []
        steps = self.draw(st.integers(1 if strength else 0, 2))
        kinds = [self.one_of("delta", "matrix", "apart", "values") for _ in range(steps)]
        for kind in kinds:
            parts.append(self.step(name, kind, turned, strength))
        if steps == 2:
            self.features.add("rank 2")
        if "values" in kinds:
            self.features.add("value-side factor")
        written = 0 if "delta" in kinds and not y else self.draw(st.integers(1, 2))
        for i in range(written):
            to = y if y and i == 0 else self.value()
            factor = self.factor()[0]
            scale = self.one_of("", "0.5 * ", f"{factor} * ", f"(1 - {factor}) * ")
            sign = self.one_of("+", "+", "-")
            parts.append([f"{name} = {name} {sign} {self.outer(self.key(), scale + to, turned)}"])
        order = self.draw(st.permutations(parts)) if self.draw(st.booleans()) else parts
        self.lines += [line for part in order for line in part]
        return turned

    def reads(self, name: str, turned: bool) -> list[str]:
        """What is read from a state: after its lines, and before them where that was said."""
        found = [self.read(name, turned)]
        if any(line.startswith(f"b_{name} =") for line in self.lines):
            found = self.one_of([f"b_{name}"], [*found, f"b_{name}"], [f"{found[0]} - b_{name}"])
        return found

    def read(self, name: str, turned: bool, along: str = "") -> str:
        q = along or self.operand("q", "K")
        if turned:
            return self.one_of(f"{name} @ {q}", f"{q} @ {name}.T", f"np.sum({name} * {q}, axis=1)")
        return self.one_of(f"{q} @ {name}", f'np.einsum("k,kv->v", {q}, {name})')

    def outer(self, x: str, y: str, turned: bool) -> str:
        return f"np.outer({y}, {x})" if turned else f"np.outer({x}, {y})"

    def factor(self) -> tuple[str, bool]:
        """A scalar in 0..1, or about 1 where the rule grows."""
        if self.growing:
            a, g = self.operand("a", "", "0.6..1.3"), self.operand("g", "", "-0.3..0.2")
        else:
            a, g = self.operand("a", "", "0..1"), self.operand("g", "", "<= 0")
        return self.one_of(a, f"np.exp({g})", f"{a} * np.exp({g})", "0.9"), False

    def decay(self) -> tuple[str, bool]:
        """What a state is multiplied by, and whether it is a vector over keys; "" for nothing."""
        kind = self.one_of("", "scalar", "key", "key")
        if kind != "key":
            return self.factor() if kind else ("", False)
        if self.growing:
            a, g = self.operand("a", "K", "0.6..1.3"), self.operand("g", "K", "-0.3..0.2")
        else:
            a, g = self.operand("a", "K", "0..1"), self.operand("g", "K", "<= 0")
        return self.one_of(a, f"np.exp({g})", f"({a} * np.exp({g}))", f"(1 - 0.5 * {a})"), True

    def scaled(
        self, name: str, decay: str, per_key: bool, turned: bool = False, vector: bool = False
    ) -> list[str]:
        if not decay:
            return []
        if not per_key or vector:
            return [f"{name} = {decay} * {name}"]
        if turned:
            right = self.one_of(f"{name} * {decay}", f"{name} @ np.diag({decay})")
            return [f"{name} = {right}"]
        left = self.one_of(f"{decay}[:, None] * {name}", f"np.diag({decay}) @ {name}")
        return [f"{name} = {left}"]

    def step(self, name: str, kind: str, turned: bool, strength: str) -> list[str]:
        """Lines that erase what is read along one key, and may write in its place."""
        k, v = self.key(), self.value()
        b = strength or self.one_of(self.operand("b", "", "0..1"), "0.5")
        read = f"{name} @ {k}" if turned else f"{k} @ {name}"
        if kind == "delta":
            return [f"{name} = {name} + {self.outer(k, f'{b} * ({v} - {read})', turned)}"]
        if kind == "matrix":
            left = f"(np.eye(K) - {b} * np.outer({k}, {k}))"
            return [f"{name} = {name} @ {left}" if turned else f"{name} = {left} @ {name}"]
        x = self.one_of(k, self.key(), f"({self.operand('x', 'K', '0..1')} * {k})")
        if kind == "apart":
            return [f"{name} = {name} - {self.outer(x, f'0.4 * ({read})', turned)}"]
        e = self.operand("e", "V", "0..0.5")
        return [f"{name} = {name} - {self.outer(x, f'{e} * ({read})', turned)}"]
