"""Keys and values in pages, gathered: what a table and lengths say of them, in NumPy."""

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
    """What a call says of keys and values that are in pages, or of 8 bits; in a ragged batch seqused_k alone."""

    page_table: Any = None
    seqused_k: Any = None
    k_scale: Any = None
    v_scale: Any = None


def gathered(pages: Any, page_table: Any, length: Any) -> Any:
    """The rows of a sequence, (length, heads, dim), of pages (pages, page_size, heads, dim).

    page_table: the sequence's row of it. Entries that are no page are the last one, and a length is bounded by 0 and
    what the row holds, as in kernels.
    """
    pages, table = np.asarray(pages), np.asarray(page_table, np.int32)
    page_size = pages.shape[1]
    count = min(max(int(length), 0), len(table) * page_size) if len(pages) else 0
    used = np.minimum(table[: -(-count // page_size)].view(np.uint32), max(len(pages) - 1, 0))
    return pages[used].reshape(-1, *pages.shape[2:])[:count]


def widened(spec: AttentionSpec, name: str, array: Any, scale: Any) -> Any:
    """Keys or values of 8 bits as float64, times their scale: one, or one for each head of k and v."""
    given, axis = np.asarray(array), 1 if spec.layout == "bhsd" and not spec.page_size else 2
    if given.dtype.name != spec.kv_dtype:
        raise ArgumentError(f"{name} has dtype {given.dtype}; the spec has kv_dtype={spec.kv_dtype!r}")
    if scale is None:
        raise ArgumentError(f"kv_dtype={spec.kv_dtype!r} needs {name}_scale")
    factors = np.asarray(scale, np.float64)
    if factors.shape not in ((1,), (given.shape[axis],)):
        raise ArgumentError(f"{name}_scale has shape {factors.shape}; give (1,) or ({given.shape[axis]},)")
    return given.astype(np.float64) * factors.reshape(-1, *(1,) * (3 - axis))


def check_ragged(cache: Cache) -> None:
    """ArgumentError where a call of a ragged batch is given what there is of pages and 8 bits alone."""
    for name, given in cache._asdict().items():
        if given is not None and name != "seqused_k":
            raise ArgumentError(f"{name} is not supported for layout='thd': leave it out")


def problems_of(
    spec: AttentionSpec,
    arrays: tuple[Any, Any, Any],
    cache: Cache,
    seed: int | None,
    offset: int,
    captures: Mapping[str, Any],
    begins: Any = None,
) -> list[Problem]:
    """The problems of a call, in order: one for the batch, or over pages, where each has a length, one a sequence.

    begins: where each sequence's queries begin, and the last one's end, where q is packed, (tokens, heads, dim).
    """
    q, k, v = arrays
    if spec.kv_dtype:
        k, v = widened(spec, "k", k, cache.k_scale), widened(spec, "v", v, cache.v_scale)
    table, lengths = cache.page_table, cache.seqused_k
    if not spec.page_size:
        if table is not None or lengths is not None:
            raise ArgumentError("page_table and seqused_k are for specs with a page_size")
        return [prepare(spec, q, k, v, seed, offset, captures)]
    if table is None or lengths is None:
        raise ArgumentError(f"page_size={spec.page_size} needs page_table and seqused_k")
    if begins is None and not len(table):  # no sequence, and so no length
        none = _of_batch(spec, gathered(k, (), 0), 0), _of_batch(spec, gathered(v, (), 0), 0)
        return [prepare(spec, q, *none, seed, offset, captures)]
    made = []
    for b, (row, length) in enumerate(zip(table, lengths, strict=True)):
        own_k, own_v = (_of_batch(spec, gathered(pages, row, length), 1) for pages in (k, v))
        queries = np.asarray(q)[b : b + 1] if begins is None else np.asarray(q)[None, begins[b] : begins[b + 1]]
        problem = prepare(spec, queries, own_k, own_v, seed, offset, captures)
        made.append(replace(problem, number=b))
    return made


def _of_batch(spec: AttentionSpec, rows: Any, batch: int) -> Any:
    """The rows of one sequence as those of every one, in the spec's layout."""
    array = rows.swapaxes(0, 1) if spec.layout == "bhsd" else rows
    return np.broadcast_to(array, (batch, *array.shape))
