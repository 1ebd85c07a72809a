"""Errors as part of the product: what is wrong, where, what disagrees, what to do next.

Every error archir raises on purpose is an `ArchirError` of one of seven kinds. It has a stable
`code` (for search and for tests) and four parts, printed in this order:

    shape error [shape-mismatch]: linear needs I = 768, but x has 512 on its last axis
      my_spec.py:14
        h = ar.linear(x, w)
            ^^^^^^^^^^^^^^^
      I = 768 from w: f[2304, 768]
      I = 512 from x: f[B, T, 512]
    next: give w 512 columns, or project x to 768 first
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass


@dataclass(frozen=True)
class Loc:
    """A place in a user's source: 1-based line, 0-based columns (`end` may be None)."""

    file: str
    line: int
    col: int = 0
    end: int | None = None

    @property
    def short(self) -> str:
        """`gpt2.py:12`: what emitted files and IR comments carry."""
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"

    def excerpt(self) -> list[str]:
        """The source line and a caret line under the columns; empty where the file is unknown."""
        text = linecache.getline(self.file, self.line).rstrip("\n")
        if not text.strip():
            return []
        indent = len(text) - len(text.lstrip())
        start = max(self.col, indent)
        end = self.end if self.end is not None and self.end > start else start + 1
        end = min(end, len(text))
        return [text[indent:], " " * (start - indent) + "^" * max(1, end - start)]


class ArchirError(Exception):
    """Base of all errors raised on purpose.

    what: one sentence that names the two things that disagree.
    code: stable slug.  loc: the user's line.  facts: one line each.  next: the next step.
    """

    kind = "error"

    def __init__(
        self,
        what: str,
        *,
        code: str,
        loc: Loc | None = None,
        facts: tuple[str, ...] | list[str] = (),
        next: str = "",
    ) -> None:
        self.what, self.code, self.loc = what, code, loc
        self.facts, self.next = tuple(facts), next
        super().__init__(self.render())

    def render(self) -> str:
        lines = [f"{self.kind} [{self.code}]: {self.what}"]
        if self.loc is not None:
            lines.append(f"  {self.loc.file}:{self.loc.line}")
            lines += [f"    {line}" for line in self.loc.excerpt()]
        lines += [f"  {fact}" for fact in self.facts]
        if self.next:
            lines.append(f"next: {self.next}")
        return "\n".join(lines)

    def at(self, loc: Loc | None) -> ArchirError:
        """The same error with a place, if it has none yet."""
        if self.loc is not None or loc is None:
            return self
        return type(self)(self.what, code=self.code, loc=loc, facts=self.facts, next=self.next)


class SpecError(ArchirError):
    """The spec (or its config, preset, names) is not usable."""

    kind = "spec error"


class ShapeError(ArchirError):
    """Two sizes, ranks or dtypes disagree."""

    kind = "shape error"


class VerifyError(ArchirError):
    """A module breaks a law of the IR; `problems` holds up to ten errors."""

    kind = "verify error"
    problems: tuple[ArchirError, ...] = ()


class ParseError(ArchirError):
    """IR text or a type annotation that does not parse."""

    kind = "parse error"


class PassError(ArchirError):
    """A pass met a module it must refuse, or changed its meaning."""

    kind = "pass error"


class UnsupportedError(ArchirError):
    """A legal request that archir, or the chosen backend, does not do."""

    kind = "unsupported"


class MismatchError(ArchirError):
    """Two things that must agree at run time do not: weights, states, inputs, results."""

    kind = "mismatch"


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    """A clause that names the closest known words: `did you mean 'gpt2'?`, or all when few."""
    import difflib

    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(name) for name in close) + "?"
    return "known: " + ", ".join(sorted(known))
