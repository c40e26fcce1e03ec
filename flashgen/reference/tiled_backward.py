"""The backward algorithms of the FlashAttention paper. Every load from HBM and every store to it is counted.

`standard_backward` is algorithm 3 of Dao, Fu, Ermon, Rudra, Ré, "FlashAttention", 2022. `flash_backward` is its
algorithm 4: the outer loop is over key blocks, the inner loop over query blocks, P is recomputed from Q, K and the LSE,
and dQ is read and written in each iteration.

Both run in float64 and equal `backward` except for the order of sums. As in `tiled`, every (batch, query head) is
computed separately and no tile is skipped. The final sum of dK and dV over the query heads of a group is not counted.
Neither algorithm takes a gradient of the LSE or returns gradients of captures; `backward` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from flashgen.reference.elementwise import HeadTiles
from flashgen.reference.gradients import GradientSums, output_like, row_values
from flashgen.reference.inputs import Array, Problem, prepare_for_papers
from flashgen.reference.oracle import softmax
from flashgen.reference.tiled import blocks_of, finite, span
from flashgen.reference.traffic import Blocks, Hbm, HbmTraffic, flash1_blocks

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec

Result = tuple[Array, Array, Array, HbmTraffic]
Head = Callable[[Hbm, int, int], None]  # adds the gradients of (b, h) to the sums


def standard_backward(
    spec: AttentionSpec,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    d_out: ArrayLike,
    *,
    seed: int | None = None,
    offset: int = 0,
    **captures: Any,
) -> Result:
    """Runs the backward of standard attention with P, dP and dS in HBM. Returns (dq, dk, dv, traffic).

    Arguments and errors are the same as in `backward`. P is in HBM at the start. Loads of the scores, which the
    derivative of a score function needs, are not counted.
    """
    problem = prepare_for_papers(spec, q, k, v, seed, offset, captures)
    sums, d_output = GradientSums(problem), output_like(problem, "d_out", d_out)

    def head(hbm: Hbm, b: int, h: int) -> None:
        _standard_head(hbm, HeadTiles(problem, b, h), d_output[b, h], sums)

    return _each_head(problem, sums, head)


def flash_backward(
    spec: AttentionSpec,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    d_out: ArrayLike,
    lse: ArrayLike,
    *,
    on_chip: int,
    seed: int | None = None,
    offset: int = 0,
    **captures: Any,
) -> Result:
    """Runs FlashAttention's backward with blocks for an on-chip memory of `on_chip` elements.

    Returns (dq, dk, dv, traffic). out and lse are results of the forward with the same seed and offset. lse (batch,
    heads_q, len_q), a natural logarithm, replaces the paper's l and m. Other arguments and errors are the same as in
    `backward`. Also raises ArgumentError if on_chip does not hold one row.

    Args:
        spec, q, k, v, d_out, seed, offset, captures: as in `backward`.
        out: the output, with the shape of d_out.
        lse: its LSE.
        on_chip: the capacity M of the on-chip memory, in elements.
    """
    blocks = flash1_blocks(on_chip, spec.head_dim, spec.value_dim)
    problem = prepare_for_papers(spec, q, k, v, seed, offset, captures)
    output, d_output = output_like(problem, "out", out), output_like(problem, "d_out", d_out)
    lses = row_values("lse", lse, (problem.batch, problem.heads, problem.len_q))
    sums = GradientSums(problem)

    def head(hbm: Hbm, b: int, h: int) -> None:
        rows = (output[b, h], d_output[b, h], lses[b, h])
        _flash_head(hbm, HeadTiles(problem, b, h), *rows, sums, blocks)

    return _each_head(problem, sums, head)


def _each_head(problem: Problem, sums: GradientSums, run: Head) -> Result:
    hbm = Hbm()
    for b, h in np.ndindex(problem.batch, problem.heads):
        run(hbm, b, h)
    dq, dk, dv, _ = sums.gradients()
    assert dv is not None, "`prepare_for_papers` refuses specs whose V is a part of K"
    return dq, dk, dv, hbm.traffic


def _standard_head(hbm: Hbm, tiles: HeadTiles, d_out: Array, sums: GradientSums) -> None:
    problem, at = tiles.problem, (tiles.b, tiles.h)
    (q, k, v), scale = problem.head(*at), problem.spec.scale
    queries, keys = range(len(q)), range(len(k))
    modified = tiles.modified(scale * (q @ k.T), queries, keys)
    p, _ = softmax(modified.scores)  # in HBM, as are the next two
    z, d_p, d_s = tiles.drop(np.ones_like(p), queries, keys), np.empty_like(p), np.empty_like(p)
    hbm.store(sums.dv[at], (hbm.load(p) * z).T @ hbm.load(d_out))
    hbm.store(d_p, (hbm.load(d_out) @ hbm.load(v).T) * z)
    p_on_chip, d_p_on_chip = hbm.load(p), hbm.load(d_p)
    row_sums = (p_on_chip * d_p_on_chip).sum(axis=1)
    hbm.store(d_s, modified.pull_back(p_on_chip * (d_p_on_chip - row_sums[:, None]), sums.captures))
    hbm.store(sums.dq[at], scale * (hbm.load(d_s) @ hbm.load(k)))
    hbm.store(sums.dk[at], scale * (hbm.load(d_s).T @ hbm.load(q)))


def _flash_head(
    hbm: Hbm, tiles: HeadTiles, out: Array, d_out: Array, lse: Array, sums: GradientSums, blocks: Blocks
) -> None:
    problem, at = tiles.problem, (tiles.b, tiles.h)
    (q, k, v), scale = problem.head(*at), problem.spec.scale
    dq, dk, dv = sums.dq[at], sums.dk[at], sums.dv[at]
    for gradient in (dq, dk, dv):
        hbm.store(gradient, 0.0)
    for keys in blocks_of(len(k), blocks.columns):
        k_j, v_j = hbm.load(k, span(keys)), hbm.load(v, span(keys))
        dk_j, dv_j = np.zeros_like(k_j), np.zeros_like(v_j)
        for queries in blocks_of(len(q), blocks.rows):
            q_i, o_i, do_i, dq_i, lse_i = (hbm.load(array, span(queries)) for array in (q, out, d_out, dq, lse))
            modified = tiles.modified(scale * (q_i @ k_j.T), queries, keys)
            p = np.exp(modified.scores - finite(lse_i)[:, None])
            z = tiles.drop(np.ones_like(p), queries, keys)
            dv_j += (p * z).T @ do_i
            d_p = (do_i @ v_j.T) * z
            row_sums = (do_i * o_i).sum(axis=1)
            d_x = modified.pull_back(p * (d_p - row_sums[:, None]), sums.captures)
            hbm.store(dq, dq_i + scale * (d_x @ k_j), span(queries))
            dk_j += scale * (d_x.T @ q_i)
        hbm.store(dk, dk_j, span(keys))
        hbm.store(dv, dv_j, span(keys))
