"""Hopper's backward of up to 192 columns in one kernel, which computes dQ in two chunks of columns."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest

import flashgen.language as fg
from flashgen.codegen.hopper.backward_plans import choose_hopper_backward_plan
from flashgen.codegen.targets import target_named
from flashgen.verify import verify
from flashgen.verify.problems import Shape
from flashgen.verify.variants import Case, Variant, in_layout, spec_of, variants

SM_90A = target_named("sm_90a")
CAUSAL = fg.AttentionSpec(192, "bfloat16", value_dim=128, mask=fg.causal())
LENGTHS = ((70, 333), (200, 133), (65, 65))  # several tiles, the last ones cut off


def computes_chunks(spec: fg.AttentionSpec) -> bool:
    plan = choose_hopper_backward_plan(spec, SM_90A)
    return plan is not None and plan.adds_dq(spec)


def case_of(variant: Variant, spec: fg.AttentionSpec, number: int) -> Case:
    lengths = (65, 65) if variant.equal else LENGTHS[number % len(LENGTHS)]
    return Case(spec, Shape(*lengths, batch=2, heads_q=4, heads_kv=2), variant.captures, lse_gradient=number % 2 == 1)


CASES = [
    case_of(variant, spec, number)
    for number, (variant, (head, value), dtype) in enumerate(
        zip(variants(), cycle([(192, 128), (144, 144), (160, 64)]), cycle(["float16", "bfloat16"]), strict=False)
    )
    if computes_chunks(spec := replace(spec_of(variant, head, dtype), value_dim=value))
]


def assert_agrees(case: Case, **engine: object) -> None:
    assert computes_chunks(case.spec)
    for result in verify([case], target="sm_90a", emulate=True, passes=("backward",), **engine):  # type: ignore[arg-type]
        assert result.ok, f"{result.case} on {result.engine}: {result.problem or result.verdict}"


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.rotated(36)
def test_every_variant(case: Case) -> None:
    assert_agrees(case, schedule_count=2)


@pytest.mark.parametrize("layout", ["bhsd", "thd"])
@pytest.mark.rotated(3)
def test_thread_and_copy_orders(layout: str) -> None:
    assert_agrees(Case(in_layout(CAUSAL, layout), Shape(150, 333, 2, 4, 2), lse_gradient=True), schedule_count=4)


@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_sanitizers_find_nothing(sanitize: str) -> None:
    assert_agrees(Case(CAUSAL, Shape(70, 140, 1, 2, 1)), sanitize=sanitize)


def test_which_specs_compute_chunks() -> None:
    assert computes_chunks(fg.AttentionSpec(160)) and computes_chunks(replace(CAUSAL, value_dim=64))
    assert not computes_chunks(fg.AttentionSpec(128)) and not computes_chunks(fg.AttentionSpec(192))
    assert not any(map(computes_chunks, (replace(CAUSAL, dropout=0.1), replace(CAUSAL, score=fg.softcap(30.0)))))
