"""Layouts: save and load are inverse, shapes tell the truth, and names place every weight once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from archir.diagnostics import MismatchError, SpecError
from archir.layout import (
    Layout,
    alias,
    assemble,
    check_total,
    concat,
    either,
    published_shapes,
    rotary_rows,
    stack,
    tensor,
)
from tests.goldens import check_golden

A, B, C = tensor("a"), tensor("b"), tensor("c")
CASES: dict[str, tuple[Layout, tuple[int, ...], dict[str, tuple[int, ...]]]] = {
    "tensor": (A, (3, 4), {"a": (3, 4)}),
    "scalar": (A, (), {"a": ()}),
    "transpose": (A.T, (3, 4), {"a": (4, 3)}),
    "transpose_twice": (A.T.T, (3, 4), {"a": (3, 4)}),
    "reshape": (A.reshape(3, 4, stored=(3, 1, 4)), (3, 4), {"a": (3, 1, 4)}),
    "reshape_transpose": (A.reshape(4, 3, stored=(2, 2, 3)).T, (3, 4), {"a": (2, 2, 3)}),
    "concat": (concat([A, B, C]), (6, 4), {"a": (2, 4), "b": (2, 4), "c": (2, 4)}),
    "concat_sizes": (concat([A, B], sizes=(4, 2)), (6, 4), {"a": (4, 4), "b": (2, 4)}),
    "concat_columns": (concat([A.T, B.T], dim=1), (3, 4), {"a": (2, 3), "b": (2, 3)}),
    "stack": (stack([A, B]), (2, 3, 4), {"a": (3, 4), "b": (3, 4)}),
    "stack_last": (stack([A, B, C], dim=1), (2, 3), {"a": (2,), "b": (2,), "c": (2,)}),
    "stack_concat": (
        stack([concat([A, B]), concat([C, tensor("d")])]),
        (2, 4, 3),
        {"a": (2, 3), "b": (2, 3), "c": (2, 3), "d": (2, 3)},
    ),
    "rotary": (rotary_rows(A, heads=2), (12, 5), {"a": (12, 5)}),
    "rotary_bias": (rotary_rows(A, heads=3), (12,), {"a": (12,)}),
    "either": (either(A.T, B), (3, 4), {"a": (4, 3)}),
    "alias": (alias(A, "b"), (3, 4), {"a": (3, 4)}),
}


@pytest.mark.parametrize("make", [np.arange, torch.arange])
@pytest.mark.parametrize("name", CASES)
def test_load_is_the_inverse_of_save(name, make):
    layout, shape, published = CASES[name]
    weight = make(int(np.prod(shape))).reshape(shape)
    saved = assemble(layout.save(weight))
    assert {n: tuple(a.shape) for n, a in saved.items()} == published
    resolved = layout.resolve(saved)
    assert published_shapes({"w": shape}, {"w": resolved}) == published
    loaded = resolved.load(saved.__getitem__)
    assert type(loaded) is type(weight) and loaded.dtype == weight.dtype
    assert tuple(loaded.shape) == shape and bool((loaded == weight).all())


@pytest.mark.parametrize("make", [np.arange, torch.arange])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_one_tensor_make_it_whole(make, transposed):
    whole = A.T if transposed else A
    names = {"v": whole.rows(5, 6), "q": whole.rows(0, 3), "k": whole.rows(3, 5)}
    weights = {"q": make(12).reshape(3, 4), "k": make(8).reshape(2, 4), "v": make(4).reshape(1, 4)}
    shapes = {name: tuple(w.shape) for name, w in weights.items()}
    check_total(shapes, names)
    saved = assemble({p: a for n, w in weights.items() for p, a in names[n].save(w).items()})
    assert {n: tuple(a.shape) for n, a in saved.items()} == published_shapes(shapes, names)
    assert tuple(saved["a"].shape) == ((4, 6) if transposed else (6, 4))
    for name, weight in weights.items():
        assert bool((names[name].load(saved.__getitem__) == weight).all())


def test_rotary_rows_is_what_transformers_undoes():
    published = np.arange(24.0 * 5).reshape(24, 5)
    for heads in (1, 2, 3, 4):
        ours = rotary_rows(A, heads).load({"a": published}.__getitem__)
        theirs = LlamaTensorProcessor()._reverse_permute_weights(published, heads, heads)
        assert (ours == theirs).all()


def test_pad_adds_zeros_and_refuses_to_drop_others():
    layout = A.pad(2)
    weight = np.array([1.0, 2.0, 0.0, 0.0])
    assert layout.save(weight)[A].tolist() == [1, 2]
    assert layout.load({"a": weight[:2]}.__getitem__).tolist() == weight.tolist()
    assert published_shapes({"w": (4,)}, {"w": layout}) == {"a": (2,)}
    with pytest.raises(MismatchError) as error:
        layout.save(np.ones(4))
    check_golden("weights/pad", str(error.value))


def test_either_reads_what_is_there():
    layout = either(A, concat([B, C]), tensor("d"))
    assert layout.names == ("a", "b", "c", "d")
    for present, chosen in [({"a", "d"}, A), ({"b"}, A), ({"d", "b"}, tensor("d")), (set(), A)]:
        assert layout.resolve(present) == chosen
    assert layout.resolve({"b", "c"}) == concat([B, C])


def test_alias_must_be_equal_where_present():
    layout = alias(A, "b", "c")
    one, two = np.ones((2, 3)), np.zeros((2, 3))
    assert layout.resolve({"a"}) == A
    resolved = layout.resolve({"a", "c"})
    assert published_shapes({"w": (2, 3)}, {"w": resolved}) == {"a": (2, 3), "c": (2, 3)}
    assert (resolved.load({"a": one, "c": one}.__getitem__) == one).all()
    with pytest.raises(MismatchError) as error:
        resolved.load({"a": one, "c": two}.__getitem__)
    check_golden("weights/alias", str(error.value))


SHAPES = {"wte": (8, 4), "attn.q": (4, 4), "attn.k": (4, 4)}
BAD_NAMES: dict[str, dict[str, Layout]] = {
    "missing": {"wte": tensor("wte.weight")},
    "unknown": {
        "wte": tensor("wte.weight"),
        "attn.q": tensor("q"),
        "attn.k": tensor("k"),
        "attn.kk": tensor("kk"),
    },
    "same_tensor": {"wte": tensor("wte.weight"), "attn.q": tensor("q"), "attn.k": tensor("q")},
    "overlap": {
        "wte": tensor("wte.weight"),
        "attn.q": tensor("qk").rows(0, 4),
        "attn.k": tensor("qk").rows(3, 7),
    },
    "whole_and_rows": {
        "wte": tensor("wte.weight"),
        "attn.q": tensor("wte.weight").rows(0, 4),
        "attn.k": tensor("k"),
    },
    "alternative": {
        "wte": either(tensor("wte.weight"), tensor("k")),
        "attn.q": tensor("q"),
        "attn.k": tensor("k"),
    },
    "gap": {
        "wte": tensor("wte.weight"),
        "attn.q": tensor("qkv").T.rows(0, 4),
        "attn.k": tensor("qkv").T.rows(8, 12),
    },
    "row_count": {
        "wte": tensor("wte.weight"),
        "attn.q": tensor("qk").rows(0, 3),
        "attn.k": tensor("qk").rows(3, 7),
    },
    "rank": {"wte": tensor("wte.weight").T.T, "attn.q": stack([A, B]), "attn.k": tensor("k")},
}


@pytest.mark.parametrize("case", BAD_NAMES)
def test_names_must_be_total_and_one_to_one(case):
    with pytest.raises(SpecError) as error:
        check_total(SHAPES, BAD_NAMES[case])
    check_golden(f"weights/names_{case}", str(error.value))


WRONG_STEPS = {
    "concat twice": lambda: concat([A, B, A]),
    "concat of none": lambda: concat([]),
    "rows of rows": lambda: A.rows(0, 2).rows(0, 1),
    "rows of stack": lambda: stack([A, B]).rows(0, 1),
    "transpose of a vector": lambda: A.T.shapes((3,)),
    "uneven concat": lambda: concat([A, B]).shapes((5, 2)),
    "wrong stack": lambda: stack([A, B]).shapes((3, 2)),
    "odd rotary": lambda: rotary_rows(A, 3).shapes((9, 2)),
    "wrong reshape": lambda: A.reshape(2, 3, stored=(6,)).shapes((3, 2)),
    "reshape of another size": lambda: A.reshape(2, 3, stored=(5,)).shapes((2, 3)),
    "large pad": lambda: A.pad(4).shapes((3, 2)),
}


def test_wrong_steps_name_both_sides():
    lines = []
    for case, make in WRONG_STEPS.items():
        with pytest.raises(SpecError) as error:
            make()
        lines.append(f"{case}: {error.value}")
    check_golden("weights/layout_steps", "\n".join(lines))
