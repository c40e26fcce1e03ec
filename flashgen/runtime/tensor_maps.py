"""Tensor maps, which describe an array (batch, head, row, column) and the box of one copy to TMA."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flashgen.dtypes import DTYPES
from flashgen.errors import ArgumentError, LaunchError
from flashgen.runtime.caching import Cache
from flashgen.runtime.driver import driver
from flashgen.runtime.emulated_maps import encode_map

MAP_BYTES = 128
_ALIGNMENT = 64  # bytes: that of the memory that a map is encoded into
_ROW_ALIGNMENT = 16  # bytes
_STRIDE_LIMIT = 2**40  # bytes
_MAX_CACHED = 64  # maps of one shape, each of another address
_REMEDY = "copy it to a contiguous array, or compile for target='sm_90'"

# Values of the driver's enumerations (cuda.h).
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # by the bytes of a row of the box
_PROMOTIONS = {128: 2, 256: 3}  # by bytes
_NO_INTERLEAVE, _FILL_WITH_ZEROS = 0, 0


@dataclass(frozen=True)
class MapShape:
    """The content of a map except the address.

    Attributes:
        dtype: "float16" or "bfloat16".
        sizes: (columns, rows, heads, batch) or (columns, heads, rows, batch); or, for pages with several panels in one
            copy, (columns of a panel, rows of a group, panels of all heads, groups of a page, pages).
        strides: bytes between rows, heads and batches, in the order of the sizes; or between rows, panels, groups and
            pages.
        box: the size of one copy in the first dimensions; it is 1 in the others. The rows of the box, 32, 64 or 128
            bytes long, are swizzled.
        rows_before: the rows from the beginning of the map to the array's address. They are never read or written. Maps
            of varlen batches address each row in several ways, so that a tile can be clipped where its sequence ends.
        l2_promotion: the bytes that a copy fetches at a time into the L2.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    rows_before: int = 0
    l2_promotion: int = 256

    @property
    def shift(self) -> int:
        """The bytes from the beginning of the map to the array's address."""
        return self.rows_before * self.strides[0]

    @property
    def full_box(self) -> tuple[int, ...]:
        """The size of one copy in all dimensions."""
        return (*self.box, *[1] * (len(self.sizes) - len(self.box)))

    @property
    def swizzle_bytes(self) -> int:
        return self.box[0] * DTYPES[self.dtype].bytes

    @cached_property
    def _driver_arguments(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The driver's arguments before and after the address."""
        rank = len(self.sizes)
        after = (
            (ctypes.c_uint64 * rank)(*self.sizes),
            (ctypes.c_uint64 * (rank - 1))(*self.strides),
            (ctypes.c_uint32 * rank)(*self.full_box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            *(_NO_INTERLEAVE, _SWIZZLES[self.swizzle_bytes], _PROMOTIONS[self.l2_promotion], _FILL_WITH_ZEROS),
        )
        return (DTYPES[self.dtype].tensor_map, rank), after


def map_shape(
    name: str,
    dtype: str,
    sizes: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    box: tuple[int, ...],
    heads_first: bool = False,
) -> MapShape:
    """Returns the shape of a map of the array that the user calls `name`.

    sizes: (columns, rows, heads, batch), which may be 0. strides: in elements. heads_first: heads come before rows in
    the map and in `box`.

    Raises:
        ArgumentError: TMA does not support a stride, because it is negative, or 2**40 bytes or more.
    """
    itemsize = DTYPES[dtype].bytes
    dense, byte_strides = -(-sizes[0] * itemsize // _ROW_ALIGNMENT) * _ROW_ALIGNMENT, []
    for stride, size in zip(strides, sizes[1:], strict=True):
        in_bytes = stride * itemsize if size > 1 else dense  # TMA also checks strides of dimensions of size 1
        if not 0 <= in_bytes < _STRIDE_LIMIT:
            raise ArgumentError(
                f"{name} has strides (row, head, batch) of {strides} elements; TMA takes those from 0 to "
                f"2**{(_STRIDE_LIMIT // itemsize).bit_length() - 1}: {_REMEDY}"
            )
        byte_strides.append(in_bytes)
    columns, rows, heads, batch = (max(size, 1) for size in sizes)
    row, head, outer = byte_strides
    if heads_first:
        return MapShape(dtype, (columns, heads, rows, batch), (head, row, outer), box)
    return MapShape(dtype, (columns, rows, heads, batch), (row, head, outer), box)


def panel_map_shape(
    name: str,
    dtype: str,
    sizes: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    box: tuple[int, ...],
) -> MapShape:
    """Returns the shape of a map of pages for copies of several panels of columns.

    sizes: (columns, rows, heads, pages), which may be 0. strides: in elements. box: (columns of a panel, rows of a
    group, panels, groups).

    Raises:
        ArgumentError: TMA does not support a stride, or the distance of heads is no multiple of a panel.
    """
    head_panels = panels_between_heads(name, sizes, strides, box)
    (columns, rows, heads, pages), (panel, group, *_) = (max(size, 1) for size in sizes), box
    plain = map_shape(name, dtype, sizes, strides, box[:2])
    row, _, page = plain.strides
    map_sizes = (panel, group, (heads - 1) * head_panels + columns // panel, rows // group, pages)
    return MapShape(dtype, map_sizes, (row, panel * DTYPES[dtype].bytes, group * row, page), box)


def panels_between_heads(
    name: str, sizes: tuple[int, int, int, int], strides: tuple[int, int, int], box: tuple[int, ...]
) -> int:
    """Returns the distance of heads in panels, with the arguments of `panel_map_shape`.

    Raises ArgumentError if it is no integer.
    """
    columns, _, heads, _ = sizes
    between = strides[1] if heads > 1 else columns
    if between % box[0]:
        raise ArgumentError(
            f"{name} has heads {between} elements apart; over pages they must be multiples of {box[0]} apart: {_REMEDY}"
        )
    return between // box[0]


class MapMaker:
    """Encodes the driver's maps of arrays of one shape, and caches those of the last addresses."""

    def __init__(self, shape: MapShape) -> None:
        self.shape = shape
        self._maps: Cache[int, bytes] = Cache(_MAX_CACHED)

    def __call__(self, address: int) -> bytes:
        """Returns the 128 bytes of the map of the array at a GPU address. Raises as `tensor_map` does."""
        return self._maps.get_or_make(address, lambda: tensor_map(address, self.shape))


def tensor_map(address: int, shape: MapShape) -> bytes:
    """Encodes the 128 bytes of the driver's map of an array at a GPU address.

    Raises:
        LaunchError: there is no driver, or it rejects the map.
    """
    memory = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
    aligned = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    before, after = shape._driver_arguments
    status = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned), *before, ctypes.c_void_p(address - shape.shift), *after
    )
    if status:
        raise LaunchError(
            f"the driver does not take the tensor map of an array at {address:#x}: CUDA error {status} for {shape}; "
            f"{_REMEDY}"
        )
    return ctypes.string_at(aligned, MAP_BYTES)


def emulated_map(shape: MapShape) -> bytes:
    """Encodes the 128 bytes of the emulator's map. The first 8 are reserved for the array's address."""
    return encode_map(shape.dtype, shape.sizes, shape.strides, shape.full_box, shape.swizzle_bytes, shape.shift)
