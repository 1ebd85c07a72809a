"""GPT-2 and Llama: what they compute, how they are published, how large they are."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

import gguf
import numpy as np
import pytest
import torch
import transformers

import archir as ar
from archir import cost
from archir.diagnostics import ArchirError
from archir.ir import fields
from archir.layout import check_total, published_shapes
from archir.spec import Spec, resolve
from backends.runtime.weights import open_checkpoint
from specs.gpt2 import GPT2
from specs.llama import Llama
from tests import oracle
from tests.goldens import check_golden
from tests.real import smollm2_path

CASES = [(family, name) for family, named in oracle.NAMED.items() for name in named]
PRESETS = [("gpt2", "tiny"), ("gpt2", "full"), ("llama", "tiny"), ("llama", "smollm2_135m")]


def spec_of(family: str) -> Spec:
    found = resolve(family)
    assert isinstance(found, Spec)
    return found


def shapes_of(family: str, config: object) -> dict[str, tuple[int, ...]]:
    weights = fields(ar.trace(family, config=config), "weight")
    return {name: field.value.type.shape for name, field in weights.items()}


@pytest.mark.parametrize("family, name", CASES)
def test_logits_are_those_of_transformers(family, name):
    config = oracle.NAMED[family][name]
    model, weights = oracle.twin(family, config)
    module = ar.trace(family, config=config)
    for length in oracle.LENGTHS:
        tokens, _ = oracle.tokens_and_targets(config, length)
        outputs, _ = ar.interpret(module, [tokens], weights)
        (found,) = outputs.values()
        expected = oracle.logits(model, tokens)
        worst = np.abs(found - expected).max() / np.abs(expected).max()
        assert worst < 1e-10, f"T = {length}: {worst:.1e}"


@pytest.mark.parametrize("family, preset", [*PRESETS, ("gpt2", "padded"), ("llama", "full")])
def test_text_parses_to_the_same_program(family, preset):
    module = ar.trace(family, preset)
    assert ar.parse(str(module)) == module
    assert max(map(len, str(module).splitlines())) <= 100


COUNTS = {
    ("gpt2", "full"): 124_439_808,
    ("gpt2", "padded"): 124_475_904,
    ("llama", "smollm2_135m"): 134_515_008,
    ("llama", "full"): 8_030_261_248,
}


@pytest.mark.parametrize("family, preset", COUNTS)
def test_parameters_are_as_many_as_transformers_counts(family, preset):
    assert cost.rows(ar.trace(family, preset))[-1].parameters == COUNTS[family, preset]
    spec = spec_of(family)
    assert spec.from_hf is not None
    published = spec.from_hf.publish(spec.presets[preset])
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**published)
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == COUNTS[family, preset]


def test_buffers_are_no_parameters():
    text = '@entry\ndef m(x: f[B, T, 4], *,\n  w: f[4] = weight("w", init=ones(), decay=False),\n'
    text += '  b: f[4] = buffer("b", init=zeros()),\n) -> f[B, T, 4]:\n'
    text += "  y: f[B, T, 4] = mul(x, w)\n  z: f[B, T, 4] = add(y, b)\n  return z\n"
    assert cost.rows(ar.parse(text)) == [cost.Row("m", 1, 4, 4), cost.Row("total", 1, 4, 4)]


@pytest.mark.parametrize("family, name", CASES)
def test_published_names_are_those_of_transformers(family, name):
    config = oracle.NAMED[family][name]
    model, _ = oracle.twin(family, config)
    state = {n: tuple(x.shape) for n, x in model.state_dict().items()}
    shapes, names = shapes_of(family, config), spec_of(family).names["hf"](config)
    check_total(shapes, names, "hf")
    resolved = {n: layout.resolve(state) for n, layout in names.items()}
    assert published_shapes(shapes, resolved) == state
    saved = published_shapes(shapes, {n: layout.resolve(()) for n, layout in names.items()})
    assert set(state) - set(saved) <= {"lm_head.weight"}, "saved under other names than published"


def test_gpt2_is_read_from_a_file_without_prefix():
    """As the weights were first published: of `GPT2Model`, with a mask in each layer."""
    kept = ["h.0.attn.bias", "transformer.h.11.attn.masked_bias", "h.0.attn.c_attn.bias"]
    ignored = [any(fnmatchcase(name, p) for p in spec_of("gpt2").ignore) for name in kept]
    assert ignored == [True, True, False]
    config = oracle.NAMED["gpt2"]["plain"]
    model, weights = oracle.gpt2_twin(config)
    state = {name: x.numpy() for name, x in model.transformer.state_dict().items()}
    found = oracle.weights_of("gpt2", config, state)
    assert all((found[name] == weights[name]).all() for name in weights)


def test_llama_gguf_names_are_those_of_llama_cpp():
    config = oracle.NAMED["llama"]["grouped"]
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.layers)
    spec = spec_of("llama")
    hf, ours = spec.names["hf"](config), spec.names["gguf"](config)
    check_total(shapes_of("llama", config), ours, "gguf")
    for weight, layout in hf.items():
        expected = known.get_name(layout.names[0], try_suffixes=(".weight",))
        assert ours[weight].names == (expected,)


def test_smollm2_file_is_the_preset():
    checkpoint, spec = open_checkpoint(smollm2_path()), spec_of("llama")
    preset = spec.presets["smollm2_135m"]
    spec.check_same(preset, spec.configure(config=checkpoint.config), "preset", "file")
    names = spec.names["gguf"](preset)
    layouts = {n: layout.resolve(checkpoint.tensors) for n, layout in names.items()}
    expected = published_shapes(shapes_of("llama", preset), layouts)
    assert expected == {name: stored.shape for name, stored in checkpoint.tensors.items()}


OLD_GPT2 = {  # as published in 2019
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
    "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
    "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
    "summary_use_proj": True, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
OLD_SMOLLM2 = {  # as published for transformers 4
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576,
    "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
    "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 9,
    "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
    "use_cache": True, "vocab_size": 49152,
}  # fmt: skip


def written(tmp_path, config) -> dict[str, object]:
    config.save_pretrained(tmp_path)
    return json.loads((tmp_path / "config.json").read_text())


def test_published_configs_are_the_presets():
    gpt2, llama = spec_of("gpt2"), spec_of("llama")
    assert gpt2.configure(config=OLD_GPT2) == gpt2.presets["full"]
    assert llama.configure(config=OLD_SMOLLM2) == llama.presets["smollm2_135m"]


@pytest.mark.parametrize(
    "theirs, ours",
    [
        (transformers.GPT2Config(), GPT2()),
        (
            transformers.GPT2Config(n_inner=100, resid_pdrop=0.0),
            GPT2(inner=100, residual_dropout=0.0),
        ),
        (
            transformers.GPT2Config(tie_word_embeddings=False, layer_norm_epsilon=1e-6),
            GPT2(tied=False, eps=1e-6),
        ),
        (
            transformers.LlamaConfig(),
            Llama(32000, 2048, 4096, 11008, kv_heads=32, head_dim=128),
        ),
        (
            transformers.LlamaConfig(rope_theta=5e5, num_key_value_heads=4, head_dim=64),
            Llama(32000, 2048, 4096, 11008, kv_heads=4, head_dim=64, theta=5e5),
        ),
        (
            transformers.LlamaConfig(
                rope_parameters={"rope_type": "default", "rope_theta": 1e6},
                tie_word_embeddings=True,
                attention_dropout=0.1,
            ),
            Llama(32000, 2048, 4096, 11008, kv_heads=32, head_dim=128, theta=1e6, tied=True),
        ),
    ],
)
def test_configs_of_transformers_are_read(theirs, ours, tmp_path):
    spec = spec_of(theirs.model_type)
    assert spec.configure(config=theirs.to_dict()) == ours
    assert spec.configure(config=written(tmp_path, theirs)) == ours
    assert spec.configure(config=tmp_path) == ours


@pytest.mark.parametrize("family, name", CASES)
def test_published_config_comes_back(family, name):
    config, spec = oracle.NAMED[family][name], spec_of(family)
    assert spec.from_hf is not None
    if name == "window":
        with pytest.raises(ArchirError) as error:
            spec.from_hf.publish(config)
        check_golden("specs/publish_window", str(error.value))
        return
    published = spec.from_hf.publish(config)
    assert spec.configure(config=published) == config
    theirs = transformers.AutoConfig.for_model(**published).to_dict()
    spec.check_same(config, spec.configure(config=theirs), "ours", "theirs")


REFUSED = {
    "gpt2": [
        {"activation_function": "relu"},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"reorder_and_upcast_attn": True},
        {"add_cross_attention": True},
        {"n_experts": 4},
    ],
    "llama": [
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"partial_rotary_factor": 0.5},
        {"rope_interleaved": True},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"sliding_window": 4096},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
}


def test_a_config_that_changes_the_model_is_refused():
    messages = []
    for family, changes in REFUSED.items():
        base = {"gpt2": OLD_GPT2, "llama": OLD_SMOLLM2}[family]
        for field in changes:
            with pytest.raises(ArchirError) as error:
                spec_of(family).configure(config={**base, **field})
            messages.append(f"{family} {json.dumps(field)}\n{error.value}")
    check_golden("specs/config_refused", "\n\n".join(messages))


def test_what_changes_no_program_is_no_difference():
    spec, preset = spec_of("llama"), spec_of("llama").presets["smollm2_135m"]
    same = {"head_dim": 64, "eps": float(np.float32(1e-5))}
    spec.check_same(preset, type(preset)(**{**vars(preset), **same}), "preset", "file")
    other = {**same, "head_dim": 32, "theta": 1e4}
    with pytest.raises(ArchirError) as error:
        spec.check_same(preset, type(preset)(**{**vars(preset), **other}), "preset x", "file")
    check_golden("specs/config_differs", str(error.value))
