"""Random inputs for any spec: q, k, v, and captures, which are sized by the way in which the spec indexes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import sympy

from flashgen.dtypes import numpy_dtype
from flashgen.language.evaluate import evaluate
from flashgen.language.indexed_sizes import distance_of
from flashgen.language.operations import BATCH, HEAD, KEY, LEN_K, LEN_Q, QUERY, Capture, Load
from flashgen.language.shards import BLOCK_K
from flashgen.reference.kv_records import encode_records

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec

Array = np.ndarray[Any, Any]

_OFFSETS = 2  # second component of the seed of the sequence lengths
_QUERY_ARGUMENTS = ("cu_seqlens_q", "max_seqlen_q")
_OUTSIDE = 3  # rows before the first sequence and after the last one
ENOUGH = 16  # the minimum number of elements over which the largest error of a gradient is taken: see `samples_needed`


@dataclass(frozen=True)
class Shape:
    """The run-time sizes of a call. heads_q is a multiple of heads_kv.

    Attributes:
        len_q: queries of a sequence.
        len_k: keys of a sequence.
        batch: sequences.
        heads_q: query heads.
        heads_kv: KV heads.
    """

    len_q: int
    len_k: int
    batch: int = 2
    heads_q: int = 2
    heads_kv: int = 2

    def __str__(self) -> str:
        heads = str(self.heads_q) if self.heads_q == self.heads_kv else f"{self.heads_q}:{self.heads_kv}"
        return f"{self.batch}x{heads}x{self.len_q}x{self.len_k}"


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arrays of a call, in the spec's dtype and layout. v is None if V is a part of K.

    Attributes:
        q: the queries.
        k: the keys, which may be in pages.
        v: the values, which may be in pages.
        captures: the captured arrays by name, with the page table and scales of a KV cache if the spec has them.
        ragged: the arguments of a varlen call by name, such as cu_seqlens_q; empty for other layouts.
    """

    q: Array
    k: Array
    v: Array | None
    captures: dict[str, Any] = field(default_factory=dict)
    ragged: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[Array, ...]:
        """The arrays of rows: q, k and v, or q and k."""
        return (self.q, self.k) if self.v is None else (self.q, self.k, self.v)


# Creates captures by name, for captures that must be consistent with each other, such as document ids and offsets.
CaptureMaker = Callable[[Shape, np.random.Generator], dict[str, Any]]


def random_inputs(
    spec: AttentionSpec,
    shape: Shape,
    seed: int = 0,
    captures: CaptureMaker | None = None,
    equal_lengths: bool = False,
) -> Inputs:
    """Returns standard normal q, k and v, and captures. Equal arguments give equal inputs.

    Args:
        spec: the spec of the call.
        shape: the sizes of the call. In a varlen batch its lengths are the maximum lengths (see `offsets`).
        seed: the seed of all random numbers.
        captures: creates the captures; None for random ones (`random_capture`).
        equal_lengths: with pages, give all sequences len_k keys instead of random numbers of keys up to len_k.
    """
    random = np.random.default_rng(seed)
    dtype = numpy_dtype(spec.dtype)
    own = spec.batch_layout.arguments
    ragged = {name: value for name, value in offsets(shape, seed).items() if name in own}

    def array(heads: int, of_keys: bool, dim: int) -> Array:
        axes = _axes(spec, shape, seed, heads, of_keys)
        return random.standard_normal((*axes, dim), dtype=np.float32).astype(dtype)

    q = array(shape.heads_q, False, spec.head_dim)
    if spec.kv_dtype:
        plain = random_inputs(replace_kv_dtype(spec), shape, seed, captures, equal_lengths)
        return narrowed(spec, shape, plain, random)
    if spec.page_size:
        ragged = {name: ragged[name] for name in _QUERY_ARGUMENTS if name in ragged}  # the page table locates the keys
        shape = replace(shape, batch=len(ragged["cu_seqlens_q"]) - 1) if ragged else shape
        given = captures(shape, random) if captures else random_captures(spec, shape, random)
        k, values, where = random_pages(spec, shape, random, equal_lengths)
        return Inputs(q, k, None if spec.shared_kv else values, given | where, ragged)
    k = array(shape.heads_kv, True, spec.head_dim)
    v = None if spec.shared_kv else array(shape.heads_kv, True, spec.value_dim)
    if ragged:
        shape = replace(shape, batch=len(ragged["cu_seqlens_q"]) - 1)
    return Inputs(q, k, v, captures(shape, random) if captures else random_captures(spec, shape, random), ragged)


