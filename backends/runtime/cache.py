"""The folder of emitted files: named by what they depend on, written aside, then renamed.

`ARCHIR_CACHE` names its parent; by default `~/.cache/archir`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
import threading
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import archir
import backends
from archir.diagnostics import MismatchError


def root() -> Path:
    """The parent of all cache folders."""
    given = os.environ.get("ARCHIR_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "archir"


@lru_cache
def toolchain() -> str:
    """A hash of archir's and the backends' own sources: a changed emitter means a new folder."""
    digest = hashlib.sha256()
    for package in (archir, backends):
        assert package.__file__ is not None
        for file in sorted(Path(package.__file__).parent.rglob("*")):
            if file.suffix in (".py", ".jinja", ".toml"):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def folder(name: str, *parts: str) -> Path:
    """The cache folder of a model: `<name>-<hash of parts and toolchain>`."""
    digest = hashlib.sha256("\0".join([*parts, toolchain()]).encode()).hexdigest()[:16]
    return root() / f"{name}-{digest}"


_MARK = "# as emitted: "


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_IMPORTS = re.compile(r"^from \.(\w*) import (\w+)", re.M)


def intact(path: Path) -> bool:
    """Whether a file, and all it imports beside it, are there as `write` wrote them: each ends with
    a digest of what stands above."""
    if not path.is_file():
        return False
    text, mark, digest = path.read_text().rpartition(_MARK)
    if not mark or digest.strip() != _digest(text):
        return False
    beside = dict.fromkeys(module or name for module, name in _IMPORTS.findall(text))
    return all(intact(path.with_name(f"{name}.py")) for name in beside)


def write(place: Path, files: dict[str, str]) -> list[Path]:
    """Writes files into a folder, in order, each aside and then renamed; equal ones stay untouched.
    Each ends with a digest of itself, so that one edited by hand is not taken for an emitted one.
    """
    paths = []
    for name, text in files.items():
        text = f"{text}{_MARK}{_digest(text)}\n"
        path = place / name
        paths.append(path)
        if path.is_file() and path.read_text() == text:
            continue
        try:
            place.mkdir(parents=True, exist_ok=True)
            # not a temporary file of the system's: whoever may read the folder may read it
            aside = place / f".{name}.{os.getpid()}.{threading.get_ident()}"
            aside.write_text(text)
        except OSError as error:
            raise MismatchError(
                f"{name} is not in the cache yet, and cannot be written there: {error.strerror}",
                code="cache-write",
                facts=[f"the folder: {place}"],
                next="set ARCHIR_CACHE to a folder that can be written, or fill this one first",
            ) from None
        os.replace(aside, path)
    return paths


def load(place: Path, name: str) -> ModuleType:
    """Imports `name.py` of a cache folder as a module of a package named after the folder."""
    package = "archir_emitted_" + hashlib.sha256(str(place.resolve()).encode()).hexdigest()[:16]
    with _PACKAGES:
        _package(package, place)
    importlib.invalidate_caches()
    return importlib.import_module(f"{package}.{name}")  # waits where a thread is importing it


_PACKAGES = threading.Lock()


def _package(package: str, place: Path) -> None:
    """The folder as a package, made once."""
    if package not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            package, place / "__init__.py", submodule_search_locations=[str(place)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[package] = module
        spec.loader.exec_module(module)
