"""Kernels on a GPU: loaded through CuPy, launched on the caller's stream."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

from flashgen.errors import LaunchError
from flashgen.remedies import install_cuda


@cache
def cupy() -> Any:
    """CuPy; LaunchError, with the remedy, where it is missing."""
    try:
        import cupy
    except ImportError as error:
        raise LaunchError(
            f"CuPy is needed to run on a GPU: {install_cuda()}; emulate=True runs the same kernel on the CPU"
        ) from error
    return cupy


def compute_capability() -> tuple[int, int]:
    """(major, minor) of the current GPU; LaunchError where there is none."""
    module = cupy()
    try:
        device = module.cuda.Device()
        text = str(device.compute_capability)
    except module.cuda.runtime.CUDARuntimeError as error:
        raise LaunchError(
            f"no usable GPU: {error}; emulate=True runs the kernel on the CPU, target='sm_80' compiles without a GPU"
        ) from error
    return int(text[:-1]), int(text[-1])


_SHARED_BY_DEFAULT = 48 * 1024  # more dynamic shared memory must be asked for


def current_device() -> int:
    """The index of the GPU that CuPy uses now."""
    return int(cupy().cuda.runtime.getDevice())


def is_capturing(stream: int) -> bool:
    """Whether a stream is being captured into a CUDA graph."""
    return bool(cupy().cuda.runtime.streamIsCapturing(stream))


@cache
def multiprocessors(device: int) -> int:
    """How many multiprocessors a GPU has."""
    return int(cupy().cuda.Device(device).attributes["MultiProcessorCount"])


@dataclass(frozen=True)
class Card:
    """A kind of GPU, for which measurements hold: its name, and how many multiprocessors it has here."""

    name: str
    multiprocessors: int


@cache
def card(device: int) -> Card:
    """The kind of a GPU."""
    properties = cupy().cuda.runtime.getDeviceProperties(device)
    return Card(properties["name"].decode(), multiprocessors(device))


class Parameters:
    """The parameters of a launch, one struct, where the driver reads them. One launch at a time may use them.

    Attributes:
        struct: its bytes, to be written to.
        address: of the array of pointers to parameters that the driver takes.
    """

    __slots__ = ("_pointers", "address", "struct")

    def __init__(self, struct: bytes | bytearray) -> None:
        memory = ctypes.create_string_buffer(bytes(struct), len(struct))
        self.struct = memoryview(memory).cast("B")
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
        self.address = ctypes.addressof(self._pointers)


class _Contexts(threading.local):
    """The devices whose context this thread has made current at least once: the driver makes none by itself."""

    def __init__(self) -> None:
        self.made: set[int] = set()


_contexts = _Contexts()


class GpuKernel:
    """A compiled kernel on the GPU. It takes one struct by value, and `shared_bytes` of dynamic memory per block."""

    def __init__(self, cubin: bytes, entry: str, threads: int, shared_bytes: int) -> None:
        self._cubin, self._entry = cubin, entry
        self._functions: dict[int, Any] = {}  # by device: a binary is loaded anew for each, and unloaded when dropped
        self._handles: dict[int, int] = {}  # of the functions
        self._loading = threading.Lock()
        self._threads, self._shared_bytes = threads, shared_bytes
        self._start = cupy().cuda.driver.launchKernel

    def launch(self, grid: tuple[int, int, int], parameters: Parameters, stream: int, device: int) -> None:
        """Starts a grid of blocks on a stream of the current device. The struct is copied before this returns.

        CuPy's functions make objects of each launch's arguments; its wrapper of the driver takes them as they are.
        """
        handle = self._handles.get(device) or self._handle(device)
        if device not in _contexts.made:
            cupy().cuda.runtime.memGetInfo()  # a call of the runtime, which makes the context current
            _contexts.made.add(device)
        self._start(handle, *grid, self._threads, 1, 1, self._shared_bytes, stream, parameters.address, 0)

    def _handle(self, device: int) -> int:
        with self._loading:  # a second copy would unload, when dropped, code that may still run
            if device not in self._handles:
                function = self._functions[device] = self._load()
                self._handles[device] = int(function.ptr)
            return self._handles[device]

    def _load(self) -> Any:
        """The kernel on the current device, from the bytes that were checked: a file may have changed since."""
        cuda = cupy().cuda
        module = cuda.function.Module()
        module.load(self._cubin)
        function = module.get_function(self._entry)
        if self._shared_bytes > _SHARED_BY_DEFAULT:
            attribute = cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            cuda.driver.funcSetAttribute(function.ptr, attribute, self._shared_bytes)
        return function


@dataclass(frozen=True)
class _ForeignStream:
    """A stream of any library, by the CUDA stream protocol."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


@cache
def stream_object(pointer: int) -> Any:
    """CuPy's view of a stream of any library, to launch on or to make current."""
    streams = cupy().cuda
    if hasattr(streams.Stream, "from_external"):
        return streams.Stream.from_external(_ForeignStream(pointer))
    return streams.ExternalStream(pointer)  # CuPy 13


def clear(
    pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, stream: int, device: int
) -> None:
    """Sets an array to 0 on a stream of the current device, without allocating. Strides are in bytes."""
    if not all(shape):
        return
    module = cupy()
    memory = module.cuda.UnownedMemory(pointer, itemsize, None, device)
    array = module.ndarray(shape, f"u{itemsize}", module.cuda.MemoryPointer(memory, 0), strides)
    with stream_object(stream):
        array.fill(0)
