"""Hopper's backward for head dims too large for one warpgroup, with every variant."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest

import flashgen.language as fg
from flashgen.attention import compile
from flashgen.codegen.hopper.wide_plans import HopperWidePlan, exchanged
from flashgen.runtime.schedule import Schedule
from flashgen.verify import verify
from flashgen.verify.gradients import gradients_by_name, judged_gradients, poisoned_gradients, random_gradients
from flashgen.verify.problems import Shape, random_inputs
from flashgen.verify.variants import Case, Variant, in_layout, learned, spec_of, variants

DIMS = (144, 256, 192)  # the last one's values have 128 columns
OF_P_ALONE = (256, 168, 224)  # one kernel computes gradients of narrower rows that follow from P
LENGTHS = ((70, 133), (133, 70), (65, 65))  # several tiles, the last ones cut off


def case_of(variant: Variant, spec: fg.AttentionSpec, number: int) -> Case:
    """Two query heads per KV head, so that accumulators of a head's elements end between them."""
    lengths = (65, 65) if variant.equal else LENGTHS[number % len(LENGTHS)]
    return Case(spec, Shape(*lengths, batch=2, heads_q=4, heads_kv=2), variant.captures, lse_gradient=number % 2 == 1)


def cases() -> Iterator[tuple[Case, bool]]:
    """Yields a case of each variant, and whether it is run in the deterministic mode."""
    dims = {True: cycle(OF_P_ALONE), False: cycle(DIMS)}
    for number, (variant, dtype) in enumerate(zip(variants(), cycle(("float16", "bfloat16")))):
        of_p_alone = exchanged(spec_of(variant, 256, dtype)) == "probabilities"
        yield case_of(variant, spec_of(variant, next(dims[of_p_alone]), dtype), number), number % 2 == 1


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


@pytest.mark.parametrize(("case", "deterministic"), [*cases()], ids=str)
@pytest.mark.rotated(36)
def test_every_variant(case: Case, deterministic: bool) -> None:
    assert_agrees(case, deterministic, schedule_count=2)


def test_what_is_exchanged() -> None:
    assert exchanged(fg.AttentionSpec(256, mask=fg.causal(), score=fg.alibi(8))) == "probabilities"
    assert exchanged(DROPPED) == exchanged(fg.AttentionSpec(256, dropout=0.1)) == "factors"
    assert exchanged(fg.AttentionSpec(256, score=fg.softcap(30))) == "factors"
    assert exchanged(LEARNED) == exchanged(fg.AttentionSpec(256, score=learned(fg.alibi("slopes")))) == "products"


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("layout", ["bhsd", "thd"])
@pytest.mark.parametrize("spec", [DROPPED, LEARNED], ids=["factors", "products"])
@pytest.mark.rotated(9)
def test_thread_and_copy_orders(spec: fg.AttentionSpec, layout: str, deterministic: bool) -> None:
    """In the deterministic mode each order gives the same bits."""
    case = Case(in_layout(spec, layout), Shape(90, 133, 2, 4, 2), lse_gradient=True)
    assert_agrees(case, deterministic, schedule_count=6 if deterministic else 3)


@pytest.mark.parametrize(("tile_q", "stages"), [(16, 4), (32, 3), (48, 2), (64, 2)])
def test_plans(tile_q: int, stages: int) -> None:
    """As many queries per step as registers and memory allow, with any number of stages."""
    spec = fg.AttentionSpec(192, mask=fg.causal(), score=fg.softcap(10), dropout=0.25)
    assert_plan_agrees(spec, HopperWidePlan(tile_q, stages), seed=7)


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
@pytest.mark.rotated(6)
def test_sanitizers_find_nothing(spec: fg.AttentionSpec, sanitize: str) -> None:
    assert_agrees(Case(spec, Shape(70, 70, 1, 2, 1)), sanitize=sanitize)
