"""Sizes that the plans of every family are made of."""

from __future__ import annotations

from flashgen.codegen.shared_memory import Extent
from flashgen.codegen.targets import TARGETS, Target
from flashgen.language.spec import AttentionSpec

WARP, MAX_THREADS = Target.threads_per_warp, Target.threads_per_block
MMA_DEPTH = 16
DROPOUT_COLUMNS = 32  # that one call of the generator serves
RESERVED_SHARED = max(target.reserved_shared_per_block for target in TARGETS.values())
"""Bytes of shared memory that plans leave to the system for each block, on every target; sm_75 reserves none."""
ELEMENT_BYTES = 2  # of float16 and bfloat16, in which tiles stand in shared memory


def padded(width: int) -> int:
    """A head dimension rounded up to the depth of an mma: what a row takes in shared memory, in elements."""
    return -(-width // MMA_DEPTH) * MMA_DEPTH


def head_extent(spec: AttentionSpec) -> Extent:
    """Columns of a row of Q and K in shared memory, by the name of their constant."""
    return Extent("kHeadDimPadded", padded(spec.head_dim))


def value_extent(spec: AttentionSpec) -> Extent:
    """Columns of a row of V and O in shared memory, by the name of their constant."""
    return Extent("kValueDimPadded", padded(spec.value_dim))
