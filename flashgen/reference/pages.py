"""Gathers the paged keys and values of each sequence, and dequantizes 8-bit ones, in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flashgen.errors import ArgumentError
from flashgen.reference.inputs import Problem, prepare

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec


class Cache(NamedTuple):
    """The arguments of a call that describe a KV cache in pages or of 8 bits. A varlen batch has only seqused_k."""

    page_table: Any = None
    seqused_k: Any = None
    k_scale: Any = None
    v_scale: Any = None


def gather_pages(pages: Any, page_table: Any, length: Any) -> Any:
    """Gathers the rows of a sequence, (length, heads, dim), from pages (pages, page_size, heads, dim).

    page_table: the row of the sequence. As in kernels, entries that are not a valid page are replaced by the last page,
    and the length is clamped to between 0 and the capacity of the row.
    """
    pages, table = np.asarray(pages), np.asarray(page_table, np.int32)
    page_size = pages.shape[1]
    count = min(max(int(length), 0), len(table) * page_size) if len(pages) else 0
    used = np.minimum(table[: -(-count // page_size)].view(np.uint32), max(len(pages) - 1, 0))
    return pages[used].reshape(-1, *pages.shape[2:])[:count]


def dequantize(spec: AttentionSpec, name: str, array: Any, scale: Any) -> Any:
    """Returns 8-bit keys or values as float64, multiplied by their scale: one, or one per head of k and v."""
    given, axis = np.asarray(array), spec.array_layout(name).heads_axis
    if given.dtype.name != spec.kv_dtype:
        raise ArgumentError(f"{name} has dtype {given.dtype}; the spec has kv_dtype={spec.kv_dtype!r}")
    if scale is None:
        raise ArgumentError(f"kv_dtype={spec.kv_dtype!r} needs {name}_scale")
    factors = np.asarray(scale, np.float64)
    if factors.shape not in ((1,), (given.shape[axis],)):
        raise ArgumentError(f"{name}_scale has shape {factors.shape}; give (1,) or ({given.shape[axis]},)")
    return given.astype(np.float64) * factors.reshape(-1, *(1,) * (3 - axis))


def check_varlen(cache: Cache) -> None:
    """Raises ArgumentError for arguments of paged or 8-bit caches, which a varlen batch without pages does not take."""
    for name, given in cache._asdict().items():
        if given is not None and name != "seqused_k":
            raise ArgumentError(f"{name} is not supported for layout='thd': leave it out")


def build_problems(
    spec: AttentionSpec,
    arrays: tuple[Any, Any, Any],
    cache: Cache,
    seed: int | None,
    offset: int,
    captures: Mapping[str, Any],
    starts: Any = None,
) -> list[Problem]:
    """Returns the problems of a call in order: one for a dense batch, or one per sequence if k and v are paged.

    starts: the offsets of the sequences, (sequences + 1,), if q is packed, (tokens, heads, dim).
    """
    q, k, v = arrays
    if spec.scales_kv:
        k, v = dequantize(spec, "k", k, cache.k_scale), dequantize(spec, "v", v, cache.v_scale)
    table, lengths = cache.page_table, cache.seqused_k
    if not spec.page_size:
        if table is not None or lengths is not None:
            raise ArgumentError("page_table and seqused_k are for specs with a page_size")
        return [prepare(spec, q, k, v, seed, offset, captures)]
    if table is None or lengths is None:
        raise ArgumentError(f"page_size={spec.page_size} needs page_table and seqused_k")
    if starts is None and not len(table):  # there is no sequence
        none = _expand_batch(spec, gather_pages(k, (), 0), 0), _expand_batch(spec, gather_pages(v, (), 0), 0)
        return [prepare(spec, q, *none, seed, offset, captures)]
    problems = []
    for b, (row, length) in enumerate(zip(table, lengths, strict=True)):
        own_k, own_v = (_expand_batch(spec, gather_pages(pages, row, length), 1) for pages in (k, v))
        queries = np.asarray(q)[b : b + 1] if starts is None else np.asarray(q)[None, starts[b] : starts[b + 1]]
        problem = prepare(spec, queries, own_k, own_v, seed, offset, captures)
        problems.append(replace(problem, first_batch=b))
    return problems


def _expand_batch(spec: AttentionSpec, rows: Any, batch: int) -> Any:
    """Repeats the rows (length, heads, dim) of one sequence over a batch, in the layout of the spec."""
    array = rows.swapaxes(0, 1) if spec.batch_layout.heads_axis == 1 else rows
    return np.broadcast_to(array, (batch, *array.shape))
