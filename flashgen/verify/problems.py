"""Random inputs for any spec: q, k, v, and captures whose sizes follow from how the spec indexes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import sympy

from flashgen.language.evaluate import evaluate
from flashgen.language.indexed_sizes import distance_of
from flashgen.language.operations import BATCH, HEAD, KEY, LEN_K, LEN_Q, QUERY, Capture, Load
from flashgen.language.shards import BLOCK_K
from flashgen.runtime.arrays import numpy_dtype

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec

Array = np.ndarray[Any, Any]

_OFFSETS = 2  # a stream of random numbers of its own
_OF_QUERIES = ("cu_seqlens_q", "max_seqlen_q")
_OUTSIDE = 3  # rows before the first sequence, and behind the last
ENOUGH = 16  # the largest error of a gradient is taken over at least so many numbers: see `samples_needed`


@dataclass(frozen=True)
class Shape:
    """The run-time sizes of a call: heads_q is a multiple of heads_kv."""

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
    """The arrays of a call, in the spec's dtype and layout; `captures` by name, among them where the pages are;
    `ragged`: where sequences begin."""

    q: Array
    k: Array
    v: Array
    captures: dict[str, Any] = field(default_factory=dict)
    ragged: dict[str, Any] = field(default_factory=dict)


# Captures by name that have a meaning together: documents' offsets beside their ids.
CaptureMaker = Callable[[Shape, np.random.Generator], dict[str, Any]]


def random_inputs(
    spec: AttentionSpec,
    shape: Shape,
    seed: int = 0,
    captures: CaptureMaker | None = None,
    equal_lengths: bool = False,
) -> Inputs:
    """Standard normal q, k and v, and captures: what `captures` makes, or for None random ones (`random_capture`).

    The same for the same arguments. In a ragged batch the lengths of the shape are the longest: see `offsets`; so is
    that of keys over pages, unless all sequences are to have `equal_lengths`.
    """
    random = np.random.default_rng(seed)
    dtype = numpy_dtype(spec.dtype)
    ragged = offsets(shape, seed) if spec.is_ragged else {}

    def array(heads: int, of_keys: bool, dim: int) -> Array:
        axes = _axes(spec, shape, seed, heads, of_keys)
        return random.standard_normal((*axes, dim), dtype=np.float32).astype(dtype)

    q = array(shape.heads_q, False, spec.head_dim)
    if spec.kv_dtype:
        plain = random_inputs(replace_kv_dtype(spec), shape, seed, captures, equal_lengths)
        return narrowed(spec, shape, plain, random)
    if spec.page_size:
        ragged = {name: ragged[name] for name in _OF_QUERIES if name in ragged}  # a table says where the keys are
        shape = replace(shape, batch=len(ragged["cu_seqlens_q"]) - 1) if ragged else shape
        given = captures(shape, random) if captures else random_captures(spec, shape, random)
        k, v, where = random_pages(spec, shape, random, equal_lengths)
        return Inputs(q, k, v, given | where, ragged)
    k = array(shape.heads_kv, True, spec.head_dim)
    v = array(shape.heads_kv, True, spec.value_dim)
    if ragged:
        shape = replace(shape, batch=len(ragged["cu_seqlens_q"]) - 1)
    return Inputs(q, k, v, captures(shape, random) if captures else random_captures(spec, shape, random), ragged)


def offsets(shape: Shape, seed: int) -> dict[str, Any]:
    """What a ragged call is given beside arrays and captures, all of which follows from the seed.

    The first sequence is as long as the shape says, one more is empty, the others are of any lengths up to that, of as
    many keys as queries where the shape's are; of some not all keys are in use. A few rows belong to no sequence.
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
    """The shape of the output without its last axis, in the spec's layout."""
    return _axes(spec, shape, seed, shape.heads_q, of_keys=False)


def _axes(spec: AttentionSpec, shape: Shape, seed: int, heads: int, of_keys: bool) -> tuple[int, ...]:
    """Of q, or of k and v, all axes but the last."""
    if spec.is_ragged:
        begins = offsets(shape, seed)["cu_seqlens_k" if of_keys else "cu_seqlens_q"]
        return int(begins[-1]) + _OUTSIDE, heads
    length = shape.len_k if of_keys else shape.len_q
    return (shape.batch, heads, length) if spec.layout == "bhsd" else (shape.batch, length, heads)


def replace_kv_dtype(spec: AttentionSpec) -> AttentionSpec:
    """The spec with keys and values of its own dtype."""
    from flashgen.language import AttentionSpec

    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return AttentionSpec(**{**values, "kv_dtype": None})


