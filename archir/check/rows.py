"""The rows that a check gives, and what they say together."""

from __future__ import annotations

from typing import Any


class Rows:
    """Of a report: `ok` when there are rows and every one holds."""

    rows: list[dict[str, Any]]

    @property
    def ok(self) -> bool:
        return bool(self.rows) and not self.failures

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The rows that do not hold."""
        return [row for row in self.rows if not row["ok"]]
