"""Which plan calls of some sizes take on Hopper: smaller tiles of queries, packed heads, or both."""

from __future__ import annotations

from flashgen.codegen.hopper.head_packing import packed_plan, packing_of
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.hopper.smaller_tiles import smaller_plan, smaller_tiles
from flashgen.codegen.targets import Target
from flashgen.codegen.workload import Workload
from flashgen.language.spec import AttentionSpec


def plan_of_sizes(plan: HopperPlan, spec: AttentionSpec, target: Target, workload: Workload) -> HopperPlan | None:
    """The plan that makes a call of these sizes cheaper than `plan`; None where nothing does."""
    smaller = smaller_tiles(plan, spec, target, workload)
    return packed_plan(smaller or plan, spec, target, workload) or smaller


def every_plan_of_sizes(plan: HopperPlan, spec: AttentionSpec, target: Target, heads_per_kv: int) -> list[HopperPlan]:
    """The plans that `plan_of_sizes` may give beside the default `plan`, where so many query heads share k and v."""
    whole = [plan, *(smaller for smaller in (smaller_plan(spec, target),) if smaller)]
    packed = (packing_of(each, spec, target, heads_per_kv) for each in whole)
    return [*whole[1:], *(each for each in packed if each)]
