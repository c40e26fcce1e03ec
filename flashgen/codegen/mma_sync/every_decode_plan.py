"""The plans of the decode kernel that tuning may choose from, the most promising first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from flashgen.codegen.mma_sync.decode_plans import (
    FEW_ROWS,
    DecodePlan,
    fitting_blocks,
    other_few_row_plans,
)
from flashgen.codegen.padding import padded
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

_WARPS, _STAGES, _KEYS = (1, 2, 3, 4, 5, 6, 8), (2, 3, 4, 5), (16, 32, 64)
_SHARING = (2, 4)  # warps that share tiles
_MAX_BLOCKS = 4
_BYTES_IN_FLIGHT, _WARPS_PER_SM = 112 * 1024, 8
"""What good plans have: default plans, measured on an H200, have 80 to 128 KB in flight and 4 to 10 warps per SM."""


def every_decode_plan(spec: AttentionSpec, target: Target, own: DecodePlan) -> Iterator[DecodePlan]:
    """Yields plans with the rows of `own`, including plans that do not fit. They have a schedule if `own` has one.

    A schedule balances sequences of any lengths, which only the device knows. A plan without one may be faster for the
    lengths that are timed and take twice the time for others. The default plans of other sizes come first.

    Bytes in flight hide the latency of memory, but more of them than needed take longer to fill. More warps process
    what arrives sooner, but have more partial outputs to merge.
    """
    sharing = own.split > 1
    rings = (
        DecodePlan(own.tile_q, keys, warps, stages, scheduled=own.scheduled, split=warps if sharing else 1)
        for keys, warps, stages in product(_KEYS, _SHARING if sharing else _WARPS, _STAGES)
    )
    plans = (replace(ring, blocks=blocks) for ring in rings for blocks in range(1, _max_blocks(ring, spec, target) + 1))
    measured = other_few_row_plans(spec, target) if own.tile_q == FEW_ROWS and not own.scheduled else ()
    return iter(dict.fromkeys((*measured, *sorted(plans, key=lambda plan: _rank(plan, spec)))))


def _max_blocks(plan: DecodePlan, spec: AttentionSpec, target: Target) -> int:
    return min(fitting_blocks(plan, spec, target), _MAX_BLOCKS)


def _rank(plan: DecodePlan, spec: AttentionSpec) -> tuple[float, str]:
    """Returns the distance of the plan from the measured ones. Its text breaks ties, so the order is deterministic."""
    warps = plan.blocks * plan.warps
    in_flight = plan.keys_in_flight * (padded(spec.head_dim) + padded(spec.value_dim)) * spec.kv_element.bytes
    distance = abs(math.log2(in_flight / _BYTES_IN_FLIGHT)) + abs(math.log2(warps / _WARPS_PER_SM)) / 2
    return distance, str(plan)
