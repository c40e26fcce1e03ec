"""Equal shares of a batch whose lengths only the device knows: the schedule of the decode kernel, and who makes it.

Pages have a length for each sequence, which the host does not know. A launch then has as many blocks as fill the card
for each group of heads, the columns of its grid, and every column an equal run of the tiles of keys of all sequences
(stream-K: Osama, Merrill, Cecka, Garland, Owens 2023, arXiv:2301.03598), of tiles that the mask needs alone. All heads
of a sequence read the same tokens at the same time, as they stand side by side in a page.

A block finds its run by a sum over the batch; or reads it from a schedule, which a kernel of its own has made for the
calls of all layers. What a schedule says decides who does what, never what is attended to: one that was made of other
lengths gives right results, less evenly divided.
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
from flashgen.codegen.mma_sync.decode_plans import BEGINNING, MOST_SHARED_TILES, DecodePlan, shared_tiles
from flashgen.codegen.mma_sync.splits import choose_splits, packed_heads, packs, row_tiles
from flashgen.codegen.rendered_kernel import Grid, RenderedKernel, entry_name, kernel_name
from flashgen.codegen.shared_memory import slot_per_warp
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import Variant, arrays_of
from flashgen.codegen.visited import visited_keys
from flashgen.errors import UnsupportedError
from flashgen.language.operations import LEN_Q
from flashgen.language.spec import AttentionSpec

RUN_NUMBERS = 4  # of a run in a schedule: its first unit, where that begins, where the next does, the length of runs
_ROUNDS, _FULL = 4, 0.96  # waves of blocks that are looked at; the share of their places that is enough
_THREADS = 256
_STRUCT = "ScheduleArguments"
LAST_QUERY = ENDS_OF_TILES | {Q_LAST: "const int q_last = work.last_query;"}


def choose_columns(spec: AttentionSpec, plan: DecodePlan, sizes: Sizes) -> int:
    """Columns of the grid, for each group of heads: so many that blocks fill the card once, or in even waves.

    Sequences that pages hold little of have no more columns than parts where the host knows their lengths, if these
    leave half of the card's places. Sequences of one length have a few columns less where none then has the end of one
    and the begin of another; where lengths differ, memory binds with these few less, too.
    UnsupportedError where the pages that sequences may have are of more tiles than an int32 counts.
    """
    units = sizes.batch * row_tiles(spec, plan, sizes)
    tiles = shared_tiles(plan, units, sizes.len_k)
    if tiles > MOST_SHARED_TILES:
        raise UnsupportedError(
            f"{sizes.batch} sequences of up to {sizes.len_k} keys have more tiles than {plan} counts: split the batch, "
            "or give num_splits=..."
        )
    units = max(units, 1)
    most, parts = even_columns(spec, plan, sizes, tiles), choose_splits(spec, plan, sizes) * units
    if 2 * parts * packs(spec, sizes) <= sizes.multiprocessors * plan.blocks:
        most = min(most, parts)
    fewest = max(math.ceil(_FULL * most), 1)
    aligned = (many for many in range(most, fewest - 1, -1) if many % units == 0 or units % many == 0)
    return next(aligned, most)


def even_columns(spec: AttentionSpec, plan: DecodePlan, sizes: Sizes, tiles: int) -> int:
    """As many columns as fill the card once, or in even waves; no more than `tiles` of keys give a step each."""
    groups, places = packs(spec, sizes), sizes.multiprocessors * plan.blocks
    if not groups:
        return 1
    columns = [max(waves * places // groups, 1) for waves in range(1, _ROUNDS + 1)]

    def filled(many: int) -> float:
        blocks = many * groups
        return blocks / (-(-blocks // places) * places)

    enough = _FULL * max(map(filled, columns))
    chosen = next(many for many in columns if filled(many) >= enough)
    return min(chosen, max(-(-tiles // plan.warps), 1))


def schedule_size(spec: AttentionSpec, plan: DecodePlan, sizes: Sizes) -> int:
    """Numbers of a schedule: the runs of all columns, where units begin, and where the last one ends."""
    return int(sizes.splits * RUN_NUMBERS + sizes.batch * row_tiles(spec, plan, sizes) + 1)


def run_fields() -> list[Field]:
    """Members of the struct of a kernel that finds runs."""
    return [
        Field("int", "tiles", comment="of rows of a group of heads, of all sequences: units"),
        Field("int", "splits", comment="columns of the grid, each of which has a run"),
        Field("int", "packed", comment="query heads that share tiles of rows"),
        Field("int", "rows", comment="of a sequence: queries x heads"),
        Field("int", "row_tiles", comment="that these are"),
    ]


def run_values(spec: AttentionSpec, plan: DecodePlan, sizes: Sizes) -> dict[str, Any]:
    """Their values."""
    packed, tiles = packed_heads(spec, sizes), row_tiles(spec, plan, sizes)
    return {
        "tiles": sizes.batch * tiles,
        "splits": sizes.splits,
        "packed": packed,
        "rows": sizes.len_q * packed,
        "row_tiles": tiles,
    }


def run_context(plan: DecodePlan) -> dict[str, Any]:
    """What templates/mma_sync/runs.cuh.jinja is told of a plan."""
    return {"scheduled": plan.scheduled, "beginning": BEGINNING, "shortest": plan.warps}


def run_counters(spec: AttentionSpec, sizes: Sizes) -> int:
    """Counters of arrivals: of each column and group of heads, as one unit at most begins there and ends behind it."""
    return int(packs(spec, sizes) * sizes.splits) if sizes.splits > 1 else 0


def share_places(spec: AttentionSpec, sizes: Sizes) -> Any:
    """Places of shares: two of each column and group of heads."""
    return 2 * packs(spec, sizes) * sizes.splits


def render_schedule(spec: AttentionSpec, target: Target, plan: DecodePlan) -> RenderedKernel:
    """The kernel that makes the schedule of a scheduled plan's calls."""
    tiles = _bounds_of(spec)
    fields = [
        Field(
            "int*",
            "schedule",
            comment="4 * splits + tiles + 1: runs of columns; begins of units, and where the last ends",
        )
    ]
    fields += [Field("const int*", "seqused_k", comment="(batch): keys of each sequence"), *run_fields()]
    fields.append(Field("int", "pages", comment="that k and v have: 0 where there are no keys"))
    fields += [Field("int", name) for name in ("len_k", *(["len_q"] if tiles.depends_on(LEN_Q) else []))]
    layout = ordered(fields + capture_fields(tiles.captures))
    templates = environment()
    variant = Variant(None, None, arrays_of(tiles.captures))
    entry = entry_name("attention_schedule", spec)
    context = run_context(plan) | {
        "spec": spec,
        "plan": plan,
        "struct": _STRUCT,
        "entry": entry,
        "threads": _THREADS,
        "types": templates.get_template("types.cuh.jinja").render(struct=_STRUCT, dtype=None, layout=layout).strip(),
        "variant": templates.get_template("variant.cuh.jinja")
        .render(struct=_STRUCT, variant=variant, position=False)
        .strip(),
        "key_tiles": visited_tiles(tiles, _STRUCT, masked=False, ends=LAST_QUERY),
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
        values=partial(run_values, spec, plan),
    )


def _bounds_of(spec: AttentionSpec) -> TileRange:
    """The tiles that a unit visits, whether or not they need their mask."""
    tiles = visited_keys(spec)
    assert tiles is not None, "over pages nothing is listed"
    none = sympy.Integer(0)
    return replace(tiles, full_begin=none, full_end=none)


def _one_block(sizes: Sizes) -> Grid:
    return 1, 1, 1
