"""Masks that are arrays, with an element for each query and key: kernels load the elements in pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import attention
from flashgen.codegen.expressions.row_elements import paired_mask_elements
from flashgen.codegen.stages import backward_kernels, forward_kernels
from flashgen.codegen.targets import TARGETS
from flashgen.verify import Shape, gradients_by_name, judged, random_gradients, random_inputs
from flashgen.verify.gradients import expected_gradients, judged_by_name

LEN_Q, LEN_K, BATCH, HEADS = 70, 150, 2, 4
TARGETS_TESTED = pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
KEPT = fg.Tensor("kept", "bool", 4)


def by_score(b: Any, h: Any, q: Any, k: Any) -> Any:
    return KEPT[b, h, q, k]


def below_diagonal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return KEPT[b, h, q, k] & (k <= q + 80)


def of_numbers(b: Any, h: Any, q: Any, k: Any) -> Any:
    return fg.Tensor("kept", "int8", 4)[b, h, q, k] > 0


def mask_of(shape: tuple[int, ...], density: float = 0.6) -> Any:
    """Returns a mask with empty rows, and with tiles that are full and empty."""
    kept = np.random.default_rng(7).random(shape) < density
    kept[..., : min(20, shape[-2]), :] = shape[-2] == 1
    if shape[-1] > 128:
        kept[..., 128:] = kept[..., :1]
    return kept


def check(spec: fg.AttentionSpec, kept: Any, target: str, heads_kv: int = 2, **options: Any) -> None:
    """Compares the output and all gradients with the reference."""
    shape = Shape(LEN_Q, LEN_K, BATCH, HEADS, heads_kv)
    inputs, (d_out, d_lse) = random_inputs(spec, shape), random_gradients(spec, shape, of_lse=True)
    qkv, captures = (inputs.q, inputs.k, inputs.v), {**inputs.captures, "kept": kept}
    compiled = attention.compile(spec, target, **{"emulate": True, **options})
    out, lse = compiled(*qkv, return_lse=True, **captures)
    verdict = judged(spec, *qkv, out, lse, captures)
    assert verdict.ok, verdict
    gradients = compiled.backward(d_out, *qkv, out, lse, d_lse=d_lse, **captures)
    exact, rounded = expected_gradients(spec, *qkv, d_out, d_lse=d_lse, **captures)
    verdicts = judged_by_name(gradients_by_name(gradients), exact, rounded)
    assert all(each.ok for each in verdicts.values()), f"{spec.name}: {verdicts}"


@TARGETS_TESTED
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("heads_kv", [2, 1])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", [by_score, below_diagonal, of_numbers])
@pytest.mark.covering(9)
def test_masks_in_both_passes(mask: Any, deterministic: bool, heads_kv: int, head_dim: int, target: str) -> None:
    spec = fg.AttentionSpec(head_dim, "bfloat16", mask=mask)
    assert len(paired_mask_elements(spec)) == 1
    kept = mask_of((BATCH, HEADS, LEN_Q, LEN_K))
    check(spec, kept.astype("int8") if mask is of_numbers else kept, target, heads_kv, deterministic=deterministic)


@TARGETS_TESTED
@pytest.mark.parametrize(
    "shape",
    [(1, 1, LEN_Q, LEN_K), (BATCH, 1, 1, LEN_K), (1, 1, LEN_Q, 1), (BATCH, 1, LEN_Q, 192), (1, HEADS, LEN_Q, 151)],
)
@pytest.mark.covering(8)
def test_masks_of_several_heads_queries_or_keys(shape: tuple[int, ...], target: str) -> None:
    check(fg.AttentionSpec(32, "bfloat16", mask=by_score), mask_of(shape), target)


@TARGETS_TESTED
@pytest.mark.parametrize(
    "view",
    [
        lambda kept: kept[..., 1 : LEN_K + 1],  # pairs are not aligned
        lambda kept: kept[..., : 2 * LEN_K : 2],
        lambda kept: kept[:, :, ::-1],
        lambda kept: kept.transpose(0, 1, 3, 2)[..., :LEN_Q, :],
        lambda kept: np.broadcast_to(kept[:1, :1, :LEN_Q, :LEN_K], (BATCH, HEADS, LEN_Q, LEN_K)),
    ],
)
@pytest.mark.covering(8)
def test_masks_of_any_strides(view: Callable[[Any], Any], target: str) -> None:
    check(fg.AttentionSpec(32, "bfloat16", mask=by_score), view(mask_of((BATCH, HEADS, 320, 320))), target)


@TARGETS_TESTED
def test_masks_beside_a_score_function(target: str) -> None:
    spec = fg.AttentionSpec(32, "bfloat16", mask=by_score, score=fg.softcap(5.0))
    assert paired_mask_elements(spec)
    check(spec, mask_of((BATCH, HEADS, LEN_Q, LEN_K)), target)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": lambda b, h, q, k: KEPT[b, h, k, q]},
        {"mask": lambda b, h, q, k: KEPT[b, h, q, k] & fg.Tensor("other", "bool", 1)[k]},
        {"mask": lambda b, h, q, k: fg.Tensor("far", "float32", 2)[q, k] < 1.0},
        {"mask": by_score, "dropout": 0.1},
        {"mask": by_score, "score": lambda s, b, h, q, k: s + fg.Tensor("bias", "float16", 2)[q, k]},
    ],
)
def test_which_masks_are_read_for_each_score(options: dict[str, Any]) -> None:
    spec = fg.AttentionSpec(64, **options)
    assert not paired_mask_elements(spec)
    assert "kept_of(" not in forward_kernels(spec, TARGETS["sm_90a"])["forward"].source


@TARGETS_TESTED
def test_text_loads_elements_of_tiles_that_the_mask_cuts(target: str) -> None:
    spec = fg.AttentionSpec(64, mask=by_score)
    forward = forward_kernels(spec, TARGETS[target])["forward"].source
    loads = "full(step)) load_pairs(pairs" if target == "sm_80" else "if (!tiles.full(step) && can_copy_tile("
    assert loads in forward and "mask_mod(kept_of(pairs.element0[n / 2], n % 2)" in forward
    backward = backward_kernels(spec, TARGETS[target])["dkdv"].source
    exchange = "transpose_pairs(pairs);" if target == "sm_80" else "load_matrix_x4_transposed(words,"
    assert exchange in backward and "mask_mod(kept_of(pairs.element0[n / 2], n % 2)" in backward


@TARGETS_TESTED
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.rotated(6)
def test_accesses_stay_within_the_mask(target: str, sanitize: Any) -> None:
    for columns in (LEN_K, LEN_K + 1, 256):
        spec = fg.AttentionSpec(32, "bfloat16", mask=by_score)
        check(spec, mask_of((BATCH, 1, LEN_Q, columns)), target, sanitize=sanitize)
