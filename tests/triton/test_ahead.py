"""Packages: compiled ahead of time where no GPU is, run where no archir is."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.compiler.errors import CompilationError

import archir as ar
from archir import dims
from archir.compile import request_for, request_for_rule
from archir.diagnostics import ArchirError
from archir.pipeline import lower
from archir.recurrence import Rule
from archir.spec import resolve
from backends.triton import ahead, binary
from backends.triton.backend import TRITON, kernels_of
from backends.triton.binary import Binary
from tests.goldens import check_golden

HERE = Path(__file__).parent
RULE = f"{HERE.parent / 'specs' / 'kda.py'}:kda"
MODEL = f"{HERE.parent / 'specs' / 'kda.py'}:kda_lm"
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
LENGTHS, MORE = [4, 6], [1, 2]  # of ragged rows
KEYS = {
    "name", "what", "op", "file", "binary", "target", "layout", "dtype", "sizes", "registers",
    "spill_bytes", "shared_bytes", "warps", "stages", "read_bytes", "written_bytes",
}  # fmt: skip

# In a process without archir: what packages give, for inputs in a file.
RUN = """
import importlib, sys
from pathlib import Path
import torch

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("archir", "backends", "specs", "tests"):
            raise ImportError(f"{name} is not to be had")

sys.meta_path.insert(0, Refuse())
folder = Path(sys.argv[1])
sys.path[:0] = [str(folder), str(folder / "rule")]
given = torch.load(folder / "given.pt")
at = importlib.import_module("model.module")
model = at.build()
model.load_state_dict(given["weights"])
rows, more = given["rows"], given["more"]
made = {}
with torch.no_grad():
    made["full"] = at.full(model, given["tokens"])
    made["prefill"], state = at.prefill(model, given["tokens"], at.empty_state(2))
    made["decode"], state = at.decode(model, given["next"], state)
    made["ragged full"] = at.full(model, given["tokens"], rows)
    made["ragged prefill"], state = at.prefill(model, given["tokens"], at.empty_state(2), rows)
    made["ragged decode"], state = at.decode(model, given["next"], state, more)
import module, kernels  # of the rule, whose folder is on the path
made["o"], made["S"] = module.kda(*given["operands"])
made["o 2"], made["S 2"] = module.kda(*given["operands"], made["S"])
made["ragged o"], made["ragged S"] = module.kda(*given["operands"], rows=rows)
q, k, v, g, beta = given["operands"]
(call,) = (getattr(kernels, name) for name in kernels.KERNELS)
made["called o"], _ = call(q, k, v, g, beta, torch.zeros_like(made["S"]), None, None)
assert not {name.partition(".")[0] for name in sys.modules} & {"archir", "backends", "specs"}
torch.save(made, folder / sys.argv[2])
"""


# The command, once for each line of arguments.
COMPILE = """
import sys, typer
from archir.cli import app
for line in sys.argv[1:]:
    typer.main.get_command(app)(["compile", *line.split()], standalone_mode=False)
"""


def process(command: list[str], interpreted: bool) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_INTERPRET": "1"} if interpreted else {}
    made = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert made.returncode == 0, made.stderr
    return made


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a rule, each in a folder, what the commands printed, and inputs for both."""
    folder = tmp_path_factory.mktemp("packages")
    made = process(
        [
            *(sys.executable, "-c", COMPILE),
            f"{MODEL} --backend triton --preset tiny --target sm_90 --out {folder}/model",
            f"{RULE} --backend triton --sizes K=16,V=24,H=2 --target sm_90,gfx942 --target sm_90 "
            f"--dtype bfloat16 --out {folder}/rule",
        ],
        interpreted=False,
    )
    (folder / "printed").write_text(made.stdout)
    (folder / "progress").write_text(made.stderr)
    return folder


