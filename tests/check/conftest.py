"""The command line, as in tests/cli."""

from tests.cli.conftest import archir

__all__ = ["archir"]
