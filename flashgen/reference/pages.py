"""Keys and values in pages, gathered: what a table and lengths say of them, in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.errors import ArgumentError
from flashgen.reference.inputs import Problem, prepare

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec

Sequences = list[tuple[Problem, range]]
"""Problems, and which sequences of the batch each is of."""


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


def sequences_of(
    spec: AttentionSpec,
    arrays: tuple[Any, Any, Any],
    seed: int | None,
    offset: int,
    captures: Mapping[str, Any],
    page_table: Any,
    seqused_k: Any,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Sequences:
    """The problems of a call: one for the batch, or over pages, where each sequence has a length, one for each."""
    q, k, v = arrays
    if spec.kv_dtype:
        k, v = widened(spec, "k", k, k_scale), widened(spec, "v", v, v_scale)
    if not spec.page_size:
        if page_table is not None or seqused_k is not None:
            raise ArgumentError("page_table and seqused_k are for specs with a page_size")
        problem = prepare(spec, q, k, v, seed, offset, captures)
        return [(problem, range(problem.batch))]
    if page_table is None or seqused_k is None:
        raise ArgumentError(f"page_size={spec.page_size} needs page_table and seqused_k")
    made: Sequences = []
    for b, (row, length) in enumerate(zip(page_table, seqused_k, strict=True)):
        own_k, own_v = (_of_batch(spec, gathered(pages, row, length), len(page_table)) for pages in (k, v))
        made.append((prepare(spec, q, own_k, own_v, seed, offset, captures), range(b, b + 1)))
    return made


def _of_batch(spec: AttentionSpec, rows: Any, batch: int) -> Any:
    """The rows of one sequence as those of every one, in the spec's layout."""
    array = rows.swapaxes(0, 1) if spec.layout == "bhsd" else rows
    return np.broadcast_to(array, (batch, *array.shape))