def offsets(shape: Shape, seed: int) -> dict[str, Any]:
    """Returns the arguments of a varlen call that locate the sequences, which the seed determines.

    The first sequence has the lengths of the shape, the second has no queries, and the others have random lengths up to
    those of the shape. Each sequence has as many keys as queries if the shape does. Some sequences do not use all of
    their keys (seqused_k). A few rows before the first sequence and after the last one belong to no sequence.
    """
    random = np.random.default_rng((seed, _OFFSETS))
    batch = shape.batch + 2
    lengths_q = random.integers(0, shape.len_q + 1, batch)
    lengths_k = lengths_q.copy() if shape.len_q == shape.len_k else random.integers(0, shape.len_k + 1, batch)
    lengths_q[0], lengths_k[0] = shape.len_q, shape.len_k
    lengths_q[1] = 0
    used = np.where(random.random(batch) < 0.5, lengths_k, random.integers(0, lengths_k + 1))
    used[0] = shape.len_k
    begins = {
        f"cu_seqlens_{name}": (_OUTSIDE + np.concatenate([[0], np.cumsum(lengths)])).astype(np.int32)
        for name, lengths in (("q", lengths_q), ("k", lengths_k))
    }
    bounds = {"max_seqlen_q": max(shape.len_q, 1), "max_seqlen_k": max(shape.len_k, 1)}
    return {**begins, "seqused_k": used.astype(np.int32), **bounds}


def rows_of(spec: AttentionSpec, shape: Shape, seed: int) -> tuple[int, ...]:
    """Returns the shape of the output without its last axis, in the spec's layout."""
    return _axes(spec, shape, seed, shape.heads_q, of_keys=False)


def _axes(spec: AttentionSpec, shape: Shape, seed: int, heads: int, of_keys: bool) -> tuple[int, ...]:
    """Returns the shape of q, or of k and v if `of_keys`, without its last axis."""
    begins = offsets(shape, seed)["cu_seqlens_k" if of_keys else "cu_seqlens_q"]
    rows = spec.batch_layout.rows(shape.len_k if of_keys else shape.len_q, int(begins[-1]) + _OUTSIDE)
    return spec.batch_layout.from_bhsd((shape.batch, heads, rows, 1))[:-1]


def replace_kv_dtype(spec: AttentionSpec) -> AttentionSpec:
    """Returns the spec without `kv_dtype`, so that keys and values have the dtype of queries."""
    from flashgen.language import AttentionSpec

    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return AttentionSpec(**{**values, "kv_dtype": None})


def narrowed(spec: AttentionSpec, shape: Shape, plain: Inputs, random: np.random.Generator) -> Inputs:
    """Returns the inputs with k and v quantized to 8 bits, with scales that use most of the range of the 8-bit dtype.

    k has a scale for each head, v has one scale for all heads. A NaN becomes the byte 255, as do all bytes of a record
    with a NaN.
    """
    assert spec.kv_dtype is not None
    if spec.kv_record:
        records = encode_records(spec.kv_record, np.nan_to_num(plain.k.astype(np.float32)))
        records[np.isnan(plain.k.astype(np.float32)).any(axis=-1)] = 255
        return Inputs(plain.q, records, None, plain.captures, plain.ragged)
    dtype, max_value = numpy_dtype(spec.kv_dtype), 127.0 if spec.kv_dtype == "int8" else 448.0
    axis = spec.array_layout("k").heads_axis
    scales = {
        "k_scale": (random.uniform(3.0, 4.0, shape.heads_kv) / max_value).astype(np.float32),
        "v_scale": np.array([3.5 / max_value], np.float32),
    }

    def narrow(array: Array, scale: Array) -> Array:
        steps = array.astype(np.float32) / scale.reshape(-1, *(1,) * (3 - axis))
        rounded = np.rint(steps) if spec.kv_dtype == "int8" else steps
        found = np.clip(np.nan_to_num(rounded), -max_value, max_value).astype(dtype)
        found.view(np.uint8)[np.isnan(steps)] = 255
        return found

    k, v = (narrow(array, scales[f"{name}_scale"]) for name, array in zip("kv", plain.rows[1:], strict=True))
    return Inputs(plain.q, k, v, {**plain.captures, **scales}, plain.ragged)


