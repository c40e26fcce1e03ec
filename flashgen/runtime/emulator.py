"""Launches kernels on the CPU: in this process, or in a separate program if they are sanitized."""

from __future__ import annotations

import ctypes
import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashgen.build.host import HostKernel
from flashgen.errors import LaunchError
from flashgen.runtime import timeline
from flashgen.runtime.findings import failure_text
from flashgen.runtime.sanitized import Pointers, Size, launch_program
from flashgen.runtime.schedule import Schedule

_POINTER_BYTES = 8
_DEFAULT = Schedule()


@dataclass(frozen=True)
class EmulatorReport:
    """Statistics of a launch: CTAs run, switches between CUDA threads, collectives, copies issued, and seconds."""

    blocks: int
    switches: int
    collectives: int
    async_copies: int
    seconds: float


def launch(
    kernel: HostKernel,
    grid: Size,
    block: Size,
    shared_bytes: int,
    arguments: bytes,
    pointers: Pointers,
    schedule: Schedule = _DEFAULT,
) -> EmulatorReport:
    """Runs a kernel on the emulator. The launch is synchronous: arrays hold the results when this returns.

    A plain kernel runs in this process without memory protection, so an access out of bounds may crash the process. A
    kernel compiled with sanitize="address" runs in a separate process and reports such accesses.

    Args:
        kernel: the result of `flashgen.build.host.compile_host`.
        grid: blocks along x, y and z.
        block: threads along x, y and z.
        shared_bytes: bytes of dynamic shared memory of each block.
        arguments: the bytes of the kernel's argument struct.
        pointers: (byte offset in the struct, array) pairs; the address of the array's data is written there. Arrays may
            have any strides, as given in the struct. The kernel may access all bytes from the first to the last one.
        schedule: the order of threads and copies.

    Raises:
        LaunchError: the kernel failed (deadlock, divergence, out of bounds, ...) or a sanitizer reported an error; the
            message names the line of the emitted source.
    """
    _check(kernel, grid, block, shared_bytes, arguments, pointers)
    start = time.perf_counter()
    if kernel.mode == "plain":
        counts = _launch_in_process(kernel, grid, block, shared_bytes, arguments, pointers, schedule)
    else:
        counts = launch_program(kernel, grid, block, shared_bytes, arguments, pointers, schedule)
    return EmulatorReport(*counts, seconds=time.perf_counter() - start)


def _check(
    kernel: HostKernel, grid: Size, block: Size, shared_bytes: int, arguments: bytes, pointers: Pointers
) -> None:
    for name, size in (("grid", grid), ("block", block)):
        if len(size) != 3 or not all(0 < int(n) < 2**31 for n in size):
            raise LaunchError(f"{name} must be three positive numbers, got {tuple(size)}")
    if not 0 <= shared_bytes < 2**31:
        raise LaunchError(f"shared_bytes must be from 0 to 2**31 - 1, got {shared_bytes}")
    for offset, array in pointers:
        if not isinstance(array, np.ndarray):
            raise LaunchError(f"pointer at byte {offset} of the arguments: a NumPy array is needed, got {type(array)}")
        if not 0 <= offset <= len(arguments) - _POINTER_BYTES:
            raise LaunchError(f"pointer at byte {offset} is outside of the {len(arguments)} bytes of arguments")


class _Request(ctypes.Structure):
    """The same as LaunchRequest in templates/emulator/interface.h; change both together."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("argument_bytes", ctypes.c_uint32),
        ("arguments", ctypes.c_void_p),
        ("order", ctypes.c_uint32),
        ("copies", ctypes.c_uint32),
        ("workers", ctypes.c_uint32),
        ("failed", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("blocks", ctypes.c_uint64),
        ("switches", ctypes.c_uint64),
        ("collectives", ctypes.c_uint64),
        ("async_copies", ctypes.c_uint64),
        ("events", ctypes.c_void_p),
        ("event_capacity", ctypes.c_uint64),
        ("event_count", ctypes.c_uint64),
        ("message", ctypes.c_char * 8192),
    )


@functools.cache
def _entry_point(kernel: HostKernel) -> Any:
    """Returns the function that launches a kernel.

    If the cache was cleared before the library is loaded, its files are built again. Raises OSError if loading fails.
    """
    before = kernel.files()
    try:
        return _load(kernel.path, kernel.runtime)
    except OSError:
        if before is not None and kernel.files() == before:
            raise
    kernel = kernel.restored()
    return _load(kernel.path, kernel.runtime)


def _load(path: Path, runtime: Path) -> Any:
    ctypes.CDLL(str(runtime))  # the kernel then finds it by name, in any folder
    function = ctypes.CDLL(str(path)).flashgen_emulator_launch
    function.argtypes = (ctypes.POINTER(_Request),)
    function.restype = ctypes.c_int
    return function


_ARGUMENT_ALIGNMENT = 64  # that of a tensor map, the strictest of all struct members


def _aligned_copy(data: bytes) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """Copies bytes to aligned memory. Returns the object that owns the memory, and the address of the copy."""
    memory = ctypes.create_string_buffer(len(data) + _ARGUMENT_ALIGNMENT)
    address = -(-ctypes.addressof(memory) // _ARGUMENT_ALIGNMENT) * _ARGUMENT_ALIGNMENT
    ctypes.memmove(address, data, len(data))
    return memory, address


def _launch_in_process(
    kernel: HostKernel,
    grid: Size,
    block: Size,
    shared_bytes: int,
    arguments: bytes,
    pointers: Pointers,
    schedule: Schedule,
) -> tuple[int, int, int, int]:
    patched = bytearray(arguments)
    for offset, array in pointers:
        patched[offset : offset + _POINTER_BYTES] = array.ctypes.data.to_bytes(_POINTER_BYTES, "little")
    memory, address = _aligned_copy(bytes(patched))
    request = _Request(
        grid=tuple(grid),
        block=tuple(block),
        shared_bytes=shared_bytes,
        argument_bytes=len(arguments),
        arguments=address,
        order=schedule.order_index,
        copies=schedule.copies_index,
        workers=schedule.workers,
        seed=schedule.seed,
    )
    recorder = timeline.recorder()
    if recorder is not None:
        recorder.begin(kernel.name)
        request.events, request.event_capacity = recorder.buffer.ctypes.data, len(recorder.buffer)
    failed = _entry_point(kernel)(ctypes.byref(request))
    del memory
    if failed:
        raise LaunchError(failure_text(kernel, request.message.decode(errors="replace"), schedule))
    if recorder is not None:
        recorder.end(request.event_count)
    return request.blocks, request.switches, request.collectives, request.async_copies
