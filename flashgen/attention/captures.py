"""Checks of the captured arrays and numbers of a call, and of the dropout's seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import sympy

from flashgen.attention.problem import INT32_MAX, Problem, check_aligned
from flashgen.errors import ArgumentError
from flashgen.language.indexed_sizes import distance_of, position_of
from flashgen.language.operations import BATCH, HEAD, KEY, LONGEST, MAX_HEADS, QUERY, Capture, Load
from flashgen.language.shards import BLOCK_K, BLOCK_Q, SHARD_NUMBERS
from flashgen.language.spec import AttentionSpec
from flashgen.language.well_formed import FLOAT32_MAX
from flashgen.runtime.arrays import View, byte_strides


def check_captures(spec: AttentionSpec, given: Mapping[str, Any]) -> None:
    """Raises ArgumentError for a capture that is missing or unknown."""
    declared = {capture.name for capture in spec.captures}
    unknown = sorted(given.keys() - declared)
    for name in sorted(declared - given.keys()):
        capture = next(capture for capture in spec.captures if capture.name == name)
        what = f"{capture.dtype} array of {capture.ndim} dimension(s)" if capture.ndim else f"{capture.dtype} number"
        beside = f"; {', '.join(map(repr, unknown))} is no capture of the spec" if unknown else ""
        raise ArgumentError(f"capture {name!r} is missing: give {name}=<{what}>{beside}")
    if unknown:
        known = ", ".join(sorted(declared)) or "none"
        raise ArgumentError(f"unknown argument {unknown[0]!r}; the spec declares these captures: {known}")


def check_array(spec: AttentionSpec, capture: Capture, view: View, problem: Problem) -> None:
    """Raises ArgumentError if a captured array is not as declared, or too short for an index that it is read at."""
    if view.dtype != capture.dtype:
        raise ArgumentError(
            f"capture {capture.name!r} has dtype {view.dtype}; it was declared {capture.dtype}: convert it"
        )
    if len(view.shape) != capture.ndim:
        raise ArgumentError(
            f"capture {capture.name!r} has shape {view.shape}; it was declared with ndim={capture.ndim}"
        )
    check_aligned(f"capture {capture.name!r}", view)
    if capture == spec.sink and view.shape != (problem.heads_q,):
        raise ArgumentError(
            f"capture {capture.name!r} has shape {view.shape}; a sink for each query head is ({problem.heads_q},)"
        )
    if not problem.has_scores:
        return  # without scores, no kernel reads it
    if not all(view.shape):
        raise ArgumentError(f"capture {capture.name!r} has shape {view.shape}; it must hold at least one element")
    if abs(byte_strides(view)[-1]) > INT32_MAX:
        raise ArgumentError(
            f"capture {capture.name!r} has strides {view.strides} (elements); the last one must be below 2**31 bytes: "
            "copy it to a contiguous array"
        )
    for load in _loads(spec, capture):
        for axis, index in enumerate(load.indices):
            if not (spec.page_size and index.has(KEY)):  # only the device knows how many keys there are
                _check_positions(capture, view, axis, index, problem)
            farthest = distance_of(index)
            if isinstance(farthest, int):
                check_distances(capture, view.shape, axis, farthest)


def _check_positions(capture: Capture, view: View, axis: int, index: sympy.Basic, problem: Problem) -> None:
    """Raises ArgumentError if a dimension that is indexed by b, h, q or k, or by blocks of them, is too short."""
    position = position_of(index)
    if position is None:
        return
    symbol, block = position
    extents = {BATCH: problem.batch, HEAD: problem.heads_q, QUERY: problem.len_q, KEY: problem.len_k}
    size, needed = view.shape[axis], -(-extents[symbol] // block)
    if size != 1 and size < needed:
        shown = f"{symbol}" if block == 1 else f"{symbol} // {block}"
        raise ArgumentError(
            f"capture {capture.name!r} has shape {view.shape}; axis {axis} is indexed by {shown}, which goes "
            f"up to {needed - 1}: give {needed} elements there, or 1 for all"
        )


def check_distances(capture: Capture, shape: tuple[int, ...], axis: int, farthest: int) -> None:
    """Raises ArgumentError if a dimension does not have one entry for each distance from -farthest to farthest.

    Longer tables are refused as well, because entry `farthest` must be that of distance 0.
    """
    wanted = 2 * farthest + 1
    if shape[axis] not in (1, wanted):
        raise ArgumentError(
            f"capture {capture.name!r} has shape {tuple(shape)}; axis {axis} is indexed by a distance from "
            f"{-farthest} to {farthest}: give {wanted} elements there, or 1 for all"
        )


def captured_distances(spec: AttentionSpec) -> tuple[tuple[Capture, int, Capture], ...]:
    """Returns (array, axis, number) for each dimension that is indexed by a distance up to a captured number."""
    found = [
        (load.capture, axis, farthest)
        for capture in spec.captures
        for load in _loads(spec, capture)
        for axis, index in enumerate(load.indices)
        if isinstance(farthest := distance_of(index), Capture)
    ]
    return tuple(dict.fromkeys(found))


def _loads(spec: AttentionSpec, capture: Capture) -> list[Load]:
    expressions = [spec.mask.expression] + ([spec.score.expression] if spec.score else [])
    return [load for expression in expressions for load in expression.atoms(Load) if load.capture == capture]


def number(capture: Capture, value: Any) -> int | float:
    """Returns a captured number as int or float. Raises ArgumentError if it does not fit its declaration."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ArgumentError(f"capture {capture.name!r} is {value!r}; give a Python number")
    if capture.kind == "float":
        size: Any = abs(value)
        if value != value or FLOAT32_MAX < size < math.inf:
            raise ArgumentError(
                f"capture {capture.name!r} is {str(value)[:40]}, no float32; give a number within 3.4e38"
            )
        return float(value)
    if not -INT32_MAX - 1 <= value <= INT32_MAX or int(value) != value:
        raise ArgumentError(f"capture {capture.name!r} is {value!r}; it was declared {capture.dtype}: give an integer")
    return int(value)


