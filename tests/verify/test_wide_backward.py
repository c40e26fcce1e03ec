"""Hopper's backward for head dims too large for one warpgroup, with every variant whose dS needs more than P."""

from __future__ import annotations

from itertools import cycle

import pytest

import flashgen.language as fg
from flashgen.attention import compile
from flashgen.codegen.hopper.wide_plans import HopperWidePlan, choose_hopper_wide_plan, exchanged
from flashgen.codegen.targets import target_named
from flashgen.runtime.schedule import Schedule
from flashgen.verify import verify
from flashgen.verify.check import Sanitizer
from flashgen.verify.gradients import gradients_by_name, judged_gradients, poisoned_gradients, random_gradients
from flashgen.verify.problems import Shape, random_inputs
from flashgen.verify.variants import Case, Variant, in_layout, learned, spec_of, variants

DIMS = (144, 256, 192)  # the last one's values have 128 columns
LENGTHS = ((70, 133), (133, 70), (65, 65))  # several tiles, the last ones cut off
NEEDING = [variant for variant in variants() if exchanged(spec_of(variant, 256, "float16")) != "probabilities"]
ONE_KERNEL_DIMS = (256, 168, 224)
IN_ONE_KERNEL = [
    variant
    for variant in variants()
    if choose_hopper_wide_plan(spec_of(variant, 256, "float16"), target_named("sm_90a"), False).with_dq
]


def case_of(variant: Variant, spec: fg.AttentionSpec, number: int) -> Case:
    """Two query heads per KV head, so that accumulators of a head's elements end between them."""
    lengths = (65, 65) if variant.equal else LENGTHS[number % len(LENGTHS)]
    return Case(spec, Shape(*lengths, batch=2, heads_q=4, heads_kv=2), variant.captures, lse_gradient=number % 2 == 1)


CASES = [
    (case_of(variant, spec_of(variant, dim, dtype), number), number % 2 == 1)
    for number, (variant, dim, dtype) in enumerate(zip(NEEDING, cycle(DIMS), cycle(("float16", "bfloat16"))))
]
CASES_IN_ONE_KERNEL = [
    case_of(variant, spec_of(variant, dim, dtype), number)
    for number, (variant, dim, dtype) in enumerate(
        zip(IN_ONE_KERNEL, cycle(ONE_KERNEL_DIMS), cycle(("float16", "bfloat16")))
    )
]
# A slope and dropout bits, also with an element per head: other values are passed between warpgroups.
DROPPED = fg.AttentionSpec(160, value_dim=144, mask=fg.causal(), score=fg.softcap(20)(fg.alibi("slopes")), dropout=0.17)
LEARNED = fg.AttentionSpec(
    136,
    "bfloat16",
    value_dim=200,
    mask=fg.sliding_window(40, 30),
    score=learned(fg.softcap(20)(fg.alibi("slopes"))),
    dropout=0.17,
)
PLANNED = Shape(70, 100, 1, 2, 1)
LATE = Schedule("random", "late", seed=1)


def assert_agrees(case: Case, deterministic: bool = False, **engine: object) -> None:
    compiled = compile(case.spec, target="sm_90a", emulate=True, deterministic=deterministic)
    assert isinstance(compiled.backward_plan, HopperWidePlan)
    how = {"target": "sm_90a", "emulate": True, "passes": ("backward",), "deterministic": deterministic}
    for result in verify([case], **how, **engine):  # type: ignore[arg-type]
        assert result.ok, f"{result.case} on {result.engine}: {result.problem or result.verdict}"


@pytest.mark.parametrize(("case", "deterministic"), CASES, ids=str)
@pytest.mark.rotated(24)
def test_every_variant(case: Case, deterministic: bool) -> None:
    assert_agrees(case, deterministic, schedule_count=2)


