"""Tensor maps in the emulator's format, which has the size of a GPU's."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from flashgen.dtypes import DTYPES
from flashgen.errors import LaunchError

# The same as TensorMapLayout in templates/emulator/tensor_map.h; change both together.
_EMULATED = struct.Struct("<QQ 4I 5I 5H 2x 4q q 24x")
_EMULATED_MAGIC = 0x3150414D54455247
_ELEMENTS = ("float16", "bfloat16", "float32")  # in the order of the emulator's numbers
_SWIZZLES = (0, 32, 64, 128)
_MAX_RANK, _LONGEST_BOX, _LINE = 5, 256, 16


def encode_map(
    dtype: str, sizes: Sequence[int], byte_strides: Sequence[int], box: Sequence[int], swizzle: int, shift: int = 0
) -> bytes:
    """Returns the emulator's map of an array. Its first 8 bytes are reserved for the array's address.

    Rejects the arguments that cuTensorMapEncodeTiled rejects, so that kernels behave the same on a GPU.

    Args:
        dtype: "float16", "bfloat16" or "float32".
        sizes: the elements of each dimension, the contiguous one first; 1 to 5 dimensions.
        byte_strides: the strides of all dimensions except the first.
        box: the elements of each dimension that one copy moves.
        swizzle: bytes of the swizzle pattern in shared memory: 0 (none), 32, 64 or 128.
        shift: bytes from the beginning of the map to the array's address, a multiple of 16.

    Raises:
        LaunchError: no GPU supports the arguments; the message gives the reason and the possible values.
    """
    if dtype not in _ELEMENTS:
        raise LaunchError(f"tensor map: the dtype must be one of {', '.join(_ELEMENTS)}, got {dtype!r}")
    element, itemsize = _ELEMENTS.index(dtype), DTYPES[dtype].bytes
    _check_shape(sizes, byte_strides, box)
    _check_row(box[0] * itemsize, swizzle)
    rank = len(sizes)
    return _EMULATED.pack(
        0,
        _EMULATED_MAGIC,
        *(rank, element, swizzle, 0),
        *_padded(sizes, _MAX_RANK, 1),
        *_padded(box, _MAX_RANK, 1),
        *_padded(byte_strides, _MAX_RANK - 1, 0),
        shift,
    )


def _padded(numbers: Sequence[int], count: int, rest: int) -> list[int]:
    return [*map(int, numbers), *[rest] * (count - len(numbers))]


def _check_shape(sizes: Sequence[int], byte_strides: Sequence[int], box: Sequence[int]) -> None:
    rank = len(sizes)
    if not (1 <= rank <= _MAX_RANK and len(box) == rank and len(byte_strides) == rank - 1):
        raise LaunchError(
            f"tensor map: 1 to {_MAX_RANK} sizes, as many of the box, one stride less; "
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
