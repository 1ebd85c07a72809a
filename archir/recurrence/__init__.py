"""Recurrences: from a NumPy rule to its IR function (D7)."""

from archir.recurrence.rule import Rule, recurrence

__all__ = ["Rule", "recurrence"]
