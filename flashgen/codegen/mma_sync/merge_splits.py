"""Renders the kernel that merges partial outputs of split-KV, for decode kernels that do not do so themselves.

Merging in the decode kernel saves a launch, but then one CTA reads the partial outputs of all splits of a tile. Here
many CTAs share the columns of a tile. The host does not launch the kernel for calls with one split.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from flashgen.codegen.arguments import Field, capture_fields, ordered, output_field
from flashgen.codegen.assembly import assemble, common_context, visited_tiles
from flashgen.codegen.costs import merge_splits_cost
from flashgen.codegen.header import header
from flashgen.codegen.mma_sync.decode import (
    PARTIALS_AT_ONCE,
    decode_values,
    lse_field,
    partial_fields,
    schedule_fields,
    split_fields,
)
from flashgen.codegen.mma_sync.splits import SplitPlan, head_groups, row_tiles
from flashgen.codegen.mma_sync.stream_k import LAST_QUERY, visited_bounds, work_unit_context
from flashgen.codegen.padding import WARP
from flashgen.codegen.rendered_kernel import RenderedKernel, entry_name, kernel_name
from flashgen.codegen.shared_memory import BYTE, INT, NO_SHARED_MEMORY, Buffer, Extent, SharedMemoryLayout, literal
from flashgen.codegen.sizes import Grid, Sizes, maximum, minimum
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import Variant, arrays_of
from flashgen.language.spec import AttentionSpec

_STRUCT = "MergeArguments"
_THREADS = 128
_COLUMNS = 4  # of a thread at a time
_MAX_BLOCKS_OF_TILE = {False: 64, True: 8}  # by whether a block first finds its splits by a prefix sum
_FEW_SPLITS = 4  # up to which a thread merges several groups of columns at once
# The number of these groups, by whether the splits come from a schedule. Without one, that many fewer blocks share a
# tile. With one, most blocks only find that their tile has one split, and fewer registers let more of them run at once.
_GROUPS_AT_ONCE = {False: 4, True: 2}
_TITLE = "merge of partial outputs of decode"
_GRID = "several CTAs per output tile, along x; groups of heads along y, and the batch along z"
_METHOD = "partial outputs are combined in a fixed order by the row maxima and row sums of the splits"
_FOUND_BYTES = 16


class _Described(NamedTuple):
    """What the header of the kernel says of its plan.

    Attributes:
        decode: The plan of the decode kernel.
        blocks: The maximum number of blocks that share a tile.
    """

    decode: Any
    blocks: int

    def summary(self, spec: AttentionSpec) -> str:
        return f"at most {self.blocks} CTA(s) of {_THREADS} threads for each tile of {self.decode.tile_q} rows"

    def show_options(self, spec: AttentionSpec) -> str:
        return f"--pass decode --kernel {self.decode.part(spec).replace('decode', 'decode_merge', 1)}"


def render_merge_splits(spec: AttentionSpec, target: Target, plan: SplitPlan) -> RenderedKernel:
    """Returns the kernel that merges the partial outputs that a decode kernel of this plan has stored."""
    columns = plan.tile_q * spec.value_dim // _COLUMNS
    blocks = max(min(columns // _THREADS, _MAX_BLOCKS_OF_TILE[plan.scheduled]), 1)
    tiles = visited_bounds(spec) if plan.scheduled else None
    read = {*(tiles.captures if tiles else ()), spec.sink}
    captures = tuple(capture for capture in spec.captures if capture in read)
    layout = ordered(_fields(spec, plan) + capture_fields(captures))
    shared = _search_memory() if plan.scheduled else NO_SHARED_MEMORY
    entry, cost = entry_name("attention_merge_splits", spec), merge_splits_cost(spec, plan.scheduled)
    bounds = visited_tiles(spec, tiles, _STRUCT, ends=LAST_QUERY, counts_only=True) if tiles else ""
    variant = Variant(None, None, arrays_of(captures))
    context: dict[str, Any] = common_context(spec, target, variant, _STRUCT, layout, position=False)
    context |= work_unit_context(plan) | {
        "plan": plan,
        "entry": entry,
        "header": header(spec, target, _Described(plan, blocks), _GRID, _METHOD, _TITLE, cost),
        "threads": _THREADS,
        "blocks_of_tile": blocks,
        "few_splits": _FEW_SPLITS,
        "groups_at_once": _GROUPS_AT_ONCE[plan.scheduled],
        "partials_at_once": PARTIALS_AT_ONCE,
        "split_depth": False,
        "widen": None,
        "page_size": spec.page_size,
        "key_tiles": bounds,
        "layouts": {"shared_constants": shared},
        "sink": f"load_{spec.sink.name}" if spec.sink else "",
        "sink_to_score": 1.0 if spec.score else 1 / spec.scale,
    }
    return RenderedKernel(
        kernel_name("merge-splits", target, spec) + ("-scheduled" if plan.scheduled else "") + f"-rows{plan.tile_q}",
        entry,
        assemble("mma_sync/decode/merge_splits.cu.jinja", context, target),
        target,
        layout,
        _THREADS,
        shared,
        plan=plan,
        role="merge",
        cost=cost,
        grid=partial(_grid, spec, plan, blocks),
        values=partial(decode_values, spec, plan),
        programmatic_launch=target.programmatic_launches,
    )


def _fields(spec: AttentionSpec, plan: SplitPlan) -> list[Field]:
    fields = [output_field(spec), lse_field(), *partial_fields(plan.scheduled), *schedule_fields(plan.scheduled)]
    if plan.scheduled:
        fields.append(Field("const int*", "seqused_k", comment="(batch): keys of each sequence"))
        fields.append(Field("int", "pages", comment="number of pages of k and v; 0 if there are no keys"))
        fields.append(Field("int", "len_k"))
    fields.append(Field("Strides", "o_strides"))
    return [*fields, *(Field("int", name) for name in ("heads_q", "len_q")), *split_fields(plan.scheduled)]


def _search_memory() -> SharedMemoryLayout:
    """Returns the shared memory in which a block finds the splits of its tile."""
    return SharedMemoryLayout(
        (
            Buffer("WarpSums", "warp sums", (Extent("kWarps", _THREADS // WARP),), INT),
            Buffer("Found", "found output tile", (literal(_FOUND_BYTES),), BYTE),
        )
    )


def _grid(spec: AttentionSpec, plan: SplitPlan, blocks: int, sizes: Sizes) -> Grid:
    several = minimum(sizes.splits - 1, 1)
    if plan.scheduled:  # the device knows the splits of each tile
        return row_tiles(spec, plan, sizes) * sizes.batch * blocks * several, head_groups(spec, sizes), 1
    few = max(blocks // _GROUPS_AT_ONCE[False], 1)
    blocks_of_tile = few + (blocks - few) * minimum(maximum(sizes.splits - _FEW_SPLITS, 0), 1)
    return row_tiles(spec, plan, sizes) * blocks_of_tile * several, head_groups(spec, sizes), sizes.batch
