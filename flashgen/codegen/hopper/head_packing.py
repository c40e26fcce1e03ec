"""When the query heads that share a head of K and V become rows of one tile, on Hopper.

A tile of few queries is mostly empty: 16 queries of a head leave 112 of 128 rows to compute nothing. Packed, the rows
of 8 heads fill it, and K and V are walked along once for all of them. What is compared are the steps of the busiest
multiprocessor, each of which takes a tile of rows past a tile of keys, whatever its rows hold:

    rounds x steps x keys

    rounds    tiles of rows, of all heads, over the multiprocessors, rounded up
    steps     tiles of keys that a tile of rows visits, on average, by the mask's ranges
    keys      of a tile

So nothing is packed where each multiprocessor has but one tile anyway: its time would be the same, or longer, as tiles
without a query in some warpgroups are done sooner. Nor is it for a tenth or less, in which a model may be wrong.
"""

from __future__ import annotations

from flashgen.codegen.demand import demand_of
from flashgen.codegen.hopper.plans import PACKS, HopperPlan
from flashgen.codegen.targets import Target
from flashgen.codegen.workload import Workload, rounds_of, steps_of
from flashgen.language.spec import AttentionSpec

_OF_A_LANE = 8
_MOST_OF_UNPACKED = 0.9  # of the steps, that packed tiles may take to be worth another kernel


def most_packed_heads(heads_per_kv: int, most: int = PACKS[-1]) -> int:
    """The most heads that can be packed: the largest power of 2 that divides them, up to a warpgroup's rows."""
    return max(pack for pack in PACKS if heads_per_kv % pack == 0 and pack <= most)


def packed_plan(plan: HopperPlan, spec: AttentionSpec, target: Target, workload: Workload) -> HopperPlan | None:
    """The plan with heads packed where that is at least a tenth less work for calls of these sizes; else None.

    At most 8 are packed where a score function reads an array by head and by query or key: up to 8 a lane's two rows
    are of one head; beyond, what each score reads takes twice the registers. None also where tiles of keys are read
    from lists: those are made ahead, for the plan's tiles, by whoever knows no heads of K and V, and would be as many
    times more as heads are packed. A plan that packs can be given all the same.
    """
    packed = packing_of(plan, spec, target, workload.heads_per_kv)
    return packed if packed and _takes_less(packed, plan, spec, workload) else None


def packing_of(plan: HopperPlan, spec: AttentionSpec, target: Target, heads_per_kv: int) -> HopperPlan | None:
    """The packed form of a plan that calls whose heads share k and v so may take; None where none is."""
    demand = demand_of(spec)
    heads = most_packed_heads(heads_per_kv, _OF_A_LANE if demand.reads_by_head_and_position else PACKS[-1])
    packed = plan.packing(heads, spec)
    return None if heads == 1 or demand.listed or packed.problem(spec, target) else packed


def _takes_less(packed: HopperPlan, plan: HopperPlan, spec: AttentionSpec, workload: Workload) -> bool:
    work, before = (float(rounds_of(it, workload)) for it in (packed, plan))
    if before == 1:
        return False
    if workload.len_q > packed.tile_q:  # else both walk along the same keys
        lengths = (workload.len_q, workload.len_k)
        work *= steps_of(spec, *lengths, packed.tile_q, packed.tile_k) * packed.tile_k
        before *= steps_of(spec, *lengths, plan.tile_q, plan.tile_k) * plan.tile_k
    return work <= _MOST_OF_UNPACKED * before
