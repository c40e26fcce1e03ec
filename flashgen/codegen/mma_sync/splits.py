"""Into how many parts the decode kernel splits the keys, so that few queries fill a card.

A part is a run of the tiles of keys that the mask needs. What is compared are the steps of the busiest place of a
block on a multiprocessor:

    rounds x (steps + begin) + merge x parts

    rounds    parts of all tiles of rows, over the places for blocks, rounded up
    steps     of a part: a tile of keys for each of its warps
    begin     what a block costs beside its steps, in steps: its first copies, its share of the output
    merge     what a part's share costs who merges it, in steps

On an H200 a step of 64 keys took 0.37 us and a share 0.2: 8 parts of 1024 keys, and 16 of 8192, are faster than the 16
and 32 that fill the card.

Sizes alone decide: nothing is read from the device.
"""

from __future__ import annotations

from typing import Any

from flashgen.codegen.mma_sync.decode_plans import DecodePlan, packs_heads, steps_alike
from flashgen.codegen.sizes import Sizes, ceil_div
from flashgen.language.spec import AttentionSpec

MOST_SPLITS = 1024
_BEGIN, _MERGE = 1.0, 0.3
# Shares of the places, and rounds of all, that are looked at: of each, the fewest parts with as few steps as the most
# that fit it have.
_ROUNDS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 3, 4)


def packed_heads(spec: AttentionSpec, sizes: Sizes) -> Any:
    """Query heads that are rows of one tile."""
    return sizes.heads_per_kv if packs_heads(spec) else 1


def packs(spec: AttentionSpec, sizes: Sizes) -> Any:
    """Groups of query heads that share tiles, of a sequence."""
    return sizes.heads_kv if packs_heads(spec) else sizes.heads_q


def row_tiles(spec: AttentionSpec, plan: DecodePlan, sizes: Sizes) -> Any:
    """Tiles of rows of a group of heads."""
    return ceil_div(sizes.len_q * packed_heads(spec, sizes), plan.tile_q)


def all_tiles(spec: AttentionSpec, plan: DecodePlan, sizes: Sizes) -> Any:
    """Tiles of rows of all heads and sequences."""
    return sizes.batch * packs(spec, sizes) * row_tiles(spec, plan, sizes)


def choose_splits(spec: AttentionSpec, plan: DecodePlan, sizes: Sizes) -> int:
    """How many parts make a call of these sizes the fastest, by the model above; the fewest of equally good ones."""
    tiles = all_tiles(spec, plan, sizes)
    if not tiles or not sizes.len_k:
        return 1
    places = sizes.multiprocessors * plan.blocks
    queries = ceil_div(plan.tile_q, packed_heads(spec, sizes))
    steps = max(round(steps_alike(spec, sizes.len_q, sizes.len_k, queries, plan.tile_k)), 1)
    most = min(ceil_div(steps, plan.warps), MOST_SPLITS)

    def each(parts: int) -> int:
        return ceil_div(ceil_div(steps, parts), plan.warps)

    def cost(parts: int) -> float:
        return ceil_div(tiles * parts, places) * (each(parts) + _BEGIN) + (_MERGE * parts if parts > 1 else 0)

    filling = [min(max(int(rounds * places) // tiles, 1), most) for rounds in _ROUNDS]
    fewest = [ceil_div(steps, each(parts) * plan.warps) for parts in filling]  # of which each has no more steps
    return min(sorted({1, *fewest}), key=cost)
