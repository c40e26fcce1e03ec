"""What plans are compared for: the sizes of a call on a card, and the steps that a mask leaves of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flashgen.analysis.closed_forms.tile_ranges import evaluate_range, key_range
from flashgen.codegen.plan import Plan
from flashgen.language.operations import BATCH
from flashgen.language.shards import SHARD_NUMBERS, WHOLE_K, WHOLE_Q
from flashgen.language.spec import AttentionSpec

_LOOKED_AT = 65536  # tiles of queries


@dataclass(frozen=True)
class Workload:
    """Lengths, query heads of all sequences, the multiprocessors that share them, query heads of each head of k; and
    how many sequences there are."""

    len_q: int
    len_k: int
    heads: int
    multiprocessors: int
    heads_per_kv: int = 1
    batch: int = 1


def rounds_of(plan: Plan, workload: Workload) -> int:
    """Tiles of queries that the busiest multiprocessor has."""
    tiles = workload.heads // plan.packed_heads * -(-workload.len_q // plan.tile_q)
    return -(-tiles // workload.multiprocessors)


@lru_cache(maxsize=1024)
def steps_of(spec: AttentionSpec, len_q: int, len_k: int, tile_q: int, tile_k: int) -> float:
    """Tiles of keys that a tile of queries visits, on average: all where only a call knows the mask's captures.

    A shard is taken for a whole: its place is a number of the call, too, but one that plans need not wait for. Of more
    tiles than are looked at, as many at equal distances.
    """
    ranges = key_range(spec.mask.expression)
    places = dict.fromkeys(SHARD_NUMBERS, 0) | {WHOLE_Q.name: len_q, WHOLE_K.name: len_k}
    if ranges is None or ranges.depends_on(BATCH) or not len_q or any(c.name not in places for c in ranges.captures):
        return -(-len_k // tile_k)
    tiles = -(-len_q // tile_q)
    first = np.arange(min(tiles, _LOOKED_AT)) * tiles // min(tiles, _LOOKED_AT) * tile_q
    last = np.minimum(first + tile_q, len_q) - 1
    begin, end, _, _ = evaluate_range(ranges, first, last, len_q, len_k, places)
    return float(np.where(end > begin, -(-end // tile_k) - begin // tile_k, 0).mean())
