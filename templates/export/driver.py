"""The CUDA driver API through ctypes: it loads cubins, encodes tensor maps and launches kernels."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

_LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")
_DEFAULT_SHARED_BYTES = 48 * 1024  # a kernel must request more dynamic shared memory than this

# Values of enumerations of cuda.h.
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # of CUfunction_attribute
_MAP_DTYPES = {"float16": 6, "bfloat16": 9}
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # by the bytes of a row of the box
_PROMOTIONS = {128: 2, 256: 3}  # to the L2, by bytes
_NO_INTERLEAVE, _FILL_WITH_ZEROS = 0, 0
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # of CUlaunchAttributeID
_PROGRAMMATIC_DRIVER = 12030  # captures programmatic dependent launches into CUDA graphs

MAP_BYTES, _MAP_ALIGNMENT = 128, 64


@functools.lru_cache(maxsize=None)
def library() -> Any:
    """Returns NVIDIA's driver. Raises RuntimeError if there is none."""
    for name in _LIBRARIES:
        try:
            found = ctypes.CDLL(name)
        except OSError:
            continue
        found.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
        return found
    raise RuntimeError("these kernels need an NVIDIA GPU and its driver, and the driver library libcuda was not found")


def call(function: str, *arguments: Any) -> None:
    """Calls a function of the driver. Raises RuntimeError with CUDA's description if it fails."""
    _check(function, getattr(library(), function)(*arguments))


