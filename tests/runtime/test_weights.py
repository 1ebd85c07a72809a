"""Checkpoints: bit-exact there and back, differences named before the first copy, little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from archir.diagnostics import ArchirError, MismatchError
from archir.layout import Layout, alias, concat, either, rotary_rows, stack, tensor
from backends.runtime import weights
from backends.runtime.weights import Checkpoint, load, open_checkpoint, save
from tests.goldens import check_golden
from tests.real import smollm2_path

NAMES: dict[str, Layout] = {
    "wte": alias(tensor("model.wte.weight"), "lm_head.weight"),
    "q": tensor("qkv.weight").T.rows(0, 4),
    "kv": tensor("qkv.weight").T.rows(4, 8),
    "gate_up": concat([tensor("gate.weight"), tensor("up.weight")]),
    "experts": stack([tensor(f"experts.{i}.weight").T for i in range(3)]),
    "norm": either(tensor("norm.weight"), tensor("ln.weight")),
    "conv": tensor("conv.weight").reshape(4, 3, stored=(4, 1, 3)),
    "scale": tensor("scale"),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "wte": (11, 4),
    "q": (4, 4),
    "kv": (4, 4),
    "gate_up": (6, 4),
    "experts": (3, 2, 4),
    "norm": (4,),
    "conv": (4, 3),
    "scale": (),
}


def random_weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    return {n: torch.randn(s, generator=draw).to(dtype) for n, s in SHAPES.items()}


def empty(like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Targets as a model has them, full of NaN."""
    return {name: torch.full_like(value, float("nan")) for name, value in like.items()}


