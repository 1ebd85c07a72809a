"""`archir explain`: its text, and that its equations are right and complete.

The equations are parsed back from the printed text, by a parser that knows nothing of records, and
evaluated token by token and by chunks against the rule's body run literally.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archir as ar
from archir.check.placed import draw
from archir.cli import main
from archir.diagnostics import SpecError
from archir.ops import lookup
from archir.recurrence import Rule
from archir.recurrence.canonical import Reason
from archir.recurrence.literal import body_on_arrays
from tests.goldens import check_golden
from tests.recurrence.library import CHUNKABLE, EXAMPLES, RECURRENT_ONLY
from tests.recurrence.rules import RULES

C = 16
SIZES = {"K": 5, "V": 7, "N": 3}
GOLDEN = (
    "linear_attention", "normalised_attention", "gated_deltanet", "kda", "delta_product",
    "two_sided", "cascade", "value_by_key", "value_decay",
)  # fmt: skip

# ---- a parser of the notation

Env = dict[str, int]
Node = Callable[["Values", Env], Any]

NAME = r"[^\W\d²³ᵀ][^\W²³ᵀ]*"
TOKENS = re.compile(
    rf"(?P<space>\s+)|(?P<ones>1_{NAME})|(?P<number>\d+(\.\d+)?(e[+-]?\d+)?)"
    rf"|(?P<big>[ΣΠ]|max_)(_?(?P<range>\{{[^}}]*\}}|\w))?"
    rf"|(?P<symbol>{NAME}′*(_\w+)?(\^{NAME})?(\{{[^}}]*\}})?)|(?P<sign>.)"
)
COMPARE = {
    "<": np.less, ">": np.greater, "≤": np.less_equal, "≥": np.greater_equal, "=": np.equal,
    "≠": np.not_equal,
}  # fmt: skip


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    range: str = ""
    called: bool = False  # a bracket follows at once
    named: bool = False  # a `=` without spaces


def tokens_of(text: str) -> list[Token]:
    found = []
    for match in TOKENS.finditer(text):
        kind = match.lastgroup if match.lastgroup != "range" else "big"
        kind = next(k for k in ("space", "ones", "number", "big", "symbol", "sign") if match[k])
        called = text[match.end() : match.end() + 1] == "("
        named = match[kind] == "=" and text[match.start() - 1] != " "
        if kind != "space":
            over = (match["range"] or "").strip("{}")
            found.append(Token(kind, match[kind], over, called, named))
    return [*found, Token("end", "")]


def split_symbol(text: str) -> tuple[str, str]:
    """`B^S_{im,j}` → `B^S`, `im,j`"""
    if text.endswith("}"):
        name, _, inner = text[:-1].partition("{")
        return name.removesuffix("_"), inner
    name, _, inner = text.rpartition("_")
    return (name, inner) if name else (text, "")


def places(inner: str) -> list[str]:
    """`im,j` → `i`, `m`, `j`; `i−1` is one place."""
    if "−" in inner:
        return [inner]
    return re.findall(r"\d+|[^\W\d]", inner)


class Parser:
    """sum of terms; ·, ⊙ and / of sides; sides by side are products of matrices."""

    def __init__(self, text: str) -> None:
        self.tokens, self.at = tokens_of(text), 0
        self.parsed = text

    @property
    def now(self) -> Token:
        return self.tokens[self.at]

    def take(self, *texts: str) -> str:
        """The next sign, if it is one of these, else ""."""
        if self.now.kind == "sign" and self.now.text in texts:
            self.at += 1
            return self.tokens[self.at - 1].text
        return ""

    def need(self, text: str) -> None:
        assert self.take(text), f"{text!r} expected before {self.tokens[self.at :]}: {self.parsed}"

    def whole(self) -> Node:
        made = self.compared()
        assert self.now.kind == "end", f"left over {self.tokens[self.at :]}: {self.parsed}"
        return made

    def compared(self) -> Node:
        left = self.sum()
        sign = self.take(*COMPARE)
        if not sign:
            return left
        right = self.sum()
        return lambda v, e: COMPARE[sign](left(v, e), right(v, e))

    def sum(self) -> Node:
        made = negated(self.term()) if self.take("−") else self.term()
        while sign := self.take("+", "−"):
            right = self.term()
            made = added(made, negated(right) if sign == "−" else right)
        return made

    def term(self) -> Node:
        if self.now.kind == "big":
            token = self.now
            self.at += 1
            return reduced(token.text, token.range, self.term())
        made = self.side()
        while sign := self.take("·", "⊙", "/"):
            made = combined(sign, made, self.side())
        return made

    def side(self) -> Node:
        made = self.post()
        while self.now.kind in ("symbol", "ones") or self.now.text == "(":
            made = multiplied(made, self.post())
        return made

    def post(self) -> Node:
        made = self.atom()
        while sign := self.take("ᵀ", "²", "³", "^", "["):
            if sign == "ᵀ":
                made = turned(made)
            elif sign == "[":
                letters = self.letters()
                made = indexed(made, letters)
            elif sign == "^":
                made = powered(made, self.exponent())
            else:
                made = powered(made, constant({"²": 2.0, "³": 3.0}[sign]))
        return made

    def exponent(self) -> Node:
        if self.take("{"):
            made = self.sum()
            self.need("}")
            return made
        return self.atom()

    def letters(self) -> list[str]:
        found = []
        while not self.take("]"):
            found.append(self.now.text)
            self.at += 1
            self.take(",")
        return found

    def arguments(self, close: str) -> dict[str, Node]:
        """Arguments by place, `eps=1e-06` by name."""
        found: dict[str, Node] = {}
        while not found or self.take(","):
            name = str(len(found))
            if self.now.kind == "symbol" and self.tokens[self.at + 1].named:
                name = self.now.text
                self.at += 2
            found[name] = self.compared()
        self.need(close)
        return found

    def atom(self) -> Node:
        token = self.now
        self.at += 1
        if token.kind == "number":
            return constant(float(token.text))
        if token.kind == "ones":
            return lambda v, e: np.ones(v.sizes[token.text.removeprefix("1_")])
        if token.kind == "symbol" and token.called:
            self.need("(")
            return called(token.text, self.arguments(")"))
        if token.kind == "symbol":
            return lambda v, e: v.get(token.text, e)
        if token.text == "√":
            self.need("(")
            return called("sqrt", self.arguments(")"))
        if token.text == "(":
            made = self.compared()
            self.need(")")
            return made
        if token.text == "⟨":
            return called("inner", self.arguments("⟩"))
        raise AssertionError(f"{token} in {self.parsed}")


def constant(x: float) -> Node:
    return lambda v, e: x


def negated(x: Node) -> Node:
    return lambda v, e: -x(v, e)


def added(a: Node, b: Node) -> Node:
    return lambda v, e: a(v, e) + b(v, e)


def combined(sign: str, a: Node, b: Node) -> Node:
    if sign == "/":
        return lambda v, e: a(v, e) / b(v, e)

    def run(v: Values, e: Env) -> Any:
        x, y = a(v, e), b(v, e)
        if sign == "·":  # scales: one side is a number
            assert np.ndim(x) == 0 or np.ndim(y) == 0, (np.shape(x), np.shape(y))
        elif np.ndim(x) and np.ndim(y):
            assert np.shape(x) == np.shape(y), (np.shape(x), np.shape(y))
        return x * y

    return run


def multiplied(a: Node, b: Node) -> Node:
    """A product of matrices; vectors are columns, and a transposed one a row."""

    def run(v: Values, e: Env) -> Any:
        x, y = a(v, e), b(v, e)
        if np.ndim(x) == 1 and np.ndim(y) == 2 and y.shape[0] == 1:
            return np.outer(x, y)
        return x @ y

    return run


def turned(x: Node) -> Node:
    return lambda v, e: x(v, e)[None, :] if np.ndim(x(v, e)) == 1 else x(v, e).T


def indexed(x: Node, letters: list[str]) -> Node:
    def run(v: Values, e: Env) -> Any:
        made = x(v, e)
        for letter, size in zip(letters, np.shape(made), strict=True):
            v.ranges[letter] = size
        return made[tuple(e.get(letter, 0) for letter in letters)]

    return run


def powered(x: Node, by: Node) -> Node:
    return lambda v, e: x(v, e) ** by(v, e)


def reduced(sign: str, over: str, body: Node) -> Node:
    """Σ and Π over the tokens or terms that a range tells, or over the components of vectors."""
    names = re.split(r"[<>≤]", over)
    signs = re.findall(r"[<>≤]", over)

    def run(v: Values, e: Env) -> Any:
        free = [x for x in names if x not in e and not x.isdigit()]
        assert len(free) == 1, (over, e)
        (letter,) = free
        first = 1
        last = v.tokens
        if not signs and letter not in v.token_letters:
            body(v, {**e, letter: 0})  # finds out how long the vectors are
            first, last = 0, v.ranges[letter] - 1
        made: Any = {"Σ": 0.0, "Π": 1.0, "max_": -np.inf}[sign]
        for at in range(first, last + 1):
            env = {**e, letter: at}
            ends = [env[x] if x in env else int(x) for x in names]
            pairs = zip(signs, ends, ends[1:], strict=False)
            if not all(COMPARE[s](a, b) for s, a, b in pairs):
                continue
            one = body(v, env)
            made = {"Σ": np.add, "Π": np.multiply, "max_": np.maximum}[sign](made, one)
        return made

    return run


def called(name: str, args: dict[str, Node]) -> Node:
    def run(v: Values, e: Env) -> Any:
        xs = [x(v, e) for key, x in args.items() if key.isdigit()]
        attrs = {key: x(v, e) for key, x in args.items() if not key.isdigit()}
        match name:
            case "inner":
                assert np.shape(xs[0]) == np.shape(xs[1]) and np.ndim(xs[0]) == 1
                return np.sum(xs[0] * xs[1])
            case "sum":
                return np.sum(xs[0])
            case "max":
                return np.max(xs[0])
            case "diag":
                return np.diag(xs[0])
            case "squeeze":
                return np.squeeze(xs[0])
            case "indicator":
                return np.where(xs[0], 1.0, 0.0)
        return lookup(name).meaning(*xs, **attrs)

    return run


# ---- what the equations say


@dataclass
class Values:
    """Quantities by name and places, evaluated from their definitions when they are asked for."""

    definitions: dict[str, list[tuple[list[str], list[str], Node]]]
    operands: dict[str, np.ndarray]
    entered: dict[str, np.ndarray]
    sizes: dict[str, int]
    token_letters: str
    tokens: int = C
    chunk: str = "C"
    found: dict[tuple[str, tuple[int, ...]], Any] = field(default_factory=dict)
    ranges: dict[str, int] = field(default_factory=dict)

    def get(self, text: str, env: Env) -> Any:
        if text in env:
            return env[text]
        if text in self.sizes:
            return self.sizes[text]
        if text == self.chunk:
            return self.tokens
        name, inner = split_symbol(text)
        at = tuple(self.place(x, env) for x in places(inner))
        if (name, at) not in self.found:
            self.found[name, at] = self.made(name, at)
        return self.found[name, at]

    def place(self, text: str, env: Env) -> int:
        letter, _, back = text.partition("−")
        if letter == self.chunk:
            return self.tokens
        value = int(letter) if letter.isdigit() else env[letter]
        return value - int(back or 0)

    def made(self, name: str, at: tuple[int, ...]) -> Any:
        if name in self.entered and at == (0,):
            return self.entered[name]
        for left, letters, node in self.definitions.get(name, []):
            env: Env = {}
            for x, value in zip(left, at, strict=True):
                if x.isdigit() or x == self.chunk:
                    if value != (self.tokens if x == self.chunk else int(x)):
                        break
                else:
                    env[x] = value
            else:
                return self.components(node, letters, env)
        (token,) = at
        return self.operands[name][token - 1]

    def components(self, node: Node, letters: list[str], env: Env) -> Any:
        """A value, from its components where the definition gives those."""
        if not letters:
            return node(self, env)
        node(self, {**env, **dict.fromkeys(letters, 0)})
        sizes = [self.ranges[x] for x in letters]
        made = np.zeros(sizes)
        for at in product(*map(range, sizes)):
            made[at] = node(self, {**env, **dict(zip(letters, at, strict=True))})
        return made


def lines_of(text: str) -> dict[str, list[str]]:
    """The printed text → the equations under each heading, without their labels, each on a line."""
    found: dict[str, list[str]] = {}
    for block in re.sub(r"\n +(?=[+−] )", " ", text).split("\n\n"):
        heading, *lines = block.splitlines()
        if any(" = " in line for line in lines):
            kind = heading.split()[0] if not heading.startswith("token by") else "recurrent"
            found[kind] = [re.sub(r"^  \S+( \S+)*  +", "", line) for line in lines]
    return found


def definitions_of(lines: list[str]) -> dict[str, list[tuple[list[str], list[str], Node]]]:
    found: dict[str, list[tuple[list[str], list[str], Node]]] = {}
    for line in lines:
        left, _, right = line.partition(" = ")
        symbol, bracket, letters = left.strip().partition("[")
        name, inner = split_symbol(symbol)
        inside = re.findall(r"\w", letters) if bracket else []
        found.setdefault(name, []).append((places(inner), inside, Parser(right).whole()))
    return found


def literally(
    rule: Rule, states: list[np.ndarray], operands: dict[str, np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The rule's outputs for every token, and its states after them."""
    rows, body = [], body_on_arrays(rule, sized(rule))
    for token in range(C):
        made = body(*states, *(x[token] for x in operands.values()))
        made = made if isinstance(made, tuple) else (made,)
        states = [np.asarray(x) for x in made[: len(states)]]
        rows.append(made[len(states) :])
    return [np.array(x) for x in zip(*rows, strict=True)], states


