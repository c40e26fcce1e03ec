"""What the kernels of Hopper do differently for each batch layout."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.batches import DenseBatch, VarlenBatch, batch_of
from flashgen.language.spec import AttentionSpec


@dataclass(frozen=True)
class BatchTraits:
    """The plan features that are available for a batch layout, and what its work tiles need.

    Attributes:
        tile_bytes: Shared memory in which the producer of the forward passes a work tile to the consumers: the number
            of the tile, or its coordinates and its sequence.
        tile_label: What these bytes hold, in words.
        key_tile_bytes: The same for a work tile of the backward.
        packs_heads: Query heads can share a tile of the forward, as its rows follow from its number.
        has_smaller_tiles: The forward has a plan of smaller tiles for calls with few queries.
        splits_heads: The backward can have one CTA per query head.
        orders_dq: CTAs can add to a tile of dQ in a fixed order. If offsets of sequences decreased, a CTA would wait
            for others that do not exist.
        converts_dq: Idle warps of the backward can convert the dQ accumulator, as its rows lie like those of dQ.
        has_equal_tiles: The tiles of all sequences are alike. The scheduler of the backward can then rotate their first
            iterations, split the last key tiles, and interleave the tiles of several heads.
        spares_registers: A thread of the backward has registers left for the addresses of an iteration, and for a score
            function in the plan of narrow heads. The rows of a sequence take them otherwise.
    """

    tile_bytes: int
    tile_label: str
    key_tile_bytes: int
    packs_heads: bool
    has_smaller_tiles: bool
    splits_heads: bool
    orders_dq: bool
    converts_dq: bool
    has_equal_tiles: bool
    spares_registers: bool


_TRAITS = {
    DenseBatch: BatchTraits(
        tile_bytes=8,
        tile_label="work tile index",
        key_tile_bytes=16,
        packs_heads=True,
        has_smaller_tiles=True,
        splits_heads=True,
        orders_dq=True,
        converts_dq=True,
        has_equal_tiles=True,
        spares_registers=True,
    ),
    VarlenBatch: BatchTraits(
        tile_bytes=64,
        tile_label="work tile",
        key_tile_bytes=48,
        packs_heads=False,
        has_smaller_tiles=False,
        splits_heads=False,
        orders_dq=False,
        converts_dq=False,
        has_equal_tiles=False,
        spares_registers=False,
    ),
}


def batch_traits(spec: AttentionSpec) -> BatchTraits:
    """Returns the traits of a spec's batch layout."""
    return _TRAITS[type(batch_of(spec))]
