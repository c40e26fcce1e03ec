"""Varlen batches: each sequence is a problem of its own. Outputs and gradients of rows outside of sequences are 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashgen.errors import ArgumentError
from flashgen.reference.gradients import Cotangents, Gradients
from flashgen.reference.inputs import Array, Problem, floats, prepare
from flashgen.reference.pages import Cache, build_problems, check_varlen

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec


@dataclass(frozen=True)
class Sequence:
    """The problem of one sequence, with a batch of one, and its rows in the packed arrays."""

    problem: Problem
    queries: slice
    keys: slice


def varlen_sequences(
    spec: AttentionSpec,
    arrays: tuple[Any, Any, Any],
    cache: Cache,
    seed: int | None,
    offset: int,
    given: Mapping[str, Any],
) -> Iterator[Sequence]:
    """Yields the sequences of a varlen batch, whose keys and values may be in pages.

    given: by name, the captures and the offsets and lengths of sequences. Raises ArgumentError if they do not fit.
    """
    if spec.page_size:
        return _paged_sequences(spec, arrays, cache, seed, offset, given)
    check_varlen(cache)
    return _packed_sequences(spec, *arrays, seed, offset, {"seqused_k": cache.seqused_k, **given})


def _packed_sequences(
    spec: AttentionSpec, q: Any, k: Any, v: Any, seed: int | None, offset: int, given: Mapping[str, Any]
) -> Iterator[Sequence]:
    """Yields the sequences of a varlen batch with packed keys and values.

    Raises ArgumentError if offsets are missing, decrease, or leave the arrays. cu_seqlens_k may be missing only if k
    has as many tokens as q.
    """
    from flashgen.language import AttentionSpec

    captures = {name: value for name, value in given.items() if name not in spec.batch_layout.arguments}
    if given.get("cu_seqlens_q") is None:
        raise ArgumentError("cu_seqlens_q is missing; give integers (sequences + 1,)")
    q, k, v = (floats(name, array, spec.dtype) for name, array in (("q", q), ("k", k), ("v", v)))
    starts_q = _offsets("cu_seqlens_q", given["cu_seqlens_q"], len(q))
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    plain = AttentionSpec(**{**values, "layout": "bshd"})
    own_k = given.get("cu_seqlens_k")
    if own_k is None and len(q) != len(k):
        raise ArgumentError(f"cu_seqlens_k is missing: q has {len(q)} tokens and k {len(k)}")
    starts_k = _offsets("cu_seqlens_k", starts_q if own_k is None else own_k, len(k))
    if len(starts_q) != len(starts_k):
        raise ArgumentError(f"cu_seqlens_q has {len(starts_q)} elements and cu_seqlens_k {len(starts_k)}; give as many")
    rows_k = np.diff(starts_k)
    used = rows_k if given.get("seqused_k") is None else np.clip(given["seqused_k"], 0, rows_k)
    for number in range(len(starts_q) - 1):
        queries = slice(int(starts_q[number]), int(starts_q[number + 1]))
        keys = slice(int(starts_k[number]), int(starts_k[number]) + int(used[number]))
        arrays = (q[None, queries], k[None, keys], v[None, keys])
        yield Sequence(replace(prepare(plain, *arrays, seed, offset, captures), first_batch=number), queries, keys)


def _paged_sequences(
    spec: AttentionSpec,
    arrays: tuple[Any, Any, Any],
    cache: Cache,
    seed: int | None,
    offset: int,
    given: Mapping[str, Any],
) -> Iterator[Sequence]:
    """Yields the sequences of a varlen batch over a paged KV cache.

    given: by name, the captures and cu_seqlens_q. Raises ArgumentError for invalid offsets, and for a page_table or
    seqused_k of a different number of sequences.
    """
    q = floats("q", arrays[0], spec.dtype)
    if given.get("cu_seqlens_q") is None:
        raise ArgumentError("cu_seqlens_q is missing; give integers (sequences + 1,)")
    if given.get("cu_seqlens_k") is not None:
        raise ArgumentError("cu_seqlens_k: keys in pages have page_table and seqused_k; leave it out")
    starts = _offsets("cu_seqlens_q", given["cu_seqlens_q"], len(q))
    if cache.page_table is None or cache.seqused_k is None:
        raise ArgumentError(f"page_size={spec.page_size} needs page_table and seqused_k")
    if not len(cache.page_table) == len(cache.seqused_k) == len(starts) - 1:
        raise ArgumentError(f"page_table and seqused_k must have {len(starts) - 1} sequences, as cu_seqlens_q has")
    captures = {name: value for name, value in given.items() if name not in spec.batch_layout.arguments}
    problems = build_problems(replace(spec, layout="bshd"), arrays, cache, seed, offset, captures, starts)
    for number, problem in enumerate(problems):
        queries = slice(int(starts[number]), int(starts[number + 1]))
        yield Sequence(problem, queries, slice(0, 0))


def varlen_outputs(
    spec: AttentionSpec, q: Any, batch: Iterator[Sequence], outputs: Callable[[Problem], tuple[Array, Array]]
) -> tuple[Array, Array]:
    """Returns the output (tokens, heads, value_dim) and the LSE (heads, tokens) of all sequences.

    outputs computes them for the problem of one sequence.
    """
    tokens, heads = np.shape(q)[:2]
    out, lse = np.zeros((tokens, heads, spec.value_dim)), np.full((heads, tokens), -np.inf)
    for sequence in batch:
        sequence_out, sequence_lse = outputs(sequence.problem)
        out[sequence.queries] = sequence_out[0].swapaxes(0, 1)
        lse[:, sequence.queries] = sequence_lse[0]
    return out, lse


def varlen_gradients(
    qkv: tuple[Any, Any, Any],
    batch: Iterator[Sequence],
    d_out: Any,
    d_lse: Any,
    gradients: Callable[[Problem, Cotangents], Gradients],
) -> Gradients:
    """Returns the gradients of all sequences; those of captures are summed. gradients computes them for one problem."""
    dq, dk, dv = (np.zeros(np.shape(array)) for array in qkv)
    captures: dict[str, Array] = {}
    shared = False
    d_out = np.asarray(d_out, np.float64)
    for sequence in batch:
        rows = d_out[None, sequence.queries].swapaxes(1, 2)
        if d_lse is None:
            row_lse = np.zeros(rows.shape[:3])
        else:
            row_lse = np.asarray(d_lse, np.float64)[None, :, sequence.queries]
        found = gradients(sequence.problem, Cotangents(rows, row_lse))
        dq[sequence.queries], dk[sequence.keys] = found.dq[0], found.dk[0]
        shared = found.dv is None  # V is a part of K
        if found.dv is not None:
            dv[sequence.keys] = found.dv[0]
        captures = {name: captures.get(name, 0.0) + gradient for name, gradient in found.captures.items()}
    return Gradients(dq, dk, None if shared else dv, captures)


def _offsets(name: str, given: Any, rows: int) -> NDArray[np.int64]:
    offsets = np.asarray(given).astype(np.int64)
    if offsets.ndim != 1 or not offsets.size or (np.diff(offsets) < 0).any() or offsets[0] < 0 or offsets[-1] > rows:
        raise ArgumentError(f"{name} must rise from 0 or more to at most {rows}, one element more than sequences")
    return offsets
