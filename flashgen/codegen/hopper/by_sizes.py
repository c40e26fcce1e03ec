"""Which plan calls of some sizes take on Hopper: smaller tiles of queries, packed heads, or both."""

from __future__ import annotations

from flashgen.codegen.hopper.head_packing import packed_plan
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.hopper.smaller_tiles import smaller_tiles
from flashgen.codegen.targets import Target
from flashgen.codegen.workload import Workload
from flashgen.language.spec import AttentionSpec


def plan_of_sizes(plan: HopperPlan, spec: AttentionSpec, target: Target, workload: Workload) -> HopperPlan | None:
    """The plan that makes a call of these sizes cheaper than `plan`; None where nothing does."""
    smaller = smaller_tiles(plan, spec, target, workload)
    return packed_plan(smaller or plan, spec, target, workload) or smaller
