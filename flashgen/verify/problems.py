"""Random inputs for any spec: q, k, v, and captures whose sizes follow from how the spec indexes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import sympy

from flashgen.language.evaluate import evaluate
from flashgen.language.indexed_sizes import distance_of
from flashgen.language.operations import BATCH, HEAD, KEY, LEN_K, LEN_Q, QUERY, Capture, Load
from flashgen.runtime.arrays import numpy_dtype

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec

Array = np.ndarray[Any, Any]

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
    """The arrays of a call, in the spec's dtype and layout; `captures` by name, among them where the pages are."""

    q: Array
    k: Array
    v: Array
    captures: dict[str, Any] = field(default_factory=dict)


# Captures by name that have a meaning together: documents' offsets beside their ids.
CaptureMaker = Callable[[Shape, np.random.Generator], dict[str, Any]]


def random_inputs(spec: AttentionSpec, shape: Shape, seed: int = 0, captures: CaptureMaker | None = None) -> Inputs:
    """Standard normal q, k and v, and captures: what `captures` makes, or for None random ones (`random_capture`).

    The same for the same arguments.
    """
    random = np.random.default_rng(seed)
    dtype = numpy_dtype(spec.dtype)

    def array(heads: int, length: int, dim: int) -> Array:
        axes = (shape.batch, heads, length, dim) if spec.layout == "bhsd" else (shape.batch, length, heads, dim)
        return random.standard_normal(axes, dtype=np.float32).astype(dtype)

    q = array(shape.heads_q, shape.len_q, spec.head_dim)
    if spec.kv_dtype:
        plain = random_inputs(replace_kv_dtype(spec), shape, seed, captures)
        return narrowed(spec, shape, plain, random)
    if spec.page_size:
        given = captures(shape, random) if captures else random_captures(spec, shape, random)
        k, v, where = random_pages(spec, shape, random)
        return Inputs(q, k, v, given | where)
    k = array(shape.heads_kv, shape.len_k, spec.head_dim)
    v = array(shape.heads_kv, shape.len_k, spec.value_dim)
    return Inputs(q, k, v, captures(shape, random) if captures else random_captures(spec, shape, random))


def replace_kv_dtype(spec: AttentionSpec) -> AttentionSpec:
    """The spec with keys and values of its own dtype."""
    from flashgen.language import AttentionSpec

    names = ("head_dim", "dtype", "value_dim", "scale", "layout", "dropout", "score", "mask", "page_size")
    return AttentionSpec(**{name: getattr(spec, name) for name in names})


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
    return Inputs(plain.q, k, v, {**plain.captures, **scales})


def random_pages(
    spec: AttentionSpec, shape: Shape, random: np.random.Generator
) -> tuple[Array, Array, dict[str, Array]]:
    """k and v in pages of any order, with the table and the lengths: up to len_k, the first sequence's that many.

    What belongs to no sequence is NaN, and so are the rows of a last page behind its keys. Entries of the table behind
    a sequence's pages are no pages.
    """
    size, dtype = spec.page_size or 1, numpy_dtype(spec.dtype)
    lengths = random.integers(0, shape.len_k + 1, shape.batch).astype(np.int32)
    lengths[:1] = shape.len_k
    used = -(-lengths // size)
    table = np.full((shape.batch, -(-shape.len_k // size) + 1), -7, np.int32)
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
    batch, heads, length = q.shape[:3] if spec.layout == "bhsd" else (q.shape[0], q.shape[2], q.shape[1])
    out = np.full((*q.shape[:3], v.shape[3]), np.nan, q.dtype)
    return out, np.full((batch, heads, length), np.nan, np.float32)


def random_captures(spec: AttentionSpec, shape: Shape, random: np.random.Generator) -> dict[str, Any]:
    """A value for each capture of a spec. A capture that indexes others is made after them."""
    captures: dict[str, Any] = {}
    loads = list(_loads(spec))
    waiting = list(spec.captures)
    while waiting:
        ready = [capture for capture in waiting if _known(capture, loads, captures)]
        for capture in ready or waiting:  # captures that index each other in a circle are sized by the lengths
            captures[capture.name] = random_capture(capture, _sizes(capture, loads, shape, captures), shape, random)
        waiting = [capture for capture in waiting if capture.name not in captures]
    return captures


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
