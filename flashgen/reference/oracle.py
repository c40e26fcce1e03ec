"""Standard attention in NumPy, for every spec: in float64, the truth; rounded at every step, the tolerance.

S = score(scale Q K^T), -inf where masked;  P = softmax(S);  O = dropout(P) V;  LSE = log sum exp S

With a sink each row of S has one score more, the head's, whose probability multiplies no value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

from flashgen.reference.elementwise import HeadTiles
from flashgen.reference.inputs import Array, Problem
from flashgen.reference.pages import Cache, check_ragged, problems_of
from flashgen.reference.ragged import outputs_of, sequences, sequences_over_pages

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec

_TILE_ELEMENTS = 1 << 22  # scores held at once: 32 MiB in float64


def attention(
    spec: AttentionSpec,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    seed: int | None = None,
    offset: int = 0,
    return_lse: bool = False,
    page_table: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    **captures: Any,
) -> Any:
    """Standard attention in float64 on the values given, or (out, lse) with return_lse.

    q (batch, heads_q, len_q, head_dim), k (batch, heads_kv, len_k, head_dim) and v (batch, heads_kv, len_k, value_dim)
    have any floating dtype; heads_q is a multiple of heads_kv; layout "bshd" swaps heads and length. Captures are given
    by name, in the dtype declared. seed and offset choose the dropout, as flashgen.reference.dropout says. With a
    page_size k and v are (pages, page_size, heads_kv, dim); page_table and seqused_k say which rows are a sequence's.
    With a kv_dtype k and v are of it, times k_scale and v_scale.
    out is float64 in the spec's layout, lse float64 (batch, heads_q, len_q), the natural log of the sum over modified
    and masked scores, before dropout. A row with nothing to attend to gives out = 0, lse = -inf.
    A ragged batch, layout "thd", has arrays (tokens, heads, dim), also cu_seqlens_q, and may have cu_seqlens_k and
    seqused_k; its out is (tokens, heads_q, value_dim), its lse (heads_q, tokens). Rows of no sequence are as such rows.
    Raises ArgumentError for arguments that do not fit the spec or each other.
    """
    cache = Cache(page_table, seqused_k, k_scale, v_scale)
    out, lse = _outputs(_exact, spec, (q, k, v), cache, seed, offset, captures)
    return (out, lse) if return_lse else out


def _outputs(
    of_problem: Callable[[Problem], tuple[Array, Array]],
    spec: AttentionSpec,
    arrays: tuple[ArrayLike, ArrayLike, ArrayLike],
    cache: Cache,
    seed: int | None,
    offset: int,
    captures: Mapping[str, Any],
) -> tuple[Array, Array]:
    """Output and LSE of a call, from what gives those of a problem."""
    if spec.is_ragged and spec.page_size:
        over_pages = sequences_over_pages(spec, arrays, cache, seed, offset, captures)
        return outputs_of(spec, arrays[0], over_pages, of_problem)
    if spec.is_ragged:
        check_ragged(cache)
        given = {**captures, "seqused_k": cache.seqused_k}
        return outputs_of(spec, arrays[0], sequences(spec, *arrays, seed, offset, given), of_problem)
    problems = problems_of(spec, arrays, cache, seed, offset, captures)
    parts = [of_problem(problem) for problem in problems]
    out, lse = (np.concatenate(each) for each in zip(*parts, strict=True))
    return problems[0].in_layout(out), lse


def _exact(problem: Problem) -> tuple[Array, Array]:
    """O and LSE in float64, heads before lengths."""
    spec = problem.spec
    out, lse = problem.empty_outputs()
    for b, h, queries in row_blocks(problem):
        q_head, k_head, v_head = problem.head(b, h)
        rows, keys, tiles = slice(queries.start, queries.stop), range(problem.len_k), HeadTiles(problem, b, h)
        scores = tiles.modify(spec.scale * (q_head[rows] @ k_head.T), queries, keys)
        probabilities, lse[b, h, rows] = softmax(scores, tiles.sink)
        out[b, h, rows] = tiles.drop(probabilities, queries, keys) @ v_head
    return out, lse


def low_precision(
    spec: AttentionSpec,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    seed: int | None = None,
    offset: int = 0,
    return_lse: bool = False,
    page_table: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    **captures: Any,
) -> Any:
    """Standard attention as a plain library runs it on arrays of spec.dtype: the `low` of flashgen.reference.numerics.

    Each step's result is rounded to spec.dtype: q, k, v, scale·q, scores, each operation on them in the score function,
    probabilities, dropped probabilities, out. Within a step, products accumulate in float32 and so does the softmax.
    Arguments, results and errors are those of `attention`; out is exact in spec.dtype. lse is the rounded scores', in
    float32. A score that overflows float16 becomes infinity or NaN, as it does there.
    Source: attention_ref(upcast=False) of flash-attention's tests.
    """
    cache = Cache(page_table, seqused_k, k_scale, v_scale)
    out, lse = _outputs(_rounded, spec, (q, k, v), cache, seed, offset, captures)
    return (out, lse) if return_lse else out


def _rounded(problem: Problem) -> tuple[Array, Array]:
    """O and LSE where each step's result is rounded, heads before lengths."""
    spec = problem.spec
    out, lse = problem.empty_outputs()
    for b, h, queries in row_blocks(problem):
        q_head, k_head, v_head = (round_to(spec.dtype, array) for array in problem.head(b, h))
        rows, keys, tiles = slice(queries.start, queries.stop), range(problem.len_k), HeadTiles(problem, b, h)
        scores = _product(spec.dtype, round_to(spec.dtype, spec.scale * q_head[rows]), k_head.T)
        scores = tiles.modify(scores, queries, keys, rounding=lambda array: round_to(spec.dtype, array))
        probabilities, lse[b, h, rows] = softmax(scores.astype(np.float32), tiles.sink)
        dropped = tiles.drop(round_to(spec.dtype, probabilities), queries, keys)
        out[b, h, rows] = _product(spec.dtype, round_to(spec.dtype, dropped), v_head)
    return out, lse


def softmax(scores: Any, sink: float | None = None) -> tuple[Any, Any]:
    """Rows of softmax and their log-sum-exp, in the dtype of scores; 0 and -inf for a row of -inf alone.

    sink: a score more in every row, whose probability is nobody's.
    """
    maximum = scores.max(axis=-1, initial=-np.inf if sink is None else sink)
    shift = np.where(maximum == -np.inf, 0, maximum).astype(scores.dtype)  # exp(-inf - -inf) is NaN
    with np.errstate(invalid="ignore", divide="ignore"):
        exponentials = np.exp(scores - shift[:, None])
        total = exponentials.sum(axis=-1)
        if sink is not None:
            total = (total + np.exp(sink - shift)).astype(scores.dtype)
        lse = shift + np.log(total)
    return exponentials / np.where(total == 0, 1, total).astype(scores.dtype)[:, None], lse


def round_to(dtype: str, array: Any) -> Array:
    """An array rounded to the nearest (or even) float16 or bfloat16, as float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.asarray(array).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return rounded.astype(np.float64)


def _product(dtype: str, a: Array, b: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return round_to(dtype, a.astype(np.float32) @ b.astype(np.float32))


def row_blocks(problem: Problem) -> Iterator[tuple[int, int, range]]:
    """(b, h, queries) in blocks whose scores are few enough for memory."""
    step = max(1, _TILE_ELEMENTS // max(1, problem.len_k))
    for b, h in np.ndindex(problem.batch, problem.heads):
        for start in range(0, problem.len_q, step):
            yield b, h, range(start, min(start + step, problem.len_q))
