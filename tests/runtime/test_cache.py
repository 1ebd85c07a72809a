"""The folder of emitted files: shared by processes, read-only, and never rendered twice."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import archir as ar
from archir.diagnostics import MismatchError
from backends.runtime import cache

# Every phase of a model on a backend; a digest of all numbers. `{before}` runs first.
SCRIPT = """
import hashlib, sys
import torch
import archir as ar
{before}
torch.set_num_threads(1)
model = ar.compile("llama", "tiny", backend=sys.argv[1]).init_weights(0)
x = torch.arange(10).view(2, 5)
with torch.no_grad():
    full = model(x)
    last, state = model.prefill(x, lengths=[5, 3])
    step, state = model.decode([[1], [2]], state)
    loss = model.loss(x, x)
print(hashlib.sha256(b"".join(y.numpy().tobytes() for y in (full, last, step, loss))).hexdigest())
"""
# Fails where anything is lowered into text.
NO_RENDERING = """
import backends.eager.emit, backends.eager.tree, backends.triton.render
def refuse(*args, **kwargs):
    raise AssertionError("rendered")
backends.triton.render._environment = refuse
backends.eager.emit.Printer.print = refuse
backends.eager.tree._class = refuse
"""


def start(cached: Path, backend: str, before: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, "ARCHIR_CACHE": str(cached), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT.format(before=before), backend]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def result(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out.strip()


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "triton"])
def test_a_second_process_renders_nothing(backend: str, tmp_path: Path) -> None:
    first = result(start(tmp_path, backend))
    assert result(start(tmp_path, backend, NO_RENDERING)) == first


def test_rendering_would_have_been_seen(tmp_path: Path) -> None:
    process = start(tmp_path, "triton", NO_RENDERING)
    _, err = process.communicate()
    assert process.returncode != 0 and "AssertionError: rendered" in err


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_eight_processes_on_one_empty_cache(backend: str, tmp_path: Path) -> None:
    processes = [start(tmp_path, backend) for _ in range(8)]
    assert len({result(process) for process in processes}) == 1
    assert not [*tmp_path.rglob(".*.py.*")], "files written aside are renamed"


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the file system refuse every new file (a superuser could write past permissions)."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def turn_on() -> None:
        monkeypatch.setattr(Path, "mkdir", refuse)
        monkeypatch.setattr(Path, "write_text", refuse)

    return turn_on


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_read_only_cache_works_once_filled(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_only: Any
) -> None:
    monkeypatch.setenv("ARCHIR_CACHE", str(tmp_path))
    x = torch.arange(6).view(2, 3)
    want = ar.compile("gpt2", "tiny", backend=backend).init_weights(0)(x)
    read_only()
    model = ar.compile("gpt2", "tiny", backend=backend).init_weights(0)
    assert torch.equal(model(x), want)
    with pytest.raises(MismatchError, match=r"prefill_dense_last\.py is not in the cache yet"):
        model.prefill(x)


def test_a_file_edited_by_hand_is_not_taken_for_an_emitted_one(tmp_path: Path) -> None:
    (path,) = cache.write(tmp_path, {"a.py": "x = 1\n"})
    assert cache.intact(path)
    path.write_text(path.read_text().replace("1", "2"))
    assert not cache.intact(path)
    cache.write(tmp_path, {"a.py": "x = 1\n"})
    assert cache.intact(path) and path.read_text().startswith("x = 1\n")
