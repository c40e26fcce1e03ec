"""Ragged batches: each sequence is a problem of its own, and rows of no sequence are 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashgen.errors import ArgumentError
from flashgen.reference.gradients import Cotangents, Gradients
from flashgen.reference.inputs import Array, Problem, floats, prepare
from flashgen.reference.pages import Cache, problems_of

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec

_OWN = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k")


@dataclass(frozen=True)
class Sequence:
    """One sequence's problem, of a batch of one, and its rows in the packed arrays."""

    problem: Problem
    queries: slice
    keys: slice


def sequences(
    spec: AttentionSpec, q: Any, k: Any, v: Any, seed: int | None, offset: int, given: Mapping[str, Any]
) -> Iterator[Sequence]:
    """The sequences of a ragged batch; `given`: captures, and by their names what says where sequences begin.

    ArgumentError for offsets that are missing, also of a k that has not as many tokens as q, that fall, or that leave
    the arrays.
    """
    from flashgen.language import AttentionSpec

    captures = {name: value for name, value in given.items() if name not in _OWN}
    if given.get("cu_seqlens_q") is None:
        raise ArgumentError("cu_seqlens_q is missing; give integers (sequences + 1,)")
    q, k, v = (floats(name, array, spec.dtype) for name, array in (("q", q), ("k", k), ("v", v)))
    begins_q = _offsets("cu_seqlens_q", given["cu_seqlens_q"], len(q))
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    plain = AttentionSpec(**{**values, "layout": "bshd"})
    own_k = given.get("cu_seqlens_k")
    if own_k is None and len(q) != len(k):
        raise ArgumentError(f"cu_seqlens_k is missing: q has {len(q)} tokens and k {len(k)}")
    begins_k = _offsets("cu_seqlens_k", begins_q if own_k is None else own_k, len(k))
    if len(begins_q) != len(begins_k):
        raise ArgumentError(f"cu_seqlens_q has {len(begins_q)} elements and cu_seqlens_k {len(begins_k)}; give as many")
    rows_k = np.diff(begins_k)
    used = rows_k if given.get("seqused_k") is None else np.clip(given["seqused_k"], 0, rows_k)
    for number in range(len(begins_q) - 1):
        queries = slice(int(begins_q[number]), int(begins_q[number + 1]))
        keys = slice(int(begins_k[number]), int(begins_k[number]) + int(used[number]))
        arrays = (q[None, queries], k[None, keys], v[None, keys])
        yield Sequence(replace(prepare(plain, *arrays, seed, offset, captures), number=number), queries, keys)


def sequences_over_pages(
    spec: AttentionSpec,
    arrays: tuple[Any, Any, Any],
    cache: Cache,
    seed: int | None,
    offset: int,
    given: Mapping[str, Any],
) -> Iterator[Sequence]:
    """The sequences of a ragged batch whose keys are in pages, each of which has as many keys as the lengths say.

    given: captures, and by its name where sequences begin. ArgumentError as above, and for tables of other batches.
    """
    q = floats("q", arrays[0], spec.dtype)
    if given.get("cu_seqlens_q") is None:
        raise ArgumentError("cu_seqlens_q is missing; give integers (sequences + 1,)")
    if given.get("cu_seqlens_k") is not None:
        raise ArgumentError("cu_seqlens_k: keys in pages have page_table and seqused_k; leave it out")
    begins = _offsets("cu_seqlens_q", given["cu_seqlens_q"], len(q))
    if cache.page_table is None or cache.seqused_k is None:
        raise ArgumentError(f"page_size={spec.page_size} needs page_table and seqused_k")
    if not len(cache.page_table) == len(cache.seqused_k) == len(begins) - 1:
        raise ArgumentError(f"page_table and seqused_k must have {len(begins) - 1} sequences, as cu_seqlens_q has")
    captures = {name: value for name, value in given.items() if name not in _OWN}
    problems = problems_of(replace(spec, layout="bshd"), arrays, cache, seed, offset, captures, begins)
    for number, problem in enumerate(problems):
        queries = slice(int(begins[number]), int(begins[number + 1]))
        yield Sequence(problem, queries, slice(0, 0))


def outputs_of(
    spec: AttentionSpec, q: Any, each: Iterator[Sequence], outputs: Callable[[Problem], tuple[Array, Array]]
) -> tuple[Array, Array]:
    """The output (tokens, heads, value_dim) and the LSE (heads, tokens) of all sequences, from those of each."""
    tokens, heads = np.shape(q)[:2]
    out, lse = np.zeros((tokens, heads, spec.value_dim)), np.full((heads, tokens), -np.inf)
    for sequence in each:
        of_one, lse_of_one = outputs(sequence.problem)
        out[sequence.queries] = of_one[0].swapaxes(0, 1)
        lse[:, sequence.queries] = lse_of_one[0]
    return out, lse


def gradients_of(
    qkv: tuple[Any, Any, Any],
    each: Iterator[Sequence],
    d_out: Any,
    d_lse: Any,
    gradients: Callable[[Problem, Cotangents], Gradients],
) -> Gradients:
    """The gradients of all sequences, from those of each. Those of captures are added up."""
    dq, dk, dv = (np.zeros(np.shape(array)) for array in qkv)
    captures: dict[str, Array] = {}
    d_out = np.asarray(d_out, np.float64)
    for sequence in each:
        rows = d_out[None, sequence.queries].swapaxes(1, 2)
        of_lse = np.zeros(rows.shape[:3]) if d_lse is None else np.asarray(d_lse, np.float64)[None, :, sequence.queries]
        found = gradients(sequence.problem, Cotangents(rows, of_lse))
        dq[sequence.queries], dk[sequence.keys], dv[sequence.keys] = found.dq[0], found.dk[0], found.dv[0]
        captures = {name: captures.get(name, 0.0) + gradient for name, gradient in found.captures.items()}
    return Gradients(dq, dk, dv, captures)


def _offsets(name: str, given: Any, rows: int) -> NDArray[np.int64]:
    offsets = np.asarray(given).astype(np.int64)
    if offsets.ndim != 1 or not offsets.size or (np.diff(offsets) < 0).any() or offsets[0] < 0 or offsets[-1] > rows:
        raise ArgumentError(f"{name} must rise from 0 or more to at most {rows}, one element more than sequences")
    return offsets
