"""Padded head dimensions, and limits that the plans of all kernel families share."""

from __future__ import annotations

from flashgen.codegen.shared_memory import Extent, size_of
from flashgen.codegen.targets import TARGETS, Target
from flashgen.language.spec import AttentionSpec

WARP, MAX_THREADS = Target.threads_per_warp, Target.threads_per_block
MMA_K = 16  # the reduction dimension of one mma of 16-bit elements
MAX_UNSPLIT = 256  # columns of the output whose accumulators fit in one warp (mma.sync) or warpgroup (wgmma)
MAX_SPLIT = 4  # warps that share the columns of wider outputs, at most; rows are padded for this number
DROPOUT_COLUMNS = 32  # keys of a block of 16 queries, of which a lane has 16 scores: one call of the generator
# Bytes of shared memory per CTA that the system keeps for itself: the maximum over all targets, so that a plan fits on
# each of them. sm_75 keeps none.
RESERVED_SHARED = max(target.reserved_shared_per_block for target in TARGETS.values())


def padded(columns: int) -> int:
    """Returns a number of columns rounded up to a multiple of the reduction dimension of an mma."""
    return -(-columns // MMA_K) * MMA_K


def padded_head_dim(spec: AttentionSpec) -> int:
    """Returns head_dim rounded up: the elements of a row of Q or K in shared memory."""
    return _padded_columns(spec, spec.head_dim)


def padded_value_dim(spec: AttentionSpec) -> int:
    """Returns value_dim rounded up: the elements of a row of V or O in shared memory."""
    return _padded_columns(spec, spec.value_dim)


def padded_output_gradient(spec: AttentionSpec) -> int:
    """Returns the elements of a row of V or dO in shared memory in the backward pass.

    If V is the first columns of K (`shared_kv`), rows of V and dO are as long as those of K, and dO is 0 beyond
    value_dim, so that P^T dO and dS^T Q accumulate in the same registers.
    """
    return padded_head_dim(spec) if spec.shared_kv else padded_value_dim(spec)


def _padded_columns(spec: AttentionSpec, columns: int) -> int:
    """Returns a number of columns rounded up so that each warp has whole mma.

    The warps that share the columns of wide rows have a multiple of MMA_K each, or of twice as many with K and V of 8
    bits, whose operands are loaded for two mma at once.
    """
    if not is_wide(spec):
        return padded(columns)
    multiple = MMA_K * MAX_SPLIT * (2 if spec.scales_kv else 1)
    return -(-columns // multiple) * multiple


def is_wide(spec: AttentionSpec) -> bool:
    """Whether a row has more columns than one warp can hold accumulators for."""
    return spec.max_dim > MAX_UNSPLIT


def head_extent(spec: AttentionSpec) -> Extent:
    """Returns the columns of a row of Q or K in shared memory, with the name of their C++ constant."""
    return Extent("kHeadDimPadded", padded_head_dim(spec))


def value_extent(spec: AttentionSpec) -> Extent:
    """Returns the columns of a row of V or O in shared memory, with the name of their C++ constant."""
    return Extent("kValueDimPadded", padded_value_dim(spec))


def output_gradient_extent(spec: AttentionSpec) -> Extent:
    """Returns the columns of a row of V or dO in shared memory, with the name of their C++ constant.

    Kernels of the backward pass use it in place of `value_extent`.
    """
    return Extent("kValueDimPadded", padded_output_gradient(spec))


def element_sizes(spec: AttentionSpec) -> tuple[Extent, Extent]:
    """Returns the bytes of an element in shared memory: (of Q, O, P and all gradients; of K and V).

    Records of K are counted by their kernels, or converted to the type of Q.
    """
    element = Extent("kElementBytes", spec.element.bytes)
    kv_element = size_of(spec.kv_element) if spec.scales_kv else element
    return element, kv_element
