"""The command `archir`: what it prints, its exit codes, how fast the light commands are."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import archir as ar
from archir.check import Report
from tests.cli.conftest import END, LETTERS
from tests.goldens import check_golden

ARCHIR = [sys.executable, "-c", "from archir.cli import main; main()"]

SPEC_FILE = '''
import archir as ar

@ar.config
class Small:
    vocab: int = 32; width: int = 8

@ar.spec(Small)
def mine(tokens, c):
    """A model of one layer."""
    x = ar.embedding(tokens, c.vocab, c.width, name="table")
    q, k, v = ar.heads(ar.linear(x, 3 * c.width, name="mix"), 3, 2)
    return ar.logits(x + ar.merge(ar.attention(q, k, v)), c.vocab, name="head")

@ar.recurrence("q:K k:K v:V -> o:V")
def rule(S, q, k, v):
    S = S + k[:, None] * v
    return S, q @ S
'''


@pytest.fixture
def spec_file(tmp_path):
    file = tmp_path / "my_spec.py"
    file.write_text(SPEC_FILE)
    return file


def test_list_names_every_spec(archir):
    code, out, _ = archir("list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["gpt2", "llama"]
    found = json.loads(archir("list", "--json").out)
    assert found["schema"] == "archir.list/1"
    assert found["rows"][0]["presets"] == ["full", "padded", "tiny"]


def test_show_prints_what_trace_prints(archir):
    assert archir("show", "gpt2").out == str(ar.trace("gpt2"))
    tiny = ar.trace("llama", preset="tiny")
    shown = archir("show", "llama", "--preset", "tiny", "--phase", "decode", "--dtype", "bfloat16")
    assert shown.out == str(ar.lower(tiny, "decode", dtype="bfloat16"))
    shown = archir("show", "llama", "--preset", "tiny", "--stage", "specialize")
    assert shown.out == str(ar.lower(tiny, stage="specialize"))


def test_show_gpt2_fits_a_page(archir):
    lines = archir("show", "gpt2").out.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100


def test_show_takes_a_users_file_and_a_rule(archir, spec_file):
    code, out, _ = archir("show", f"{spec_file}:mine")
    assert code == 0
    assert "my_spec.py:11" in out
    code, out, _ = archir("show", f"{spec_file}:rule")
    assert code == 0
    assert "S: f[K, V]" in out or "S: F[K, V]" in out


def test_cost_counts_parameters(archir):
    found = json.loads(archir("cost", "gpt2", "--json").out)
    assert found["schema"] == "archir.cost/1"
    by_part = {row["part"]: row for row in found["rows"]}
    assert by_part["total"]["parameters"] == 124_439_808
    assert by_part["layer"]["calls"] == 12
    assert by_part["embedding"]["parameters"] == (50257 + 1024) * 768
    assert archir("cost", "gpt2").out.splitlines()[-1].split() == ["total", "1", "124,439,808", "0"]


def test_compile_prints_where_the_files_are(archir, tmp_path):
    code, out, _ = archir("compile", "gpt2", "--preset", "tiny", "--out", tmp_path / "made")
    assert code == 0
    files = out.split()
    assert {"modules.py", "decode_dense_all.py"} <= {os.path.basename(file) for file in files}
    assert all(os.path.dirname(file) == str(tmp_path / "made") for file in files)
    assert all(os.path.isfile(file) for file in files)
    assert all(map(os.path.isfile, archir("compile", "gpt2", "--preset", "tiny").out.split()))


def test_compile_prints_the_code_of_a_rule(archir, tmp_path):
    rule = f"{Path(__file__).parent.parent / 'specs' / 'kda.py'}:kda"
    code, out, _ = archir("compile", rule, "--sizes", "K=8,V=4,H=2", "--out", tmp_path / "made")
    assert code == 0
    names = {os.path.basename(file) for file in out.split()}
    assert {"full_dense_all.py", "prefill_dense_all.py", "decode_dense_all.py"} <= names
    text = (tmp_path / "made" / "prefill_dense_all.py").read_text()
    assert "def kda_recurrent(" in text and "def kda_chunk(" in text


def test_run_writes_what_the_model_generates(archir, published):
    code, out, err = archir("run", "llama", "--weights", published, "--prompt", "abc", "-n", 6)
    assert code == 0
    model = ar.compile("llama", preset="tiny").load_weights(published)
    ids = [ord(letter) - 32 for letter in "abc"]
    tokens = model.generate([ids], 6)[0, 3:].tolist()
    assert END not in tokens, "this seed must not end the text"
    assert out == "".join(LETTERS[token] for token in tokens) + "\n"
    assert err.startswith("6 tokens after 3: ")
    assert "tokens per second" in err


def test_run_draws_the_same_with_a_seed(archir, published):
    options = ["--temperature", 1.5, "--top-p", 0.9, "-n", 8]
    one, two, three = (
        archir("run", "llama", "--weights", published, "--prompt", "abc", *options, "--seed", seed)
        for seed in (3, 3, 4)
    )
    assert one.out == two.out
    assert one.out != three.out


def test_run_stops_where_the_context_is_full(archir, published):
    prompt = "a" * 250
    code, _, err = archir("run", "llama", "--weights", published, "--prompt", prompt, "-n", 20)
    assert code == 0
    assert "257 tokens do not fit the context of 256" in err


def test_run_ends_where_the_text_ends(archir, published, monkeypatch):
    from backends.runtime.model import Model

    monkeypatch.setattr(Model, "stream", lambda *_, **__: iter([1, 2, END]))
    code, out, err = archir("run", "llama", "--weights", published, "--prompt", "abc")
    assert (code, out) == (0, LETTERS[1] + LETTERS[2] + "\n")
    assert err.startswith("3 tokens after 3: ")


def test_ctrl_c_ends_cleanly(published, tmp_path):
    folder = shutil.copytree(published, tmp_path / "endless")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**7}))
    command = [
        *ARCHIR,
        "run",
        "llama",
        "--weights",
        str(folder),
        "--prompt",
        "abc",
        "-n",
        "10000000",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "tokens after 3: " in err


def test_check_compares_a_users_file(archir, spec_file):
    code, out, _ = archir("check", f"{spec_file}:mine", "--dtype", "float64,float32", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["schema"] == "archir.check/1"
    assert {row["dtype"] for row in found["rows"]} == {"float64", "float32"}
    assert {"full", "prefill", "decode"} <= {row["phase"] for row in found["rows"]}


def test_check_exits_1_on_a_difference(archir, monkeypatch):
    cell = {"backend": "eager", "dtype": "float32", "phase": "decode", "layout": "left", "T": 7}
    rows = [
        {"spec": "mine", **cell, "error": 1e-9, "allowed": 1e-7, "where": "logits", "ok": True},
        {
            "spec": "mine",
            **cell,
            "T": 65,
            "error": 1e-3,
            "allowed": 1e-7,
            "where": "k",
            "ok": False,
        },
    ]
    monkeypatch.setattr(sys.modules["archir.check"], "check", lambda *_, **__: Report("mine", rows))
    code, out, err = archir("check", "gpt2")
    assert code == 1
    check_golden("cli/check", out + err)


@dataclass(frozen=True)
class Wrong:
    """Arguments that must end in a message; names in braces are files of the test."""

    arguments: str
    files: dict[str, str] = field(default_factory=dict)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0}
SIZES = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip

WRONG = {
    "spec_unknown": Wrong("show gpt3"),
    "spec_far": Wrong("cost transformer"),
    "spec_file_missing": Wrong("show {tmp}/nothing.py:mine"),
    "spec_name_missing": Wrong("show {tmp}/my_spec.py:min"),
    "preset_unknown": Wrong("show llama --preset smollm2"),
    "stage_unknown": Wrong("show gpt2 --stage expnd"),
    "phase_unknown": Wrong("show gpt2 --phase train"),
    "dtype_unknown": Wrong("show gpt2 --dtype float8"),
    "backend_unknown": Wrong("compile gpt2 --preset tiny --backend eagr"),
    "target_unknown": Wrong("compile {tmp}/my_spec.py:mine {ahead},sm_91 --out {tmp}/made"),
    "target_interpreted": Wrong("compile {tmp}/my_spec.py:mine {ahead} --out {tmp}/made"),
    "target_eager": Wrong("compile {tmp}/my_spec.py:mine --target sm_90 --out {tmp}/made"),
    "target_no_folder": Wrong("compile {tmp}/my_spec.py:mine {ahead}"),
    "sizes_of_a_spec": Wrong("compile {tmp}/my_spec.py:mine --sizes K=16"),
    "sizes_missing": Wrong("compile {tmp}/my_spec.py:rule {ahead} --out {tmp}/made"),
    "sizes_one_missing": Wrong("compile {tmp}/my_spec.py:rule {ahead} --sizes V=96"),
    "sizes_of_no_dim": Wrong("compile {tmp}/my_spec.py:rule {ahead} --sizes K=16,V=16,D=16"),
    "sizes_no_number": Wrong("compile {tmp}/my_spec.py:rule {ahead} --sizes K=16,V=0"),
    "target_product": Wrong("compile {tmp}/my_spec.py:mine --backend triton --target H100 --out x"),
    "sizes_missing_of_heads": Wrong("compile {tmp}/my_spec.py:rule {ahead} --sizes K=16,H=4"),
    "rule_of_one_head": Wrong("compile {tmp}/my_spec.py:rule {ahead} --sizes K=16,V=24 --out x"),
    "rule_without_sizes": Wrong("compile {tmp}/my_spec.py:rule"),
    "out_file": Wrong("compile {tmp}/my_spec.py:mine {ahead} --out {tmp}/my_spec.py"),
    "out_below_a_file": Wrong("compile gpt2 --preset tiny --out {tmp}/my_spec.py/made"),
    "rule_with_preset": Wrong("compile {tmp}/my_spec.py:rule {ahead} --preset tiny"),
    "config_missing": Wrong("show llama --config {tmp}/config.json"),
    "config_no_json": Wrong("show llama --config {tmp}/c.json", {"c.json": "{"}),
    "config_family": Wrong("show gpt2 --config {tmp}/c.json", {"c.json": json.dumps(SIZES)}),
    "config_lacks": Wrong(
        "show llama --config {tmp}/c.json", {"c.json": json.dumps(SIZES | {"vocab_size": None})}
    ),
    "config_scaled_rotary": Wrong(
        "show llama --config {tmp}/c.json",
        {"c.json": json.dumps(SIZES | {"rope_parameters": LLAMA3})},
    ),
    "config_unknown_field": Wrong(
        "show llama --config {tmp}/c.json", {"c.json": json.dumps(SIZES | {"expert_count": 8})}
    ),
    "weights_missing": Wrong("run llama --weights {tmp}/model.gguf --prompt x"),
    "weights_of_another_preset": Wrong("run llama --preset full --weights {model} --prompt x"),
    "weights_of_another_family": Wrong("run gpt2 --weights {model} --prompt x"),
    "prompt_too_long": Wrong("run llama --weights {model} --prompt " + "x" * 300),
    "prompt_empty": Wrong("run llama --weights {model} --prompt ="),
    "run_a_rule": Wrong("run {tmp}/my_spec.py:rule --weights {model} --prompt x"),
    "user_slip": Wrong("show {tmp}/slip.py:mine", {"slip.py": SPEC_FILE.replace("c.width", "c.w")}),
    "user_syntax": Wrong("show {tmp}/slip.py:mine", {"slip.py": "def mine(:\n"}),
    "user_trap": Wrong(
        "show {tmp}/trap.py:mine",
        {
            "trap.py": SPEC_FILE.replace(
                "    return ar.logits(", "    if x: pass\n    return ar.logits("
            )
        },
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_is_a_message_and_exit_code_2(case, archir, spec_file, published):
    folder = spec_file.parent
    for name, text in WRONG[case].files.items():
        (folder / name).write_text(text)
    ahead = "--backend triton --target sm_90"
    given = WRONG[case].arguments.format(tmp=folder, model=published, ahead=ahead).split()
    code, out, err = archir(*("" if argument == "=" else argument for argument in given))
    assert code == 2
    assert out == ""
    check_golden(f"cli/{case}", err)


@pytest.mark.parametrize(
    "arguments", ["frob", "show", "show gpt2 --fast", "run llama --prompt x", "cost gpt2 --seed 1"]
)
def test_bad_usage_is_exit_code_2(arguments, archir):
    code, _, err = archir(*arguments.split())
    assert code == 2
    assert err


def test_what_nobody_foresaw_is_still_a_message(archir, monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("archir.cli.trace", broken)
    code, _, err = archir("show", "gpt2")
    assert code == 2
    assert "error [internal]: ZeroDivisionError: division by zero" in err
    assert "this is a bug of archir" in err


@pytest.mark.parametrize("arguments", ["list", "show gpt2", "show llama"])
def test_light_commands_take_less_than_a_second(arguments):
    """Processor time: they wait for nothing, and other tests on the machine don't count."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*ARCHIR, *arguments.split()], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    taken = [statistics.median(seconds() for _ in range(3))]
    if taken[0] >= 1:
        taken.append(statistics.median(seconds() for _ in range(3)))
    assert min(taken) < 1


@pytest.mark.parametrize("arguments", ["list", "show gpt2 --phase decode", "cost llama"])
def test_light_commands_never_import_torch(arguments):
    code = (
        "import sys\nfrom archir.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "sys.exit(int(any(n.split('.')[0] in ('torch', 'triton') for n in sys.modules)))"
    )
    command = [sys.executable, "-c", code, *arguments.split()]
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0
