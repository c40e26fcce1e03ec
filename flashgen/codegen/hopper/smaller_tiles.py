"""When calls with too few tiles of queries to fill the GPU use smaller tiles, on Hopper.

A CTA has 64 queries for each consumer warpgroup. Three warpgroups are the fastest if there is enough work. But 512
queries of 32 heads are 96 such tiles, which leave 36 of 132 SMs idle, while two warpgroups with more keys per iteration
make 128 tiles, each of which takes about two thirds of the time. The cost model compares the time of the busiest SM:

    waves x iterations x scores x time of a score

    waves           tiles of rows of all heads over the SMs, rounded up
    iterations      tiles of keys that a tile of rows visits on average, by the ranges of the mask
    scores          of an iteration
    time of a score relative to that of the default tiles, in calls that fill the GPU
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashgen.codegen.hopper.batch_traits import batch_traits
from flashgen.codegen.hopper.measured_plans import choose_hopper_plan
from flashgen.codegen.hopper.pages import has_small_pages
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.targets import Target
from flashgen.codegen.workload import Workload, rounds_of, steps_of
from flashgen.language.spec import AttentionSpec


@dataclass(frozen=True)
class SmallerTiles:
    """The tiles of two consumer warpgroups that calls with few tiles may use in place of those of three.

    Attributes:
        plan: The plan.
        loss: The time of a score relative to the default plan, with contiguous keys or pages of more than 16 keys.
        loss_with_small_pages: The same with smaller pages.
    """

    plan: HopperPlan
    loss: float
    loss_with_small_pages: float


# The first was measured with pages of 64 and of 16 keys, on an H100. Contiguous keys are assumed to cost as much as the
# former. The second was measured on an H200. 512 and 2048 queries of 32 heads over 8192 keys take 98 and 372 us with
# two warpgroups, over pages of 64, and 124 and 375 us with three, over contiguous keys.
_SMALLER = {
    HopperPlan(3, 80): SmallerTiles(HopperPlan(2, 128), 1.09, 1.16),
    HopperPlan(3, 64, takes_turns=True): SmallerTiles(HopperPlan(2, 128, takes_turns=True), 1.12, 1.16),
}
_FEW_WAVES = 2  # waves of default tiles up to which the partial last wave matters
_MAX_RELATIVE_TIME = 0.9  # of smaller to default tiles; smaller gains are within the error of the model


def _smaller_tiles_of(plan: HopperPlan, spec: AttentionSpec) -> SmallerTiles | None:
    """Returns the smaller tiles in place of those of a plan; None if none were measured.

    Dropout, records and tiles of arrays take registers or shared memory that larger tiles of keys do not leave. Masks
    with tile lists have other default plans, for whose tiles the lists are built in advance.
    """
    if spec.kv_dtype or spec.dropout or plan.array_stages(spec) or not batch_traits(spec).has_smaller_tiles:
        return None
    return _SMALLER.get(plan)


def smaller_plan(spec: AttentionSpec, target: Target) -> HopperPlan | None:
    """Returns the plan with fewer queries per tile than the default plan of a spec; None if there is none."""
    smaller = _smaller_tiles_of(choose_hopper_plan(spec, target), spec)
    return smaller.plan if smaller else None


def smaller_option(plan: HopperPlan, spec: AttentionSpec, target: Target) -> str:
    """Returns the option of `flashgen show` for a plan of smaller tiles, packed or not; "" for other plans."""
    return " --smaller-tiles" if replace(plan, packed_heads=1) == smaller_plan(spec, target) else ""


def smaller_tiles(plan: HopperPlan, spec: AttentionSpec, target: Target, workload: Workload) -> HopperPlan | None:
    """Returns the plan of smaller tiles if it saves at least a tenth of the time of a call; otherwise None."""
    smaller = _smaller_tiles_of(plan, spec)
    if not smaller or plan != choose_hopper_plan(spec, target) or rounds_of(plan, workload) > _FEW_WAVES:
        return None
    loss = smaller.loss_with_small_pages if has_small_pages(spec) else smaller.loss
    relative = loss * _max_scores_per_sm(smaller.plan, spec, workload)
    return smaller.plan if relative <= _MAX_RELATIVE_TIME * _max_scores_per_sm(plan, spec, workload) else None


def _max_scores_per_sm(plan: HopperPlan, spec: AttentionSpec, workload: Workload) -> float:
    """Returns the number of scores that the busiest SM computes."""
    steps = steps_of(spec, workload.len_q, workload.len_k, plan.tile_q, plan.tile_k)
    return rounds_of(plan, workload) * steps * plan.rows * plan.tile_k
