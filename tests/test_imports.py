"""Who may import whom (DESIGN section 1), read from the files; and what `import archir` loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "archir").rglob("*.py"))
NEVER = {"torch", "triton", "transformers", "safetensors", "backends", "specs", "tests"}
# library → the only places of archir that may import it
ONLY_IN = {
    "hypothesis": "archir.fuzz",
    "networkx": "archir.analysis",
    "typer": "archir.cli",
    "rich": "archir.cli",
    "jinja2": "archir.never",
}
# A module of a layer imports only layers up to its own, except inside functions.
LAYERS = (
    "diagnostics dims types sequence philox",
    "ir text source draw layout",
    "ops verify bounds",
    "trace recurrence dsl",
    "passes recurrence.lift recurrence.chunk recurrence.backward interp inputs",
    "pipeline spec analysis",
    "fuzz cost compile check provide explain",
    "cli __main__",
)
LAYER = {name: level for level, names in enumerate(LAYERS) for name in names.split()}


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path, everywhere: bool = True) -> Iterator[str]:
    """Full names a file imports; without `everywhere` only those at its top level."""
    tree = ast.parse(file.read_text())
    nodes = ast.walk(tree) if everywhere else iter(tree.body)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = (ROOT / f"{full.replace('.', '/')}.py").exists()
                yield full if is_module or node.module in ("archir",) else str(node.module)


def layer(module: str) -> int:
    """The layer of `archir.passes.head`, by its longest prefix in the table."""
    parts = module.removeprefix("archir.").split(".")
    for count in range(len(parts), 0, -1):
        if ".".join(parts[:count]) in LAYER:
            return LAYER[".".join(parts[:count])]
    raise AssertionError(f"{module} has no layer: add it to LAYERS")


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_imports(file: Path) -> None:
    name = module_of(file)
    for found in imports(file):
        top = found.split(".")[0]
        assert top not in NEVER, f"{name} imports {found}"
        if top in ONLY_IN:
            assert name.startswith(ONLY_IN[top]), f"{name} imports {found}"
    if name == "archir":
        return
    for found in imports(file, everywhere=False):
        if found.startswith("archir."):
            assert layer(found) <= layer(name), f"{name} imports {found}, which stands above it"


def test_one_place_looks_for_backends() -> None:
    users = [module_of(f) for f in FILES if "archir.backends" in f.read_text()]
    assert users == ["archir.compile"]
    lookups = [module_of(f) for f in FILES if "entry_points(" in f.read_text()]
    assert set(lookups) == {"archir.compile", "archir.spec"}


def test_import_archir_loads_no_heavy_library() -> None:
    code = (
        "import sys, archir; "
        "archir.trace('tests/specs/conv.py:conv_lm', 'tiny'); "
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    heavy = NEVER | {"networkx", "hypothesis", "typer", "rich", "jinja2", "scipy"}
    assert not heavy & set(run.stdout.split())
