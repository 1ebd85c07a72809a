"""archir: a compiler for language-model architectures.

import archir as ar

model = ar.compile("gpt2", preset="tiny")
model.init_weights(0)
logits = model(tokens)
"""

from archir.check import check
from archir.check.recurrence import check_recurrence
from archir.compile import compile, op
from archir.dsl import (
    attention,
    block,
    buffer,
    cast,
    concat,
    config,
    constant,
    dropout,
    embedding,
    exp,
    expand_dims,
    gelu_tanh,
    heads,
    inverse_softplus,
    l2_norm,
    layer_norm,
    linear,
    log,
    log_uniform,
    logits,
    merge,
    normal,
    ones,
    pointwise,
    positions,
    relu,
    rms_norm,
    rotary,
    rsqrt,
    short_conv,
    sigmoid,
    silu,
    softplus,
    split,
    sqrt,
    tanh,
    tap,
    uniform,
    weight,
    where,
    zeros,
)
from archir.explain import explain
from archir.interp import interpret
from archir.pipeline import lower
from archir.provide import provide
from archir.recurrence import recurrence
from archir.spec import HuggingFace, Spec, spec, trace
from archir.text import parse

__version__ = "0.1.0"