def sized(rule: Rule) -> dict[str, int]:
    dims = {d for shape in rule.operands.values() for d in shape}
    return {d: SIZES.get(d, 4) for d in dims}


def evaluate(rule: Rule, kind: str) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Every output and state as the printed equations give it, and as the loop does."""
    sizes = sized(rule)
    rng = np.random.default_rng(len(rule.name))
    shapes = {n: (C, *(sizes[d] for d in shape)) for n, shape in rule.operands.items()}
    operands = draw(rule, shapes, rng)
    inputs = rule.function.inputs[: len(rule.states)]
    entered = {
        v.name: rng.standard_normal([sizes[str(d)] for d in v.type.shape])  # type: ignore[union-attr]
        for v in inputs
    }
    outputs, states = literally(rule, [*entered.values()], operands)

    text = lines_of(str(ar.explain(rule)))
    lines = [*text.get("token", ()), *text[kind], *text.get("outputs", ())]
    found = ar.explain(rule).rules[0].equations
    assert found is not None
    letters = "".join(found.letters[x] for x in "ijtmn")
    values = Values(
        definitions_of(lines), operands, entered, sizes, letters, chunk=found.letters["C"]
    )
    for name, want in zip(rule.outputs, outputs, strict=True):
        got = np.array([values.get(f"{name}_{i}", {}) for i in range(1, C + 1)])
        yield name, np.broadcast_to(got, want.shape), want
    last = found.letters["C"] if kind == "by" else C
    for name, want in zip(entered, states, strict=True):
        yield name, np.asarray(values.get(f"{name}_{last}", {})), want


# ---- more ways of writing


@ar.recurrence("q:K k:K v:V b:K,K c: -> o:V")
def mixed_keys(S, q, k, v, b, c):
    """A matrix of a token mixes keys."""
    S = c * S + np.outer(b @ k, v * np.max(q))
    return S, (q @ b) @ S


@ar.recurrence("q:K k:K v:V -> o:K,V n:")
def matrix_output(S, q, k, v):
    """An output is a matrix, another a number."""
    S = 0.5 * S + np.outer(k, v)
    return S, np.outer(q, q @ S), np.sum(q @ S)


@ar.recurrence("S:K,V n: z:V | q:K k:K v:V i: j: t: alpha: -> o:V", domain={"alpha": "0..1"})
def letters_taken(S, n, z, q, k, v, i, j, t, alpha):
    """A number and a vector of values as states; operands have the letters of indices."""
    S = alpha * S - alpha * np.outer(k, i * (k @ S)) + np.outer(j * k, v)
    n, z = alpha * n + t, 0.5 * z + t * v
    return S, n, z, (q @ S) / (2 + np.abs(n)) + z


@ar.recurrence("q:K k:K l:K u:K v:V e:V f:V -> o:V", domain={"e": "0..0.3", "f": "0..0.3"})
def two_erases(S, q, k, l, u, v, e, f):  # noqa: E741
    """Two erasures per value, three terms written, not along the same keys."""
    S = 0.8 * S - np.outer(k, e * (k @ S)) / 5 - np.outer(l, f * (u @ S)) / 5
    S = S + np.outer(k, v) + np.outer(u, np.exp(v)) + np.outer(l, np.sin(v))
    return S, q @ S


@ar.recurrence("q:K k:K v:V -> o:V")
def constants_written(S, q, k, v):
    """What is written is the same for all values, then for all keys."""
    S = 0.5 * S + np.outer(k, np.ones(V)) * np.sum(v) + np.outer(np.ones(K), v)
    return S, q @ S


@ar.recurrence("S:K,V z:K | q:K k:K v:V a: -> o:V", domain={"a": "<= 0"})
def same_decay(S, z, q, k, v, a):
    """Two states that decay alike have their scores together."""
    S, z = np.exp(a) * S + np.outer(k, v), np.exp(a) * z + k
    return S, z, (q @ S) / (1 + np.abs(q @ z)) ** 1.5


@ar.recurrence("q:K k:K v:V beta: -> o:V", domain={"beta": "0..1"})
def normed_keys(S, q, k, v, beta):
    """An op that the algebra does not look into, and a function of the result."""
    k = ar.l2_norm(k)
    gate = ar.sigmoid(ar.l2_norm(q) - 2)
    S = gate[:, None] * S - np.outer(beta * k, k @ S) + np.outer(k, v)
    return S, ar.silu(q) @ S


@ar.recurrence(
    "S:V,K z:K M:K,V | q:K k:K v:V g:K p:K e:V b: -> o:V",
    domain={"g": "<= 0", "p": "unit", "k": "unit", "e": "0..0.5", "b": "0..1"},
)
def everything_at_once(S, z, M, q, k, v, g, p, e, b):
    """A transposed state that decays per key and is erased per value, a vector that is erased, and
    a state that both feed."""
    S = S * np.exp(g) - np.outer(e * (S @ p), k) + np.outer(v, q)
    z = np.exp(g) * z + k * (b - k @ z)
    M = np.exp(g)[:, None] * M + np.outer(k, b * (S @ q - (p @ M)) + (q @ z))
    return S, z, M, q @ M + S @ k


MORE = (
    everything_at_once,
    mixed_keys, matrix_output, letters_taken, two_erases, constants_written, same_decay,
    normed_keys,
)  # fmt: skip
ALL = {name: rule for name, (rule, _) in CHUNKABLE.items()}
ALL |= {rule.name: rule for rule in MORE}
ALL |= {name: RULES[name] for name in ("ratio", "transposed", "square", "matrices")}


@pytest.mark.parametrize("kind", ("recurrent", "by"))
@pytest.mark.parametrize("name", ALL)
def test_the_printed_equations_are_the_loop(name: str, kind: str) -> None:
    for label, got, want in evaluate(ALL[name], kind):
        assert got.shape == want.shape, label
        scale = max(1.0, float(np.max(np.abs(want))))
        assert np.max(np.abs(got - want)) <= 1e-12 * scale, label


def test_a_wrong_equation_would_be_found() -> None:
    """The evaluator tells one decay too many from the right product."""
    text = lines_of(str(ar.explain(ALL["kda"])))
    lines = [line.replace("Π_{j<t<i}", "Π_{t<i}") for line in text["by"]]
    assert lines != text["by"]
    rng = np.random.default_rng(0)
    shapes = {n: (C, *(SIZES[d] for d in s)) for n, s in ALL["kda"].operands.items()}
    operands = draw(ALL["kda"], shapes, rng)
    S = np.zeros((5, 7))
    (want,), _ = literally(ALL["kda"], [S], operands)
    definitions = definitions_of([*text["token"], *lines, *text["outputs"]])
    values = Values(definitions, operands, {"S": S}, SIZES, "ijtmn")
    assert np.max(np.abs(values.get("o_16", {}) - want[-1])) > 1e-3


# ---- text


def check(name: str, text: str) -> None:
    """A golden text, in which lines of the file of rules are left out."""
    check_golden(name, re.sub(r"\b(\w+\.py):\d+", r"\1:LINE", text))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str) -> None:
    check(f"recurrence/explain_{name}", str(ar.explain(EXAMPLES[name][0])))
    check(f"recurrence/explain_{name}_latex", ar.explain(EXAMPLES[name][0]).latex())


@pytest.mark.parametrize("name", [*ALL, *RECURRENT_ONLY])
def test_latex_is_balanced(name: str) -> None:
    """No LaTeX is here to run it: its structure is checked."""
    rule = ALL.get(name) or EXAMPLES[name][0]
    text = ar.explain(rule).latex()
    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    depth = 0
    for sign in re.sub(r"\\[{}]", "", body):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        assert depth >= 0
    assert depth == 0
    assert body.count(r"\left") == body.count(r"\right")
    assert body.isascii()
    stack: list[str] = []
    for word, what in re.findall(r"\\(begin|end)\{([^}]*)\}", body):
        if word == "begin":
            stack.append(what)
        else:
            assert stack.pop() == what
    assert not stack
    for section in re.findall(r"\\begin\{align\*\}(.*?)\\end\{align\*\}", body, re.S):
        rows = re.sub(r"\\begin\{cases\}.*?\\end\{cases\}", "", section, flags=re.S)
        for row in rows.split(r"\\"):
            assert row.count("&") == 1 and re.search(r"&=|^\s*&\\quad [+-] ", row), row
    known = (
        "begin end left right frac sum prod max exp log sin cos tanh operatorname mathrm mathbf "
        "odot langle rangle top text quad sqrt cdot le ge ne alpha beta eta kappa rho pi phi psi "
        "xi chi omega epsilon Lambda Delta Gamma"
    ).split()
    assert {*re.findall(r"\\([A-Za-z]+)", body)} <= {*known}


@pytest.mark.parametrize("name", ALL)
def test_long_equations_go_on_below_their_first_term(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a narrow page nothing is lost, in either notation, and lines are as long as they must."""
    (found,) = ar.explain(ALL[name]).rules
    assert found.equations is not None
    monkeypatch.setattr(sys.modules["archir.explain"], "WIDTH", 30)
    below = 0
    for line in str(found).partition("\n\ntoken")[2].splitlines():
        if " = " in line:
            below = line.index(" = ") + 3
        elif line.startswith("  "):
            assert re.match(r" +[+−] ", line) and line.index(line.strip()) == below, line
    shown = [x for section in lines_of(str(found)).values() for x in section]
    texts = [e.text for e in found.equations.all]
    assert [re.sub(" +", " ", x) for x in shown if " = " in x] == texts
    rows = re.sub(r" \\\\\n  &\\quad ", " ", found.latex())
    assert all(f"  {e.latex}" in rows for e in found.equations.all)