def narrowed(spec: AttentionSpec, shape: Shape, plain: Inputs, random: np.random.Generator) -> Inputs:
    """Inputs whose k and v are rounded to 8 bits, with scales under which they span most of what those hold.

    Of k each head has a scale, of v all have one. What is NaN becomes the pattern of all bits.
    """
    assert spec.kv_dtype is not None
    dtype, most = numpy_dtype(spec.kv_dtype), 127.0 if spec.kv_dtype == "int8" else 448.0
    axis = 1 if spec.layout == "bhsd" and not spec.page_size else 2
    scales = {
        "k_scale": (random.uniform(3.0, 4.0, shape.heads_kv) / most).astype(np.float32),
        "v_scale": np.array([3.5 / most], np.float32),
    }

    def narrow(array: Array, scale: Array) -> Array:
        steps = array.astype(np.float32) / scale.reshape(-1, *(1,) * (3 - axis))
        rounded = np.rint(steps) if spec.kv_dtype == "int8" else steps
        found = np.clip(np.nan_to_num(rounded), -most, most).astype(dtype)
        found.view(np.uint8)[np.isnan(steps)] = 255
        return found

    k, v = narrow(plain.k, scales["k_scale"]), narrow(plain.v, scales["v_scale"])
    return Inputs(plain.q, k, v, {**plain.captures, **scales}, plain.ragged)


def random_pages(
    spec: AttentionSpec, shape: Shape, random: np.random.Generator, equal_lengths: bool = False
) -> tuple[Array, Array, dict[str, Array]]:
    """k and v in pages of any order, with the table and the lengths: up to len_k, which the first one has, or all.

    What belongs to no sequence is NaN, and so are the rows of a last page behind its keys. Entries of the table behind
    a sequence's pages are no pages; where all have as many keys there are none.
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


def poisoned_outputs(spec: AttentionSpec, q: Array, v: Array) -> tuple[Array, Array]:
    """Arrays for the output and its LSE, full of NaN, so that an element that is not written is seen."""
    *batch, heads, length = q.shape[:-1] if spec.layout == "bhsd" else (*q.shape[:-3], q.shape[-2], q.shape[-3])
    out = np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
    return out, np.full((*batch, heads, length), np.nan, np.float32)


def random_captures(spec: AttentionSpec, shape: Shape, random: np.random.Generator) -> dict[str, Any]:
    """A value for each capture of a spec. A capture that indexes others is made after them."""
    captures: dict[str, Any] = {}
    loads = list(_loads(spec))
    waiting = list(spec.captures)
    while waiting:
        ready = [capture for capture in waiting if _known(capture, loads, captures)]
        for capture in ready or waiting:  # captures that index each other in a circle are sized by the lengths
            sizes = (shape.heads_q,) if capture == spec.sink else _sizes(capture, loads, shape, captures)
            captures[capture.name] = random_capture(capture, sizes, shape, random)
        waiting = [capture for capture in waiting if capture.name not in captures]
    return captures | (random_places(shape, random) if spec.sharded else {})


def random_places(shape: Shape, random: np.random.Generator) -> dict[str, int]:
    """Where a shard stands in the whole: at blocks of random bytes, so that dropout takes them."""
    shard_q, shard_k = (int(first) for first in random.integers(0, 4, 2) * BLOCK_K)
    behind = int(random.integers(0, 64))
    places = {"shard_b": int(random.integers(0, 3)), "shard_h": int(random.integers(0, 3))}
    lengths = {"whole_q": shard_q + shape.len_q + behind, "whole_k": shard_k + shape.len_k + behind}
    return places | {"shard_q": shard_q, "shard_k": shard_k} | lengths


def random_capture(capture: Capture, sizes: tuple[int, ...], shape: Shape, random: np.random.Generator) -> Any:
    """One capture.

    Floats are small and positive, so that biases leave the scores exact enough. Integers step up through multiples of
    a quarter of the keys, so that they serve as documents' ids and as positions. Booleans are mostly true.
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


def _known(capture: Capture, loads: list[Load], captures: dict[str, Any]) -> bool:
    """Whether everything that this capture's indices read has a value."""
    read = {
        leaf.name
        for load in loads
        if load.capture == capture
        for index in load.indices
        for leaf in index.atoms(Capture)
    }
    return read <= captures.keys()


def _sizes(capture: Capture, loads: list[Load], shape: Shape, captures: dict[str, Any]) -> tuple[int, ...]:
    """For each dimension, one more than the largest index that any element of the call loads."""
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
                sizes[axis] = max(sizes[axis], 2 * distance + 1)  # as documented, however short the call
                continue
            if all(leaf.name in captures for leaf in index.atoms(Capture)):
                largest = int(evaluate(index, values, captures).max(initial=0)) + 1
            else:
                largest = max(shape.len_q, shape.len_k)
            sizes[axis] = max(sizes[axis], min(largest, 2 * (shape.len_q + shape.len_k) + 64))
    return tuple(sizes)
