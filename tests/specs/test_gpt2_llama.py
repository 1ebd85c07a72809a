"""GPT-2 and Llama: what they compute, how they are published, how large they are."""

from __future__ import annotations

import numpy as np
import pytest

import archir as ar
from archir.spec import Spec, resolve
from tests import oracle

CASES = [(family, name) for family, named in oracle.NAMED.items() for name in named]


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
        print(family, name, length, worst)
        assert worst < 1e-10, f"T = {length}: {worst:.1e}"
