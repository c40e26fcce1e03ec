"""Runs the emulator's small kernels on a GPU: compiled for sm_90a, with tensor maps from the driver."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from flashgen.build.cache import default_cache
from flashgen.runtime.gpu import GpuKernel, Parameters, current_device
from flashgen.runtime.tensor_maps import MAP_BYTES
from hopper_kernels import TensorMap
from kernel_arguments import pack_arguments

# Values of the driver's enumerations (cuda.h).
DATA_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


def encode_for_gpu(tensor: TensorMap, pointer: int) -> bytes:
    """Returns the driver's map of an array whose copy on the GPU is at `pointer`."""
    memory = ctypes.create_string_buffer(MAP_BYTES + 64)
    at = -(-ctypes.addressof(memory) // 64) * 64
    rank, strides = len(tensor.sizes), [tensor.array.itemsize * tensor.sizes[0]]
    for size, given in zip(tensor.sizes[1:], tensor.byte_strides, strict=True):
        strides[-1] = given or strides[-1]  # NumPy gives new axes stride 0
        strides.append(strides[-1] * size)
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        DATA_TYPES[tensor.dtype],
        rank,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*tensor.sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides[: rank - 1]),
        (ctypes.c_uint32 * rank)(*tensor.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        *(0, SWIZZLES[tensor.swizzle], 0, 0),  # not interleaved, swizzle, no promotion, zeros outside
    )
    assert status == 0, f"cuTensorMapEncodeTiled: CUDA error {status} for {tensor.sizes}, box {tensor.box}"
    return ctypes.string_at(at, MAP_BYTES)


def run_on_gpu(
    source: str,
    name: str,
    *values: Any,
    block: tuple[int, int, int],
    shared: int,
    grid: tuple[int, int, int] = (1, 1, 1),
) -> None:
    """Runs like the emulator tests' `run`: arrays hold the results when this returns. They must be contiguous."""
    import cupy

    arguments, pointers = pack_arguments(values)
    struct = bytearray(arguments)
    copies: dict[int, tuple[np.ndarray[Any, Any], Any]] = {}  # by address: maps may describe them
    for _, array in pointers:
        data = array.reshape(-1).view(np.uint8)
        copies.setdefault(array.ctypes.data, (data, cupy.asarray(data)))
    maps = [value for value in values if isinstance(value, TensorMap)]
    for number, (offset, array) in enumerate(pointers):
        pointer = copies[array.ctypes.data][1].data.ptr
        if number < len(maps):  # maps come first
            struct[offset : offset + MAP_BYTES] = encode_for_gpu(maps[number], pointer)
        else:
            struct[offset : offset + 8] = pointer.to_bytes(8, "little")
    entry = default_cache().load_or_compile(name, source, "sm_90a")
    assert entry.resources.spill_stores == 0
    GpuKernel(entry.cubin, name, block[0], shared).launch(grid, Parameters(struct), 0, current_device())
    cupy.cuda.runtime.deviceSynchronize()
    for data, copy in copies.values():
        data[:] = cupy.asnumpy(copy)
