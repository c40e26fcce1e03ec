"""Standard attention in NumPy, for every spec.

In float64 it is the reference. Rounded at every step, it gives the tolerance.

S = score(scale Q K^T), -inf where masked;  P = softmax(S);  O = dropout(P) V;  LSE = log sum exp S

With a sink, each row of S has one extra score. It takes part in the softmax but has no value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from flashgen.dtypes import numpy_dtype
from flashgen.reference.elementwise import HeadTiles
from flashgen.reference.inputs import Array, Problem, with_values
from flashgen.reference.pages import Cache, build_problems
from flashgen.reference.varlen import varlen_outputs, varlen_sequences

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec

_TILE_ELEMENTS = 1 << 22  # scores held at once: 32 MiB in float64


def attention(
    spec: AttentionSpec,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike | None = None,
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
    """Computes standard attention in float64. Returns out, or (out, lse) with return_lse.

    q (batch, heads_q, len_q, head_dim), k (batch, heads_kv, len_k, head_dim) and v (batch, heads_kv, len_k, value_dim)
    have any floating dtype; v is None for a spec with `shared_kv`. heads_q is a multiple of heads_kv. Layout "bshd"
    swaps heads and length. Captures are given by name in their declared dtype. seed and offset select the dropout mask
    (flashgen.reference.dropout). With a page_size, k and v are (pages, page_size, heads_kv, dim), and page_table and
    seqused_k give the rows of each sequence. With a kv_dtype, k and v have this dtype and are multiplied by k_scale and
    v_scale; with "fp8_ds_mla" k is uint8 and has its scales in it.
    out is float64 in the layout of the spec. lse is float64 (batch, heads_q, len_q): the natural log of the sum of the
    exponentials of modified and masked scores, before dropout. A row with nothing to attend to has out = 0, lse = -inf.
    A varlen batch, layout "thd", has arrays (tokens, heads, dim), requires cu_seqlens_q, and may have cu_seqlens_k and
    seqused_k. Its out is (tokens, heads_q, value_dim), its lse (heads_q, tokens). Rows outside of all sequences have
    out = 0 and lse = -inf.
    Raises ArgumentError for arguments that do not fit the spec or each other.

    Args:
        spec: the AttentionSpec of the call.
        q: (batch, heads_q, len_q, head_dim), of any floating dtype; "bshd" swaps heads and length; "thd" is (tokens,
            heads_q, head_dim).
        k: (batch, heads_kv, len_k, head_dim); heads_q is a multiple of heads_kv. With a page_size (pages, page_size,
            heads_kv, head_dim).
        v: (batch, heads_kv, len_k, value_dim), or in pages as k.
        seed: the seed of the dropout, an integer from 0 to 2**64 - 1; None without dropout.
        offset: the offset of the dropout, an integer from 0 to 2**32 - 1.
        return_lse: whether to return the LSE, too.
        page_table: with a page_size, int32 (batch, pages of a sequence): the pages of each sequence, in order.
        seqused_k: int32 (batch,): the number of keys of each sequence.
        k_scale: with a kv_dtype, float32 (1,) or (heads_kv,): the factor of k.
        v_scale: the factor of v, likewise.
        captures: the captured arrays and numbers by name, and in a varlen batch cu_seqlens_q, cu_seqlens_k and
            seqused_k.
    """
    cache = Cache(page_table, seqused_k, k_scale, v_scale)
    out, lse = _call_outputs(_exact_outputs, spec, (q, k, v), cache, seed, offset, captures)
    return (out, lse) if return_lse else out


def _call_outputs(
    for_problem: Callable[[Problem], tuple[Array, Array]],
    spec: AttentionSpec,
    given: tuple[ArrayLike, ArrayLike, ArrayLike | None],
    cache: Cache,
    seed: int | None,
    offset: int,
    captures: Mapping[str, Any],
) -> tuple[Array, Array]:
    """Returns the output and LSE of a call. for_problem computes them for one problem."""
    arrays = with_values(spec, *given)
    if spec.is_varlen:
        sequences = varlen_sequences(spec, arrays, cache, seed, offset, captures)
        return varlen_outputs(spec, arrays[0], sequences, for_problem)
    problems = build_problems(spec, arrays, cache, seed, offset, captures)
    results = [for_problem(problem) for problem in problems]
    out, lse = (np.concatenate(each) for each in zip(*results, strict=True))
    return problems[0].in_layout(out), lse


def _exact_outputs(problem: Problem) -> tuple[Array, Array]:
    """Computes O and LSE in float64, heads before lengths."""
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
    v: ArrayLike | None = None,
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
    """Computes standard attention as an unfused library does on arrays of spec.dtype: the `low` argument of `judge`.

    The result of each step is rounded to spec.dtype: q, k, v, scale·q, scores, each operation of the score function on
    them, probabilities, probabilities after dropout, out. Within a step, products and the softmax accumulate in
    float32. The output is rounded to spec.out_dtype. Arguments, results and errors are the same as in `attention`. lse
    is that of the rounded scores, computed in float32. A score that overflows float16 becomes infinity or NaN.
    Source: attention_ref(upcast=False) in the tests of flash-attention.
    """
    cache = Cache(page_table, seqused_k, k_scale, v_scale)
    out, lse = _call_outputs(_rounded_outputs, spec, (q, k, v), cache, seed, offset, captures)
    return (out, lse) if return_lse else out


def _rounded_outputs(problem: Problem) -> tuple[Array, Array]:
    """Computes O and LSE with the result of each step rounded, heads before lengths."""
    spec = problem.spec
    out, lse = problem.empty_outputs()
    for b, h, queries in row_blocks(problem):
        q_head, k_head, v_head = (round_to(spec.dtype, array) for array in problem.head(b, h))
        rows, keys, tiles = slice(queries.start, queries.stop), range(problem.len_k), HeadTiles(problem, b, h)
        scores = _product(spec.dtype, round_to(spec.dtype, spec.scale * q_head[rows]), k_head.T)
        scores = tiles.modify(scores, queries, keys, rounding=lambda array: round_to(spec.dtype, array))
        probabilities, lse[b, h, rows] = softmax(scores.astype(np.float32), tiles.sink)
        dropped = tiles.drop(round_to(spec.dtype, probabilities), queries, keys)
        out[b, h, rows] = _product(spec.out_element.name, round_to(spec.dtype, dropped), v_head)
    return out, lse


def softmax(scores: Any, sink: float | None = None) -> tuple[Any, Any]:
    """Returns the softmax of each row and its log-sum-exp in the dtype of scores; 0 and -inf for a row of all -inf.

    sink: one extra score per row that takes probability but has no value.
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
    """Rounds an array to float16, bfloat16 or float32, to nearest even, and returns it as float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.asarray(array).astype(numpy_dtype(dtype))
    return rounded.astype(np.float64)


def _product(dtype: str, a: Array, b: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return round_to(dtype, a.astype(np.float32) @ b.astype(np.float32))


def row_blocks(problem: Problem) -> Iterator[tuple[int, int, range]]:
    """Yields (b, h, queries) in blocks that bound the memory for scores."""
    step = max(1, _TILE_ELEMENTS // max(1, problem.len_k))
    for b, h in np.ndindex(problem.batch, problem.heads):
        for start in range(0, problem.len_q, step):
            yield b, h, range(start, min(start + step, problem.len_q))