def _check(function: str, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        library().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{function}: CUDA error {status}, {(text.value or b'unknown').decode()}")


def check_device(tensor: torch.Tensor) -> None:
    """Raises RuntimeError for a tensor that is not on an NVIDIA GPU."""
    if tensor.is_cuda and torch.version.cuda is not None:
        return
    here = "" if torch.cuda.is_available() else "; torch finds no CUDA GPU on this machine"
    raise RuntimeError(f"q is on {tensor.device}: these kernels run on NVIDIA GPUs, move q, k and v to one{here}")


def on(device: torch.device) -> Any:
    """Returns a context manager that makes a device the current one."""
    return _AS_IT_IS if _current_device() == device.index else torch.cuda.device(device)


def allocator(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """Returns a function that allocates such tensors on a device, which must be the current one when it is called."""
    if device.type == "cuda" and _empty_strided is not None:
        return functools.partial(_empty_strided, shape, strides, dtype)
    return functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


class _Thread(threading.local):
    """What a thread has: the devices whose context it has made current, and the identity of its own stream."""

    def __init__(self) -> None:
        self.devices: set[int] = set()
        self.stream = object()


# Private functions of torch that do less than the public ones, which replace them in versions without them.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty_strided = getattr(_guards, "_empty_strided_cuda", None)

_AS_IT_IS = contextlib.nullcontext()
_LEGACY, _PER_THREAD = (0, 1), 2  # handles of the default stream, and of cudaStreamPerThread
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_thread = _Thread()


def current_stream(device: torch.device) -> int:
    """Returns the handle of torch's current stream on a device."""
    return _raw_stream(device.index) if _raw_stream else int(torch.cuda.current_stream(device).cuda_stream)


def identity(stream: int) -> Hashable:
    """Returns a value that two launches share only if they are on the same stream, so that one follows the other.

    A handle is no identity: that of a destroyed stream may be reused while its work still runs. The default stream has
    two handles, which are never reused, and cudaStreamPerThread is a stream of each thread.
    """
    if stream in _LEGACY:
        return _LEGACY
    if stream != _PER_THREAD:
        number = ctypes.c_uint64()
        call("cuStreamGetId", ctypes.c_void_p(stream), ctypes.byref(number))
        return number.value
    return _thread.stream  # ids of threads are reused, too


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


@functools.lru_cache(maxsize=None)
def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of a device."""
    return torch.cuda.get_device_capability(device)


@functools.lru_cache(maxsize=None)
def multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(maxsize=None)
def _context(index: int) -> ctypes.c_void_p:
    """Returns the primary context of a device, which torch uses too."""
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), index)
    return context


def _make_current(index: int) -> None:
    """Makes the context of the current device that of this thread, which torch may not have done yet."""
    if index not in _thread.devices:
        call("cuCtxSetCurrent", _context(index))
        _thread.devices.add(index)


def allocate_zeros(count: int, device: torch.device, stream: int) -> int:
    """Returns the address of `count` 32-bit zeros that later launches on the stream may use. They are never freed."""
    _make_current(device.index)
    address, mode = ctypes.c_uint64(), ctypes.c_int(_RELAXED)
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))  # another thread may be capturing a CUDA graph
    try:
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4 * count))
        call("cuMemsetD32Async", address, 0, ctypes.c_size_t(count), ctypes.c_void_p(stream))
    finally:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    return address.value


class _Configuration(ctypes.Structure):
    """CUlaunchConfig: the numbers of blocks and of threads along x, y and z, shared memory, stream and attributes."""

    _fields_ = [
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("blocks", "threads") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with a number as its value."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


_PROGRAMMATIC = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)


@functools.lru_cache(maxsize=None)
def _version() -> int:
    """Returns the version of CUDA that the driver supports, such as 12030 for 12.3."""
    version = ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(version))
    return version.value


class Parameters:
    """The memory that the driver reads a launch from: its argument struct and its configuration. Used by one launch at
    a time.
    """

    def __init__(self, struct: bytes, grid: Sequence[int], threads: int, shared_bytes: int, programmatic: bool) -> None:
        memory = ctypes.create_string_buffer(struct, len(struct))
        self.struct = memoryview(memory).cast("B")
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
        self.address = ctypes.addressof(self._pointers)
        self.configuration = _Configuration(*grid, threads, 1, 1, shared_bytes)
        if programmatic and _version() >= _PROGRAMMATIC_DRIVER:
            self.configuration.attributes, self.configuration.count = ctypes.addressof(_PROGRAMMATIC), 1
        self.configuration_address = ctypes.addressof(self.configuration)


class Function:
    """A kernel in a cubin, which is loaded on each device when it is first launched there.

    programmatic: whether it may start before the previous kernel of the stream has finished, for which it waits itself.
    """

    def __init__(
        self, path: Any, sha256: str, entry: str, threads: int, shared_bytes: int, programmatic: bool = False
    ) -> None:
        self._path, self._sha256, self._entry = path, sha256, entry
        self._threads, self._shared_bytes, self._programmatic = threads, shared_bytes, programmatic
        self._handles: dict[int, int] = {}
        self._loading = threading.Lock()

    def parameters(self, struct: bytes, grid: Sequence[int]) -> Parameters:
        """Returns new memory for launches of a grid of blocks with an argument struct like this."""
        return Parameters(struct, grid, self._threads, self._shared_bytes, self._programmatic)

    def launch(self, parameters: Parameters, index: int, stream: int) -> None:
        """Launches on the current device. The driver copies the parameters before this returns."""
        _make_current(index)
        handle = self._handles.get(index) or self._load(index)
        parameters.configuration.stream = stream
        status = library().cuLaunchKernelEx(parameters.configuration_address, handle, parameters.address, None)
        if status:
            _check("cuLaunchKernelEx", status)

    def _load(self, index: int) -> int:
        with self._loading:
            if index not in self._handles:
                cubin = self._path.read_bytes()
                if hashlib.sha256(cubin).hexdigest() != self._sha256:
                    raise RuntimeError(f"{self._path} is not the file that was exported: export the package again")
                module, handle = ctypes.c_void_p(), ctypes.c_void_p()
                call("cuModuleLoadData", ctypes.byref(module), cubin)
                call("cuModuleGetFunction", ctypes.byref(handle), module, self._entry.encode())
                if self._shared_bytes > _DEFAULT_SHARED_BYTES:
                    call("cuFuncSetAttribute", handle, _MAX_DYNAMIC_SHARED_SIZE_BYTES, self._shared_bytes)
                self._handles[index] = handle.value or 0
            return self._handles[index]


def tensor_map(
    dtype: str,
    address: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
    promotion: int,
) -> bytes:
    """Returns the 128 bytes of the map by which TMA copies boxes of an array. strides: in bytes, without the first."""
    memory = ctypes.create_string_buffer(MAP_BYTES + _MAP_ALIGNMENT)
    aligned = -(-ctypes.addressof(memory) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
    rank = len(sizes)
    call(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(aligned),
        _MAP_DTYPES[dtype],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        *(_NO_INTERLEAVE, _SWIZZLES[swizzle], _PROMOTIONS[promotion], _FILL_WITH_ZEROS),
    )
    return ctypes.string_at(aligned, MAP_BYTES)
