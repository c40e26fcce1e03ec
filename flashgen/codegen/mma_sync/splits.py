"""The number of splits of the keys by which the decode kernel fills the GPU with few queries.

A split is a run of the key tiles that the mask needs. The cost model counts the iterations of the busiest CTA slot:

    waves x (iterations + begin) + merge

    waves         splits of all output tiles over the CTA slots of the GPU, rounded up
    iterations    of a split; each takes one tile of keys for every warp
    begin         fixed cost of a CTA in iterations: its first copies and its partial output
    merge         cost of merging the partial outputs of the splits, in iterations, by the plan

On an H200 an iteration of 64 keys took 0.37 us and a merge 0.2 us: 8 splits of 1024 keys, and 16 of 8192, are faster
than the 16 and 32 that fill the GPU.

The number depends on the sizes of the call alone: nothing is read from the device.
"""

from __future__ import annotations

from typing import Any, Protocol

from flashgen.codegen.family import DecodePlan
from flashgen.codegen.mma_sync.decode_plans import packs_heads, steps_of_rounded_length
from flashgen.codegen.sizes import Sizes, ceil_div
from flashgen.language.spec import AttentionSpec

MAX_SPLITS = 1024
_BEGIN = 1.0
# Waves of CTAs that are considered. For each, the candidate is the fewest splits with as few iterations as the most
# splits that fit these waves.
_WAVES = (1 / 8, 1 / 4, 1 / 2, 1, 2, 3, 4)


class SplitPlan(DecodePlan, Protocol):
    """The plan of a decode kernel that splits keys.

    Attributes:
        groups: The tiles of keys that a CTA processes at a time.
        tile_overhead: The fixed cost of an output tile in tiles of keys, for stream-K.
        min_length: The minimum tiles of keys that an output tile counts as, for stream-K.
    """

    @property
    def groups(self) -> int: ...
    @property
    def tile_overhead(self) -> int: ...
    @property
    def min_length(self) -> int: ...

    def merge_cost(self, spec: AttentionSpec, splits: int) -> float:
        """Returns the cost of merging the partial outputs of several splits, in iterations."""


def packed_heads(spec: AttentionSpec, sizes: Sizes) -> Any:
    """Returns the number of query heads that share a tile."""
    return sizes.heads_per_kv if packs_heads(spec) else 1


def head_groups(spec: AttentionSpec, sizes: Sizes) -> Any:
    """Returns the number of groups of query heads that share tiles, per sequence."""
    return sizes.heads_kv if packs_heads(spec) else sizes.heads_q


def row_tiles(spec: AttentionSpec, plan: SplitPlan, sizes: Sizes) -> Any:
    """Returns the number of output tiles of one group of heads of a sequence."""
    return ceil_div(sizes.len_q * packed_heads(spec, sizes), plan.tile_q)


def all_tiles(spec: AttentionSpec, plan: SplitPlan, sizes: Sizes) -> Any:
    """Returns the number of output tiles of all heads and sequences."""
    return sizes.batch * head_groups(spec, sizes) * row_tiles(spec, plan, sizes)


def choose_splits(spec: AttentionSpec, plan: SplitPlan, sizes: Sizes) -> int:
    """Returns the fastest number of splits for a call of these sizes by the cost model; on ties, the fewest."""
    tiles = all_tiles(spec, plan, sizes)
    if not tiles or not sizes.len_k:
        return 1
    slots = sizes.multiprocessors * plan.blocks
    queries = ceil_div(plan.tile_q, packed_heads(spec, sizes))
    key_tiles = max(round(steps_of_rounded_length(spec, sizes.len_q, sizes.len_k, queries, plan.tile_k)), 1)
    limit = min(ceil_div(key_tiles, plan.groups), MAX_SPLITS)

    def iterations(splits: int) -> int:
        return ceil_div(ceil_div(key_tiles, splits), plan.groups)

    def cost(splits: int) -> float:
        waves = ceil_div(tiles * splits, slots)
        return waves * (iterations(splits) + _BEGIN) + (plan.merge_cost(spec, splits) if splits > 1 else 0)

    filling = [min(max(int(waves * slots) // tiles, 1), limit) for waves in _WAVES]
    fewest = [ceil_div(key_tiles, iterations(splits) * plan.groups) for splits in filling]  # with as few iterations
    return min(sorted({1, *fewest}), key=cost)
