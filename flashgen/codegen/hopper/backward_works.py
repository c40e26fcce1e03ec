"""What persistent blocks of Hopper's backward take one after the other: tiles of keys, the last of them in parts.

Where tiles of keys are no multiple of the blocks that a card holds, many of its multiprocessors have nothing to do in
the end. The tiles of that last round are divided along their queries, where rounds of parts end sooner than tiles:

    rest      tiles of keys beyond full rounds, fewer than multiprocessors
    parts     of a tile, each of some hundred queries at least, as it loads K and V and hands on dK and dV
    rounds    of all parts of the rest
    divided   the rest, if rounds < parts; else no tile

Under a mask the last tiles have fewer queries than others and end together; there no tile is divided.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from flashgen.codegen.arguments import Field
from flashgen.codegen.backward_kernels import PART_TURNS, Rows, is_masked, row_values
from flashgen.codegen.hopper.backward_plans import HopperBackwardPlan
from flashgen.codegen.hopper.wide_plans import HopperWidePlan
from flashgen.codegen.ragged import tiles_of_keys
from flashgen.codegen.rendered_kernel import Grid, Workspace
from flashgen.codegen.sizes import Sizes, ceil_div, maximum, minimum
from flashgen.codegen.tiling import padded
from flashgen.language.spec import AttentionSpec

_NEXT_TILE = Field(
    "unsigned*", "next_tile", comment="of all tiles of keys the next that no block has: 0, before and after"
)
_TILES = Field("int", "tiles", comment="of keys, of all heads and batches")
_TILES_OF_HEAD = Field("int", "tiles_k", comment="of them those of a head")
_HEADS = Field("int", "heads", comment="of a batch that have blocks of their own: of K and V, or query heads")
_HEADS_AT_ONCE = Field("int", "heads_at_once", comment="whose blocks fill the card")
_PARTS = (
    Field("float*", "part_sums", comment="dK and dV of tiles in parts, as far as they are added up"),
    PART_TURNS,
    Field("int", "divided", comment="tiles in parts, the last ones; each part counts as one of the tiles"),
    Field("int", "parts", comment="of each of these"),
)
# As measured on an H200 at head dims 64 and 128: with twice as many parts, of half the queries, short calls are slower.
_MOST_PARTS, _LEAST_QUERIES = 8, 512
_WARPS, _WARP_ROWS = 4 * HopperBackwardPlan.consumers, 16  # of a block; of a warp, keys
_FINISHED_ROWS = 1024  # of dQ, that are worth a block


class Division(NamedTuple):
    """How many tiles of keys are in parts, and in how many each of them is."""

    tiles: Any
    parts: Any


def rotates(spec: AttentionSpec, plan: HopperBackwardPlan, dq_apart: bool) -> bool:
    """Whether walks of a head's tiles of keys, which all have the same steps, begin at as many places."""
    return not (dq_apart or plan.in_turns or is_masked(spec) or spec.is_ragged)


def divides(spec: AttentionSpec, plan: HopperBackwardPlan, dq_apart: bool) -> bool:
    """Whether tiles of keys may be in parts."""
    return rotates(spec, plan, dq_apart) and plan.loads_early(dq_apart)


def interleaves(spec: AttentionSpec, plan: HopperBackwardPlan) -> bool:
    """Whether blocks take tiles of several heads alternately.

    They do all along where tiles of keys have turns, and in the end where masks leave some more to do than others.
    """
    return plan.in_turns or (is_masked(spec) and not spec.is_ragged)


def fields(spec: AttentionSpec, plan: HopperBackwardPlan, dq_apart: bool) -> list[Field]:
    """The members of the struct from which blocks know their works."""
    made = [_NEXT_TILE, _TILES, _TILES_OF_HEAD, *([] if spec.is_ragged else [_HEADS])]
    made += [_HEADS_AT_ONCE] if interleaves(spec, plan) else []
    return [*made, *(_PARTS if divides(spec, plan, dq_apart) else ())]


