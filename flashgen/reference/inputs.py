"""Checks the arguments of a reference call and converts them to one form: float64, heads before lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from flashgen.dtypes import numpy_dtype
from flashgen.errors import ArgumentError
from flashgen.language.operations import Capture
from flashgen.reference.dropout import check_counter, threshold
from flashgen.reference.kv_records import decode_records

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention problem with checked arguments.

    q (batch, heads_q, len_q, head_dim), k (batch, heads_kv, len_k, head_dim) and v (batch, heads_kv, len_k, value_dim)
    are float64. captures maps names to arrays of the declared dtype. first_batch is the index `b` of the first batch
    element; the problem of one sequence of a varlen batch has the number of the sequence there.
    """

    spec: AttentionSpec
    q: Array
    k: Array
    v: Array
    seed: int
    offset: int
    captures: Mapping[str, NDArray[Any]]
    first_batch: int = 0

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.q.shape[1]

    @property
    def len_q(self) -> int:
        return self.q.shape[2]

    @property
    def len_k(self) -> int:
        return self.k.shape[2]

    @property
    def keep_scale(self) -> float:
        """The factor by which dropout scales a kept probability."""
        return 256 / threshold(self.spec.dropout)

    def shard_start(self, name: str) -> int:
        """Returns the index of the shard's first batch, head, query or key in the full problem.

        name: "shard_b", "shard_h", "shard_q" or "shard_k". Without sharding the index is 0.
        """
        return int(self.captures[name]) if self.spec.sharded else 0

    def head(self, b: int, h: int) -> tuple[Array, Array, Array]:
        """Returns q, k and v of one query head, each (length, dim). Consecutive query heads share a key head."""
        kv = h * self.k.shape[1] // self.heads
        return self.q[b, h], self.k[b, kv], self.v[b, kv]

    def empty_outputs(self) -> tuple[Array, Array]:
        """Returns arrays for O and LSE, heads before lengths, filled with NaN."""
        shape = (self.batch, self.heads, self.len_q)
        return np.full((*shape, self.v.shape[3]), np.nan), np.full(shape, np.nan)

    def in_layout(self, out: Array) -> Array:
        """Returns O in the layout of the spec."""
        return np.ascontiguousarray(self.spec.batch_layout.swap_heads(out))


def prepare(
    spec: AttentionSpec, q: Any, k: Any, v: Any, seed: int | None, offset: int, captures: Mapping[str, Any]
) -> Problem:
    """Checks the arguments of a call against the spec and each other. Raises ArgumentError that names the argument."""
    q, k, v = (heads_first(spec, name, array) for name, array in (("q", q), ("k", k), ("v", v)))
    _check_shapes(spec, q, k, v)
    seed, offset = _check_dropout(spec, seed, offset, q.shape)
    nothing_read = 0 in (*q.shape[:3], k.shape[2])
    captures = {name: array.on_host() for name, array in spec.bound.items()} | dict(captures)
    checked = _check_captures(spec, captures, nothing_read)
    if spec.sink and checked[spec.sink.name].shape != (q.shape[1],):
        raise ArgumentError(
            f"capture {spec.sink.name!r} has shape {checked[spec.sink.name].shape}; give ({q.shape[1]},)"
        )
    return Problem(spec, q, k, v, seed, offset, checked)


