"""A small model of gated short convolutions, in the manner of LFM2: nothing else mixes tokens.

Stores: per layer the last taps − 1 inputs of the convolution.
Updates: by shifting; what is older is forgotten.
Retrieves: by fixed taps per channel, gated before and after.
"""

import archir as ar


@ar.config
class Conv:
    vocab: int = 96
    width: int = 32
    taps: tuple[int, ...] = (4, 2, 1)  # per layer
    pinned: bool = False  # filters kept in float32


@ar.block
def layer(x: "f[B, T, width]", c, taps):
    h = ar.linear(ar.rms_norm(x, name="norm"), 3 * c.width, bias=False, name="up")
    before, after, h = ar.split(h, [c.width] * 3)
    dtype = "float32" if c.pinned else None
    h = ar.short_conv(before * h, taps, activation=ar.silu, name="conv", dtype=dtype)
    return x + ar.linear(after * h, c.width, bias=False, name="down")


@ar.spec(
    Conv,
    presets={
        "tiny": Conv(),
        "pinned": Conv(pinned=True),
        "full": Conv(vocab=512, width=256, taps=(4, 4, 4, 4)),
    },
)
def conv_lm(tokens, c):
    table = ar.weight("embed.weight", [c.vocab, c.width])
    x = ar.embedding(tokens, table)
    for i, taps in enumerate(c.taps):
        x = layer(x, c, taps, name=f"layers.{i}")
    return ar.logits(ar.rms_norm(x, name="norm"), table)
