"""Hopper's backward for heads of more than 256 columns, in clusters of two CTAs."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

import flashgen.language as fg
from flashgen.attention import compile
from flashgen.codegen.hopper.cluster_plans import HopperClusterPlan, cluster_problem
from flashgen.codegen.mma_sync.backward_plans import BackwardPlan
from flashgen.runtime.schedule import Schedule
from flashgen.verify import verify
from flashgen.verify.gradients import gradients_by_name, judged_gradients, poisoned_gradients, random_gradients
from flashgen.verify.problems import Shape, random_inputs
from flashgen.verify.variants import Case, Variant, in_layout, learned, spec_of, variants

DIMS = (512, 264, 320, 384, 448)  # halves of 4 panels of 64 columns, 5 of 32, 3 of 64 and 7 of 32
LENGTHS = ((70, 133), (133, 70), (65, 65))  # several tiles, the last ones cut off
TAKEN = [variant for variant in variants() if cluster_problem(spec_of(variant, 512, "float16")) is None]


def case_of(variant: Variant, spec: fg.AttentionSpec, number: int) -> Case:
    """Two query heads per KV head, whose iterations follow each other."""
    lengths = (65, 65) if variant.equal else LENGTHS[number % len(LENGTHS)]
    return Case(spec, Shape(*lengths, batch=1, heads_q=4, heads_kv=2), variant.captures, lse_gradient=number % 2 == 1)


CASES = [
    case_of(variant, spec_of(variant, dim, dtype), number)
    for number, (variant, dim, dtype) in enumerate(zip(TAKEN, cycle(DIMS), cycle(("bfloat16", "float16"))))
]
CAUSAL = fg.AttentionSpec(288, "bfloat16", mask=fg.causal(), score=fg.alibi("slopes"))


def assert_agrees(case: Case, deterministic: bool = False, **engine: Any) -> None:
    compiled = compile(case.spec, target="sm_90a", emulate=True, deterministic=deterministic)
    assert isinstance(compiled.backward_plan, HopperClusterPlan)
    how = {"target": "sm_90a", "emulate": True, "passes": ("backward",), "deterministic": deterministic}
    for result in verify([case], **how, **engine):
        assert result.ok, f"{result.case} on {result.engine}: {result.problem or result.verdict}"


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.rotated(27)
def test_every_variant(case: Case) -> None:
    assert_agrees(case, schedule_count=2)


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
@pytest.mark.rotated(4)
def test_thread_and_copy_orders(layout: str, deterministic: bool) -> None:
    """In the deterministic mode each order gives the same bits."""
    case = Case(in_layout(CAUSAL, layout), Shape(90, 133, 2, 2, 1), lse_gradient=True)
    assert_agrees(case, deterministic, schedule_count=6 if deterministic else 3)


@pytest.mark.parametrize(("tile_q", "stages"), [(16, 4), (32, 3), (48, 2), (64, 2), (80, 2)])
@pytest.mark.rotated(3)
def test_plans(tile_q: int, stages: int) -> None:
    """The kernel of dQ streams as many keys as that of dK and dV streams queries."""
    spec, shape = fg.AttentionSpec(320, mask=fg.causal()), Shape(100, 140, 1, 2, 1)
    schedule, plan = Schedule("random", "late", seed=1), HopperClusterPlan(stages, tile_q)
    compiled = compile(spec, target="sm_90a", emulate=True, backward_plan=plan, schedule=schedule)
    inputs, (d_out, _) = random_inputs(spec, shape), random_gradients(spec, shape, 3)
    out, lse = compiled(inputs.q, inputs.k, inputs.v, return_lse=True)
    into = poisoned_gradients(spec, inputs)
    found = compiled.backward(d_out, inputs.q, inputs.k, inputs.v, out, lse, into=into)
    verdicts = judged_gradients(spec, inputs.q, inputs.k, inputs.v, d_out, gradients_by_name(found))
    assert all(verdict.ok for verdict in verdicts.values()), verdicts


@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.rotated(3)
def test_sanitizers_find_nothing(sanitize: str) -> None:
    assert_agrees(Case(CAUSAL, Shape(70, 70, 1, 2, 1)), sanitize=sanitize)


def test_maps_are_in_the_order_of_the_struct() -> None:
    """A launch on a GPU writes them one after the other."""
    for kernel in compile(CAUSAL, target="sm_90a", emulate=True).backward_kernels.values():
        maps = [field.name for field in kernel.layout.fields if field.type == "TensorMap"]
        assert maps == [f"{name}_map" for name in kernel.boxes]


OTHERS = [
    # (spec, what the message says)
    (fg.AttentionSpec(512, dropout=0.1), "dS must follow from P alone"),
    (fg.AttentionSpec(512, score=fg.softcap(30)), "dS must follow from P alone"),
    (fg.AttentionSpec(512, score=learned(fg.alibi("slopes"))), "dS must follow from P alone"),
    (fg.AttentionSpec(512, shared_kv=True), "hold K and V apart"),
    (fg.AttentionSpec(512, value_dim=256), "equally many columns"),
    (fg.AttentionSpec(576, value_dim=512), "equally many columns, up to 512"),
    (fg.AttentionSpec(512, grad_dtype="float32"), "store 16-bit gradients"),
]


@pytest.mark.parametrize(("spec", "reason"), OTHERS, ids=str)
def test_others_keep_mma_sync(spec: fg.AttentionSpec, reason: str) -> None:
    assert reason in (cluster_problem(spec) or "")
    compiled = compile(spec, target="sm_90a", emulate=True)
    assert isinstance(compiled.backward_plan, BackwardPlan)


def test_a_plan_of_mma_sync_may_be_given() -> None:
    default = compile(fg.AttentionSpec(512), target="sm_80", emulate=True).backward_plan
    compiled = compile(fg.AttentionSpec(512), target="sm_90a", emulate=True, backward_plan=default)
    assert isinstance(compiled.backward_plan, BackwardPlan)


ON_A_GPU = [
    (fg.AttentionSpec(512, "bfloat16"), Shape(300, 500, 2, 4, 2)),
    (fg.AttentionSpec(512, "bfloat16", mask=fg.causal()), Shape(1500, 1500, 2, 4, 4)),
    (fg.AttentionSpec(320, mask=fg.causal(), layout="thd"), Shape(700, 900, 3, 4, 1)),
    (fg.AttentionSpec(448, mask=fg.sliding_window(300, 100), score=fg.alibi("slopes")), Shape(1000, 900, 1, 4, 2)),
]


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize(("spec", "shape"), ON_A_GPU, ids=str)
def test_on_a_gpu(spec: fg.AttentionSpec, shape: Shape) -> None:
    for result in verify([Case(spec, shape, lse_gradient=True)], passes=("backward",)):
        assert result.ok, (result.problem, result.verdicts)