def with_values(spec: AttentionSpec, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Returns q, k and v of a call, where V may be a part of K. Raises ArgumentError if v is missing or not taken."""
    if spec.shared_kv:
        if v is not None:
            raise ArgumentError("v: with shared_kv=True, V is the first columns of k; give None, or leave it out")
        k = decode_records(spec.kv_record, k) if spec.kv_record else k
        return q, k, np.asarray(k)[..., : spec.value_dim]
    if v is None:
        raise ArgumentError("v is missing: give q, k and v, or declare shared_kv=True if V is a part of K")
    return q, k, v


def prepare_for_papers(
    spec: AttentionSpec, q: Any, k: Any, v: Any, seed: int | None, offset: int, captures: Mapping[str, Any]
) -> Problem:
    """Does the same as `prepare` for the papers' algorithms. Raises ArgumentError also for varlen batches and sinks."""
    if what := "layout='thd'" if spec.is_varlen else "sink" if spec.sink else "shared_kv" if spec.shared_kv else "":
        raise ArgumentError(f"{what} is not in the papers' algorithms; use flashgen.reference.attention")
    return prepare(spec, *with_values(spec, q, k, v), seed, offset, captures)


def heads_first(spec: AttentionSpec, name: str, given: Any) -> Array:
    """Converts an array of 4 dimensions to float64 with heads before lengths. Raises ArgumentError."""
    array = floats(name, given, spec.dtype)
    if array.ndim != 4:
        axes = ", ".join(spec.batch_layout.axes)
        raise ArgumentError(f"{name} has shape {array.shape}; layout {spec.layout!r} needs 4 dimensions ({axes})")
    swapped: Array = spec.batch_layout.swap_heads(array)
    return swapped


def floats(name: str, given: Any, best: str) -> Array:
    """Converts an array of floating-point numbers to float64. Raises ArgumentError that suggests the dtype `best`."""
    try:
        array = np.asarray(given)
    except TypeError as error:  # raised by CuPy for an array on a GPU
        raise ArgumentError(f"{name} is not a NumPy array and does not become one ({error}); copy it first") from None
    if array.dtype.kind != "f" and array.dtype != ml_dtypes.bfloat16:
        raise ArgumentError(f"{name} has dtype {array.dtype}; give floating point numbers, best {best}")
    return array.astype(np.float64)


def _check_shapes(spec: AttentionSpec, q: Array, k: Array, v: Array) -> None:
    """Checks the shapes of arrays that have heads before lengths."""
    for name, array, dim in (("q", q, spec.head_dim), ("k", k, spec.head_dim), ("v", v, spec.value_dim)):
        if array.shape[3] != dim:
            which = "value_dim" if name == "v" else "head_dim"
            raise ArgumentError(
                f"{name} has a last dimension of {array.shape[3]}, the spec {which}={dim}; make them one"
            )
    for axis, what in ((0, "batch"), (1, "heads"), (2, "length")):
        if k.shape[axis] != v.shape[axis]:
            raise ArgumentError(f"k has {what} {k.shape[axis]}, v {v.shape[axis]}; give k and v of one {what}")
    if q.shape[0] != k.shape[0]:
        raise ArgumentError(f"q has batch {q.shape[0]}, k and v {k.shape[0]}; give one batch to all three")
    heads_q, heads_kv = q.shape[1], k.shape[1]
    if heads_q and (heads_kv == 0 or heads_q % heads_kv):
        raise ArgumentError(
            f"q has {heads_q} heads, k and v {heads_kv}; heads of q must be a multiple of heads of k and v"
        )


def _check_dropout(spec: AttentionSpec, seed: int | None, offset: int, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns seed and offset. Without dropout both are ignored, so that callers can pass them for every spec."""
    if spec.dropout == 0:
        return 0, 0
    if seed is None:
        raise ArgumentError(f"seed is missing: the spec has dropout={spec.dropout}; give seed=an integer in [0, 2**64)")
    return check_counter(seed, offset, shape[0], shape[1])


def _check_captures(spec: AttentionSpec, given: Mapping[str, Any], nothing_read: bool) -> dict[str, NDArray[Any]]:
    declared = {capture.name: capture for capture in spec.captures}
    names = ", ".join(declared) or "none"
    for name in given:
        if name not in declared:
            raise ArgumentError(f"{name}= is not an argument or capture of this spec (captures: {names}); leave it out")
    for name in declared:
        if name not in given:
            raise ArgumentError(f"capture {name!r} is missing; give {name}=... (captures of this spec: {names})")
    checked = {name: _check_capture(capture, given[name]) for name, capture in declared.items()}
    for name, array in checked.items():
        if array.size == 0 and not nothing_read:
            raise ArgumentError(f"capture {name!r} has shape {array.shape} and no element to load; give at least one")
    return checked


def _check_capture(capture: Capture, given: Any) -> NDArray[Any]:
    """Returns a capture as the kernel sees it. Arrays must have the declared dtype; numbers are converted to it."""
    dtype = numpy_dtype(capture.dtype)
    array = np.asarray(given)
    if array.ndim != capture.ndim:
        raise ArgumentError(
            f"capture {capture.name!r} has {array.ndim} dimensions; it was declared with {capture.ndim}"
        )
    if capture.ndim == 0:
        array = _convert_number(capture, dtype, array)
    elif array.dtype != dtype:
        raise ArgumentError(f"capture {capture.name!r} has dtype {array.dtype}; it was declared as {dtype}, convert it")
    return array


def _convert_number(capture: Capture, dtype: np.dtype[Any], given: NDArray[Any]) -> NDArray[Any]:
    """Converts a number: rounds it to a float dtype; an integer or bool dtype must hold it exactly."""
    if given.dtype.kind not in "biuf" and given.dtype != ml_dtypes.bfloat16:
        raise ArgumentError(f"capture {capture.name!r}={given!r} is not a number; give a {dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        converted = given.astype(dtype)
    value = float(given)
    lost = math.isfinite(value) and not np.isfinite(converted.astype(np.float64))
    if lost or (capture.kind != "float" and converted != given):
        raise ArgumentError(f"capture {capture.name!r}={given} does not fit its declared dtype {dtype}")
    return converted
