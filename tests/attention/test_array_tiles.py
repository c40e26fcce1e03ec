"""Tiles of captured arrays in shared memory, in both passes of Hopper's kernels: dense biases and arrays as masks.

The arrays have rows at multiples of 16 bytes, so that chunks of 16 bytes are copied; tests of other arrays are in
test_array_masks.py and tests/codegen/test_row_elements.py.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen as fg
from flashgen import attention
from flashgen.codegen.hopper.array_tiles import array_tile
from flashgen.codegen.hopper.backward_plans import HopperBackwardPlan
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.stages import backward_kernels, forward_kernels
from flashgen.codegen.targets import TARGETS
from flashgen.runtime.schedule import Schedule
from flashgen.verify import Case, Shape, gradients_by_name, judged, random_gradients, random_inputs, verify
from flashgen.verify.gradients import expected_gradients, judged_by_name

LEN_Q, LEN_K, BATCH, HEADS = 200, 300, 2, 4
BIAS, KEPT = fg.Tensor("array", "bfloat16", 3), fg.Tensor("array", "bool", 4)


def biased(mask: fg.Mask, head_dim: int, **options: Any) -> fg.AttentionSpec:
    return fg.AttentionSpec(head_dim, "bfloat16", mask=mask, score=lambda s, b, h, q, k: s + BIAS[h, q, k], **options)


def masked(head_dim: int, **options: Any) -> fg.AttentionSpec:
    return fg.AttentionSpec(head_dim, "bfloat16", mask=lambda b, h, q, k: KEPT[b, h, q, k], **options)


def numbers(spec: fg.AttentionSpec, columns: int = 320, rows: int = LEN_Q) -> Any:
    random = np.random.default_rng(5)
    if spec.score is None:
        return random.random((BATCH, HEADS, rows, columns)) < 0.7
    return random.standard_normal((HEADS, rows, columns)).astype(ml_dtypes.bfloat16)


def check(spec: fg.AttentionSpec, array: Any, heads_kv: int = 2, backward: bool = True, **options: Any) -> None:
    """Compares the output, and all gradients, with the reference."""
    shape = Shape(LEN_Q, LEN_K, BATCH, HEADS, heads_kv)
    inputs, captures = random_inputs(spec, shape), {"array": array}
    qkv = (inputs.q, inputs.k, inputs.v)
    compiled = attention.compile(spec, "sm_90a", emulate=True, **options)
    out, lse = compiled(*qkv, return_lse=True, **captures)
    verdict = judged(spec, *qkv, out, lse, captures)
    assert verdict.ok, verdict
    if not backward:
        return
    d_out, d_lse = random_gradients(spec, shape, of_lse=True)
    gradients = compiled.backward(d_out, *qkv, out, lse, d_lse=d_lse, **captures)
    exact, rounded = expected_gradients(spec, *qkv, d_out, d_lse=d_lse, **captures)
    verdicts = judged_by_name(gradients_by_name(gradients), exact, rounded)
    assert all(each.ok for each in verdicts.values()), f"{spec.name}: {verdicts}"


SPECS = {
    "bias": lambda dim, **options: biased(fg.full(), dim, **options),
    "causal bias": lambda dim, **options: biased(fg.causal(), dim, **options),
    "bias in a window": lambda dim, **options: biased(fg.sliding_window(60), dim, **options),
    "mask": masked,
}


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.covering(6)
def test_both_passes(deterministic: bool, name: str, head_dim: int) -> None:
    spec = SPECS[name](head_dim)
    assert "array_producer" in forward_kernels(spec, TARGETS["sm_90a"])["forward"].source
    if not deterministic:
        assert "array_producer" in backward_kernels(spec, TARGETS["sm_90a"])["dkdv"].source
    check(spec, numbers(spec), deterministic=deterministic)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    "schedule", [Schedule("greedy_warp", "early"), Schedule("reverse", "late"), Schedule("random", "random", 5)]
)
@pytest.mark.covering(6)
def test_in_varied_orders(schedule: Schedule, name: str) -> None:
    spec = SPECS[name](64)
    check(spec, numbers(spec), schedule=schedule)


@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("name", ["causal bias", "mask"])
@pytest.mark.rotated(6)
def test_accesses(name: str, sanitize: Any) -> None:
    spec = SPECS[name](32)
    check(spec, numbers(spec, columns=304), sanitize=sanitize)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("causal bias", HopperPlan(2, 96, takes_turns=True)),
        ("mask", HopperPlan(3, 64)),
        ("bias in a window", HopperPlan(1, 128)),
        ("causal bias", HopperPlan(2, 128, packed_heads=2)),
    ],
)
def test_plans_of_the_forward(name: str, plan: HopperPlan) -> None:
    spec = SPECS[name](64)
    assert plan.array_stages(spec) == 2
    check(spec, numbers(spec), plan=plan, backward=False)


@pytest.mark.parametrize("name", ["bias", "causal bias", "mask"])
def test_varlen_batches(name: str) -> None:
    spec = SPECS[name](32, layout="thd")
    cases = [Case(spec, shape) for shape in (Shape(LEN_Q, LEN_K, BATCH, HEADS, 2), Shape(70, 130, 3, 2, 1))]
    results = list(verify(cases, passes=("forward", "backward"), target="sm_90a", emulate=True))
    assert len(results) == 4 and all(result.ok for result in results), results


@pytest.mark.parametrize(
    "plan", [HopperBackwardPlan(128, early_scores=False), HopperBackwardPlan(64, heads_apart=True)]
)
@pytest.mark.parametrize("name", ["causal bias", "mask"])
@pytest.mark.covering(3)
def test_plans_of_the_backward(name: str, plan: HopperBackwardPlan) -> None:
    spec = SPECS[name](32)
    assert plan.array_stages(spec) == 2
    check(spec, numbers(spec), backward_plan=plan)


@pytest.mark.parametrize(("rows", "columns"), [(1, 320), (LEN_Q, 1), (LEN_Q + 40, 303)])
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_arrays_of_other_sizes(name: str, rows: int, columns: int) -> None:
    """Tiles have one row for all queries, or elements are written one by one."""
    spec = SPECS[name](32)
    check(spec, numbers(spec, columns, rows))


def test_which_arrays_have_tiles() -> None:
    two, four = fg.Tensor("array", "float16", 2), fg.Tensor("array", "float16", 4)
    ids = fg.Tensor("ids", "int32", 1)
    scores = {
        "shared by heads": (lambda s, b, h, q, k: s + two[q, k], True),
        "of each head and sequence": (lambda s, b, h, q, k: s + four[b, h, q, k], True),
        "one number for an axis": (lambda s, b, h, q, k: s + four[0, h // 2, q, k], True),
        "shifted queries": (lambda s, b, h, q, k: s + two[q + 1, k], False),
        "selected queries": (lambda s, b, h, q, k: s + two[ids[q], k], False),
        "queries twice": (lambda s, b, h, q, k: s + four[q, h, q, k], False),
        "32 bits": (lambda s, b, h, q, k: s + fg.Tensor("array", "float32", 2)[q, k], False),
    }
    for name, (score, expected) in scores.items():
        assert (array_tile(fg.AttentionSpec(64, "float16", score=score), 128) is not None) == expected, name
