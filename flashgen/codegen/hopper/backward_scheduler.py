"""The tile scheduler of Hopper's persistent backward kernel. Work tiles are key tiles, or splits of the last key tiles.

If the number of key tiles is not a multiple of the number of CTAs, many SMs idle in the last wave. The key tiles of
that wave are split along their queries if the waves of their splits end sooner than one wave of full key tiles:

    rest      key tiles beyond full waves, fewer than SMs
    parts     splits of a key tile, with at least some hundred queries each, because every split loads K and V and
              passes dK and dV on
    waves     of all splits of the rest
    tiles     key tiles that are split: the rest if waves < parts, otherwise none

Under a mask the last key tiles have fewer queries than others and end at about the same time, so none is split.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, TypedDict

from flashgen.codegen.arguments import Field
from flashgen.codegen.assembly import is_masked
from flashgen.codegen.backward_kernels import PART_SEMAPHORE, Rows, row_values
from flashgen.codegen.batches import batch_of
from flashgen.codegen.hopper.backward_plans import HopperBackwardPlan
from flashgen.codegen.hopper.batch_traits import batch_traits
from flashgen.codegen.hopper.wide_plans import HopperWidePlan
from flashgen.codegen.padding import padded
from flashgen.codegen.rendered_kernel import Workspace
from flashgen.codegen.sizes import Grid, Sizes, ceil_div, maximum, minimum
from flashgen.language.spec import AttentionSpec

_NEXT_TILE = Field("unsigned*", "next_tile", comment="counts fetched work tiles: 0 before and after a launch")
_TILES = Field("int", "tiles", comment="work tiles of all heads and batch entries")
TILES_OF_HEAD = Field("int", "tiles_k", comment="key tiles of a head")
_HEADS_AT_ONCE = Field("int", "heads_at_once", comment="heads whose work tiles fill all multiprocessors")
_PARTS = (
    Field("float*", "part_sums", comment="dK and dV of split key tiles, summed over the splits so far"),
    PART_SEMAPHORE,
    Field("int", "divided", comment="key tiles that are split, the last ones; `tiles` counts each split"),
    Field("int", "parts", comment="splits of each of these"),
)
# Measured on an H200 at head dims 64 and 128: with twice as many splits of half the queries, short calls are slower.
_MAX_PARTS, _MIN_QUERIES = 8, 512
_WARPS, _WARP_ROWS = 4 * HopperBackwardPlan.consumers, 16  # warps of a CTA; keys of a warp
_CONVERTED_ROWS = 1024  # rows of dQ for which one more CTA pays


class SchedulerContext(TypedDict):
    """What the tile scheduler and the iterator over query tiles are rendered from."""

    rotates_start: bool
    splits_tiles: bool


class TileSplit(NamedTuple):
    """How many key tiles are split, and into how many splits each."""

    tiles: Any
    parts: Any


def rotates_start(spec: AttentionSpec, plan: HopperBackwardPlan | HopperWidePlan, dq_apart: bool) -> bool:
    """Whether the work tiles of a head, which all have the same iterations, start at different query tiles."""
    return batch_traits(spec).has_equal_tiles and not (dq_apart or plan.in_turns or is_masked(spec))


def splits_tiles(spec: AttentionSpec, plan: HopperBackwardPlan, dq_apart: bool) -> bool:
    """Whether key tiles may be split."""
    return rotates_start(spec, plan, dq_apart) and plan.loads_early(dq_apart)


def interleaves(spec: AttentionSpec, plan: HopperBackwardPlan) -> bool:
    """Whether the scheduler interleaves the tiles of several heads.

    It interleaves all tiles if they accumulate dQ in a fixed order, and the last tiles if masks make some of them
    longer than others.
    """
    return plan.in_turns or (is_masked(spec) and batch_traits(spec).has_equal_tiles)


def scheduler_context(spec: AttentionSpec, plan: HopperBackwardPlan, dq_apart: bool) -> SchedulerContext:
    """Returns the template context of the scheduler."""
    return {
        "rotates_start": rotates_start(spec, plan, dq_apart),
        "splits_tiles": splits_tiles(spec, plan, dq_apart),
    }


def scheduler_fields(spec: AttentionSpec, plan: HopperBackwardPlan, dq_apart: bool) -> list[Field]:
    """Returns the struct members that the scheduler reads."""
    fields = [_NEXT_TILE, _TILES, TILES_OF_HEAD, *batch_of(spec).outer_fields(_heads(plan))]
    fields += [_HEADS_AT_ONCE] if interleaves(spec, plan) else []
    return [*fields, *(_PARTS if splits_tiles(spec, plan, dq_apart) else ())]


def _heads(plan: HopperBackwardPlan) -> Field:
    """Returns the member that counts the heads that have work tiles of their own."""
    return Field("int", "heads", comment=f"{'query' if plan.heads_apart else 'KV'} heads of a batch entry")


def launch_parameters(spec: AttentionSpec, plan: HopperBackwardPlan, rows: Rows, dq_apart: bool) -> dict[str, Any]:
    """Returns the fields of RenderedKernel that a launch follows from. `rows`: padded rows of LSE and D."""
    parameters: dict[str, Any] = {"grid": partial(_grid, spec, plan, rows, dq_apart)}
    parameters["values"] = partial(_values, spec, plan, rows, dq_apart)
    parameters["counts"] = lambda sizes: 1
    if splits_tiles(spec, plan, dq_apart):
        parameters["workspaces"] = (_part_sums(spec, plan),)
    return parameters


def semaphores(spec: AttentionSpec, plan: HopperBackwardPlan, dq_apart: bool) -> Rows | None:
    """Returns the number of semaphores of split key tiles, one for each warp's keys; None if none are ever split."""
    return (lambda sizes: tile_split(spec, plan, sizes).tiles * _WARPS) if splits_tiles(spec, plan, dq_apart) else None