def test_a_package_is_listed(packages: Path) -> None:
    """Every file is printed and in the manifest; progress goes to stderr, a line per binary."""
    folder = packages / "model"
    paths = (packages / "printed").read_text().split()
    printed = {Path(path).name for path in paths if Path(path).parent == folder}
    files = {path.name for path in folder.iterdir() if path.is_file()}
    found = manifest(folder)
    assert printed == files == {*found["files"], "manifest.json"}
    assert {"module.py", "kernels.py", "modules.py", "decode_ragged.py"} <= files
    count = len(found["kernels"])
    assert f"{count} of {count}: " in (packages / "progress").read_text()
    assert {kernel["file"] for kernel in found["kernels"]} <= files


def test_a_manifest_tells_what_each_binary_takes(packages: Path) -> None:
    found = manifest(packages / "rule")
    assert found["schema"] == "archir.package/1"
    assert found["targets"] == ["sm_90", "gfx942"]
    cells = {(kernel["target"], kernel["layout"]) for kernel in found["kernels"]}
    assert cells == {(t, layout) for t in found["targets"] for layout in ("dense", "ragged")}
    for kernel in found["kernels"]:
        assert kernel.keys() == KEYS
        assert kernel["op"] == f"archir::{kernel['name']}"
        assert kernel["sizes"] == {"K": 16, "V": 24, "H": 2}
        assert kernel["dtype"] == "bfloat16"
        assert (packages / "rule" / kernel["binary"]).read_bytes()[:4] == b"\x7fELF"
        assert kernel["binary"].endswith("hsaco" if kernel["target"] == "gfx942" else "cubin")
        assert kernel["registers"] > 0 and kernel["warps"] > 0 and kernel["stages"] > 0
        assert kernel["spill_bytes"] == 0
        for side in ("read_bytes", "written_bytes"):
            assert dims.symbols(dims.parse(kernel[side])) <= found["symbols"].keys()
    assert found["meaning"].keys() <= KEYS


def test_a_rules_operands_are_those_of_a_model(packages: Path) -> None:
    """In bfloat16, but decays and strengths in float32; the state in float32."""
    text = (packages / "rule" / "module.py").read_text()
    for line in (
        "q: bf16[B, T, 2, 16]", "g: f32[B, T, 2, 16]", "beta: f32[B, T, 2]",
        "S: f32[R, 2, 16, 24], zeros if None", "returns o: bf16[B, T, 2, 24]",
    ):  # fmt: skip
        assert f"    {line}\n" in text
    folder = packages / "rule"
    for path in folder.glob("*.py"):  # no line of the command's own
        if path.stem not in ("support", "launch", "cache", "philox", "sequence"):
            assert set(re.findall(r"  # .*?(\w+\.py):\d+", path.read_text())) <= {"kda.py"}, path
    hash = next(iter(manifest(folder)["kernels"]))["name"].removeprefix("kda_")
    for name in ("module", "kernels"):
        text = (folder / f"{name}.py").read_text().replace(hash, "HASH")
        *_, package = text.partition('__spec__, __package__ = None, "')[2].partition('"')[:1]
        *lines, _ = text.replace(package, "PACKAGE").splitlines()
        check_golden(f"triton/package_{name}", "\n".join(lines))


