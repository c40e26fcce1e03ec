"""The workload for which plans are compared: the sizes of a call on a GPU, and the mainloop steps under a mask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flashgen.analysis.closed_forms.tile_ranges import evaluate_range, key_range
from flashgen.codegen.plan import Plan
from flashgen.language.operations import BATCH
from flashgen.language.shards import SHARD_NUMBERS, WHOLE_K, WHOLE_Q
from flashgen.language.spec import AttentionSpec

_MAX_SAMPLED_TILES = 65536  # of queries


@dataclass(frozen=True)
class Workload:
    """The sizes of a call.

    Attributes:
        heads: Query heads of all sequences together.
        multiprocessors: Multiprocessors of the GPU.
        batch: Number of sequences.
    """

    len_q: int
    len_k: int
    heads: int
    multiprocessors: int
    heads_per_kv: int = 1
    batch: int = 1


def rounds_of(plan: Plan, workload: Workload) -> int:
    """Returns the number of query tiles of the busiest multiprocessor."""
    tiles = workload.heads // plan.packed_heads * -(-workload.len_q // plan.tile_q)
    return -(-tiles // workload.multiprocessors)


@lru_cache(maxsize=1024)
def steps_of(spec: AttentionSpec, len_q: int, len_k: int, tile_q: int, tile_k: int) -> float:
    """Returns the average number of key tiles that a query tile visits.

    This is the number of all key tiles if the mask has no ranges, or its ranges depend on the batch or on captures,
    which are known only at a call. The position of a shard is also known only at a call; it is taken as 0, as if the
    arrays were not sharded. Beyond `_MAX_SAMPLED_TILES` query tiles, equally spaced ones are sampled.
    """
    ranges = key_range(spec.mask.expression)
    numbers = dict.fromkeys(SHARD_NUMBERS, 0) | {WHOLE_Q.name: len_q, WHOLE_K.name: len_k}
    if ranges is None or ranges.depends_on(BATCH) or not len_q or any(c.name not in numbers for c in ranges.captures):
        return -(-len_k // tile_k)
    tiles = -(-len_q // tile_q)
    sampled = min(tiles, _MAX_SAMPLED_TILES)
    first = np.arange(sampled) * tiles // sampled * tile_q
    last = np.minimum(first + tile_q, len_q) - 1
    begin, end, _, _ = evaluate_range(ranges, first, last, len_q, len_k, numbers)
    return float(np.where(end > begin, -(-end // tile_k) - begin // tile_k, 0).mean())
