"""Templates are Python before and after they are filled in; helpers are accurate."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jinja2
import numpy as np
import pytest
import torch

from archir.ops import OPS
from backends.triton.body import HELPERS
from backends.triton.render import FOLDER, helpers, parses, render


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda f: f.name)
def test_templates_are_python(file: Path) -> None:
    parses(file.read_text())


def test_a_template_that_is_no_python_is_refused() -> None:
    with pytest.raises(SyntaxError):
        parses("def f(:\n    {{ x }}\n")


def test_a_name_that_nobody_gave_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="'places' is undefined"):
        render("pointwise", name="f", parameters="x_ptr", function="f", inner=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [name for name in HELPERS if name != "_power"])
def test_helpers_are_accurate(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """To a few units in the last place, near zero and at the ends."""
    kernel = (
        "@triton.jit\ndef kernel(x_ptr, y_ptr, N: tl.constexpr):\n"
        "    at = tl.arange(0, N)\n"
        f"    tl.store(y_ptr + at, {name}(tl.load(x_ptr + at)))\n"
    )
    head = "import triton\nimport triton.language as tl"
    path = tmp_path / "k.py"
    path.write_text("\n\n\n".join([head, *helpers([kernel]), kernel]))
    spec = importlib.util.spec_from_file_location("k", path)
    assert spec is not None and spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    x = torch.cat([torch.tensor([0.0, 88.0, 1e-30]), torch.logspace(-8, 1.4, 61)]).to(dtype)
    x = x if name == "_log1p" else torch.cat([x, -x])
    y = torch.empty_like(x)
    with np.errstate(all="ignore"):
        file.kernel[(1,)](x, y, N=len(x))
    true = x.double().numpy()
    want = {
        "_log1p": np.log1p, "_expm1": np.expm1, "_tanh": np.tanh,
        "_gelu_tanh": OPS["gelu_tanh"].meaning,
    }[name](true)  # fmt: skip
    floor = 1.0 if name == "_gelu_tanh" else 1e-38  # 1 + tanh cancels, as everywhere
    units = np.abs(y.double().numpy() - want) / np.maximum(np.abs(want), floor)
    assert np.max(units) < 16 * torch.finfo(dtype).eps
