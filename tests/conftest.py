"""One thread per test worker, Triton interpreted (said before it is imported, as its own library is
too), and a cache of emitted files of the run's own."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Emitted files go to a temporary folder."""
    os.environ["ARCHIR_CACHE"] = str(tmp_path_factory.mktemp("cache"))
