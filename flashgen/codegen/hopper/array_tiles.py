"""Tiles of a captured array in shared memory, such as those of a dense bias or of an array of booleans as a mask.

Warps of the producer warpgroup copy a tile of queries and keys by cp.async, 16 bytes at a time, while the consumers
compute the tile before. Loads from global memory by the consumers would touch a cache line for each row of a fragment:
eight in an instruction, of which the L1 looks up one per cycle. Copies by TMA would need a tensor map at each launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashgen.codegen.demand import is_clipped
from flashgen.codegen.expressions.function_text import DEVICE_NAMES
from flashgen.codegen.expressions.row_elements import RowElement, paired_elements, paired_mask_elements
from flashgen.codegen.shared_memory import BYTE, Buffer, Extent, SharedMemoryLayout
from flashgen.language.operations import BATCH, QUERY, Load
from flashgen.language.spec import AttentionSpec

_MAX_STAGES = 2
_CHUNK_BYTES, _SWIZZLED_CHUNKS, _MAX_BYTES = 16, 8, 2
_SWIZZLE_BYTES = 256  # a multiple of the bytes of exchanged chunks


@dataclass(frozen=True)
class ArrayTile:
    """A tile of elements, with a row for each query.

    Attributes:
        element: the element that each score reads.
        tile_k: the keys of a tile.
    """

    element: RowElement
    tile_k: int

    @property
    def bytes(self) -> int:
        """Bytes of an element."""
        return self.element.bytes

    @property
    def address(self) -> str:
        """The text of the address of an element, given `position`, q and k."""
        return self.element.address(DEVICE_NAMES)

    @property
    def query_axis(self) -> int:
        """The axis of the array that the query indexes."""
        return list(self.element.load.indices).index(QUERY)

    @property
    def key_axis(self) -> int:
        """The axis that the key indexes: the last one."""
        return len(self.element.load.indices) - 1

    @property
    def of_all_sequences(self) -> bool:
        """Whether all sequences of a batch read the same elements."""
        return not self.element.load.has(BATCH)

    @property
    def swizzled(self) -> bool:
        """Whether chunks of a row are exchanged, in blocks of 8, so that those of a column are in different banks."""
        return self._chunks % _SWIZZLED_CHUNKS == 0

    @property
    def pitch(self) -> int:
        """Bytes between rows. Without a swizzle it is an odd number of chunks."""
        return (self._chunks if self.swizzled else self._chunks | 1) * _CHUNK_BYTES

    @property
    def row_lanes(self) -> int:
        """Threads that copy a row: as many as copy a cache line, if that divides the chunks."""
        return next(lanes for lanes in (8, 4, 2, 1) if self._chunks % lanes == 0)

    @property
    def _chunks(self) -> int:
        return self.tile_k * self.bytes // _CHUNK_BYTES

    def buffer(self, rows: Extent, stages: Extent) -> Buffer:
        """Returns the stages of tiles in shared memory."""
        shape, alignment = (rows, Extent("kArrayPitch", self.pitch)), _SWIZZLE_BYTES
        return Buffer(
            "Array", "elements of a captured array", shape, BYTE, stages, alignment=alignment, member="arrays"
        )


def array_tile(spec: AttentionSpec, tile_k: int) -> ArrayTile | None:
    """Returns the tile of the array that the scores of a spec read by query and key; None if there is no such array.

    Its elements have 16 bits at most, and are the only ones that are read for each score. One index is the query, the
    last one is the key, and the others depend on neither, so that rows are at equal distances.
    """
    if is_clipped(spec):
        return None
    elements = paired_elements(spec) or paired_mask_elements(spec)
    found = [each for each in elements if each.bytes <= _MAX_BYTES and _has_equal_rows(each)]
    return ArrayTile(found[0], tile_k) if found else None


def max_array_stages(layout: Callable[[int], SharedMemoryLayout], shared_bytes: int) -> int:
    """Returns the largest number of stages of a tile whose layout fits into shared memory; 0 if none fits.

    Args:
        layout: returns the layout of a CTA, given the number of stages.
        shared_bytes: the shared memory that a CTA can have.
    """
    return next((each for each in range(_MAX_STAGES, 0, -1) if layout(each).total_bytes <= shared_bytes), 0)


def _has_equal_rows(element: RowElement) -> bool:
    others = [index for index in element.load.indices[:-1] if index != QUERY]
    one_axis = len(others) == len(element.load.indices) - 2
    return one_axis and not any(index.has(QUERY, Load) for index in others)
