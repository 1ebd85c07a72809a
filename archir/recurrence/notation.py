"""How equations are written: as text for a terminal, and for LaTeX with amsmath."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GREEK: dict[str, str] = dict(zip(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau "
    "phi chi psi omega Gamma Delta Lambda Phi".split(),
    "αβγδεζηθικλμνξπρστφχψωΓΔΛΦ", strict=True,
))  # fmt: skip
LETTER_NAMES: dict[str, str] = {letter: name for name, letter in GREEK.items()}
COMPARISONS = {
    "less": "<", "less_equal": "≤", "greater": ">", "greater_equal": "≥", "equal": "=",
    "not_equal": "≠",
}  # fmt: skip
ATOM, POWER, PRODUCT, SUM = range(4)  # how closely a piece of text is bound


@dataclass(frozen=True)
class Symbol:
    """A letter or a name of the rule, with the state it belongs to where there are several."""

    base: str
    mark: str = ""
    state: str = ""


@dataclass(frozen=True)
class Piece:
    """Text, and how closely it is bound."""

    text: str
    level: int = ATOM


class Text:
    """Mathematics in a terminal."""

    times, each, side = " · ", " ⊙ ", " "
    minus = "−"

    def symbol(self, s: Symbol, at: str = "") -> str:
        state = f"^{s.state}" if s.state else ""
        at = f"{{{at}}}" if set(at) & set(",−") else at
        return f"{s.base}{s.mark}{state}" + (f"_{at}" if at else "")

    def component(self, of: str, indices: Sequence[str]) -> str:
        return f"{of}[{', '.join(indices)}]"

    def ones(self, dim: str) -> str:
        return f"1_{dim}"

    def number(self, n: float) -> str:
        return str(int(n)) if n == int(n) and abs(n) < 1e15 else repr(n)

    def group(self, x: str) -> str:
        return f"({x})"

    def transposed(self, x: str) -> str:
        return f"{x}ᵀ"

    def power(self, x: str, by: str) -> str:
        return x + {"2": "²", "3": "³"}.get(by, f"^{by}" if by.isalnum() else f"^{{{by}}}")

    def root(self, x: str) -> str:
        return f"√({x})"

    def ratio(self, over: Piece, under: Piece) -> Piece:
        return Piece(f"{closed(self, over, PRODUCT)} / {closed(self, under, POWER)}", PRODUCT)

    def inner(self, a: str, b: str) -> str:
        return f"⟨{a}, {b}⟩"

    def diagonal(self, x: str) -> str:
        return f"diag({x})"

    def over(self, sign: str, below: str) -> str:
        below = below.replace("<=", "≤")
        return f"{sign}_{below} " if len(below) == 1 else f"{sign}_{{{below}}} "

    def call(self, name: str, args: Sequence[str]) -> str:
        if name in COMPARISONS:
            return f"{args[0]} {COMPARISONS[name]} {args[1]}"
        return f"{name}({', '.join(args)})"

    def note(self, x: str) -> str:
        return x

    def equation(self, left: str, right: str) -> str:
        return f"{left} = {right}"


class Latex(Text):
    """The same for LaTeX, with amsmath."""

    times, each, side = r" \, ", r" \odot ", r" \, "
    minus = "-"

    def symbol(self, s: Symbol, at: str = "") -> str:
        base = s.base
        if base in GREEK or base in LETTER_NAMES:
            base = rf"\{LETTER_NAMES.get(base, base)}"
        elif len(base) > 1:
            base = rf"\mathrm{{{base.replace('_', chr(92) + '_')}}}"
        base += s.mark.replace("′", "'")
        state = f"^{{({self.symbol(Symbol(s.state))})}}" if s.state else ""
        return base + state + (f"_{{{at.replace('−', '-')}}}" if at else "")

    def ones(self, dim: str) -> str:
        return rf"\mathbf{{1}}_{{{dim}}}"

    def number(self, n: float) -> str:
        text = super().number(n)
        base, e, power = text.partition("e")
        return rf"{base} \cdot 10^{{{int(power)}}}" if e else text

    def group(self, x: str) -> str:
        return rf"\left({x}\right)"

    def transposed(self, x: str) -> str:
        return f"{{{x}}}^{{\\top}}"

    def power(self, x: str, by: str) -> str:
        return f"{{{x}}}^{{{by.replace('−', '-')}}}"

    def root(self, x: str) -> str:
        return rf"\sqrt{{{x}}}"

    def ratio(self, over: Piece, under: Piece) -> Piece:
        return Piece(rf"\frac{{{over.text}}}{{{under.text}}}", POWER)

    def inner(self, a: str, b: str) -> str:
        return rf"\langle {a}, {b} \rangle"

    def diagonal(self, x: str) -> str:
        return rf"\operatorname{{diag}}({x})"

    def over(self, sign: str, below: str) -> str:
        name = {"Σ": r"\sum", "Π": r"\prod", "max": r"\max"}[sign]
        return rf"{name}_{{{below.replace('<=', chr(92) + 'le ')}}} "

    def call(self, name: str, args: Sequence[str]) -> str:
        match name, args:
            case (("less" | "greater" | "equal"), [a, b]):
                return f"{a} {COMPARISONS[name]} {b}"
            case (("less_equal" | "greater_equal" | "not_equal"), [a, b]):
                sign = {"less_equal": r"\le", "greater_equal": r"\ge", "not_equal": r"\ne"}[name]
                return f"{a} {sign} {b}"
            case "where", [c, a, b]:
                rows = rf"{a} & \text{{if }} {c} \\ {b} & \text{{otherwise}}"
                return rf"\begin{{cases}} {rows} \end{{cases}}"
            case "abs", [a]:
                return rf"\left|{a}\right|"
            case "pow", [a, b]:
                return self.power(self.group(a), b)
        shown = name.replace("_", r"\_")
        word = rf"\{name}" if name in ("exp", "log", "sin", "cos", "tanh", "max") else ""
        return (word or rf"\operatorname{{{shown}}}") + self.group(", ".join(args))

    def note(self, x: str) -> str:
        return rf"\text{{{x.replace('_', chr(92) + '_')}}}"

    def equation(self, left: str, right: str) -> str:
        return f"{left} &= {right}"


def closed(notation: Text, piece: Piece, level: int) -> str:
    """A piece as it stands where what is bound less closely than `level` needs brackets."""
    return piece.text if piece.level <= level else notation.group(piece.text)