def check_shard(spec: AttentionSpec, captures: Mapping[str, Any], problem: Problem) -> None:
    """Raises ArgumentError if a shard is not within the full range that its call gives.

    Kernels rely on this to compute positions in int32. With dropout a shard must begin at a block of random bytes.
    """
    positions = {name: captures[name] for name in SHARD_NUMBERS}
    for index, length in (("q", problem.len_q), ("k", problem.len_k)):
        first, whole = positions[f"shard_{index}"], positions[f"whole_{index}"]
        if first < 0 or not first + length <= whole <= LONGEST:
            raise ArgumentError(
                f"shard_{index}={first} and whole_{index}={whole}: the {length} rows of {index} must lie within the "
                f"whole, and it within {LONGEST}"
            )
    for index, size in (("b", problem.batch), ("h", problem.heads_q)):
        first = positions[f"shard_{index}"]
        if first < 0 or first + size > MAX_HEADS:
            raise ArgumentError(f"shard_{index}={first}: from it on {size} must lie within {MAX_HEADS}")
    for index, block in (("q", BLOCK_Q), ("k", BLOCK_K)) if spec.dropout else ():
        first = positions[f"shard_{index}"]
        if first % block:
            raise ArgumentError(f"shard_{index}={first}: with dropout a shard begins at a multiple of {block}")


def is_in_memory(seed: Any) -> bool:
    """Whether a dropout's seed is an array that kernels read, and not a number."""
    return type(seed) is not int and hasattr(seed, "dtype") and not isinstance(seed, np.generic)


def check_seed(spec: AttentionSpec, seed: Any, offset: Any) -> dict[str, int | float]:
    """Returns the struct members of the seed, which are 0 if it is an array, and of the offset of the dropout.

    Raises ArgumentError if the seed is missing, or either is out of range.
    """
    if seed is None:
        raise ArgumentError(
            f"seed is missing: the spec has dropout={spec.dropout:g}; give seed=<int from 0 to 2**64 - 1>, or an array "
            "that holds it"
        )
    seed = 0 if is_in_memory(seed) else seed
    for name, value, limit in (("seed", seed, 2**64), ("offset", offset, 2**32)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < limit:
            raise ArgumentError(f"{name}={value!r} must be an integer from 0 to {limit - 1}")
    return {"seed_low": int(seed) & 0xFFFFFFFF, "seed_high": int(seed) >> 32, "offset": int(offset)}


def check_seed_in_memory(view: View) -> None:
    """Raises ArgumentError if an array is not a seed that kernels can read."""
    words = {"int64": 1, "uint64": 1, "uint32": 2}.get(view.dtype)
    if words is None or math.prod(view.shape) != words:
        raise ArgumentError(
            f"seed is {view.dtype} of shape {view.shape}: give a number, or one int64 or uint64, or two uint32, the "
            "low half first"
        )
    if view.pointer % 8 or (words == 2 and 2 in view.shape and view.strides[view.shape.index(2)] != 1):
        raise ArgumentError(
            f"seed at address {view.pointer:#x} with strides {view.strides} (elements): its 8 bytes must be "
            "contiguous and start at a multiple of 8; copy it"
        )
