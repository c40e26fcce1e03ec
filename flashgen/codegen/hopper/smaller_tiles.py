"""When calls with too few tiles of queries to fill the GPU use smaller tiles, on Hopper.

A CTA has 64 queries for each consumer warpgroup. Three warpgroups are the fastest if there is enough work. But 512
queries of 32 heads are 96 such tiles, which leave 36 of 132 SMs idle, while two warpgroups with more keys per iteration
make 128 tiles, each of which takes two thirds of the time. The cost model compares the work of the busiest SM, as for
packed heads (head_packing.py), and multiplies it by the loss of smaller tiles in calls that fill the GPU.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.codegen.hopper.batch_traits import batch_traits
from flashgen.codegen.hopper.measured_plans import choose_hopper_plan
from flashgen.codegen.hopper.pages import has_small_pages
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.targets import Target
from flashgen.codegen.workload import Workload, rounds_of, steps_of
from flashgen.language.spec import AttentionSpec

_LARGER, _SMALLER = HopperPlan(3, 80), HopperPlan(2, 128)
_FEW_WAVES = 2  # waves of default tiles up to which the partial last wave matters
_MAX_RELATIVE_WORK = 0.9  # of smaller to default tiles; smaller gains are within the error of the model
_LOSS, _LOSS_WITH_SMALL_PAGES = 1.09, 1.16
"""Relative cost of a score in smaller tiles, measured on an H100 with pages of 64 and of 16 keys. Contiguous keys are
assumed to cost as much as the former."""


def smaller_plan(spec: AttentionSpec, target: Target) -> HopperPlan | None:
    """Returns the plan with fewer queries per tile than the default plan of a spec; None if none was measured.

    Masks with tile lists have other default plans, for whose tiles the lists are built in advance.
    """
    if spec.kv_dtype or not batch_traits(spec).has_smaller_tiles:
        return None
    return _SMALLER if choose_hopper_plan(spec, target) == _LARGER else None


def smaller_option(plan: HopperPlan, spec: AttentionSpec, target: Target) -> str:
    """Returns the option of `flashgen show` for a plan of smaller tiles, packed or not; "" for other plans."""
    return " --smaller-tiles" if replace(plan, packed_heads=1) == smaller_plan(spec, target) else ""


def smaller_tiles(plan: HopperPlan, spec: AttentionSpec, target: Target, workload: Workload) -> HopperPlan | None:
    """Returns the plan of smaller tiles if it saves at least a tenth of the work of a call; otherwise None."""
    smaller = smaller_plan(spec, target)
    if plan != _LARGER or smaller is None or rounds_of(plan, workload) > _FEW_WAVES:
        return None
    loss = _LOSS_WITH_SMALL_PAGES if has_small_pages(spec) else _LOSS
    relative = loss * _max_scores_per_sm(smaller, spec, workload)
    return smaller if relative <= _MAX_RELATIVE_WORK * _max_scores_per_sm(plan, spec, workload) else None


def _max_scores_per_sm(plan: HopperPlan, spec: AttentionSpec, workload: Workload) -> float:
    """Returns the number of scores that the busiest SM computes."""
    steps = steps_of(spec, workload.len_q, workload.len_k, plan.tile_q, plan.tile_k)
    return rounds_of(plan, workload) * steps * plan.rows * plan.tile_k