@pytest.mark.parametrize("name", ALL)
def test_lines_have_a_hundred_columns(name: str) -> None:
    """Unless they are one term."""
    for line in str(ar.explain(ALL[name])).splitlines():
        if len(line) > 100:
            _, _, term = line.partition(" = ")
            while (inner := re.sub(r"[({][^(){}]*[)}]", "", term)) != term:
                term = inner
            assert not re.search(" [+−] ", term), line


@pytest.mark.parametrize("name", RECURRENT_ONLY)
def test_a_rule_that_does_not_chunk_says_why(name: str) -> None:
    (found,) = ar.explain(EXAMPLES[name][0]).rules
    assert [form.legal for form in found.forms] == [True, False, False]
    assert re.search(r"\(library\.py:\d+\)$", found.forms[1].says)
    assert found.equations is None


def test_the_reason_names_the_line() -> None:
    (found,) = ar.explain(EXAMPLES["squashed"][0]).rules
    assert isinstance(found.found, Reason) and found.found.loc is not None
    assert "np.tanh" in found.found.loc.excerpt()[0]


def test_the_same_algebra_prints_the_same_equations() -> None:
    """What is printed comes of the record, and not of how a rule is written or called."""
    from tests.recurrence.library import KDA_REWRITTEN, kda

    first, *others = (ar.explain(rule).rules[0].equations for rule in (kda, *KDA_REWRITTEN))
    assert first is not None
    assert all(other is not None and other.all == first.all for other in others)


