"""Loads kernels through CuPy and launches them on a GPU, on the caller's stream."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

from flashgen.errors import LaunchError
from flashgen.remedies import install_cuda
from flashgen.runtime.programmatic_launches import launcher


@cache
def cupy() -> Any:
    """Returns the module CuPy. Raises LaunchError, with a remedy, if it is missing."""
    try:
        import cupy
    except ImportError as error:
        raise LaunchError(
            f"CuPy is needed to run on a GPU: {install_cuda()}; emulate=True runs the same kernel on the CPU"
        ) from error
    return cupy


def compute_capability() -> tuple[int, int]:
    """Returns (major, minor) of the current GPU. Raises LaunchError if there is none."""
    module = cupy()
    try:
        device = module.cuda.Device()
        text = str(device.compute_capability)
    except module.cuda.runtime.CUDARuntimeError as error:
        raise LaunchError(
            f"no usable GPU: {error}; emulate=True runs the kernel on the CPU, target='sm_80' compiles without a GPU"
        ) from error
    return int(text[:-1]), int(text[-1])


_DEFAULT_SHARED_BYTES = 48 * 1024  # more dynamic shared memory must be requested


def current_device() -> int:
    """Returns the index of CuPy's current GPU."""
    return int(cupy().cuda.runtime.getDevice())


def is_capturing(stream: int) -> bool:
    """Whether a stream is being captured into a CUDA graph."""
    return bool(cupy().cuda.runtime.streamIsCapturing(stream))


@cache
def multiprocessors(device: int) -> int:
    """Returns the number of multiprocessors of a GPU."""
    return int(cupy().cuda.Device(device).attributes["MultiProcessorCount"])


@dataclass(frozen=True)
class Card:
    """A model of GPU that measurements are valid for: its name and its number of multiprocessors."""

    name: str
    multiprocessors: int


@cache
def card(device: int) -> Card:
    """Returns the model of a GPU."""
    properties = cupy().cuda.runtime.getDeviceProperties(device)
    return Card(properties["name"].decode(), multiprocessors(device))


class Parameters:
    """The memory that the driver reads a launch's parameter, one struct, from. Used by one launch at a time.

    Attributes:
        struct: the bytes of the struct, writable.
        address: the address of the array of pointers to parameters, as the driver takes it.
    """

    __slots__ = ("_pointers", "address", "struct")

    def __init__(self, struct: bytes | bytearray) -> None:
        memory = ctypes.create_string_buffer(bytes(struct), len(struct))
        self.struct = memoryview(memory).cast("B")
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
        self.address = ctypes.addressof(self._pointers)


class _Contexts(threading.local):
    """The devices that this thread has initialised: the driver API does not make a context current by itself."""

    def __init__(self) -> None:
        self.initialised: set[int] = set()


_contexts = _Contexts()


class GpuKernel:
    """A compiled kernel on the GPU, which takes one struct by value, with `shared_bytes` of dynamic shared memory."""

    def __init__(
        self, cubin: bytes, entry: str, threads: int, shared_bytes: int, programmatic_launch: bool = False
    ) -> None:
        self._cubin, self._entry = cubin, entry
        self._functions: dict[int, Any] = {}  # by device; each keeps its loaded module alive
        self._handles: dict[int, int] = {}  # of the functions, by device
        self._loading = threading.Lock()
        self._threads, self._shared_bytes = threads, shared_bytes
        cuda = cupy().cuda
        self._start = launcher(cuda) if programmatic_launch else cuda.driver.launchKernel

    def launch(self, grid: tuple[int, int, int], parameters: Parameters, stream: int, device: int) -> None:
        """Starts a grid of blocks on a stream of the current device. The struct is copied before this returns.

        Uses CuPy's wrapper of the driver API, because launches through CuPy's functions create objects for arguments.
        """
        handle = self._handles.get(device) or self._handle(device)
        if device not in _contexts.initialised:
            cupy().cuda.runtime.memGetInfo()  # any call of the runtime API makes the context current
            _contexts.initialised.add(device)
        self._start(handle, *grid, self._threads, 1, 1, self._shared_bytes, stream, parameters.address, 0)

    def _handle(self, device: int) -> int:
        with self._loading:  # a second copy would unload code that may still run when it is dropped
            if device not in self._handles:
                function = self._functions[device] = self._load()
                self._handles[device] = int(function.ptr)
            return self._handles[device]

    def _load(self) -> Any:
        """Loads the kernel on the current device from bytes that were checked; a file may have changed since then."""
        cuda = cupy().cuda
        module = cuda.function.Module()
        module.load(self._cubin)
        function = module.get_function(self._entry)
        if self._shared_bytes > _DEFAULT_SHARED_BYTES:
            attribute = cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            cuda.driver.funcSetAttribute(function.ptr, attribute, self._shared_bytes)
        return function


@dataclass(frozen=True)
class _ForeignStream:
    """A stream of any library, through the CUDA stream protocol."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


@cache
def stream_object(pointer: int) -> Any:
    """Returns a CuPy stream for a stream of any library, to launch on or to make current."""
    streams = cupy().cuda
    if hasattr(streams.Stream, "from_external"):
        return streams.Stream.from_external(_ForeignStream(pointer))
    return streams.ExternalStream(pointer)  # CuPy 13


def clear(
    pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, stream: int, device: int
) -> None:
    """Sets an array to 0 on a stream of the current device, without an allocation. Strides are in bytes."""
    if not all(shape):
        return
    module = cupy()
    memory = module.cuda.UnownedMemory(pointer, itemsize, None, device)
    array = module.ndarray(shape, f"u{itemsize}", module.cuda.MemoryPointer(memory, 0), strides)
    with stream_object(stream):
        array.fill(0)
