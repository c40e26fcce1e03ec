"""When the query heads that share a head of K and V get blocks of their own in the backward, on Hopper.

A block that walks the queries of all heads that share its keys holds dK and dV in registers from the first to the last.
With few heads of K and V there are few such blocks: of 32 query heads on one, 128 for 16384 keys, where 132
multiprocessors wait for them, and under a causal mask for the longest, which is twice the average. Divided by heads
there are as many more and as much shorter ones, whose shares of dK and dV are added up in global memory, and two more
kernels that round the sums. That is worth it where blocks are too few to fill the card evenly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy

from flashgen.codegen.hopper.backward_plans import HopperBackwardPlan
from flashgen.codegen.sizes import ceil_div
from flashgen.codegen.targets import Target
from flashgen.codegen.workload import Workload
from flashgen.language.spec import AttentionSpec

_EVEN_ROUNDS = 4  # of blocks of unequal length over the card: with more the last ones hardly show
_FILLED = 0.8  # of the card in the rounds of equal blocks


def plan_of_heads_apart(plan: Any) -> HopperBackwardPlan | None:
    """The plan with heads apart; None of one for wide rows, or of another family."""
    return replace(plan, heads_apart=True) if isinstance(plan, HopperBackwardPlan) else None


def divided_plan(plan: Any, spec: AttentionSpec, target: Target, workload: Workload) -> HopperBackwardPlan | None:
    """The plan with heads apart where a call of these sizes has too few blocks; else None."""
    divided = plan_of_heads_apart(plan)
    if divided is None or workload.heads_per_kv == 1 or not _has_too_few(divided, spec, workload):
        return None
    return None if divided.problem(spec, target) else divided


def _has_too_few(plan: HopperBackwardPlan, spec: AttentionSpec, workload: Workload) -> bool:
    blocks = workload.heads // workload.heads_per_kv * ceil_div(workload.len_k, plan.tile_k)
    if spec.mask.expression != sympy.true:
        return bool(blocks < _EVEN_ROUNDS * workload.multiprocessors)
    rounds = ceil_div(blocks, workload.multiprocessors)
    return bool(blocks < _FILLED * rounds * workload.multiprocessors)
