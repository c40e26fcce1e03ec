"""The forward algorithms of the papers. Every load from HBM and every store to it is counted.

`standard` is algorithm 0 of Dao, Fu, Ermon, Rudra, Ré, "FlashAttention", 2022. `flash1` is its algorithm 1 (algorithm 2
with mask and dropout): the outer loop is over key blocks, the inner loop over query blocks, and O is rescaled and
written in each iteration. `flash2` is algorithm 1 of Dao, "FlashAttention-2", 2023: the outer loop is over query
blocks, O stays unnormalised until one division at the end, and the LSE replaces l and m.

All run in float64 and equal `attention` except for the order of sums. Every (batch, query head) is computed separately,
as on a GPU: with GQA or MQA, heads that share K and V load them again. No tile is skipped, whatever the mask is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from flashgen.reference.elementwise import HeadTiles
from flashgen.reference.inputs import Array, Problem, prepare_for_papers
from flashgen.reference.oracle import softmax
from flashgen.reference.traffic import Hbm, HbmTraffic, flash1_blocks, flash2_blocks

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec

Result = tuple[Array, Array, HbmTraffic]
Head = Callable[[Hbm, HeadTiles, Array, Array, Array, Array, Array], None]  # writes its last two arguments, O and LSE


def standard(
    spec: AttentionSpec,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    seed: int | None = None,
    offset: int = 0,
    **captures: Any,
) -> Result:
    """Runs standard attention with S and P in HBM. Returns (out, lse, traffic).

    Arguments and errors are the same as in `attention`. The score function and mask are fused into the computation of
    S, dropout into that of P. The LSE is not part of the algorithm and not counted.
    """
    return _each_head(prepare_for_papers(spec, q, k, v, seed, offset, captures), _standard_head)


def flash1(
    spec: AttentionSpec,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    on_chip: int,
    seed: int | None = None,
    offset: int = 0,
    **captures: Any,
) -> Result:
    """Runs FlashAttention 1 with blocks for an on-chip memory of `on_chip` elements. Returns (out, lse, traffic).

    Other arguments and errors are the same as in `attention`. Also raises ArgumentError if on_chip does not hold one
    row. The algorithm leaves l and m in HBM; lse = m + log l is added for comparison and not counted.

    Args:
        spec, q, k, v, seed, offset, captures: as in `attention`.
        on_chip: the capacity M of the on-chip memory, in elements.
    """
    blocks = flash1_blocks(on_chip, spec.head_dim, spec.value_dim)

    def head(hbm: Hbm, tiles: HeadTiles, q: Array, k: Array, v: Array, out: Array, lse: Array) -> None:
        _flash1_head(hbm, tiles, q, k, v, out, lse, blocks.rows, blocks.columns)

    return _each_head(prepare_for_papers(spec, q, k, v, seed, offset, captures), head)


def flash2(
    spec: AttentionSpec,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    on_chip: int,
    seed: int | None = None,
    offset: int = 0,
    **captures: Any,
) -> Result:
    """Runs FlashAttention 2 with blocks for an on-chip memory of `on_chip` elements. Returns (out, lse, traffic).

    Arguments and errors are the same as in `flash1`.
    """
    blocks = flash2_blocks(on_chip, spec.head_dim, spec.value_dim)

    def head(hbm: Hbm, tiles: HeadTiles, q: Array, k: Array, v: Array, out: Array, lse: Array) -> None:
        _flash2_head(hbm, tiles, q, k, v, out, lse, blocks.rows, blocks.columns)

    return _each_head(prepare_for_papers(spec, q, k, v, seed, offset, captures), head)


def _each_head(problem: Problem, run: Head) -> Result:
    hbm = Hbm()
    out, lse = problem.empty_outputs()
    for b, h in np.ndindex(problem.batch, problem.heads):
        run(hbm, HeadTiles(problem, b, h), *problem.head(b, h), out[b, h], lse[b, h])
    return problem.in_layout(out), lse, hbm.traffic


def _standard_head(hbm: Hbm, tiles: HeadTiles, q: Array, k: Array, v: Array, out: Array, lse: Array) -> None:
    queries, keys = range(len(q)), range(len(k))
    s, p = np.empty((len(q), len(k))), np.empty((len(q), len(k)))  # both in HBM
    scores = tiles.problem.spec.scale * (hbm.load(q) @ hbm.load(k).T)
    hbm.store(s, tiles.modify(scores, queries, keys))
    probabilities, lse[:] = softmax(hbm.load(s))
    hbm.store(p, tiles.drop(probabilities, queries, keys))
    hbm.store(out, hbm.load(p) @ hbm.load(v))


def _flash1_head(
    hbm: Hbm, tiles: HeadTiles, q: Array, k: Array, v: Array, out: Array, lse: Array, rows: int, columns: int
) -> None:
    total, maximum = np.empty(len(q)), np.empty(len(q))  # l and m, in HBM
    hbm.store(out, 0.0)
    hbm.store(total, 0.0)
    hbm.store(maximum, -np.inf)
    for keys in blocks_of(len(k), columns):
        at_k = span(keys)
        k_j, v_j = hbm.load(k, at_k), hbm.load(v, at_k)
        for queries in blocks_of(len(q), rows):
            at_q = span(queries)
            q_i, o_i = hbm.load(q, at_q), hbm.load(out, at_q)
            l_i, m_i = hbm.load(total, at_q), hbm.load(maximum, at_q)
            scores = tiles.modify(tiles.problem.spec.scale * (q_i @ k_j.T), queries, keys)
            m_tile = scores.max(axis=1)
            p_tile = np.exp(scores - finite(m_tile)[:, None])
            m_new = np.maximum(m_i, m_tile)
            old, new = np.exp(m_i - finite(m_new)), np.exp(m_tile - finite(m_new))
            l_new = old * l_i + new * p_tile.sum(axis=1)
            values = tiles.drop(p_tile, queries, keys) @ v_j
            hbm.store(out, ((l_i * old)[:, None] * o_i + new[:, None] * values) / nonzero(l_new)[:, None], at_q)
            hbm.store(total, l_new, at_q)
            hbm.store(maximum, m_new, at_q)
    lse[:] = lse_of(maximum, total)


def _flash2_head(
    hbm: Hbm, tiles: HeadTiles, q: Array, k: Array, v: Array, out: Array, lse: Array, rows: int, columns: int
) -> None:
    for queries in blocks_of(len(q), rows):
        at_q = span(queries)
        q_i = hbm.load(q, at_q)
        o_i = np.zeros((len(queries), v.shape[1]))
        l_i, m_i = np.zeros(len(queries)), np.full(len(queries), -np.inf)
        for keys in blocks_of(len(k), columns):
            k_j, v_j = hbm.load(k, span(keys)), hbm.load(v, span(keys))
            scores = tiles.modify(tiles.problem.spec.scale * (q_i @ k_j.T), queries, keys)
            m_new = np.maximum(m_i, scores.max(axis=1))
            p_tile = np.exp(scores - finite(m_new)[:, None])
            rescale = np.exp(m_i - finite(m_new))
            l_i = rescale * l_i + p_tile.sum(axis=1)
            o_i = rescale[:, None] * o_i + tiles.drop(p_tile, queries, keys) @ v_j
            m_i = m_new
        hbm.store(out, o_i / nonzero(l_i)[:, None], at_q)
        hbm.store(lse, lse_of(m_i, l_i), at_q)


def blocks_of(length: int, size: int) -> list[range]:
    """Splits `length` positions into blocks of `size` positions; the last block may be shorter."""
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


def span(positions: range) -> slice:
    return slice(positions.start, positions.stop)


def finite(maximum: Array) -> Array:
    """Returns the maximum or LSE to subtract: 0 where a row has nothing to attend to, because -inf - -inf is NaN."""
    return np.where(maximum == -np.inf, 0.0, maximum)


def nonzero(total: Array) -> Array:
    """Returns the sum to divide by: 1 where a row has nothing to attend to, so that O stays 0."""
    return np.where(total == 0, 1.0, total)


def lse_of(maximum: Array, total: Array) -> Array:
    """Returns m + log l, which is -inf where a row has nothing to attend to."""
    with np.errstate(divide="ignore"):
        return finite(maximum) + np.log(total)