def launch(spec: AttentionSpec, plan: HopperBackwardPlan, rows: Rows, dq_apart: bool) -> dict[str, Any]:
    """What a launch follows from, as a RenderedKernel has it; `rows` of the statistics."""
    told: dict[str, Any] = {"grid": partial(_grid, spec, plan, rows, dq_apart)}
    told["values"] = partial(_values, spec, plan, rows, dq_apart)
    told["counts"] = lambda sizes: 1
    if divides(spec, plan, dq_apart):
        told["workspaces"] = (_part_sums(spec, plan),)
    return told


def turns(spec: AttentionSpec, plan: HopperBackwardPlan, dq_apart: bool) -> Rows | None:
    """How many turns parts of tiles have in a call, one for each warp's keys; None where no tile is ever divided."""
    return (lambda sizes: division(spec, plan, sizes).tiles * _WARPS) if divides(spec, plan, dq_apart) else None


def division(spec: AttentionSpec, plan: HopperBackwardPlan, sizes: Sizes) -> Division:
    """Of a call; `divides` holds."""
    tiles, heads, batch = _works(spec, plan, sizes)
    works, places = tiles * heads * batch, sizes.multiprocessors
    rest = works - works // places * places
    parts = maximum(minimum(sizes.len_q * sizes.heads_per_kv // _LEAST_QUERIES, _MOST_PARTS), 1)
    rounds = ceil_div(rest * parts, places)
    return Division(rest * minimum(parts - rounds, 1), parts)


def _part_sums(spec: AttentionSpec, plan: HopperBackwardPlan) -> Workspace:
    columns = _WARP_ROWS * (plan.head_columns(spec) + padded(spec.value_dim))

    def shape(sizes: Sizes) -> tuple[Any, ...]:
        return division(spec, plan, sizes).tiles, _WARPS, columns

    return Workspace("part_sums", shape, "float32", wanted=lambda sizes: shape(sizes)[0] > 0)


def _works(spec: AttentionSpec, plan: HopperBackwardPlan, sizes: Sizes) -> Grid:
    """How many tiles of keys a head has, heads that have blocks, and batches."""
    tiles, heads, batch = tiles_of_keys(spec, plan.tile_k, sizes)
    return tiles, sizes.heads_q if plan.heads_apart else heads, batch


def _all_works(spec: AttentionSpec, plan: HopperBackwardPlan, dq_apart: bool, sizes: Sizes) -> Any:
    """Tiles of keys of all heads; of those in parts each part is one."""
    tiles, heads, batch = _works(spec, plan, sizes)
    whole = tiles * heads * batch
    if not divides(spec, plan, dq_apart):
        return whole
    divided, parts = division(spec, plan, sizes)
    return whole + divided * (parts - 1)


def _grid(spec: AttentionSpec, plan: HopperBackwardPlan, rows: Rows, dq_apart: bool, sizes: Sizes) -> Grid:
    """As many blocks as the card holds, each of which has one work after the other.

    Where there are fewer works, but many rows of dQ that the kernel finishes, the other blocks turn sums into them.
    """
    blocks = _all_works(spec, plan, dq_apart, sizes)
    if plan.finishes(spec, dq_apart):
        blocks = maximum(blocks, rows(sizes) * sizes.heads_q * _works(spec, plan, sizes)[2] // _FINISHED_ROWS)
    return maximum(minimum(blocks, sizes.multiprocessors), 1), 1, 1


def _values(spec: AttentionSpec, plan: HopperBackwardPlan, rows: Rows, dq_apart: bool, sizes: Sizes) -> dict[str, Any]:
    tiles, heads, _ = _works(spec, plan, sizes)
    values = row_values(rows, sizes) | {"tiles": _all_works(spec, plan, dq_apart, sizes), "tiles_k": tiles}
    values |= {} if spec.is_ragged else {"heads": heads}
    if interleaves(spec, plan):
        values["heads_at_once"] = ceil_div(sizes.multiprocessors, maximum(tiles, 1))
    if divides(spec, plan, dq_apart):
        divided, parts = division(spec, plan, sizes)
        values |= {"divided": divided, "parts": parts}
    return values | ({"keys": keys_of(plan)(sizes)} if plan.heads_apart else {})


def keys_of(plan: HopperBackwardPlan | HopperWidePlan) -> Rows:
    """Keys of a call, rounded up to whole tiles of a plan."""
    return lambda sizes: ceil_div(sizes.len_k, plan.tile_k) * plan.tile_k