def bits(value: torch.Tensor) -> torch.Tensor:
    size = value.element_size()
    return (
        value.contiguous().reshape(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    )


@pytest.mark.parametrize("limit", [5_000_000_000, 200], ids=["one_file", "shards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_load_of_save_is_bit_exact(tmp_path, dtype, limit):
    saved = random_weights(dtype)
    saved["q"].view(-1)[:3] = torch.tensor([float("nan"), float("-inf"), -0.0], dtype=dtype)
    save(tmp_path / "m", saved, NAMES, {"model_type": "x"}, "def f():\n", max_shard_bytes=limit)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.convention == "hf" and checkpoint.config == {"model_type": "x"}
    assert (tmp_path / "m/model.archir").read_text() == "def f():\n"
    loaded = empty(saved)
    load(checkpoint, loaded, NAMES)
    for name, value in saved.items():
        assert loaded[name].dtype == dtype and torch.equal(bits(loaded[name]), bits(value)), name
    shards = list((tmp_path / "m").glob("*.safetensors"))
    assert (len(shards) > 1) == (limit == 200)
    assert "lm_head.weight" not in checkpoint.keys()
    assert checkpoint.shape("qkv.weight") == (4, 8)


@pytest.mark.parametrize("first, then", [(200, 10**9), (10**9, 200), (200, 400), (10**9, 10**9)])
def test_saving_over_an_older_model_leaves_only_the_new_one(tmp_path, first, then):
    old, new = random_weights(), {n: v + 1 for n, v in random_weights().items()}
    (tmp_path / "tokenizer.json").write_text("{}")
    save(tmp_path, old, NAMES, {}, "old", max_shard_bytes=first)
    save(tmp_path, new, NAMES, {}, "new", max_shard_bytes=then)
    loaded = empty(new)
    load(open_checkpoint(tmp_path), loaded, NAMES)
    assert all(torch.equal(loaded[name], new[name]) for name in new)
    files = {file.name for file in tmp_path.iterdir()}
    again = tmp_path / "fresh"
    save(again, new, NAMES, {}, "new", max_shard_bytes=then)
    assert files == {file.name for file in again.iterdir()} | {"tokenizer.json"}


@pytest.mark.parametrize("limit", [5_000_000_000, 200], ids=["one_file", "shards"])
def test_a_crash_while_writing_leaves_the_older_model(tmp_path, monkeypatch, limit):
    old = random_weights()
    save(tmp_path, old, NAMES, {"a": 1}, "old", max_shard_bytes=limit)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def crash(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(weights, "save_file", crash)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, old, NAMES, {"a": 2}, "new", max_shard_bytes=limit)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


class Steps:
    """Progress as it was told."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def add(self, done: int, total: int) -> None:
        self.seen.append((done, total))


def test_load_casts_once_into_the_parameters_themselves(tmp_path):
    save(tmp_path, random_weights(torch.float64), NAMES, {}, "")
    for dtype in (torch.bfloat16, torch.float32):
        targets = {n: torch.nn.Parameter(v) for n, v in empty(random_weights(dtype)).items()}
        places = {name: target.data_ptr() for name, target in targets.items()}
        steps = Steps()
        load(open_checkpoint(tmp_path), targets, NAMES, progress=steps.add)
        for name, value in random_weights(torch.float64).items():
            assert torch.equal(targets[name], value.to(dtype))
            assert targets[name].data_ptr() == places[name]
        total = sum(target.nbytes for target in targets.values())
        assert (len(steps.seen), steps.seen[-1]) == (len(targets), (total, total))


def published(folder: Path, **changes: torch.Tensor | None) -> Checkpoint:
    """A saved model with published tensors replaced, added or (None) removed."""
    save(folder, random_weights(), NAMES, {}, "")
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")
    return open_checkpoint(folder)


def test_alternatives_aliases_and_inert_tensors_are_read(tmp_path):
    value = random_weights()
    extra = {"lm_head.weight": value["wte"].clone(), "h.0.attn.bias": torch.ones(2)}
    changes = {"norm.weight": None, "ln.weight": value["norm"], **extra}
    loaded = empty(value)
    load(published(tmp_path, **changes), loaded, NAMES, ignore=["*.attn.bias"])
    assert all(torch.equal(loaded[name], value[name]) for name in value)


MANY = {f"extra.{i}": torch.zeros(1) for i in range(12)}
DIFFERENT = {
    "missing": {"norm.weight": None, "experts.1.weight": None},
    "unexpected": {"h.0.attn.bias": torch.ones(2), "h.1.attn.bias": torch.ones(2)},
    "shape": {"model.wte.weight": torch.zeros(12, 4), "qkv.weight": torch.zeros(8, 4)},
    "mixed": {"scale": None, "scales": torch.zeros(()), "gate.weight": torch.zeros(3, 5)},
    "many": {"scale": None, **MANY},
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_differences_are_named_before_the_first_copy(tmp_path, case):
    targets = empty(random_weights())
    with pytest.raises(MismatchError) as error:
        load(published(tmp_path, **DIFFERENT[case]), targets, NAMES)
    check_golden(f"weights/load_{case}", str(error.value))
    assert all(torch.isnan(target).all() for target in targets.values())


def test_a_tied_head_that_differs_is_an_error(tmp_path):
    checkpoint = published(tmp_path, **{"lm_head.weight": torch.zeros(11, 4)})
    with pytest.raises(MismatchError) as error:
        load(checkpoint, empty(random_weights()), NAMES)
    check_golden("weights/load_tied", str(error.value))


def test_meta_targets_are_refused(tmp_path):
    save(tmp_path, random_weights(), NAMES, {}, "")
    targets = {n: v.to("meta") if n == "q" else v for n, v in empty(random_weights()).items()}
    with pytest.raises(MismatchError) as error:
        load(open_checkpoint(tmp_path), targets, NAMES)
    check_golden("weights/load_meta", str(error.value))


def cut(file: Path, size: int) -> Path:
    os.truncate(file, size)
    return file


def broken(case: str, folder: Path) -> Path:
    """A path that `open_checkpoint` must refuse."""
    save(folder, random_weights(), NAMES, {}, "", max_shard_bytes=200 if "shard" in case else 10**9)
    file = folder / "model.safetensors"
    match case:
        case "cut_data":
            return cut(file, file.stat().st_size - 20).parent
        case "cut_header":
            return cut(file, 40)
        case "cut_start":
            return cut(file, 5)
        case "cut_shard":
            shard = sorted(folder.glob("model-*"))[1]
            return cut(shard, shard.stat().st_size - 1).parent
        case "lost_shard":
            sorted(folder.glob("model-*"))[1].unlink()
            return folder
        case "wrong_shard_index":
            index = folder / "model.safetensors.index.json"
            content = json.loads(index.read_text())
            files = sorted(set(content["weight_map"].values()))
            content["weight_map"]["scale"] = files[0]
            index.write_text(json.dumps(content))
            return folder
        case "cut_gguf_data":
            gguf_file = small_gguf(folder / "m.gguf")
            return cut(gguf_file, gguf_file.stat().st_size - 200)
        case "cut_gguf_header":
            return cut(small_gguf(folder / "m.gguf"), 200)
        case "cut_gguf_start":
            return cut(small_gguf(folder / "m.gguf"), 10)
        case "no_gguf":
            return file.rename(folder / "m.gguf")
        case "pickle":
            return file.rename(folder / "pytorch_model.bin")
        case "empty_folder":
            file.unlink()
            return folder
        case _:
            return folder / "mode.safetensors"


@pytest.mark.parametrize(
    "case",
    "cut_data cut_header cut_start cut_shard lost_shard wrong_shard_index cut_gguf_data "
    "cut_gguf_header cut_gguf_start no_gguf pickle empty_folder no_file".split(),
)
def test_broken_files_are_refused(tmp_path, case):
    with pytest.raises(ArchirError) as error:
        open_checkpoint(broken(case, tmp_path / "model"))
    check_golden(f"weights/{case}", str(error.value))


def small_gguf(file: Path, kinds: tuple[str, ...] = ("F32", "F16", "BF16", "Q8_0")) -> Path:
    """A GGUF file with one [5, 64] tensor of each kind."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    values = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    for kind in kinds:
        quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(kind.lower(), quantised, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_gguf_tensors_are_what_the_library_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "DEQUANTIZED_AT_ONCE", 128)  # two rows at once
    kinds = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
    file = small_gguf(tmp_path / "m.gguf", kinds)
    checkpoint = open_checkpoint(file)
    assert checkpoint.keys() == [kind.lower() for kind in kinds]
    for stored in gguf.GGUFReader(file).tensors:
        ours = checkpoint.get(stored.name)
        theirs = gguf.quants.dequantize(stored.data, stored.tensor_type).reshape(5, 64)
        assert checkpoint.shape(stored.name) == tuple(ours.shape) == (5, 64)
        assert torch.equal(ours.float(), torch.from_numpy(theirs.copy()))


def llama_gguf_names(layers: int, heads: int, kv_heads: int) -> dict[str, Layout]:
    """Hugging Face's llama parameters, from GGUF's tensors."""
    names: dict[str, Layout] = {
        "model.embed_tokens.weight": tensor("token_embd.weight"),
        "model.norm.weight": tensor("output_norm.weight"),
    }
    plain = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
    }
    for i in range(layers):
        hf, own = f"model.layers.{i}", f"blk.{i}"
        names |= {f"{hf}.{a}.weight": tensor(f"{own}.{b}.weight") for a, b in plain.items()}
        for part, count in (("q", heads), ("k", kv_heads)):
            layout = rotary_rows(tensor(f"{own}.attn_{part}.weight"), count)
            names[f"{hf}.self_attn.{part}_proj.weight"] = layout
    return names


def test_smollm2_opens_with_the_config_its_header_says():
    checkpoint = open_checkpoint(smollm2_path())
    assert checkpoint.convention == "gguf"
    check_golden("weights/smollm2_config", json.dumps(checkpoint.config, indent=2))
    assert checkpoint.shape("blk.29.ffn_down.weight") == (576, 1536)
    published = {name for layout in llama_gguf_names(30, 9, 3).values() for name in layout.names}
    assert published == set(checkpoint.keys())


FREQUENCIES = {
    "plain": ({}, None, {}),
    "linear": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
        None,
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "none": ({"llama.rope.scaling.type": "none"}, None, {}),
    "ones": ({}, np.ones(8, np.float32), {}),
    "llama3": ({}, np.arange(8, dtype=np.float32), {"rope_scaling": "rope_freqs.weight"}),
    "partial": ({"llama.rope.dimension_count": 8}, None, {"partial_rotary_factor": 0.5}),
}


@pytest.mark.parametrize("case", FREQUENCIES)
def test_what_changes_rotary_frequencies_shows_in_the_config(tmp_path, case):
    entries, factors, expected = FREQUENCIES[case]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    for key, value in entries.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        add[type(value)](key, value)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = open_checkpoint(tmp_path / "m.gguf").config
    assert (config["rope_theta"], config["head_dim"], config["num_key_value_heads"]) == (1e4, 16, 4)
    found = {k: config[k] for k in ("rope_scaling", "partial_rotary_factor") if k in config}
    if case == "llama3":
        found["rope_scaling"] = found["rope_scaling"]["rope_type"]
    assert found == expected


@pytest.mark.slow
def test_smollm2_equals_transformers_reading_the_same_file():
    file = smollm2_path()
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    checkpoint = open_checkpoint(file)
    config = LlamaConfig(**checkpoint.config)
    for field in checkpoint.config:
        assert getattr(config, field, None) == getattr(theirs.config, field, None), field
    reference = dict(theirs.named_parameters())
    ours = empty({name: value.detach() for name, value in reference.items()})
    load(checkpoint, ours, llama_gguf_names(30, 9, 3))
    for name, value in reference.items():
        assert torch.equal(ours[name], value), name


def test_a_transformers_folder_loads(tmp_path):
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size=4000)
    assert (tmp_path / "model.safetensors.index.json").exists()
    saved = {name: value.detach() for name, value in model.named_parameters()}
    names: dict[str, Layout] = {name: tensor(name) for name in saved}
    names["model.embed_tokens.weight"] = alias(names["model.embed_tokens.weight"], "lm_head.weight")
    loaded = empty(saved)
    load(open_checkpoint(tmp_path), loaded, names)
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    ours = tmp_path / "ours"
    save(ours, loaded, names, config.to_dict(), "", max_shard_bytes=4000)
    again = LlamaForCausalLM.from_pretrained(ours)
    assert all(torch.equal(value, saved[name]) for name, value in again.named_parameters())


MEMORY = """
import sys, threading, time, torch
from archir.layout import tensor, rotary_rows, concat
from backends.runtime.weights import load, open_checkpoint

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

targets = {f"w{i}": torch.zeros(4096, 4096, dtype=getattr(torch, sys.argv[2])) for i in range(16)}
names = {name: tensor(name) for name in targets}
names["w1"] = rotary_rows(names["w1"], 32)
names["w2"] = names["w2"].T
names["w3"] = concat([tensor("w3.a"), tensor("w3.b")])
parameters = sum(target.nbytes for target in targets.values())
base, peak, done = anonymous() - parameters, 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.0005)

thread = threading.Thread(target=watch)
thread.start()
load(open_checkpoint(sys.argv[1]), targets, names)
done = True
thread.join()
print(parameters, peak - base, float(targets["w2"][1, 0]), float(targets["w3"][4095, 0]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_a_gigabyte_needs_little_more_than_the_parameters(tmp_path, dtype):
    folder = tmp_path / "big"
    large = {f"w{i}": torch.full((4096, 4096), float(i)) for i in range(16) if i != 3}
    large["w2"][0, 1] = 5.0
    large |= {"w3.a": torch.ones(2048, 4096), "w3.b": torch.full((2048, 4096), 9.0)}
    names: dict[str, Layout] = {name: tensor(name) for name in large}
    save(folder, large, names, {}, "", max_shard_bytes=300_000_000)
    assert len(list(folder.glob("model-*"))) >= 4
    largest = large["w0"].nbytes
    command = [sys.executable, "-c", MEMORY, str(folder), dtype]
    root = Path(__file__).parents[2]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout
    parameters, peak, transposed, joined = (float(word) for word in output.split())
    print(f"{dtype}: peak {peak / 2**20:.0f} MiB, parameters {parameters / 2**20:.0f} MiB")
    assert (transposed, joined) == (5.0, 9.0)
    assert peak <= parameters + largest + 64 * 2**20
