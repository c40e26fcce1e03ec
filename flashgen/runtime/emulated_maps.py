"""Tensor maps for the emulator: they describe an array to its TMA, in as many bytes as a GPU's map has."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from flashgen.errors import LaunchError

# TensorMapLayout of templates/emulator/tensor_map.h; keep both alike.
_EMULATED = struct.Struct("<QQ 4I 5I 5H 2x 4q q 24x")
_EMULATED_MAGIC = 0x3150414D54455247
_ELEMENTS = {"float16": (0, 2), "bfloat16": (1, 2), "float32": (2, 4)}  # number, bytes
_SWIZZLES = (0, 32, 64, 128)
_MOST_RANKS, _LONGEST_BOX, _LINE = 5, 256, 16


def encode_map(
    dtype: str, sizes: Sequence[int], byte_strides: Sequence[int], box: Sequence[int], swizzle: int, shift: int = 0
) -> bytes:
    """The map of an array for the emulator; its first 8 bytes are for the array's address.

    Refuses what cuTensorMapEncodeTiled refuses, so that a kernel that runs here is not refused there.

    Args:
        dtype: "float16", "bfloat16" or "float32".
        sizes: elements of each dimension, the contiguous one first; 1 to 5 dimensions.
        byte_strides: the stride of every dimension but the first.
        box: how many elements of each dimension one copy takes.
        swizzle: bytes of the pattern in shared memory: 0 (none), 32, 64 or 128.
        shift: bytes from where the map begins to the array's address, a multiple of 16.

    Raises:
        LaunchError: no GPU could do that; the message says why, and which values are possible.
    """
    if dtype not in _ELEMENTS:
        raise LaunchError(f"tensor map: the dtype must be one of {', '.join(_ELEMENTS)}, got {dtype!r}")
    element, itemsize = _ELEMENTS[dtype]
    _check_shape(sizes, byte_strides, box)
    _check_row(box[0] * itemsize, swizzle)
    rank = len(sizes)
    return _EMULATED.pack(
        0,
        _EMULATED_MAGIC,
        *(rank, element, swizzle, 0),
        *_filled(sizes, _MOST_RANKS, 1),
        *_filled(box, _MOST_RANKS, 1),
        *_filled(byte_strides, _MOST_RANKS - 1, 0),
        shift,
    )


def _filled(numbers: Sequence[int], count: int, rest: int) -> list[int]:
    return [*map(int, numbers), *[rest] * (count - len(numbers))]


def _check_shape(sizes: Sequence[int], byte_strides: Sequence[int], box: Sequence[int]) -> None:
    rank = len(sizes)
    if not (1 <= rank <= _MOST_RANKS and len(box) == rank and len(byte_strides) == rank - 1):
        raise LaunchError(
            f"tensor map: 1 to {_MOST_RANKS} sizes, as many of the box, one stride less; "
            f"got sizes {tuple(sizes)}, strides {tuple(byte_strides)}, box {tuple(box)}"
        )
    for size in sizes:
        if not 0 < size < 2**32:
            raise LaunchError(f"tensor map: sizes must be from 1 to 2**32 - 1, got {tuple(sizes)}")
    for length in box:
        if not 0 < length <= _LONGEST_BOX:
            raise LaunchError(f"tensor map: a box has 1 to {_LONGEST_BOX} elements a side, got {tuple(box)}")
    for stride in byte_strides:
        if stride % _LINE or not 0 <= stride < 2**40:
            raise LaunchError(
                f"tensor map: strides must be multiples of {_LINE} bytes below 2**40, got {tuple(byte_strides)}"
            )


def _check_row(row_bytes: int, swizzle: int) -> None:
    if swizzle not in _SWIZZLES:
        raise LaunchError(f"tensor map: the swizzle must be one of {_SWIZZLES} bytes, got {swizzle}")
    if row_bytes % _LINE:
        raise LaunchError(f"tensor map: a row of the box must be a multiple of {_LINE} bytes, got {row_bytes}")
    if swizzle and row_bytes != swizzle:
        raise LaunchError(f"tensor map: a row of the box must have the swizzle's {swizzle} bytes, got {row_bytes}")
