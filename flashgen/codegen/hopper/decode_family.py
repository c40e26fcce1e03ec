"""Hopper's decode kernels: that of wgmma for wide heads, and those of mma.sync, which run few rows of some of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from flashgen.codegen.demand import Weight, demand_of
from flashgen.codegen.hopper.decode_plans import HopperDecodePlan, choose_hopper_decode_plan
from flashgen.codegen.hopper.left_to_mma_sync import forward_problem
from flashgen.codegen.mma_sync.decode_plans import (
    FEW_ROWS,
    MIN_KEYS,
    PROMPT,
    DecodePlan,
    decode_plan_for,
    has_stream_k_tiles,
    is_prefill,
    plan_of_rows,
)
from flashgen.codegen.mma_sync.family import MmaSyncDecode
from flashgen.codegen.targets import Target
from flashgen.codegen.workload import Workload
from flashgen.language.spec import AttentionSpec

AnyPlan = DecodePlan | HopperDecodePlan

_MIN_SPLITS = 4  # of the keys, from which on few rows of K and V apart are faster by wgmma


class HopperDecode(MmaSyncDecode):
    """Decode kernels by wgmma for wide heads, and by mma.sync for others.

    The kernel of wgmma has 64 rows. Of wide heads it runs up to 16 rows too if V is a part of K, as memory bandwidth
    limits both kernels and TMA uses more of it, or if the keys have many splits, as another kernel merges these. On an
    H200 it takes 0.97 of the time for 64 sequences of 8192 keys, and 0.4 for one of 131072. With K and V apart and few
    splits it takes 1.02 of the time. Variants whose scores are costly, and records of keys, are left to mma.sync.
    """

    plans = (DecodePlan, HopperDecodePlan)

    def default_plans(self, spec: AttentionSpec, target: Target) -> tuple[Any, ...]:
        plans = super().default_plans(spec, target)
        wide = [choose_hopper_decode_plan(spec, target, kind) for kind in (False, True)]
        if not wide[0]:
            return plans
        few = [] if _runs_any_rows(spec) else [plan for plan in plans if plan.tile_q == FEW_ROWS]
        return tuple(
            each for kind in (False, True) for each in (*(p for p in few if p.scheduled == kind), wide[kind]) if each
        )

    def choose(self, spec: AttentionSpec, target: Target, workload: Workload) -> AnyPlan | None:
        rows, groups = workload.heads_per_kv * workload.len_q, workload.heads // workload.heads_per_kv
        splits_keys = _suits_few_rows(spec) and _MIN_SPLITS * groups <= workload.multiprocessors
        plan = choose_hopper_decode_plan(spec, target) if splits_keys else self._wide(spec, target, rows)
        if spec.kv_dtype and forward_problem(spec) is None and is_prefill(workload):
            return None
        if plan is None:
            return decode_plan_for(spec, target, workload)
        tiles = -(-rows // plan.tile_q)
        if spec.page_size:
            scheduled = workload.batch > 1 and has_stream_k_tiles(plan, workload.batch * tiles, workload.len_k)
            return choose_hopper_decode_plan(spec, target, scheduled)
        fills = workload.len_q >= PROMPT and 2 * groups * tiles > workload.multiprocessors
        return None if workload.len_k < MIN_KEYS or fills else plan

    def plan_of_rows(self, spec: AttentionSpec, target: Target, rows: int, scheduled: bool) -> AnyPlan:
        return self._wide(spec, target, rows, scheduled) or plan_of_rows(spec, target, rows, scheduled)

    def candidates(self, spec: AttentionSpec, target: Target, default: Any) -> Iterator[Any]:
        if type(default) in MmaSyncDecode.plans:
            return super().candidates(spec, target, default)
        sizes = product((64, 48, 80, 32, 96, 128), (3, 2, 4))
        return (HopperDecodePlan(keys, stages, default.scheduled) for keys, stages in sizes)

    def _wide(self, spec: AttentionSpec, target: Target, rows: int, scheduled: bool = False) -> HopperDecodePlan | None:
        """Returns the plan by wgmma for a number of query rows per KV head, or None."""
        takes_wgmma = rows > FEW_ROWS or _runs_any_rows(spec)
        return choose_hopper_decode_plan(spec, target, scheduled) if takes_wgmma else None


def _runs_any_rows(spec: AttentionSpec) -> bool:
    """Whether the kernel of wgmma runs calls with up to 16 rows whatever their batch and lengths."""
    return spec.shared_kv and _suits_few_rows(spec)


def _suits_few_rows(spec: AttentionSpec) -> bool:
    """Whether the kernel of wgmma runs up to 16 rows fast, of which it computes 64."""
    return not spec.kv_record and demand_of(spec).weight <= Weight.PLAIN