def random_pages(
    spec: AttentionSpec, shape: Shape, random: np.random.Generator, equal_lengths: bool = False
) -> tuple[Array, Array, dict[str, Array]]:
    """Returns k and v in pages in random order, and by name the page table and the number of keys of each sequence.

    The first sequence, or every one if `equal_lengths`, has len_k keys; the others have random numbers of keys up to
    len_k. Pages of no sequence are NaN, as are the rows of a last page after the last key. Table entries after the
    pages of a sequence are not valid page numbers; there are no such entries if all sequences have equal lengths.
    """
    size, dtype = spec.page_size or 1, numpy_dtype(spec.dtype)
    lengths = random.integers(0, shape.len_k + 1, shape.batch).astype(np.int32)
    lengths[: shape.batch if equal_lengths else 1] = shape.len_k
    used = -(-lengths // size)
    spare = 0 if equal_lengths else 1
    table = np.full((shape.batch, -(-shape.len_k // size) + spare), -7, np.int32)
    pages = random.permutation(int(used.sum()) + 2).astype(np.int32)
    k, v = (np.full((len(pages), size, shape.heads_kv, dim), np.nan, dtype) for dim in (spec.head_dim, spec.value_dim))
    first = 0
    for b, (length, count) in enumerate(zip(lengths, used, strict=True)):
        own = table[b, :count] = pages[first : first + count]
        first += count
        for array in (k, v):
            rows = random.standard_normal((length, *array.shape[2:]), dtype=np.float32).astype(dtype)
            for number, page in enumerate(own):
                part = rows[number * size : (number + 1) * size]
                array[page, : len(part)] = part
    return k, v, {"page_table": table, "seqused_k": lengths}


def poisoned_outputs(spec: AttentionSpec, q: Array) -> tuple[Array, Array]:
    """Returns arrays for the output and its LSE, full of NaN, so that an element that is not written is detected."""
    out = np.full((*q.shape[:-1], spec.value_dim), np.nan, spec.out_element.numpy)
    return out, np.full(spec.batch_layout.lse_shape(q.shape), np.nan, np.float32)


def random_captures(spec: AttentionSpec, shape: Shape, random: np.random.Generator) -> dict[str, Any]:
    """Returns a random value for each capture of a spec. Captures that are used as indices are created first."""
    captures: dict[str, Any] = {}
    loads = list(_loads(spec))
    waiting = list(spec.captures)
    while waiting:
        ready = [capture for capture in waiting if _is_ready(capture, loads, captures)]
        for capture in ready or waiting:  # captures that index each other in a cycle are sized by the lengths
            sizes = (shape.heads_q,) if capture == spec.sink else _sizes(capture, loads, shape, captures)
            captures[capture.name] = random_capture(capture, sizes, shape, random)
        waiting = [capture for capture in waiting if capture.name not in captures]
    return captures | (random_shard(shape, random) if spec.sharded else {})


def random_shard(shape: Shape, random: np.random.Generator) -> dict[str, int]:
    """Returns the position of a shard in the full problem, aligned to the blocks of dropout's random bytes."""
    shard_q, shard_k = (int(first) for first in random.integers(0, 4, 2) * BLOCK_K)
    rest = int(random.integers(0, 64))
    position = {"shard_b": int(random.integers(0, 3)), "shard_h": int(random.integers(0, 3))}
    lengths = {"whole_q": shard_q + shape.len_q + rest, "whole_k": shard_k + shape.len_k + rest}
    return position | {"shard_q": shard_q, "shard_k": shard_k} | lengths


def random_capture(capture: Capture, sizes: tuple[int, ...], shape: Shape, random: np.random.Generator) -> Any:
    """Returns a random value for one capture; `sizes` is its shape.

    Floats are small and positive, so that biases hardly add to the rounding errors of scores. Integers are ascending
    multiples of a quarter of len_k, so that they can serve both as document ids and as positions. Most booleans are
    true.
    """
    dtype = numpy_dtype(capture.dtype)
    if capture.kind == "float":
        value: Any = random.uniform(0.01, 0.1, sizes).astype(dtype) if sizes else dtype.type(20.0)
    elif capture.kind == "bool":
        value = random.random(sizes) < 0.6 if sizes else True
    else:
        quarters = np.sort(random.integers(0, 4, sizes), axis=-1) if sizes else 1
        value = np.minimum(quarters * max(1, shape.len_k // 4), np.iinfo(dtype).max).astype(dtype)
    return value if sizes else dtype.type(value).item()


def _loads(spec: AttentionSpec) -> Iterator[Load]:
    for expression in (spec.mask.expression, *([spec.score.expression] if spec.score else [])):
        yield from (node for node in sympy.preorder_traversal(expression) if isinstance(node, Load))


def _is_ready(capture: Capture, loads: list[Load], captures: dict[str, Any]) -> bool:
    """Returns whether every capture that the indices of this capture read has a value."""
    read = {
        leaf.name
        for load in loads
        if load.capture == capture
        for index in load.indices
        for leaf in index.atoms(Capture)
    }
    return read <= captures.keys()


def _sizes(capture: Capture, loads: list[Load], shape: Shape, captures: dict[str, Any]) -> tuple[int, ...]:
    """Returns the shape of a capture: for each axis, one more than the largest index that the call loads."""
    values = {
        BATCH: np.arange(shape.batch).reshape(-1, 1, 1, 1),
        HEAD: np.arange(shape.heads_q).reshape(-1, 1, 1),
        QUERY: np.arange(shape.len_q).reshape(-1, 1),
        KEY: np.arange(shape.len_k),
        LEN_Q: shape.len_q,
        LEN_K: shape.len_k,
    }
    sizes = [1] * capture.ndim
    for load in loads:
        if load.capture != capture:
            continue
        for axis, index in enumerate(load.indices):
            farthest = distance_of(index)
            if farthest is not None:
                distance = farthest if isinstance(farthest, int) else int(captures[farthest.name])
                sizes[axis] = max(sizes[axis], 2 * distance + 1)  # the documented size, even if the call is short
                continue
            if all(leaf.name in captures for leaf in index.atoms(Capture)):
                largest = int(evaluate(index, values, captures).max(initial=0)) + 1
            else:
                largest = max(shape.len_q, shape.len_k)
            sizes[axis] = max(sizes[axis], min(largest, 2 * (shape.len_q + shape.len_k) + 64))
    return tuple(sizes)
