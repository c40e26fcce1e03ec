"""Flash-Decoding as it computes: few queries over keys in parts. Every load from HBM and every store to it is counted.

Rows, the queries of all heads that share a head of K and V, are tiled; each tile goes over the keys in `splits` parts,
whose shares, outputs that are not yet divided, references and sums, are merged. Source: Dao, Haziza, Massa, Sizov,
"Flash-Decoding for long-context inference", 2023; as algorithm 1 of Dao, "FlashAttention-2", 2023, within a part.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from flashgen.errors import ArgumentError
from flashgen.reference.elementwise import HeadTiles
from flashgen.reference.inputs import Array, Problem, prepare_of_papers
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
    """Flash-Decoding with keys in `splits` parts, for tiles of `rows` rows: (out, lse, traffic, traffic of shares).

    The first counts elements of q, k, v and out, the second float32s: the shares, where there are several, and the LSE.
    Other arguments and errors are those of `attention`; ArgumentError too for splits or rows below 1.
    """
    if splits < 1 or rows < 1:
        raise ArgumentError(f"splits={splits} and rows={rows} must be 1 or more")
    problem = prepare_of_papers(spec, q, k, v, seed, offset, captures)
    hbm, shares = Hbm(), Hbm()
    out, lse = problem.empty_outputs()
    heads_kv = problem.k.shape[1]
    for b, head_kv in np.ndindex(problem.batch, heads_kv if problem.heads else 0):
        group = range(head_kv * problem.heads // heads_kv, (head_kv + 1) * problem.heads // heads_kv)
        pairs = [(query, head) for query in range(problem.len_q) for head in group]
        for tile in blocks_of(len(pairs), rows):
            _tile(problem, hbm, shares, b, pairs[span(tile)], splits, out[b], lse[b])
    return problem.in_layout(out), lse, hbm.traffic, shares.traffic


def _tile(
    problem: Problem,
    hbm: Hbm,
    shares: Hbm,
    b: int,
    pairs: list[tuple[int, int]],
    splits: int,
    out: Array,
    lse: Array,
) -> None:
    """The parts of the keys of a tile of rows, (query, head) pairs of one head of K and V, and their merge."""
    queries = [hbm.load(problem.q[b, head], slice(query, query + 1))[0] for query, head in pairs]
    _, keys, values = problem.head(b, pairs[0][1])
    held = np.empty((splits, len(pairs), values.shape[1] + 2))  # outputs, references, sums
    door = shares if splits > 1 else Hbm()  # a single share stays on chip: nobody counts it
    borders = [len(keys) * part // splits for part in range(splits + 1)]
    for part, (begin, end) in enumerate(pairwise(borders)):
        k_part, v_part = hbm.load(keys, slice(begin, end)), hbm.load(values, slice(begin, end))
        share = [
            _share(HeadTiles(problem, b, head), q, k_part, v_part, query, range(begin, end))
            for q, (query, head) in zip(queries, pairs, strict=True)
        ]
        door.store(held, np.stack(share), slice(part, part + 1))
    merged = door.load(held)
    references, sums = merged[..., -2], merged[..., -1]
    reference = references.max(axis=0)
    weights = np.exp(references - finite(reference))
    total = (weights * sums).sum(axis=0)
    outputs = (weights[..., None] * merged[..., :-2]).sum(axis=0) / nonzero(total)[:, None]
    for (query, head), output, state in zip(pairs, outputs, lse_of(reference, total), strict=True):
        hbm.store(out[head], output, slice(query, query + 1))
        shares.store(lse[head], state, slice(query, query + 1))


def _share(tiles: HeadTiles, query: Array, keys: Array, values: Array, at: int, positions: range) -> Array:
    """A row's output over a part of the keys, not yet divided, what it is relative to, and its sum."""
    position = range(at, at + 1)
    scores = tiles.modify(tiles.problem.spec.scale * (query[None] @ keys.T), position, positions)
    reference = scores.max(initial=-np.inf)
    probabilities = np.exp(scores - finite(np.asarray(reference)))
    output = tiles.drop(probabilities, position, positions) @ values
    return np.concatenate([output[0], [reference, probabilities.sum()]])