@pytest.fixture(scope="module")
def wanted(packages: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What packages are given, and what archir's own model gives."""
    model = ar.compile(MODEL, preset="tiny", backend="triton").init_weights(3)
    random = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    tokens = torch.randint(0, 96, (2, 6), generator=random)
    k = torch.nn.functional.normalize(draw(2, 6, 2, 16), dim=-1).bfloat16()
    q, v = draw(2, 6, 2, 16).bfloat16(), draw(2, 6, 2, 24).bfloat16()
    given = {
        "weights": model.state_dict(),
        "tokens": tokens,
        "next": tokens[:, :2],
        "rows": ([0, 6], [4, 12]),  # LENGTHS of 6
        "more": ([0, 2], [1, 4]),  # MORE of 2
        "operands": [q, k, v, -draw(2, 6, 2, 16).abs(), draw(2, 6, 2).sigmoid()],
    }
    torch.save(given, packages / "given.pt")
    return given, own(model, given)


def own(model: Any, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What archir's own model and rule give."""
    tokens, more, made = given["tokens"], given["next"], {}
    with torch.no_grad():
        made["full"] = model(tokens)
        made["prefill"], state = model.prefill(tokens)
        made["decode"], state = model.decode(more, state)
        made["ragged full"] = model(tokens, lengths=LENGTHS)
        made["ragged prefill"], state = model.prefill(tokens, lengths=LENGTHS)
        made["ragged decode"], state = model.decode(more, state, lengths=MORE)
    return made


@pytest.mark.parametrize("interpreted", [False, True], ids=["torch", "interpreted kernels"])
def test_a_package_runs_without_archir(packages: Path, wanted: Any, interpreted: bool) -> None:
    """Its model and its rule are archir's own, in every phase, dense and ragged."""
    given, model = wanted
    process([sys.executable, "-c", RUN, str(packages), "made.pt"], interpreted)
    made = torch.load(packages / "made.pt")
    for name, want in model.items():
        have = made[name]
        if name in ("ragged full", "ragged decode"):  # outputs at padding are unspecified
            counts = LENGTHS if name == "ragged full" else MORE
            have, want = ([x[r, :n] for r, n in enumerate(counts)] for x in (have, want))
        if interpreted:
            assert all(map(torch.equal, have, want)), name
        torch.testing.assert_close(have, want, rtol=2e-5, atol=2e-6, msg=name)
    ragged, first, second, states = literally(given["operands"])
    # o is rounded to bfloat16, to half a unit in its last place
    for name, want in {"o": first, "called o": first, "o 2": second}.items():
        torch.testing.assert_close(made[name].double(), want, rtol=2**-8, atol=1e-5)
    for name, want in {"S 2": states, "ragged S": ragged}.items():
        torch.testing.assert_close(made[name].double(), want, rtol=1e-5, atol=1e-5)


def literally(operands: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """KDA in float64: the states after LENGTHS tokens, outputs of a pass and of a second one that
    goes on from its states, and the states after both."""
    q, k, v, g, beta = (x.double() for x in operands)
    state, outputs = torch.zeros(2, 2, 16, 24, dtype=torch.float64), []
    early = [state[0], state[1]]
    for step in range(12):
        t = step % 6
        state = g[:, t].exp()[..., None] * state
        seen = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        write = beta[:, t, :, None] * (v[:, t] - seen)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], write)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        early = [state[r] if step + 1 == n else early[r] for r, n in enumerate(LENGTHS)]
    made = torch.stack(outputs, 1)
    return torch.stack(early), made[:, :6], made[:, 6:], state


# ---- in this process, where nothing can be compiled: a binary of no code stands for each


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that would have been compiled."""
    found: list[str] = []

    def stand_in(kernel: Any, fn: Any, target: str, layout: str) -> Binary:
        assert callable(fn)
        found.append(kernel.name)
        return Binary(b"", "cubin", 1, 0, 0, 4, 2)

    monkeypatch.setattr(ahead, "check_targets", lambda _: None)
    monkeypatch.setattr(ahead, "compile_kernel", stand_in)
    return found


def package(out: Path, dtype: str, **sizes: int) -> list[Path]:
    rule = resolve(RULE)
    assert isinstance(rule, Rule)
    request = request_for_rule(rule, sizes, dtype=dtype)
    return TRITON.package(request, ["sm_90"], out, lambda _: None)


def test_a_package_replaces_an_older_one(compiled: list[str], tmp_path: Path) -> None:
    """Files that the older one had alone go; others stay."""
    first = {path.name for path in package(tmp_path, "float32", K=4, V=6)}
    (tmp_path / "notes.txt").write_text("mine")
    second = {path.name for path in package(tmp_path, "float32", K=4, V=5)}
    assert first - second and len(first) == len(second)
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert left == second | {"notes.txt"}


def test_a_package_cut_short_has_no_manifest(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "float32", K=4, V=6)
    assert (tmp_path / "manifest.json").is_file()
    stand_in = ahead.compile_kernel

    def interrupted(*given: Any) -> Binary:
        if len(compiled) == 3:
            raise KeyboardInterrupt
        return stand_in(*given)

    monkeypatch.setattr(ahead, "compile_kernel", interrupted)
    with pytest.raises(KeyboardInterrupt):
        package(tmp_path, "bfloat16", K=4, V=6)
    assert len(compiled) == 3  # two of the first, one of the second
    assert not (tmp_path / "manifest.json").exists()


def test_a_spec_without_phases_or_layouts(compiled: list[str], tmp_path: Path) -> None:
    """What looks ahead has no prefill; what mixes tokens has no ragged rows either."""
    for name, fn in {"ahead": _looks_ahead, "mixes": _mixes_tokens}.items():
        files = TRITON.package(request_for(fn), ["sm_90"], tmp_path / name, lambda _: None)
        programs = {path.name for path in files if path.name.startswith(("full", "prefill"))}
        wanted = {"full_dense.py", "full_ragged.py"} if name == "ahead" else {"full_dense.py"}
        assert programs == wanted
        text = (tmp_path / name / "module.py").read_text()
        assert ("rows=None" in text) == (name == "ahead")
        assert "def prefill" not in text and "def empty_state" not in text
        compile(text, name, "exec")


@ar.block
def _looks_ahead(x: "f[B, T, 8]"):
    q, k, v = ar.heads(ar.linear(x, 24, name="mix"), 3, 2)
    return ar.rms_norm(ar.merge(ar.attention(q, k, v, causal=False)), name="n")


@ar.block
def _mixes_tokens(x: "f[B, T, 8]"):
    return ar.rms_norm(x, name="n") + np.sum(x, axis=1, keepdims=True)


NORMED = """
import archir as ar

@ar.recurrence("q:K k:K v:V -> o:V")
def normed(S, q, k, v):
    S = S + ar.l2_norm(k)[:, None] * v
    return S, q @ S
"""


def test_a_rule_without_a_kernel(compiled: list[str], tmp_path: Path) -> None:
    (tmp_path / "my_rule.py").write_text(NORMED)
    rule = resolve(f"{tmp_path / 'my_rule.py'}:normed")
    assert isinstance(rule, Rule)
    with pytest.raises(ArchirError) as caught:
        TRITON.package(
            request_for_rule(rule, {"K": 4, "V": 6}), ["sm_90"], tmp_path / "out", lambda _: None
        )
    check_golden("triton/rule_kernel", str(caught.value))
    assert not (tmp_path / "out").exists()


def test_a_folder_of_somebody_elses(compiled: list[str], tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "of a web page"}')
    with pytest.raises(ArchirError) as caught:
        package(tmp_path, "float32", K=4, V=6)
    check_golden("triton/package_taken", str(caught.value))
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def loaded(folder: Path, name: str = "module") -> Any:
    """A file of a package, found by its path."""
    spec = importlib.util.spec_from_file_location(f"{name} of {folder.name}", folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    return file


def drawn(heads: int = 3, batch: int = 2, **other: torch.Tensor) -> dict[str, torch.Tensor]:
    """Operands of KDA with K = 4 and V = 6 on a grid of 2 × 5 tokens."""
    shapes = {"q": (4,), "k": (4,), "v": (6,), "g": (4,), "beta": ()}
    found = {n: torch.randn(batch, 5, heads, *s).sigmoid() for n, s in shapes.items()}
    return {**found, "g": -found["g"], **other}


MISFITS: dict[str, dict[str, Any]] = {
    "heads": drawn(heads=2),
    "heads of one": drawn(k=torch.zeros(2, 5, 1, 4)),
    "a dim": drawn(v=torch.zeros(2, 5, 3, 4)),
    "tokens": drawn(beta=torch.zeros(2, 4, 3)),
    "the batch": drawn(g=torch.zeros(1, 5, 3, 4)),
    "axes": drawn(beta=torch.zeros(2, 5, 3, 1)),
    "a dtype": drawn(q=torch.zeros(2, 5, 3, 4, dtype=torch.bfloat16)),
    "a device": drawn(k=torch.zeros(2, 5, 3, 4, device="meta")),
    "a number": {**drawn(), "beta": 0.5},
    "a state": {**drawn(), "S": torch.zeros(2, 3, 6, 4)},
    "rows of a state": {**drawn(), "S": torch.zeros(2, 3, 4, 6), "rows": ([0], [10])},
    "a row beyond": {**drawn(), "rows": ([0, 5], [5, 11])},
    "a row before": {**drawn(), "rows": ([-1], [5])},
    "a row turned": {**drawn(), "rows": ([4], [2])},
    "rows that overlap": {**drawn(), "rows": ([0, 4], [5, 10])},
    "rows out of order": {**drawn(), "rows": ([5, 0], [10, 5])},
    "rows without ends": {**drawn(), "rows": ([0, 5], [5])},
    "rows as a tensor": {**drawn(), "rows": torch.tensor([[0, 5], [5, 10]])},
    "rows as pairs": {**drawn(), "rows": [(0, 5), (5, 10), (10, 10)]},
}


def test_a_rule_refuses_what_it_was_not_compiled_for(compiled: list[str], tmp_path: Path) -> None:
    """Before anything runs; and takes what fits, also in one graph of a compiler."""
    package(tmp_path, "float32", K=4, V=6, H=3)
    file, shown = loaded(tmp_path), []
    for name, given in MISFITS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(file, "_prefill_dense", lambda *_: pytest.fail("ran"))
            patch.setattr(file, "_prefill_ragged", lambda *_: pytest.fail("ran"))
            with pytest.raises((ValueError, TypeError)) as caught:
                file.kda(**given)
        shown.append(f"# {name}\n{caught.type.__name__}: {caught.value}\n")
    check_golden("triton/package_refused", "\n".join(shown))
    rows = ([0, 2, 2, 6], [2, 2, 4, 10])  # one without tokens, tokens without a row
    given = drawn()
    made, states = file.kda(**given, rows=rows)
    assert made.shape == (2, 5, 3, 6) and states.shape == (4, 3, 4, 6)
    for how in ({}, {"rows": rows}):
        traced = torch.compile(file.kda, fullgraph=True, backend="eager")(**given, **how)
        for x, y in zip(traced, file.kda(**given, **how), strict=True):
            torch.testing.assert_close(x, y)


def test_a_kernel_refuses_shapes_that_it_would_read_outside(
    compiled: list[str], tmp_path: Path
) -> None:
    """As an op, called directly, on real tensors and on fake ones."""
    package(tmp_path, "float32", K=4, V=6, H=3)
    (call,) = (getattr(loaded(tmp_path, "kernels"), name) for name in dict.fromkeys(compiled))
    state = torch.zeros(2, 3, 4, 6)
    wrong = [[*MISFITS[name].values(), state, None, None] for name in [*MISFITS][:6]]
    wrong += [[*drawn().values(), x, None, None] for x in (state[:1], state.mT)]
    wrong += [[*drawn().values(), state, [0], [5]], [*drawn().values(), state, [0, 5], [5]]]
    right = [[*drawn().values(), state, *rows] for rows in ((None, None), ([0, 5], [5, 10]))]
    for fake in (False, True):
        with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
            for given in wrong:
                with pytest.raises(ValueError, match=r"is needed|states of . rows"):
                    call(*given)
            for given in right:
                assert call(*given)[1].shape == state.shape
    with pytest.raises(ValueError, match="row 1 is from 5 to 11, of 10 tokens"):
        call(*drawn().values(), state, [0, 5], [5, 11])


def test_a_model_refuses_rows_and_states_that_do_not_fit(
    compiled: list[str], tmp_path: Path
) -> None:
    TRITON.package(request_for(MODEL, "tiny"), ["sm_90"], tmp_path, lambda _: None)
    at, shown = loaded(tmp_path), []
    model, tokens = at.build(), torch.zeros(2, 5, dtype=torch.int64)
    wrong: dict[str, Callable[[], Any]] = {
        "one row": lambda: at.full(model, tokens[0]),
        "floats": lambda: at.full(model, tokens.float()),
        "a row beyond": lambda: at.full(model, tokens, ([0, 5], [5, 11])),
        "rows of a state": lambda: at.prefill(model, tokens, at.empty_state(3)),
        "ragged rows of a state": lambda: at.decode(
            model, tokens, at.empty_state(2), ([0, 2, 5], [2, 5, 9])
        ),
        "no state": lambda: at.decode(model, tokens, None),
        "where a state is": lambda: at.decode(model, tokens, at.empty_state(2, "meta")),
    }
    for name, run in wrong.items():
        with pytest.raises((ValueError, TypeError)) as caught:
            run()
        shown.append(f"# {name}\n{caught.type.__name__}: {caught.value}\n")
    check_golden("triton/package_model_refused", "\n".join(shown))


def test_a_package_has_what_its_files_import(compiled: list[str], tmp_path: Path) -> None:
    """And no other: a rule has no weights, a spec without kernels launches none."""
    rule = {path.name for path in package(tmp_path / "rule", "float32", K=4, V=6)}
    assert "launch.py" in rule and "modules.py" not in rule
    torch_alone = TRITON.package(request_for(_linear), ["sm_90"], tmp_path / "x", lambda _: None)
    assert not compiled[2:] and "launch.py" not in {path.name for path in torch_alone}
    for folder in (tmp_path / "rule", tmp_path / "x"):
        texts = [path.read_text() for path in folder.glob("*.py")]
        found = {m or n for text in texts for m, n in IMPORTS.findall(text)}
        assert {path.stem for path in folder.glob("*.py")} == found | {
            "__init__", "module", "kernels"
        }  # fmt: skip


IMPORTS = re.compile(r"^ *from \.(\w*) import (\w+)", re.M)


@ar.block
def _linear(x: "f[B, T, 8]"):
    return ar.logits(x, ar.weight("table", [8, 8]))


@pytest.mark.parametrize("name", ["h100", "A100", "b200", "MI300"])
def test_a_gpu_as_it_is_sold(name: str, tmp_path: Path) -> None:
    rule = resolve(RULE)
    assert isinstance(rule, Rule)
    request = request_for_rule(rule, {"K": 4, "V": 6})
    with pytest.raises(ArchirError) as caught:
        TRITON.package(request, [name], tmp_path / "out", lambda _: None)
    wanted = {"h100": "sm_90", "a100": "sm_80", "b200": "sm_100", "mi300": "gfx942"}[name.lower()]
    assert caught.value.next == f"write --target {wanted}" and not (tmp_path / "out").exists()


def test_a_kernel_that_triton_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CompilationError("line 1", ast.Pass(), "a tile of 2097152 elements is too large")

    monkeypatch.setattr(binary.triton, "compile", refuse)
    rule = resolve(RULE)
    assert isinstance(rule, Rule)
    request = request_for_rule(rule, {"K": 4, "V": 6})
    module = lower(request.module, "prefill", backend="triton")
    (kernel,) = kernels_of(module).values()
    skeleton = kernel.skeleton
    blocks = skeleton.constants({"BLOCK_V": 8}, "dense")
    names = dict.fromkeys([*(a.name for a in skeleton.arguments), *blocks])
    fn = SimpleNamespace(__name__=skeleton.name, arg_names=[*names])
    with pytest.raises(ArchirError) as caught:
        binary.compile_kernel(kernel, fn, "sm_90", "dense")
    check_golden("triton/kernel_refused", str(caught.value).replace(kernel.name, "NAME"))


# ---- every kernel of the published sizes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "kda"])
def test_every_kernel_compiles_for_every_target(name: str, dtype: str, tmp_path: Path) -> None:
    """And nothing is spilled on Hopper and Blackwell."""
    how = "--sizes K=128,V=128" if name == "kda" else "--preset full"
    line = f"{RULE if name == 'kda' else name} {how} --dtype {dtype} --backend triton"
    line += f" --target {','.join(TARGETS)} --out {tmp_path}"
    process([sys.executable, "-c", COMPILE, line], interpreted=False)
    kernels = manifest(tmp_path)["kernels"]
    assert {kernel["target"] for kernel in kernels} == {*TARGETS}
    for kernel in kernels:
        if kernel["target"] in ("sm_90", "sm_100"):
            assert kernel["spill_bytes"] == 0, kernel
