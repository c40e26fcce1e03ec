"""Stream-K work units of the decode kernel, and the kernel that computes a schedule of them.

The lengths of sequences in a paged KV cache are on the device, and the host does not know them. A launch then has as
many CTAs for each group of heads as fill the GPU: the columns of its grid. Each column gets one work unit, an equal run
of the key tiles of all sequences (stream-K: Osama, Merrill, Cecka, Garland, Owens 2023, arXiv:2301.03598). Only tiles
that the mask needs count. All heads of a sequence read the same tokens at the same time, as a page stores them side by
side.

A CTA finds its work unit by a prefix sum over the batch, or reads it from a schedule that another kernel has computed
once for the calls of all layers. A schedule only assigns work, and does not decide which keys are attended to: with a
schedule for other lengths the results are right, but the work is divided less evenly.

An output tile is a tile of rows of one group of heads of one sequence.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import sympy

from flashgen.analysis.closed_forms.inequalities import Q_LAST
from flashgen.analysis.closed_forms.tile_ranges import TileRange
from flashgen.codegen.arguments import Field, capture_fields, ordered
from flashgen.codegen.assembly import ENDS_OF_TILES, assemble, visited_tiles
from flashgen.codegen.environment import environment
from flashgen.codegen.mma_sync.decode_plans import MAX_STREAM_K_TILES, stream_k_tiles
from flashgen.codegen.mma_sync.splits import SplitPlan, choose_splits, head_groups, packed_heads, row_tiles
from flashgen.codegen.rendered_kernel import RenderedKernel, entry_name, kernel_name
from flashgen.codegen.shared_memory import slot_per_warp
from flashgen.codegen.sizes import Grid, Sizes, minimum
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import Variant, arrays_of
from flashgen.codegen.visited import visited_keys
from flashgen.errors import UnsupportedError
from flashgen.language.operations import LEN_Q
from flashgen.language.spec import AttentionSpec

INTS_PER_WORK_UNIT = 4  # in a schedule: first output tile, its start, the start of the next, length of all work units
_MAX_WAVES, _FULL = 4, 0.96  # waves of CTAs that are considered; the occupancy that is enough
_THREADS = 256
_STRUCT = "ScheduleArguments"
LAST_QUERY = ENDS_OF_TILES | {Q_LAST: "const int q_last = work.last_query;"}


def choose_work_units(spec: AttentionSpec, plan: SplitPlan, sizes: Sizes) -> int:
    """Returns the number of work units for each group of heads: the CTAs that fill the GPU, in one or more full waves.

    If the maximum length that the host knows is short, there are no more work units than a plan without schedule would
    have splits, provided that these leave half of the GPU idle. The number is slightly smaller if for sequences of
    equal length each work unit then lies within one sequence, or each sequence within one work unit. Where lengths
    differ these few CTAs less do not matter, as memory bandwidth limits both.

    Raises:
        UnsupportedError: the pages of all sequences may have more tiles than an int32 counts.
    """
    output_tiles = sizes.batch * row_tiles(spec, plan, sizes)
    tiles = stream_k_tiles(plan, output_tiles, sizes.len_k)
    if tiles > MAX_STREAM_K_TILES:
        raise UnsupportedError(
            f"{sizes.batch} sequences of up to {sizes.len_k} keys have more tiles than {plan} counts: split the batch, "
            "or give num_splits=..."
        )
    output_tiles = max(output_tiles, 1)
    limit = full_wave_work_units(spec, plan, sizes, tiles)
    splits = choose_splits(spec, plan, sizes) * output_tiles
    if 2 * splits * head_groups(spec, sizes) <= sizes.multiprocessors * plan.blocks:
        limit = min(limit, splits)
    fewest = max(math.ceil(_FULL * limit), 1)
    candidates = range(limit, fewest - 1, -1)
    aligned = (count for count in candidates if count % output_tiles == 0 or output_tiles % count == 0)
    return next(aligned, limit)


def full_wave_work_units(spec: AttentionSpec, plan: SplitPlan, sizes: Sizes, tiles: int) -> int:
    """Returns the number of work units for each group of heads that fills one or more waves of CTAs.

    Each of the units has at least one iteration of `tiles` tiles of keys.
    """
    groups, slots = head_groups(spec, sizes), sizes.multiprocessors * plan.blocks
    if not groups:
        return 1
    counts = [max(waves * slots // groups, 1) for waves in range(1, _MAX_WAVES + 1)]

    def occupancy(count: int) -> float:
        blocks = count * groups
        return blocks / (-(-blocks // slots) * slots)

    enough = _FULL * max(map(occupancy, counts))
    chosen = next(count for count in counts if occupancy(count) >= enough)
    return min(chosen, max(-(-tiles // plan.groups), 1))


def schedule_size(spec: AttentionSpec, plan: SplitPlan, sizes: Sizes) -> int:
    """Returns the int32 numbers in a schedule: all work units, the start of each output tile, the end of the last."""
    return int(sizes.splits * INTS_PER_WORK_UNIT + sizes.batch * row_tiles(spec, plan, sizes) + 1)


def work_unit_fields() -> list[Field]:
    """Returns the struct members from which a kernel finds work units."""
    return [
        Field("int", "tiles", comment="output tiles of a group of heads, over all sequences"),
        Field("int", "splits", comment="work units of a group of heads: columns of the grid"),
        Field("int", "packed", comment="query heads that share a tile of rows"),
        Field("int", "rows", comment="of a sequence: queries x heads"),
        Field("int", "row_tiles", comment="tiles of these rows"),
    ]


def work_unit_values(spec: AttentionSpec, plan: SplitPlan, sizes: Sizes) -> dict[str, Any]:
    """Returns the values of `work_unit_fields`."""
    packed, tiles = packed_heads(spec, sizes), row_tiles(spec, plan, sizes)
    return {
        "tiles": sizes.batch * tiles,
        "splits": sizes.splits,
        "packed": packed,
        "rows": sizes.len_q * packed,
        "row_tiles": tiles,
    }


def work_unit_context(plan: SplitPlan) -> dict[str, Any]:
    """Returns the context of templates/mma_sync/decode/work_units.cuh.jinja for a plan."""
    return {
        "stream_k": plan.scheduled,
        "tile_overhead": plan.tile_overhead,
        "min_length": plan.min_length,
        "min_unit_tiles": plan.groups,
    }


def arrival_counters(spec: AttentionSpec, sizes: Sizes) -> Any:
    """Returns the number of arrival counters: one for each work unit of each group of heads; 0 for one work unit.

    That suffices because at most one output tile starts in a work unit and ends in a later one.
    """
    return head_groups(spec, sizes) * sizes.splits * minimum(sizes.splits - 1, 1)


def partial_slots(spec: AttentionSpec, sizes: Sizes) -> Any:
    """Returns the number of partial outputs: two for each work unit of each group of heads."""
    return 2 * head_groups(spec, sizes) * sizes.splits


def render_schedule(spec: AttentionSpec, target: Target, plan: SplitPlan) -> RenderedKernel:
    """Returns the kernel that computes the schedule for calls of a scheduled plan."""
    tiles = visited_bounds(spec)
    fields = [
        Field(
            "int*",
            "schedule",
            comment="4 * splits + tiles + 1: work units; where output tiles begin; where the last ends",
        )
    ]
    fields += [Field("const int*", "seqused_k", comment="(batch): keys of each sequence"), *work_unit_fields()]
    fields.append(Field("int", "pages", comment="number of pages of k and v; 0 if there are no keys"))
    fields += [Field("int", name) for name in ("len_k", *(["len_q"] if tiles.depends_on(LEN_Q) else []))]
    layout = ordered(fields + capture_fields(tiles.captures))
    templates = environment()
    variant = Variant(None, None, arrays_of(tiles.captures))
    entry = entry_name("attention_schedule", spec)
    context = work_unit_context(plan) | {
        "spec": spec,
        "plan": plan,
        "struct": _STRUCT,
        "entry": entry,
        "threads": _THREADS,
        "types": templates.get_template("types.cuh.jinja").render(struct=_STRUCT, element=None, layout=layout).strip(),
        "variant": templates.get_template("variant.cuh.jinja")
        .render(struct=_STRUCT, variant=variant, position=False)
        .strip(),
        "key_tiles": visited_tiles(spec, tiles, _STRUCT, ends=LAST_QUERY, counts_only=True),
    }
    rows = f"-rows{plan.tile_q}" if plan.tile_q != 16 else ""
    return RenderedKernel(
        f"{kernel_name('schedule', target, spec)}{rows}",
        entry,
        assemble("mma_sync/schedule.cu.jinja", context, target),
        target,
        layout,
        _THREADS,
        slot_per_warp("sums of warps", _THREADS // 32),
        plan=plan,
        role="schedule",
        grid=_one_block,
        values=partial(work_unit_values, spec, plan),
    )


def visited_bounds(spec: AttentionSpec) -> TileRange:
    """Returns the range of key tiles that an output tile visits, without the range of tiles that need no mask."""
    tiles = visited_keys(spec)
    assert tiles is not None, "a paged KV cache has no tile lists"
    none = sympy.Integer(0)
    return replace(tiles, full_begin=none, full_end=none)


def _one_block(sizes: Sizes) -> Grid:
    return 1, 1, 1
