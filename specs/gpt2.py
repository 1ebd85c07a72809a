"""GPT-2 (Radford et al. 2019): learned positions, pre-norm layers, softmax attention, GELU.

stores      keys and values of every past token, per layer: [tokens, heads, size] twice
updates     by appending; nothing is ever forgotten, the context is the limit
retrieves   for each head, values weighted by softmax(q · k / √size)
"""

import archir as ar
from archir.layout import Layout, either, tensor
from specs.blocks import head_names


@ar.config
class GPT2:
    vocab: int = 50257
    context: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12
    inner: int | None = None  # 4 × width unless given
    eps: float = 1e-5
    tied: bool = True
    embedding_dropout: float = 0.1  # these three in training only
    attention_dropout: float = 0.1
    residual_dropout: float = 0.1


PRESETS = {
    "full": GPT2(),
    "padded": GPT2(vocab=50304),  # the next multiple of 64: faster, the rows beyond 50257 unused
    "tiny": GPT2(vocab=256, context=256, width=64, layers=2, heads=4),
}

READ = {
    "vocab": "vocab_size", "context": "n_positions", "width": "n_embd", "layers": "n_layer",
    "heads": "n_head", "inner": "n_inner", "eps": "layer_norm_epsilon",
    "tied": "tie_word_embeddings", "embedding_dropout": "embd_pdrop",
    "attention_dropout": "attn_pdrop", "residual_dropout": "resid_pdrop",
}  # fmt: skip

FROM_HF = ar.HuggingFace(
    "gpt2",
    read=READ,
    absent={
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
    },
    neutral={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
    inert=(
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
        *("summary_first_dropout", "n_ctx"),  # other heads; the size of a mask kept in old files
    ),
)

MATRICES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


def published(c: GPT2) -> dict[str, Layout]:
    """Matrices are published [in, out]; `GPT2LMHeadModel` puts `transformer.` before every name."""

    def at(name: str) -> Layout:
        return either(tensor(f"transformer.{name}"), tensor(name))

    names = {name: at(name) for name in ("wpe.weight", "ln_f.weight", "ln_f.bias")}
    names |= head_names(c.tied, "wte.weight", at("wte.weight"), "lm_head.weight")
    for i in range(c.layers):
        for part in ("ln_1", "ln_2", *MATRICES):
            weight, bias = f"h.{i}.{part}.weight", f"h.{i}.{part}.bias"
            names[weight] = at(weight).T if part in MATRICES else at(weight)
            names[bias] = at(bias)
    return names


@ar.block
def layer(x: "f[B, T, width]", c: GPT2):
    inner, small = c.inner or 4 * c.width, ar.normal(0.02 / (2 * c.layers) ** 0.5)
    h = ar.layer_norm(x, name="ln_1", eps=c.eps)
    h = ar.linear(h, 3 * c.width, name="attn.c_attn")
    q, k, v = ar.heads(h, 3, c.heads)  # 3 × [B, T, heads, size]
    h = ar.attention(q, k, v, causal=True, dropout=c.attention_dropout, name="attn")
    h = ar.linear(ar.merge(h), c.width, name="attn.c_proj", init=small)
    x = x + ar.dropout(h, c.residual_dropout)
    h = ar.layer_norm(x, name="ln_2", eps=c.eps)
    h = ar.gelu_tanh(ar.linear(h, inner, name="mlp.c_fc"))
    h = ar.linear(h, c.width, name="mlp.c_proj", init=small)
    return x + ar.dropout(h, c.residual_dropout)


@ar.spec(
    GPT2,
    presets=PRESETS,
    from_hf=FROM_HF,
    names={"hf": published},
    ignore=("*.attn.bias", "*.attn.masked_bias"),
)
def gpt2(tokens, c: GPT2):  # i64[B, T] → f[B, T, vocab]
    """GPT-2: learned positions, pre-norm, full attention over a growing cache, GELU."""
    wte = ar.weight("wte.weight", [c.vocab, c.width])
    place = ar.positions(tokens, limit=c.context)
    x = ar.embedding(tokens, wte) + ar.embedding(place, c.context, c.width, name="wpe")
    x = ar.dropout(x, c.embedding_dropout)
    for i in range(c.layers):
        x = layer(x, c, name=f"h.{i}")
    x = ar.layer_norm(x, name="ln_f", eps=c.eps)
    return ar.logits(x, wte) if c.tied else ar.logits(x, c.vocab, name="lm_head")