def test_a_model_explains_each_rule_once() -> None:
    found = ar.explain("tests/specs/kda.py:kda_lm", "plain")
    assert [rule.rule.name for rule in found.rules] == ["kda"]
    with pytest.raises(SpecError, match="gpt2 has no recurrence"):
        ar.explain("gpt2", "tiny")


NAMED = """
import numpy as np
import archir as ar

@ar.config
class Config:
    width: int = 8

@ar.recurrence("q:K k:K v:V -> y:V last:V")
def rule(S, q, k, v):
    S = S + np.outer(k, v)
    return S, q @ S, k @ S

@ar.spec(Config)
def model(x: "f[B, T, width]", c):
    q, k, v = (ar.heads(x, 1, 2) for _ in "qkv")
    y, last = rule(q, k, v)
    return ar.merge(y + last)
"""


def test_outputs_have_the_names_of_the_signature(tmp_path: Path) -> None:
    """Of a rule, and of the rules of a model."""
    (tmp_path / "named.py").write_text(NAMED)
    texts = [str(ar.explain(f"{tmp_path}/named.py:{name}")) for name in ("rule", "model")]
    assert texts[0] == texts[1]
    assert [line.split(" = ")[0] for line in lines_of(texts[0])["outputs"]] == ["y_i   ", "last_i"]


