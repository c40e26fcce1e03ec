"""Hopper's decode kernels: those of mma.sync for few rows, and that of wgmma for more rows of wide heads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

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


class HopperDecode(MmaSyncDecode):
    """Decode kernels by mma.sync for up to 16 rows per KV head, and by wgmma for more, where rows are wide."""

    plans = (DecodePlan, HopperDecodePlan)

    def default_plans(self, spec: AttentionSpec, target: Target) -> tuple[Any, ...]:
        plans = super().default_plans(spec, target)
        wide = [choose_hopper_decode_plan(spec, target, kind) for kind in (False, True)]
        if not wide[0]:
            return plans
        few = [plan for plan in plans if plan.tile_q == FEW_ROWS]
        return tuple(
            each for kind in (False, True) for each in (*(p for p in few if p.scheduled == kind), wide[kind]) if each
        )

    def choose(self, spec: AttentionSpec, target: Target, workload: Workload) -> AnyPlan | None:
        rows = workload.heads_per_kv * workload.len_q
        plan = self._wide(spec, target, rows)
        if spec.kv_dtype and forward_problem(spec) is None and is_prefill(workload):
            return None
        if plan is None:
            return decode_plan_for(spec, target, workload)
        tiles = -(-rows // plan.tile_q)
        if spec.page_size:
            scheduled = workload.batch > 1 and has_stream_k_tiles(plan, workload.batch * tiles, workload.len_k)
            return choose_hopper_decode_plan(spec, target, scheduled)
        all_tiles = workload.heads // workload.heads_per_kv * tiles
        fills = workload.len_q >= PROMPT and 2 * all_tiles > workload.multiprocessors
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
        return choose_hopper_decode_plan(spec, target, scheduled) if rows > FEW_ROWS else None