def tile_split(spec: AttentionSpec, plan: HopperBackwardPlan, sizes: Sizes) -> TileSplit:
    """Returns which key tiles of a call are split, by the rule above. Requires `splits_tiles`."""
    tiles, heads, batch = _tile_grid(spec, plan, sizes)
    all_tiles, slots = tiles * heads * batch, sizes.multiprocessors
    rest = all_tiles - all_tiles // slots * slots
    parts = maximum(minimum(sizes.len_q * sizes.heads_per_kv // _MIN_QUERIES, _MAX_PARTS), 1)
    waves = ceil_div(rest * parts, slots)
    return TileSplit(rest * minimum(parts - waves, 1), parts)


def _part_sums(spec: AttentionSpec, plan: HopperBackwardPlan) -> Workspace:
    columns = _WARP_ROWS * (plan.head_columns(spec) + padded(spec.value_dim))

    def shape(sizes: Sizes) -> tuple[Any, ...]:
        return tile_split(spec, plan, sizes).tiles, _WARPS, columns

    return Workspace("part_sums", shape, "float32", wanted=lambda sizes: shape(sizes)[0])


def _tile_grid(spec: AttentionSpec, plan: HopperBackwardPlan, sizes: Sizes) -> Grid:
    """Returns the key tiles of a head, the heads that have work tiles of their own, and the batch size."""
    tiles, heads, batch = batch_of(spec).key_grid(plan.tile_k, sizes)
    return tiles, sizes.heads_q if plan.heads_apart else heads, batch


def _work_tiles(spec: AttentionSpec, plan: HopperBackwardPlan, dq_apart: bool, sizes: Sizes) -> Any:
    """Returns the number of work tiles: the key tiles of all heads, with each split of a key tile counted as one."""
    tiles, heads, batch = _tile_grid(spec, plan, sizes)
    unsplit = tiles * heads * batch
    if not splits_tiles(spec, plan, dq_apart):
        return unsplit
    divided, parts = tile_split(spec, plan, sizes)
    return unsplit + divided * (parts - 1)


def _grid(spec: AttentionSpec, plan: HopperBackwardPlan, rows: Rows, dq_apart: bool, sizes: Sizes) -> Grid:
    """Returns the grid: persistent CTAs, at most one per SM.

    If there are fewer work tiles but many rows of dQ that the kernel converts, more CTAs are launched to convert them.
    """
    blocks = _work_tiles(spec, plan, dq_apart, sizes)
    if plan.finishes(spec, dq_apart):
        blocks = maximum(blocks, rows(sizes) * sizes.heads_q * _tile_grid(spec, plan, sizes)[2] // _CONVERTED_ROWS)
    return maximum(minimum(blocks, sizes.multiprocessors), 1), 1, 1


def _values(spec: AttentionSpec, plan: HopperBackwardPlan, rows: Rows, dq_apart: bool, sizes: Sizes) -> dict[str, Any]:
    tiles, heads, _ = _tile_grid(spec, plan, sizes)
    values = row_values(rows, sizes) | {"tiles": _work_tiles(spec, plan, dq_apart, sizes), "tiles_k": tiles}
    values |= {field.name: heads for field in batch_of(spec).outer_fields(_heads(plan))}
    if interleaves(spec, plan):
        values["heads_at_once"] = ceil_div(sizes.multiprocessors, maximum(tiles, 1))
    if splits_tiles(spec, plan, dq_apart):
        divided, parts = tile_split(spec, plan, sizes)
        values |= {"divided": divided, "parts": parts}
    return values | ({"keys": padded_keys(plan)(sizes)} if plan.heads_apart else {})


def padded_keys(plan: HopperBackwardPlan | HopperWidePlan) -> Rows:
    """Returns a function that gives the keys of a call, rounded up to full tiles of a plan."""
    return lambda sizes: ceil_div(sizes.len_k, plan.tile_k) * plan.tile_k