@pytest.mark.parametrize("case", CASES_IN_ONE_KERNEL, ids=str)
@pytest.mark.rotated(24)
def test_every_variant_in_one_kernel(case: Case) -> None:
    assert compile(case.spec, target="sm_90a", emulate=True).backward_plan.with_dq
    assert_agrees(case, schedule_count=2)


@pytest.mark.parametrize("layout", ["bhsd", "thd"])
@pytest.mark.parametrize("sanitize", [None, "address", "thread"])
@pytest.mark.rotated(3)
def test_orders_and_sanitizers_of_one_kernel(layout: str, sanitize: Sanitizer | None) -> None:
    """dV and dK have parts of several widths, the last chunk of dQ is narrow, and stages are used several times."""
    spec = in_layout(fg.AttentionSpec(176, "bfloat16", value_dim=200, mask=fg.causal()), layout)
    case = Case(spec, Shape(400, 150, 1, 2, 1), lse_gradient=True)
    assert_agrees(case, schedule_count=1 if sanitize else 4, sanitize=sanitize)


def test_what_is_exchanged() -> None:
    assert exchanged(fg.AttentionSpec(256, mask=fg.causal(), score=fg.alibi(8))) == "probabilities"
    assert exchanged(DROPPED) == exchanged(fg.AttentionSpec(256, dropout=0.1)) == "factors"
    assert exchanged(fg.AttentionSpec(256, score=fg.softcap(30))) == "factors"
    assert exchanged(LEARNED) == exchanged(fg.AttentionSpec(256, score=learned(fg.alibi("slopes")))) == "products"


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("layout", ["bhsd", "thd"])
@pytest.mark.parametrize("spec", [DROPPED, LEARNED], ids=["factors", "products"])
@pytest.mark.rotated(6)
def test_thread_and_copy_orders(spec: fg.AttentionSpec, layout: str, deterministic: bool) -> None:
    """In the deterministic mode each order gives the same bits."""
    case = Case(in_layout(spec, layout), Shape(90, 133, 2, 4, 2), lse_gradient=True)
    assert_agrees(case, deterministic, schedule_count=6 if deterministic else 3)


@pytest.mark.parametrize(("tile_q", "stages"), [(16, 4), (32, 3), (48, 2), (64, 2)])
def test_plans(tile_q: int, stages: int) -> None:
    """As many queries per step as registers and memory allow, with any number of stages."""
    spec = fg.AttentionSpec(192, mask=fg.causal(), score=fg.softcap(10), dropout=0.25)
    assert_plan_agrees(spec, HopperWidePlan(tile_q, stages), seed=7)


@pytest.mark.parametrize("columns", [32, 64])
@pytest.mark.parametrize("head_dim", [144, 256])
def test_chunks_of_dq(columns: int, head_dim: int) -> None:
    assert_plan_agrees(fg.AttentionSpec(head_dim, mask=fg.causal()), HopperWidePlan(dq_columns=columns))


def assert_plan_agrees(spec: fg.AttentionSpec, plan: HopperWidePlan, **given: int) -> None:
    how = {"target": "sm_90a", "emulate": True, "backward_plan": plan, "schedule": LATE}
    compiled, inputs = compile(spec, **how), random_inputs(spec, PLANNED)
    d_out, _ = random_gradients(spec, PLANNED, 3)
    out, lse = compiled(inputs.q, inputs.k, inputs.v, return_lse=True, **given)
    into = poisoned_gradients(spec, inputs)
    found = compiled.backward(d_out, inputs.q, inputs.k, inputs.v, out, lse, into=into, **given)
    verdicts = judged_gradients(spec, inputs.q, inputs.k, inputs.v, d_out, gradients_by_name(found), **given)
    assert all(verdict.ok for verdict in verdicts.values()), verdicts


@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("spec", [DROPPED, LEARNED], ids=["factors", "products"])
@pytest.mark.rotated(4)
def test_sanitizers_find_nothing(spec: fg.AttentionSpec, sanitize: str) -> None:
    assert_agrees(Case(spec, Shape(70, 70, 1, 2, 1)), sanitize=sanitize)
