"""The Flash-Decoding algorithm (split-KV). Every load from HBM and every store to it is counted.

The rows of a tile are queries of all heads that share a head of K and V. Each tile processes the keys in `splits`
splits. A split gives a partial state per row: the unnormalised output, the row maximum and the row sum. A final step
merges the partial states. Source: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023. Within
a split it is algorithm 1 of Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from flashgen.errors import ArgumentError
from flashgen.reference.elementwise import HeadTiles
from flashgen.reference.inputs import Array, Problem, prepare_for_papers
from flashgen.reference.tiled import blocks_of, finite, lse_of, nonzero, span
from flashgen.reference.traffic import Hbm, HbmTraffic

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec


def flash_decoding(
    spec: AttentionSpec,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    splits: int = 1,
    rows: int = 16,
    seed: int | None = None,
    offset: int = 0,
    **captures: Any,
) -> tuple[Array, Array, HbmTraffic, HbmTraffic]:
    """Runs Flash-Decoding with `splits` splits of the keys and tiles of `rows` rows.

    Returns (out, lse, traffic, float32 traffic). The first traffic counts elements of q, k, v and out. The second
    counts float32 elements: the LSE, and the partial states if there is more than one split.
    Other arguments and errors are the same as in `attention`. Also raises ArgumentError for splits or rows below 1.

    Args:
        spec, q, k, v, seed, offset, captures: as in `attention`.
        splits: the number of splits.
        rows: rows of a tile.
    """
    if splits < 1 or rows < 1:
        raise ArgumentError(f"splits={splits} and rows={rows} must be 1 or more")
    problem = prepare_for_papers(spec, q, k, v, seed, offset, captures)
    hbm, partials = Hbm(), Hbm()
    out, lse = problem.empty_outputs()
    heads_kv = problem.k.shape[1]
    for b, head_kv in np.ndindex(problem.batch, heads_kv if problem.heads else 0):
        group = range(head_kv * problem.heads // heads_kv, (head_kv + 1) * problem.heads // heads_kv)
        pairs = [(query, head) for query in range(problem.len_q) for head in group]
        for tile in blocks_of(len(pairs), rows):
            _tile(problem, hbm, partials, b, pairs[span(tile)], splits, out[b], lse[b])
    return problem.in_layout(out), lse, hbm.traffic, partials.traffic


def _tile(
    problem: Problem,
    hbm: Hbm,
    partials: Hbm,
    b: int,
    pairs: list[tuple[int, int]],
    splits: int,
    out: Array,
    lse: Array,
) -> None:
    """Computes and merges the partial states of a tile. pairs: its rows, (query, head) of one head of K and V."""
    queries = [hbm.load(problem.q[b, head], slice(query, query + 1))[0] for query, head in pairs]
    _, keys, values = problem.head(b, pairs[0][1])
    states = np.empty((splits, len(pairs), values.shape[1] + 2))  # outputs, maxima, sums
    memory = partials if splits > 1 else Hbm()  # the state of a single split stays on chip and is not counted
    bounds = [len(keys) * split // splits for split in range(splits + 1)]
    for split, (begin, end) in enumerate(pairwise(bounds)):
        k_split, v_split = hbm.load(keys, slice(begin, end)), hbm.load(values, slice(begin, end))
        rows = [
            _partial_state(HeadTiles(problem, b, head), q, k_split, v_split, query, range(begin, end))
            for q, (query, head) in zip(queries, pairs, strict=True)
        ]
        memory.store(states, np.stack(rows), slice(split, split + 1))
    merged = memory.load(states)
    maxima, sums = merged[..., -2], merged[..., -1]
    maximum = maxima.max(axis=0)
    weights = np.exp(maxima - finite(maximum))
    total = (weights * sums).sum(axis=0)
    outputs = (weights[..., None] * merged[..., :-2]).sum(axis=0) / nonzero(total)[:, None]
    for (query, head), output, row_lse in zip(pairs, outputs, lse_of(maximum, total), strict=True):
        hbm.store(out[head], output, slice(query, query + 1))
        partials.store(lse[head], row_lse, slice(query, query + 1))


def _partial_state(tiles: HeadTiles, query: Array, keys: Array, values: Array, at: int, positions: range) -> Array:
    """Returns the partial state of a row over one split: the unnormalised output, the row maximum and the row sum."""
    position = range(at, at + 1)
    scores = tiles.modify(tiles.problem.spec.scale * (query[None] @ keys.T), position, positions)
    maximum = scores.max(initial=-np.inf)
    probabilities = np.exp(scores - finite(np.asarray(maximum)))
    output = tiles.drop(probabilities, position, positions) @ values
    return np.concatenate([output[0], [maximum, probabilities.sum()]])