def test_rows() -> None:
    (row,) = ar.explain(EXAMPLES["delta_product"][0]).rows
    assert row["states"][0]["erase_rank"] == 2
    assert row["states"][0]["shared"] is True
    assert [form["form"] for form in row["forms"]] == ["recurrent", "chunk", "parallel"]
    assert {e["section"] for e in row["equations"]} == {"terms", "recurrent", "chunk", "outputs"}
    (row,) = ar.explain(EXAMPLES["cascade"][0]).rows
    assert row["states"][1]["fed_by"] == ["S"]


FILE = """
import numpy as np
import archir as ar

@ar.recurrence("q:K k:K v:V g: -> o:V", domain={"g": "<= 0"})
def rule(S, q, k, v, g):
    S = np.exp(g) * S + np.outer(k, v)
    return S, q @ S
"""


@pytest.mark.parametrize("option", ("", "--latex", "--json"))
def test_cli(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    monkeypatch.setattr("sys.argv", ["archir", "explain", f"{file}:rule", *option.split()])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code in (0, None)
    check_golden(f"cli/explain{option.replace('--', '_')}", capsys.readouterr().out)


def test_operands_are_called_as_the_user_does() -> None:
    """`f` is `f_` in IR text."""
    rule, _ = EXAMPLES["mlstm"]
    head, *_ = str(ar.explain(rule)).split("  ")
    assert head == f"mlstm({', '.join([*rule.states, *rule.operands])})" and ", f)" in head
