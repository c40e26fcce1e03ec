"""Tensor maps: they describe an array (batch, head, row, column), and the box that one copy moves, to TMA."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flashgen.errors import ArgumentError, LaunchError
from flashgen.runtime.caching import Cache
from flashgen.runtime.driver import driver
from flashgen.runtime.emulated_maps import encode_map

MAP_BYTES = 128
_ALIGNMENT = 64  # bytes, where a map is encoded
_ELEMENT_BYTES = 2
_ROW_ALIGNMENT = 16  # bytes
_STRIDE_LIMIT = 2**40  # bytes
_MAX_CACHED = 64  # maps of one shape, of arrays at as many addresses
_REMEDY = "copy it to a contiguous array, or compile for target='sm_90'"

# Values of the driver's enumerations (cuda.h).
_DATA_TYPES = {"float16": 6, "bfloat16": 9}
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # by the bytes of a box's row
_NO_INTERLEAVE, _PROMOTE_256_BYTES, _FILL_WITH_ZEROS = 0, 3, 0


@dataclass(frozen=True)
class MapShape:
    """All that a map says except the address.

    Attributes:
        dtype: "float16" or "bfloat16".
        sizes: columns, rows, heads, batch; or columns, heads, rows, batch; or, of pages whose panels are copied
            together, columns of a panel, rows of a group, panels of all heads, groups of a page, pages.
        strides: bytes from row to row, head to head, batch to batch, in the order of the sizes; or from row to row,
            panel to panel, group to group, page to page.
        box: how much of the first sizes one copy moves; it moves 1 of the others. Its rows, of 32, 64 or 128 bytes, are
            swizzled.
        rows_before: how many rows before the array's address the map begins. None of them is ever read or written:
            maps of ragged batches clip a tile where its sequence ends by reaching each row in several ways.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    rows_before: int = 0

    @property
    def shift(self) -> int:
        """Bytes from where the map begins to the array's address."""
        return self.rows_before * self.strides[0]

    @property
    def whole_box(self) -> tuple[int, ...]:
        """How much of each size one copy moves."""
        return (*self.box, *[1] * (len(self.sizes) - len(self.box)))

    @property
    def swizzle_bytes(self) -> int:
        return self.box[0] * _ELEMENT_BYTES

    @cached_property
    def _driver_arguments(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The driver's arguments before and after the address."""
        rank = len(self.sizes)
        after = (
            (ctypes.c_uint64 * rank)(*self.sizes),
            (ctypes.c_uint64 * (rank - 1))(*self.strides),
            (ctypes.c_uint32 * rank)(*self.whole_box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            *(_NO_INTERLEAVE, _SWIZZLES[self.swizzle_bytes], _PROMOTE_256_BYTES, _FILL_WITH_ZEROS),
        )
        return (_DATA_TYPES[self.dtype], rank), after


def map_shape(
    name: str,
    dtype: str,
    sizes: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    box: tuple[int, ...],
    heads_first: bool = False,
) -> MapShape:
    """The shape of a map of the array that the user calls `name`: strides in elements, sizes may be 0.

    sizes: columns, rows, heads, batch. heads_first: heads come before rows in the map, and in `box`.

    Raises:
        ArgumentError: TMA cannot walk along a stride: it is negative, or 2**40 bytes or more.
    """
    tight, whole = -(-sizes[0] * _ELEMENT_BYTES // _ROW_ALIGNMENT) * _ROW_ALIGNMENT, []
    for stride, size in zip(strides, sizes[1:], strict=True):
        in_bytes = stride * _ELEMENT_BYTES if size > 1 else tight  # TMA checks the stride of a size of 1 too
        if not 0 <= in_bytes < _STRIDE_LIMIT:
            raise ArgumentError(
                f"{name} has strides (row, head, batch) of {strides} elements; TMA takes those from 0 to 2**39: "
                f"{_REMEDY}"
            )
        whole.append(in_bytes)
    columns, rows, heads, batch = (max(size, 1) for size in sizes)
    if heads_first:
        return MapShape(dtype, (columns, heads, rows, batch), (whole[1], whole[0], whole[2]), box)
    return MapShape(dtype, (columns, rows, heads, batch), (whole[0], whole[1], whole[2]), box)


def panel_map_shape(
    name: str,
    dtype: str,
    sizes: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    box: tuple[int, ...],
) -> MapShape:
    """The shape of a map of pages of which one copy moves several panels; strides in elements, sizes may be 0.

    sizes: columns, rows, heads, pages. box: columns of a panel, rows of a group, panels, groups.

    Raises:
        ArgumentError: TMA cannot walk along a stride, or heads are no whole panels apart.
    """
    head_panels = panels_between_heads(name, sizes, strides, box)
    (columns, rows, heads, pages), (panel, group, *_) = (max(size, 1) for size in sizes), box
    plain = map_shape(name, dtype, sizes, strides, box[:2])
    row, _, page = plain.strides
    whole = (panel, group, (heads - 1) * head_panels + columns // panel, rows // group, pages)
    return MapShape(dtype, whole, (row, panel * _ELEMENT_BYTES, group * row, page), box)


def panels_between_heads(
    name: str, sizes: tuple[int, int, int, int], strides: tuple[int, int, int], box: tuple[int, ...]
) -> int:
    """From a head to the next, in panels; ArgumentError where that is no whole number. Arguments are as above."""
    columns, _, heads, _ = sizes
    between = strides[1] if heads > 1 else columns
    if between % box[0]:
        raise ArgumentError(
            f"{name} has heads {between} elements apart; over pages they must be multiples of {box[0]} apart: {_REMEDY}"
        )
    return between // box[0]


class MapMaker:
    """Makes the driver's maps of arrays of one shape, and remembers those of the last addresses."""

    def __init__(self, shape: MapShape) -> None:
        self.shape = shape
        self._made: Cache[int, bytes] = Cache(_MAX_CACHED)

    def __call__(self, address: int) -> bytes:
        """The 128 bytes of the map of the array at an address of the GPU's memory; raises what `tensor_map` raises."""
        return self._made.get_or_make(address, lambda: tensor_map(address, self.shape))


def tensor_map(address: int, shape: MapShape) -> bytes:
    """The 128 bytes of the driver's map of an array at an address of the GPU's memory.

    Raises:
        LaunchError: there is no driver, or it does not take the map.
    """
    memory = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
    at = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    before, after = shape._driver_arguments
    status = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), *before, ctypes.c_void_p(address - shape.shift), *after
    )
    if status:
        raise LaunchError(
            f"the driver does not take the tensor map of an array at {address:#x}: CUDA error {status} for {shape}; "
            f"{_REMEDY}"
        )
    return ctypes.string_at(at, MAP_BYTES)


def emulated_map(shape: MapShape) -> bytes:
    """The 128 bytes of the emulator's map; its first 8 are for the array's address."""
    return encode_map(shape.dtype, shape.sizes, shape.strides, shape.whole_box, shape.swizzle_bytes, shape.shift)
