"""Llama (Touvron et al. 2023; Llama 3, SmolLM): rotary positions, grouped attention, SwiGLU.

stores      keys and values of every past token, per layer: [tokens, kv_heads, size] twice
updates     by appending; with a window, only the last `window` tokens are still seen
retrieves   for each head, values weighted by softmax(q · k / √size), q and k turned by position;
            heads / kv_heads query heads read the same keys and values
"""

import archir as ar
from archir.layout import Layout, rotary_rows, tensor
from specs.blocks import PLAIN_ROTARY, head_names


@ar.config
class Llama:
    vocab: int = 128256
    context: int = 8192
    width: int = 4096
    inner: int = 14336
    layers: int = 32
    heads: int = 32
    kv_heads: int | None = None  # heads unless given
    head_dim: int | None = None  # width / heads unless given
    theta: float = 10000.0
    eps: float = 1e-6
    tied: bool = False
    window: int | None = None


PRESETS = {
    "full": Llama(kv_heads=8, theta=500000.0, eps=1e-5),  # Llama 3 8B
    "smollm2_135m": Llama(
        49152, 8192, 576, 1536, 30, heads=9, kv_heads=3, theta=100000.0, eps=1e-5, tied=True
    ),
    "tiny": Llama(256, 256, 64, 160, 2, heads=4, kv_heads=2, tied=True),
}

READ = {
    "vocab": "vocab_size", "context": "max_position_embeddings", "width": "hidden_size",
    "inner": "intermediate_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "eps": "rms_norm_eps",
    "theta": "rope_theta|rope_parameters.rope_theta", "tied": "tie_word_embeddings",
}  # fmt: skip
ABSENT = {
    "num_key_value_heads": None, "head_dim": None, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip
NEUTRAL = {
    "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,),
    "rope_interleaved": (False,), **PLAIN_ROTARY,
}  # fmt: skip
INERT = ("attention_dropout", "pretraining_tp", "is_llama_config", "transformers.js_config")

TABLE = "embed_tokens.weight"
# Weights of a layer, and their names in GGUF.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def hf(c: Llama) -> dict[str, Layout]:
    layers = [f"layers.{i}.{part}.weight" for i in range(c.layers) for part in LAYER]
    names = {name: tensor(f"model.{name}") for name in ("norm.weight", *layers)}
    return names | head_names(c.tied, TABLE, tensor(f"model.{TABLE}"), "lm_head.weight")


def gguf(c: Llama) -> dict[str, Layout]:
    """llama.cpp turns neighbouring rows of queries and keys, and files hold them in its order."""
    names = head_names(c.tied, TABLE, tensor("token_embd.weight"), "output.weight")
    names["norm.weight"] = tensor("output_norm.weight")
    turned = {"self_attn.q_proj": c.heads, "self_attn.k_proj": c.kv_heads or c.heads}
    for i in range(c.layers):
        for part, short in LAYER.items():
            file = tensor(f"blk.{i}.{short}.weight")
            layout = rotary_rows(file, turned[part]) if part in turned else file
            names[f"layers.{i}.{part}.weight"] = layout
    return names


@ar.block
def layer(x: "f[B, T, width]", place: "i64[B, T]", c: Llama):
    kv_heads, size = c.kv_heads or c.heads, c.head_dim or c.width // c.heads
    h = ar.rms_norm(x, name="input_layernorm", eps=c.eps)
    q = ar.linear(h, c.heads * size, bias=False, name="self_attn.q_proj")
    k = ar.linear(h, kv_heads * size, bias=False, name="self_attn.k_proj")
    v = ar.linear(h, kv_heads * size, bias=False, name="self_attn.v_proj")
    q = ar.rotary(ar.heads(q, 1, c.heads), place, theta=c.theta)  # [B, T, heads, size]
    k = ar.rotary(ar.heads(k, 1, kv_heads), place, theta=c.theta)  # [B, T, kv_heads, size]
    v = ar.heads(v, 1, kv_heads)
    h = ar.merge(ar.attention(q, k, v, causal=True, window=c.window, name="self_attn"))
    x = x + ar.linear(h, c.width, bias=False, name="self_attn.o_proj")
    h = ar.rms_norm(x, name="post_attention_layernorm", eps=c.eps)
    gate = ar.linear(h, c.inner, bias=False, name="mlp.gate_proj")
    up = ar.linear(h, c.inner, bias=False, name="mlp.up_proj")
    return x + ar.linear(ar.silu(gate) * up, c.width, bias=False, name="mlp.down_proj")


@ar.spec(
    Llama,
    presets=PRESETS,
    from_hf=ar.HuggingFace("llama", READ, ABSENT, NEUTRAL, INERT),
    names={"hf": hf, "gguf": gguf},
    ignore=("*.rotary_emb.inv_freq",),
)
def llama(tokens, c: Llama):  # i64[B, T] → f[B, T, vocab]
    """Llama: rotary positions, grouped attention over a growing cache, SwiGLU, RMS norm."""
    table = ar.weight(TABLE, [c.vocab, c.width])
    x, place = ar.embedding(tokens, table), ar.positions(tokens, limit=c.context)
    for i in range(c.layers):
        x = layer(x, place, c, name=f"layers.{i}")
    x = ar.rms_norm(x, name="norm", eps=c.eps)
    return ar.logits(x, table) if c.tied else ar.logits(x, c.vocab, name="lm_head")
