"""Python values as the argument struct of a kernel."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from flashgen.runtime.emulated_maps import encode_map
from hopper_kernels import TensorMap


def pack_arguments(values: tuple[Any, ...]) -> tuple[bytes, list[tuple[int, np.ndarray[Any, Any]]]]:
    """Returns a struct of the values with C's alignment: arrays are pointers, np.int64 long long, int int, float float.

    Tensor maps (of hopper_kernels.py) come first.
    """
    data, pointers, widest = b"", [], 1
    for value in values:
        if isinstance(value, TensorMap):
            pointers.append((len(data), value.array))
            data, widest = data + encode_map(value.dtype, value.sizes, value.byte_strides, value.box, value.swizzle), 64
            continue
        if isinstance(value, np.ndarray):
            field = bytes(8)
        elif isinstance(value, np.int64):
            field = struct.pack("<q", value)
        else:
            field = struct.pack("<f" if isinstance(value, float) else "<i", value)
        data += bytes(-len(data) % len(field))
        if isinstance(value, np.ndarray):
            pointers.append((len(data), value))
        data += field
        widest = max(widest, len(field))
    return data + bytes(-len(data) % widest), pointers
