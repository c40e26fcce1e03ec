"""Constants and extents that the plans of all families use."""

from __future__ import annotations

from flashgen.codegen.shared_memory import Extent, size_of
from flashgen.codegen.targets import TARGETS, Target
from flashgen.language.spec import AttentionSpec

WARP, MAX_THREADS = Target.threads_per_warp, Target.threads_per_block
MMA_DEPTH = 16
MAX_UNSPLIT = 256  # columns of the output that one warp, or warpgroup, holds
MAX_SPLIT = 4  # warps that share the columns of wider outputs
DROPOUT_COLUMNS = 32  # keys whose random numbers come from one call of the generator
RESERVED_SHARED = max(target.reserved_shared_per_block for target in TARGETS.values())
"""Bytes of shared memory per block that plans leave to the system, on all targets; sm_75 itself reserves none."""


def padded(width: int) -> int:
    """Returns a head dimension rounded up to the depth of an mma: elements of a row in shared memory."""
    return -(-width // MMA_DEPTH) * MMA_DEPTH


def padded_head(spec: AttentionSpec) -> int:
    """Returns head_dim rounded up: elements of a row of Q or K in shared memory."""
    return _padded_columns(spec, spec.head_dim)


def padded_value(spec: AttentionSpec) -> int:
    """Returns value_dim rounded up: elements of a row of V or O in shared memory."""
    return _padded_columns(spec, spec.value_dim)


def _padded_columns(spec: AttentionSpec, width: int) -> int:
    """Returns a width rounded up to a multiple of an mma's depth.

    If rows are wide, warps share the columns of the output and of gradients, and each part of them is such a multiple.
    """
    parts = MAX_SPLIT if is_wide(spec) else 1
    return -(-width // (MMA_DEPTH * parts)) * MMA_DEPTH * parts


def is_wide(spec: AttentionSpec) -> bool:
    """Whether a row has more columns than one warp can hold accumulators for."""
    return spec.max_dim > MAX_UNSPLIT


def head_extent(spec: AttentionSpec) -> Extent:
    """Returns the columns of a row of Q or K in shared memory, with the name of their constant."""
    return Extent("kHeadDimPadded", padded_head(spec))


def value_extent(spec: AttentionSpec) -> Extent:
    """Returns the columns of a row of V or O in shared memory, with the name of their constant."""
    return Extent("kValueDimPadded", padded_value(spec))


def element_sizes(spec: AttentionSpec) -> tuple[Extent, Extent]:
    """Returns the sizes of elements in shared memory: those of Q, O, P and all gradients, and those of K and V."""
    element = Extent("kElementBytes", spec.element.bytes)
    return element, size_of(spec.kv_element) if spec.kv_dtype else element
