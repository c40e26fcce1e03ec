"""The plans of the decode kernel that tuning may choose from, the likeliest first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from flashgen.codegen.mma_sync.decode_plans import (
    FEW_ROWS,
    DecodePlan,
    cached_bytes,
    fitting_blocks,
    others_of_few,
)
from flashgen.codegen.targets import Target
from flashgen.codegen.tiling import padded
from flashgen.language.spec import AttentionSpec

_WARPS, _STAGES, _KEYS = (1, 2, 3, 4, 5, 6, 8), (2, 3, 4, 5), (16, 32, 64)
_MOST_BLOCKS = 4
_ENOUGH, _BUSY = 112 * 1024, 8
"""Bytes on their way to a multiprocessor, and warps of it: default plans, measured on an H200, have 80 to 128 KB, and 4
to 10."""


def every_decode_plan(spec: AttentionSpec, target: Target, own: DecodePlan) -> Iterator[DecodePlan]:
    """Plans of as many rows as `own`, whether or not they fit, with a schedule where that has one.

    A schedule shares keys whatever the lengths are, which only the device knows: without one a plan may be faster for
    lengths that are timed, and take twice the time for others. The defaults of other sizes come first.

    What is on its way hides the memory's latency; more takes longer to fill, for nothing. More warps are sooner done
    with what arrives, and have more shares to merge.
    """
    plans = (
        DecodePlan(own.tile_q, keys, warps, stages, blocks, own.scheduled)
        for keys, warps, stages in product(_KEYS, _WARPS, _STAGES)
        for blocks in range(1, _most_blocks(DecodePlan(own.tile_q, keys, warps, stages), spec, target) + 1)
    )
    measured = others_of_few(spec, target) if own.tile_q == FEW_ROWS and not own.scheduled else ()
    return iter(dict.fromkeys((*measured, *sorted(plans, key=lambda plan: _rank(plan, spec)))))


def _most_blocks(plan: DecodePlan, spec: AttentionSpec, target: Target) -> int:
    return min(fitting_blocks(plan, spec, target), _MOST_BLOCKS)


def _rank(plan: DecodePlan, spec: AttentionSpec) -> tuple[float, str]:
    """How far the plan is from the measured ones, by ratio; no two are alike, so that every machine has one order."""
    warps = plan.blocks * plan.warps
    keys = warps * (plan.stages - 1) * plan.tile_k
    on_the_way = keys * (padded(spec.head_dim) + padded(spec.value_dim)) * cached_bytes(spec)
    return abs(math.log2(on_the_way / _ENOUGH)) + abs(math.log2(warps / _BUSY)) / 2, str(plan)
