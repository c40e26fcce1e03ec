"""Sizes that the plans of every family are made of."""

from __future__ import annotations

WARP = 32
MMA_DEPTH = 16
MOST_THREADS = 1024  # of a block
DROPOUT_COLUMNS = 32  # that one call of the generator serves
RESERVED_SHARED = 1024  # bytes of each block's shared memory that the system takes
ELEMENT_BYTES = 2  # of float16 and bfloat16, in which tiles stand in shared memory


def padded(width: int) -> int:
    """A head dimension rounded up to the depth of an mma: what a row takes in shared memory, in elements."""
    return -(-width // MMA_DEPTH) * MMA_DEPTH
