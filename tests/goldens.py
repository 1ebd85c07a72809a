"""Expected text in files: `tests/golden/<name>.txt`.

Run with ARCHIR_UPDATE_GOLDEN=1 to write what the code says now, then read the diff.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
_TMP = re.escape(tempfile.gettempdir().rstrip("/"))


def check_golden(name: str, text: str) -> None:
    """Assert that `text` is what `tests/golden/<name>.txt` says, temporary folders aside."""
    file = GOLDEN / f"{name}.txt"
    text = normalise(text)
    if os.environ.get("ARCHIR_UPDATE_GOLDEN") == "1":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return
    assert file.is_file(), f"no {file}; ARCHIR_UPDATE_GOLDEN=1 writes it:\n{text}"
    assert text == file.read_text(), f"{file} says something else"


def normalise(text: str) -> str:
    """Temporary folders as TMP and this repository as REPO, one newline at the end."""
    text = text.replace(str(GOLDEN.parent.parent), "REPO")  # which may lie in a temporary folder
    text = re.sub(rf"{_TMP}/pytest-of-[^/\s]+/pytest-\d+/(popen-gw\d+/)?[^/\s]+", "TMP", text)
    text = re.sub(rf"{_TMP}/[^/\s]+", "TMP", text)
    return text.rstrip("\n") + "\n"
