"""One call's sizes, and the refusal of what does not fit together, before anything is launched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashgen.errors import ArgumentError
from flashgen.language.operations import BATCH, HEAD, KEY, QUERY, Capture, Load
from flashgen.language.rules import FLOAT32_MAX
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.arrays import JAX, View, library_of, numpy_dtype

_INT32 = 2**31 - 1
_MOST_BLOCKS = 65535  # of a grid along y and z
_MOST_HEADS_PER_KV = 8192  # up to which the kernel's division by a reciprocal is exact
_ROW_ALIGNMENT = 16  # bytes: what one copy instruction moves


@dataclass(frozen=True)
class Problem:
    """Sizes of a call, and strides in elements as (batch, head, row) whatever the layout."""

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    strides: dict[str, tuple[int, int, int]]

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share a head of k and v."""
        return max(self.heads_q // max(self.heads_kv, 1), 1)

    def output_shape(self, spec: AttentionSpec) -> tuple[int, int, int, int]:
        return in_layout((self.batch, self.heads_q, self.len_q, spec.value_dim), spec.layout)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return self.batch, self.heads_q, self.len_q

    @property
    def is_empty(self) -> bool:
        """Whether there is no output element to compute."""
        return not (self.batch and self.heads_q and self.len_q)


def in_layout(shape: tuple[int, ...], layout: str) -> tuple[int, int, int, int]:
    """(batch, heads, length, dim), or what belongs to each, in the order of the layout; its own inverse."""
    first, second, third, last = shape
    return (first, second, third, last) if layout == "bhsd" else (first, third, second, last)


def problem_of(spec: AttentionSpec, views: Mapping[str, View]) -> Problem:
    """The sizes of a call with arrays q, k and v; ArgumentError where they are not what the spec takes."""
    shapes = {name: _shape(spec, name, views[name]) for name in "qkv"}
    (batch, heads_q, len_q, _), (_, heads_kv, len_k, _) = shapes["q"], shapes["k"]
    for name in "kv":
        if shapes[name][0] != batch:
            raise ArgumentError(f"{name} has batch {shapes[name][0]} and q has {batch}; give arrays of one batch size")
    if shapes["v"][1:3] != shapes["k"][1:3]:
        raise ArgumentError(
            f"v has (heads, length) {shapes['v'][1:3]} and k has {shapes['k'][1:3]}; every key needs one value"
        )
    if heads_q and (not heads_kv or heads_q % heads_kv):
        raise ArgumentError(f"q has {heads_q} heads, no multiple of the {heads_kv} heads of k and v (GQA, MQA)")
    if max(batch, heads_q) > _MOST_BLOCKS or heads_q > _MOST_HEADS_PER_KV * max(heads_kv, 1):
        raise ArgumentError(
            f"batch {batch} and heads {heads_q} must be at most {_MOST_BLOCKS}, and for each head of k "
            f"at most {_MOST_HEADS_PER_KV} of q; call it on parts of the batch"
        )
    if max(len_q, len_k) > _INT32:
        raise ArgumentError(f"len_q {len_q} and len_k {len_k} must be at most 2**31 - 1")
    strides = {name: _strides(spec, name, views[name]) for name in "qkv"}
    return Problem(batch, heads_q, heads_kv, len_q, len_k, strides)


def _shape(spec: AttentionSpec, name: str, view: View) -> tuple[int, int, int, int]:
    """(batch, heads, length, dim) of q, k or v."""
    axes = "(batch, heads, length, dim)" if spec.layout == "bhsd" else "(batch, length, heads, dim)"
    dim = spec.value_dim if name == "v" else spec.head_dim
    if len(view.shape) != 4:
        raise ArgumentError(f"{name} has shape {view.shape}; give 4 dimensions {axes}")
    if view.shape[3] != dim:
        field = "value_dim" if name == "v" else "head_dim"
        raise ArgumentError(f"{name} has shape {view.shape}; its last dimension must be the spec's {field}={dim}")
    if view.dtype != spec.dtype:
        raise ArgumentError(f"{name} has dtype {view.dtype}; the spec was compiled for {spec.dtype}: convert it")
    return in_layout(view.shape, spec.layout)


def _strides(spec: AttentionSpec, name: str, view: View) -> tuple[int, int, int]:
    batch, head, row, last = in_layout(view.strides, spec.layout)
    elements = math.prod(view.shape)
    if elements and last != 1:
        raise ArgumentError(f"{name} has strides {view.strides} (elements); the last dimension must be contiguous")
    aligned = _ROW_ALIGNMENT // 2
    misaligned = [
        s for s, n in zip((batch, head, row), in_layout(view.shape, spec.layout), strict=False) if n > 1 and s % aligned
    ]
    if elements and (misaligned or view.pointer % _ROW_ALIGNMENT):
        raise ArgumentError(
            f"{name} at address {view.pointer:#x} with strides {view.strides} (elements): every row must start at a "
            f"multiple of {_ROW_ALIGNMENT} bytes; copy it to a contiguous array"
        )
    return batch, head, row


def given_outputs(out: Any, return_lse: bool) -> dict[str, Any]:
    """The arrays of the argument `out`, by their names in the struct; ArgumentError where they cannot be written to."""
    if return_lse and (not isinstance(out, tuple) or len(out) != 2):
        raise ArgumentError(f"out of type {type(out).__name__}: with return_lse=True give a pair (output, lse)")
    if not return_lse and isinstance(out, (tuple, list)):
        raise ArgumentError(f"out of type {type(out).__name__}: give one array, or add return_lse=True for a pair")
    given = {"o": out[0], "lse": out[1]} if return_lse else {"o": out}
    for name, array in given.items():
        immutable = not array.flags.writeable if isinstance(array, np.ndarray) else library_of(array, "out") is JAX
        if immutable:
            raise ArgumentError(f"{'out' if name == 'o' else name} is read-only; give an array that may be written to")
    return given


def check_outputs(spec: AttentionSpec, views: Mapping[str, View], problem: Problem) -> None:
    """ArgumentError where arrays given for the results cannot hold them; their strides join the problem's."""
    wanted = {"o": ("out", problem.output_shape(spec), spec.dtype), "lse": ("lse", problem.lse_shape, "float32")}
    for name, (argument, shape, dtype) in wanted.items():
        view = views.get(name)
        if view and (view.shape, view.dtype) != (shape, dtype):
            raise ArgumentError(f"{argument} is {view.dtype} {view.shape}; give {dtype} {shape}")
    if "o" in views:
        problem.strides["o"] = _strides(spec, "out", views["o"])
        if _overlaps(views["o"]):
            raise ArgumentError(f"out has strides {views['o'].strides} (elements): its elements share memory; copy it")
    if "lse" in views:
        _check_aligned("lse", views["lse"])
        if not _is_contiguous(views["lse"]):
            raise ArgumentError(f"lse has strides {views['lse'].strides} (elements); give a C-contiguous array")


def _check_aligned(what: str, view: View) -> None:
    """ArgumentError where an array's elements do not start at multiples of their size."""
    size = numpy_dtype(view.dtype).itemsize
    if view.pointer % size and all(view.shape):
        raise ArgumentError(
            f"{what} at address {view.pointer:#x}: its {view.dtype} must start at multiples of {size} bytes"
        )


def _overlaps(view: View) -> bool:
    """Whether two elements may stand at one address: dimensions that do not nest."""
    reach = 0
    for stride, size in sorted((abs(stride), size) for stride, size in zip(view.strides, view.shape, strict=True)):
        if size > 1 and stride <= reach:
            return all(view.shape)
        reach += stride * (size - 1)
    return False


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous array."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


def _is_contiguous(view: View) -> bool:
    wanted = contiguous_strides(view.shape)
    used = zip(view.shape, view.strides, wanted, strict=True)
    return not math.prod(view.shape) or all(size == 1 or stride == want for size, stride, want in used)


def check_captures(spec: AttentionSpec, given: Mapping[str, Any]) -> None:
    """ArgumentError for a capture that is missing or unknown."""
    declared = {capture.name for capture in spec.captures}
    for name in sorted(declared - given.keys()):
        capture = next(capture for capture in spec.captures if capture.name == name)
        what = f"{capture.dtype} array of {capture.ndim} dimension(s)" if capture.ndim else f"{capture.dtype} number"
        raise ArgumentError(f"capture {name!r} is missing: give {name}=<{what}>")
    for name in sorted(given.keys() - declared):
        known = ", ".join(sorted(declared)) or "none"
        raise ArgumentError(f"unknown argument {name!r}; the spec declares these captures: {known}")


def check_array(spec: AttentionSpec, capture: Capture, view: View, problem: Problem) -> None:
    """ArgumentError where a captured array is not as declared, or too short for an index that it is read at."""
    if view.dtype != capture.dtype:
        raise ArgumentError(f"capture {capture.name!r} has dtype {view.dtype}; it was declared {capture.dtype}")
    if len(view.shape) != capture.ndim:
        raise ArgumentError(
            f"capture {capture.name!r} has shape {view.shape}; it was declared with ndim={capture.ndim}"
        )
    _check_aligned(f"capture {capture.name!r}", view)
    if problem.is_empty or not problem.len_k:
        return  # there is no score that would read it
    if not all(view.shape):
        raise ArgumentError(f"capture {capture.name!r} has shape {view.shape}; it must hold at least one element")
    if abs(byte_strides(view)[-1]) > _INT32:
        raise ArgumentError(
            f"capture {capture.name!r} has strides {view.strides} (elements); the last one must be below 2**31 bytes: "
            "copy it to a contiguous array"
        )
    extents = {BATCH: problem.batch, HEAD: problem.heads_q, QUERY: problem.len_q, KEY: problem.len_k}
    for load in _loads(spec, capture):
        for axis, index in enumerate(load.indices):
            size, needed = view.shape[axis], extents.get(index, 0)
            if size != 1 and size < needed:
                raise ArgumentError(
                    f"capture {capture.name!r} has shape {view.shape}; axis {axis} is indexed by {index}, which goes "
                    f"up to {needed - 1}: give {needed} elements there, or 1 for all"
                )


def byte_strides(view: View) -> tuple[int, ...]:
    """Strides in bytes; 0 for an axis of one element, which is read at index 0 only."""
    itemsize = numpy_dtype(view.dtype).itemsize
    return tuple(0 if size == 1 else stride * itemsize for size, stride in zip(view.shape, view.strides, strict=True))


def _loads(spec: AttentionSpec, capture: Capture) -> list[Load]:
    expressions = [spec.mask.expression] + ([spec.score.expression] if spec.score else [])
    return [load for expression in expressions for load in expression.atoms(Load) if load.capture == capture]


def number(capture: Capture, value: Any) -> int | float:
    """A captured number, checked against its declaration."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ArgumentError(f"capture {capture.name!r} is {value!r}; give a Python number")
    if capture.kind == "float":
        size: Any = abs(value)
        if value != value or FLOAT32_MAX < size < math.inf:
            raise ArgumentError(
                f"capture {capture.name!r} is {str(value)[:40]}, no float32; give a number within 3.4e38"
            )
        return float(value)
    if not -_INT32 - 1 <= value <= _INT32 or int(value) != value:
        raise ArgumentError(f"capture {capture.name!r} is {value!r}; it was declared {capture.dtype}: give an integer")
    return int(value)


def check_seed(spec: AttentionSpec, seed: Any, offset: Any) -> tuple[int, int]:
    """Seed and offset of the dropout bytes; ArgumentError where the seed is missing or either is out of range."""
    if seed is None:
        raise ArgumentError(
            f"seed is missing: the spec has dropout={spec.dropout:g}; give seed=<int from 0 to 2**64 - 1>"
        )
    for name, value, limit in (("seed", seed, 2**64), ("offset", offset, 2**32)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < limit:
            raise ArgumentError(f"{name}={value!r} must be an integer from 0 to {limit - 1}")
    return int(seed), int(offset)
