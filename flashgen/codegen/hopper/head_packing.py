"""When to pack the query heads of a KV head into one tile (GQA packing), on Hopper.

A tile of few queries is mostly empty: with 16 queries of one head, 112 of 128 rows compute nothing. Packed, the rows of
8 heads fill it, and the tile loops over K and V once for all of them. The cost model compares the work of the busiest
SM, where an iteration costs the same whatever its rows hold:

    waves x iterations x keys

    waves         tiles of rows of all heads over the SMs, rounded up
    iterations    tiles of keys that a tile of rows visits on average, by the ranges of the mask
    keys          of a tile

So heads are not packed if each SM has only one tile anyway. The time would be the same or longer, as tiles in which
some warpgroups have no query end sooner. A gain below a tenth is ignored too, as it is within the error of the model.
"""

from __future__ import annotations

from flashgen.codegen.demand import demand_of
from flashgen.codegen.hopper.plans import PACKS, HopperPlan
from flashgen.codegen.targets import Target
from flashgen.codegen.workload import Workload, rounds_of, steps_of
from flashgen.language.spec import AttentionSpec

_LANE_HEADS = 8  # packed heads up to which both rows of a lane belong to one head
_MAX_RELATIVE_WORK = 0.9  # of packed to unpacked tiles, for which another kernel pays


def max_packed_heads(heads_per_kv: int, limit: int = PACKS[-1]) -> int:
    """Returns the most heads that can be packed: the largest power of 2 that divides them, at most 64 by default."""
    return max(pack for pack in PACKS if heads_per_kv % pack == 0 and pack <= limit)


def packed_plan(plan: HopperPlan, spec: AttentionSpec, target: Target, workload: Workload) -> HopperPlan | None:
    """Returns the plan with packed heads if this saves at least a tenth of the work of a call; otherwise None.

    At most 8 heads are packed if a score function reads an array by head and by query or key. Up to 8, both rows of a
    lane belong to one head; beyond, the elements that scores read need twice the registers. Heads are not packed for
    masks with tile lists, which are built in advance for the plan's tiles without the number of KV heads, and would
    grow by the number of packed heads. A caller can still give a plan with packed heads.
    """
    packed = packing_of(plan, spec, target, workload.heads_per_kv)
    return packed if packed and _takes_less(packed, plan, spec, workload) else None


def packing_of(plan: HopperPlan, spec: AttentionSpec, target: Target, heads_per_kv: int) -> HopperPlan | None:
    """Returns the packed form of a plan for calls with `heads_per_kv` query heads per KV head, or None."""
    demand = demand_of(spec)
    heads = max_packed_heads(heads_per_kv, _LANE_HEADS if demand.reads_by_head_and_position else PACKS[-1])
    packed = plan.packing(heads, spec)
    return None if heads == 1 or demand.listed or packed.problem(spec, target) else packed


def _takes_less(packed: HopperPlan, plan: HopperPlan, spec: AttentionSpec, workload: Workload) -> bool:
    work, before = (float(rounds_of(each, workload)) for each in (packed, plan))
    if before == 1:
        return False
    if workload.len_q > packed.tile_q:  # otherwise both visit the same keys
        lengths = (workload.len_q, workload.len_k)
        work *= steps_of(spec, *lengths, packed.tile_q, packed.tile_k) * packed.tile_k
        before *= steps_of(spec, *lengths, plan.tile_q, plan.tile_k) * plan.tile_k
    return work <= _MAX_RELATIVE_WORK * before
