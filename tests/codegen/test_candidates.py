"""Candidates of tuning: feasible, the default first, few, and reproducible."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

import flashgen.language as fg
from flashgen.build import nvrtc
from flashgen.codegen.candidates import MAX_CANDIDATES, candidates, cost
from flashgen.codegen.dispatch import default_plan, render_forward
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.targets import TARGETS
from flashgen.codegen.workload import Workload
from flashgen.errors import UnsupportedError
from flashgen.language import AttentionSpec
from flashgen.verify import variants
from flashgen.verify.variants import spec_of

LONG, DECODING = Workload(16384, 16384, 16, 132), Workload(1, 4096, 32, 132)
HOPPER, AMPERE = TARGETS["sm_90a"], TARGETS["sm_80"]


@pytest.mark.parametrize("name", ["sm_75", "sm_80", "sm_86", "sm_90a"])
def test_candidates_are_feasible_and_the_default_is_first(name: str) -> None:
    target = TARGETS[name]
    for variant, dim in product(variants(), (64, 256)):
        spec = spec_of(variant, dim, "float16")
        plans = candidates(spec, target, LONG)
        assert plans[0] == default_plan(spec, target) and 1 <= len(plans) <= MAX_CANDIDATES
        assert len(set(plans)) == len(plans)
        for plan in plans:
            assert plan.problem(spec, target) is None
            assert plan == plans[0] or plan.registers(spec) <= plan.register_budget


@pytest.mark.parametrize("workload", [LONG, DECODING, Workload(1000, 3, 1, 1), Workload(5, 0, 2, 132)], ids=str)
def test_candidates_are_sorted_by_cost(workload: Workload) -> None:
    for target, dim in product((HOPPER, AMPERE), (64, 128)):
        spec = AttentionSpec(dim, mask=fg.sliding_window(300))
        costs = [cost(plan, spec, workload) for plan in candidates(spec, target, workload)[1:]]
        assert costs == sorted(costs) and min(costs) > 0


def test_candidates_have_several_shapes_and_the_requested_number() -> None:
    spec = AttentionSpec(64)
    plans = candidates(spec, HOPPER, LONG)
    assert (
        len(plans) == MAX_CANDIDATES
        and len({plan.tile_k for plan in plans}) >= 4
        and len({plan.tile_q for plan in plans}) > 1
    )
    assert candidates(spec, HOPPER, LONG, limit=3)[0] == plans[0]
    assert len(candidates(spec, HOPPER, LONG, limit=3)) == 3 and len(candidates(spec, HOPPER, LONG, limit=1)) == 1


def test_candidates_depend_only_on_spec_target_and_workload() -> None:
    spec = AttentionSpec(128, "bfloat16", mask=fg.causal())
    again = AttentionSpec.from_json(spec.to_json())
    assert candidates(spec, HOPPER, LONG) == candidates(again, HOPPER, replace(LONG))
    assert candidates(spec, HOPPER, LONG) != candidates(spec, HOPPER, DECODING)


def test_short_queries_prefer_small_tiles_and_long_ones_large_tiles() -> None:
    spec = AttentionSpec(128)
    assert candidates(spec, HOPPER, DECODING)[1].tile_q == 64
    assert candidates(spec, HOPPER, LONG)[1].tile_q >= 128
    one, two = HopperPlan(1, 128), HopperPlan(2, 128)
    assert cost(one, spec, DECODING) < cost(two, spec, DECODING) and cost(two, spec, LONG) < cost(one, spec, LONG)


def test_only_visited_tiles_cost() -> None:
    plan = HopperPlan(2, 128)
    full, causal, near = (AttentionSpec(64, mask=mask) for mask in (fg.full(), fg.causal(), fg.sliding_window(100)))
    lists = AttentionSpec(64, mask=fg.document("ids"))
    assert 0.5 < cost(plan, causal, LONG) / cost(plan, full, LONG) < 0.6
    assert cost(plan, near, LONG) < 0.05 * cost(plan, full, LONG) < cost(plan, lists, LONG)


def test_tiles_do_not_cut_blocks_of_a_layout() -> None:
    spec = AttentionSpec(64, mask=fg.block_sparse("layout", 64, 64))
    for target in (HOPPER, AMPERE):
        assert all(plan.tile_k in (32, 64, 128, 256) for plan in candidates(spec, target, LONG)[1:])


def test_registers_hold_scores_probabilities_and_output() -> None:
    spec = AttentionSpec(128)

    assert HopperPlan(2, 128).registers(spec) - HopperPlan(2, 64).registers(spec) == (64 + 32) - (32 + 16)
    assert ForwardPlan(128, 64, 4).registers(spec) - ForwardPlan(128, 32, 4).registers(spec) == 64 - 32
    assert HopperPlan(3, 64).register_budget == 160 and ForwardPlan(128, 64, 8, blocks=2).register_budget == 128
    assert ForwardPlan(64, 64, 4).register_budget == 255


def test_unsupported_specs_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="bfloat16"):
        candidates(AttentionSpec(64, "bfloat16"), TARGETS["sm_75"], LONG)


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")
def test_the_first_candidates_do_not_spill() -> None:
    """Tests the estimate of registers: most candidates must be usable."""
    spec = AttentionSpec(64, "bfloat16")
    for plan in candidates(spec, HOPPER, LONG, limit=4)[1:]:
        assert nvrtc.compile(render_forward(spec, HOPPER, plan).source, "sm_90a", "candidate").resources.spills == 0
