"""Arrays of any library as kernels see them, and the allocation of results.

NumPy, CuPy and PyTorch arrays are read by their own attributes, JAX and all other arrays through DLPack or the CUDA
array interface. Strides are in elements. Nothing is copied, and no library is imported unless the caller has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter, methodcaller
from typing import Any, Protocol

import numpy as np

from flashgen.dtypes import numpy_dtype
from flashgen.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class View:
    """An array as a kernel sees it: address, shape, strides in elements, name of the dtype, GPU (None for the CPU)."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int | None
    owner: Any  # keeps the memory alive


class Maker(Protocol):
    """The type of `Library.maker`."""

    def __call__(
        self, shape: tuple[int, ...], dtype: str, device: int, strides: tuple[int, ...] | None = None, /
    ) -> Callable[[], Any]: ...


@dataclass(frozen=True, slots=True)
class Library:
    """The functions of an array library: read its arrays, allocate new ones, and find the current stream.

    Attributes:
        look: the fast path of each call. Returns a hashable value, which two arrays share only if they agree in
            library, shape, strides, dtype and device, and the address.
        view: returns a complete View, with errors that name the array.
        maker: takes (shape, dtype, device, strides), and returns a function that allocates a new array at each call,
            C-contiguous or with strides from `strides_like`.
        stream: returns the current stream of the device of an array.
        pools_for_graphs: whether memory that is allocated during a stream capture belongs to the graph while it lives.
        recogniser: takes arrays, and returns a function that tells whether other arrays agree with them in class,
            shape, strides, dtype and device; it holds no array. None if the library cannot do so.
    """

    name: str
    pointer: Callable[[Any], int]
    look: Callable[[Any], tuple[Any, int]]
    view: Callable[[Any, str], View]
    maker: Maker
    stream: Callable[[Any], int]
    pools_for_graphs: bool
    recogniser: Callable[[Sequence[Any]], Callable[..., bool] | None] | None = None

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        """Allocates a C-contiguous array."""
        return self.maker(shape, dtype, device)()


def _element_strides(byte_strides: tuple[int, ...], itemsize: int, argument: str) -> tuple[int, ...]:
    if any(stride % itemsize for stride in byte_strides):
        raise ArgumentError(f"{argument}: strides {byte_strides} in bytes must be multiples of its {itemsize}")
    return tuple(stride // itemsize for stride in byte_strides)


def view_numpy(array: Any, argument: str) -> View:
    """Returns the view of a NumPy array, in host memory."""
    strides = _element_strides(array.strides, array.itemsize, argument)
    dtype = array.dtype.name if array.dtype.isnative else f"byte-swapped {array.dtype.name}"
    return View(array.ctypes.data, array.shape, strides, dtype, None, array)


def _look_cupy(array: Any) -> tuple[Any, int]:
    memory = array.data
    return (array.shape, array.strides, array.dtype, memory.device_id), memory.ptr


_describe_cupy = attrgetter("__class__", "shape", "strides", "dtype", "data.device_id")


def _recogniser_of_cupy(arrays: Sequence[Any]) -> Callable[..., bool]:
    """Returns a function that compares arrays with the descriptions of these."""
    described = [*map(_describe_cupy, arrays)]
    return lambda *others: [*map(_describe_cupy, others)] == described


def _view_cupy(array: Any, argument: str) -> View:
    strides = _element_strides(array.strides, array.itemsize, argument)
    return View(array.data.ptr, array.shape, strides, array.dtype.name, array.data.device_id, array)


def _view_torch(tensor: Any, argument: str) -> View:
    if tensor.is_meta:
        raise ArgumentError(f"{argument} is a torch tensor on meta, which has no elements; give one that is on a GPU")
    if not tensor.is_cuda:
        raise ArgumentError(f"{argument} is a torch tensor on {tensor.device}; move it to a GPU with .cuda()")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return View(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), dtype, tensor.device.index, tensor)


def _view_interface(array: Any, argument: str) -> View:
    """Returns the view of any array with DLPack or the CUDA array interface, read through CuPy."""
    cupy = _cupy()
    try:
        wrapped = cupy.asarray(array) if hasattr(array, "__cuda_array_interface__") else cupy.from_dlpack(array)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise ArgumentError(f"{argument} of type {type(array).__name__} is not readable on the GPU: {error}") from error
    view = _view_cupy(wrapped, argument)
    return View(view.pointer, view.shape, view.strides, view.dtype, view.device, (array, wrapped))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides in elements of a C-contiguous array."""
    strides, elements = [], 1
    for size in reversed(shape):
        strides.append(elements)
        elements *= max(size, 1)
    return tuple(reversed(strides))


def nesting(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the axes from the outermost to the innermost, by their strides; axes of equal strides keep their order.

    An axis of stride 0 keeps the position that it has in a C-contiguous array.
    """
    lengths = [abs(stride) for stride in strides]
    ordered: list[int] = []
    for axis, length in enumerate(lengths):
        if length:  # not `sorted`, which torch.compile does not support for symbolic sizes
            ordered.insert(len([other for other in ordered if lengths[other] >= length]), axis)
    outermost_first = iter(ordered)
    return tuple([next(outermost_first) if length else axis for axis, length in enumerate(lengths)])


def inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the inverse of a permutation."""
    return tuple(axes.index(axis) for axis in range(len(axes)))


def strides_like(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides in elements of a dense array with the axis order in memory of the strides `like`.

    A model splits one product into q, k and v, and transposes heads and rows. An output with the same axis order is
    reshaped to the input of the next layer without a copy.
    """
    order = nesting(like)
    strides = contiguous_strides(tuple(shape[axis] for axis in order))
    return tuple(strides[position] for position in inverse(order))


def byte_strides(view: View) -> tuple[int, ...]:
    """Returns the strides in bytes; 0 for an axis of one element, which is read at index 0 only."""
    itemsize = numpy_dtype(view.dtype).itemsize
    return tuple(0 if size == 1 else stride * itemsize for size, stride in zip(view.shape, view.strides, strict=True))


def _empty(
    empty: Callable[..., Any], shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None
) -> Callable[[], Any]:
    """Returns a function that allocates arrays by an `empty` function of shape and dtype."""
    element = numpy_dtype(dtype)
    if strides is None or strides == contiguous_strides(shape):
        return partial(empty, shape, element)
    order = nesting(strides)
    outermost_first, back = tuple(shape[axis] for axis in order), inverse(order)
    return lambda: empty(outermost_first, element).transpose(back)


def _maker_of_numpy(
    shape: tuple[int, ...], dtype: str, _device: int, strides: tuple[int, ...] | None = None
) -> Callable[[], Any]:
    return _empty(np.empty, shape, dtype, strides)


def _maker_of_cupy(
    shape: tuple[int, ...], dtype: str, _device: int, strides: tuple[int, ...] | None = None
) -> Callable[[], Any]:
    return _empty(_cupy().empty, shape, dtype, strides)  # on the current device, which is that of the call


def _maker_on_legacy_stream(
    shape: tuple[int, ...], dtype: str, device: int, strides: tuple[int, ...] | None = None
) -> Callable[[], Any]:
    """Allocates on the legacy stream: CuPy reuses memory in the order of the stream that was current at allocation."""
    make = _maker_of_cupy(shape, dtype, device, strides)

    def make_on_legacy_stream() -> Any:
        with _cupy().cuda.Stream.null:
            return make()

    return make_on_legacy_stream


class _GraphMemory:
    """Memory that a graph allocates and frees at each replay. Created and dropped while its stream is captured."""

    def __init__(self, size: int, stream: int) -> None:
        self._free, self._stream = _cupy().cuda.runtime.freeAsync, stream
        self.pointer = int(_cupy().cuda.runtime.mallocAsync(size, stream))

    def __del__(self) -> None:
        self._free(self.pointer, self._stream)


def _maker_of_graph(
    stream: int, shape: tuple[int, ...], dtype: str, device: int, _strides: tuple[int, ...] | None = None
) -> Callable[[], Any]:
    """Allocates C-contiguous workspaces that belong to a captured graph."""
    cuda, size = _cupy().cuda, max(math.prod(shape), 1) * numpy_dtype(dtype).itemsize

    def make() -> Any:
        owner = _GraphMemory(size, stream)
        memory = cuda.UnownedMemory(owner.pointer, size, owner, device)
        return _cupy().ndarray(shape, numpy_dtype(dtype), cuda.MemoryPointer(memory, 0))

    return make


def _maker_of_torch(
    shape: tuple[int, ...], dtype: str, device: int, strides: tuple[int, ...] | None = None
) -> Callable[[], Any]:
    """Allocates by `empty_strided`, which is faster than `torch.empty`.

    An undocumented function, which compiled graphs use, skips torch's dispatcher and is faster still. It allocates on
    the current device, which is that of the call. Versions of torch without it use the public function.
    """
    import torch

    strides, element = strides or contiguous_strides(shape), getattr(torch, dtype)
    undispatched = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)
    if undispatched is not None:
        return partial(undispatched, shape, strides, element)
    return partial(torch.empty_strided, shape, strides, dtype=element, device=torch.device("cuda", device))


def _stream_cupy(_like: Any) -> int:
    return int(_cupy().cuda.get_current_stream().ptr)


def _stream_torch(like: Any) -> int:
    return _raw_stream_of_torch()(like.get_device())


@cache
def _raw_stream_of_torch() -> Callable[[int], int]:
    """Returns a function that returns the handle of torch's current stream of a device.

    `torch.cuda.current_stream` creates an object, which takes more time than all other uses of torch in a call. The
    function that compiled graphs use instead is not documented; versions of torch without it use the public one.
    """
    import torch

    raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw_stream or (lambda device: int(torch.cuda.current_stream(device).cuda_stream))


def _recogniser_of_torch(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """Returns a function that recognises tensors by the guards of compiled graphs.

    They also compare whether a gradient is required. They are not documented: None if this version of torch has none,
    or if a tensor is given twice, which guards never accept.
    """
    import torch

    guards = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
    if guards is None or len({*map(id, tensors)}) < len(tensors):
        return None
    sizes = [list(tensor.shape) for tensor in tensors]
    strides = [list(tensor.stride()) for tensor in tensors]
    recognises: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return recognises


@cache
def _cupy() -> Any:
    import cupy

    return cupy


NUMPY = Library(
    "numpy",
    lambda array: int(array.ctypes.data),
    lambda array: ((array.shape, array.strides, array.dtype), int(array.ctypes.data)),
    view_numpy,
    _maker_of_numpy,
    lambda _like: 0,
    pools_for_graphs=True,  # NumPy arrays are never part of a graph
)
CUPY = Library(
    "cupy",
    attrgetter("data.ptr"),
    _look_cupy,
    _view_cupy,
    _maker_of_cupy,
    _stream_cupy,
    pools_for_graphs=False,
    recogniser=_recogniser_of_cupy,
)
TORCH = Library(
    "torch",
    methodcaller("data_ptr"),
    lambda tensor: ((tensor.shape, tensor.stride(), tensor.dtype, tensor.device), tensor.data_ptr()),
    _view_torch,
    _maker_of_torch,
    _stream_torch,
    pools_for_graphs=True,
    recogniser=_recogniser_of_torch,
)


def _through_cupy(name: str, stream: Callable[[Any], int], maker: Callable[..., Any]) -> Library:
    """Returns a library that reads its arrays and allocates its results through CuPy."""

    def look(array: Any) -> tuple[Any, int]:
        view = _view_interface(array, "an array")
        return (name, view.shape, view.strides, view.dtype, view.device), view.pointer

    def pointer(array: Any) -> int:
        return _view_interface(array, "an array").pointer

    return Library(name, pointer, look, _view_interface, maker, stream, pools_for_graphs=False)


JAX = _through_cupy("jax", lambda _like: 0, _maker_on_legacy_stream)  # the stream on which JAX arrays are ready
OTHER = _through_cupy("other", _stream_cupy, _maker_of_cupy)


@dataclass(frozen=True, slots=True)
class OfBytes:
    """A GPU array of a dtype that CuPy does not have: a CuPy array of its bytes, and the name of the dtype."""

    bytes_: Any
    dtype: str


def _look_of_bytes(array: OfBytes) -> tuple[Any, int]:
    described, pointer = _look_cupy(array.bytes_)
    return (array.dtype, described), pointer


OF_BYTES = Library(
    "bytes",
    lambda array: CUPY.pointer(array.bytes_),
    _look_of_bytes,
    lambda array, argument: replace(_view_cupy(array.bytes_, argument), dtype=array.dtype),
    _maker_of_cupy,
    _stream_cupy,
    pools_for_graphs=False,
)


def on_gpu(array: np.ndarray[Any, Any]) -> Any:
    """Copies a NumPy array to the current GPU: to a CuPy array, or to OfBytes for dtypes that CuPy does not have."""
    if array.dtype.name.startswith("float8"):
        return OfBytes(_cupy().asarray(array.view(np.uint8)), array.dtype.name)
    return _cupy().asarray(array)


def of_graph(library: Library, stream: int) -> Library:
    """Returns the library for workspaces of one call on a stream that is being captured.

    CuPy's pool would give such memory to others as soon as the call has returned, although every replay of the graph
    writes to it. The graph therefore gets memory of its own. torch has a pool for each graph.
    """
    return library if library.pools_for_graphs else replace(library, maker=partial(_maker_of_graph, stream))


_BY_MODULE = {"numpy": NUMPY, "cupy": CUPY, "torch": TORCH, "jaxlib": JAX, "jax": JAX}
_BY_TYPE: dict[type, Library] = {OfBytes: OF_BYTES}


def library_of(array: Any, argument: str) -> Library:
    """Returns the library of an array. Raises ArgumentError for objects that no kernel can read."""
    found = _BY_TYPE.get(type(array))
    if found is None:
        found = _BY_TYPE[type(array)] = _library_of_type(array, argument)
    return found


def _library_of_type(array: Any, argument: str) -> Library:
    for cls in type(array).__mro__:
        library = _BY_MODULE.get(cls.__module__.partition(".")[0])
        if library and not isinstance(array, np.generic):
            _check_class(library, array, argument)
            return library
    if hasattr(array, "__cuda_array_interface__") or hasattr(array, "__dlpack__"):
        return OTHER
    raise ArgumentError(
        f"{argument} of type {type(array).__name__} is not an array; give a NumPy, CuPy, PyTorch or JAX array, or one "
        "that speaks DLPack or the CUDA array interface"
    )


def _check_class(library: Library, array: Any, argument: str) -> None:
    """Raises ArgumentError for classes of arrays with elements that their memory alone does not determine."""
    kind = type(array)
    if library is NUMPY and isinstance(array, np.ma.MaskedArray):
        raise ArgumentError(
            f"{argument} is a masked array of NumPy, whose mask no kernel reads: give {argument}.filled(value), or "
            f"{argument}.data where the mask does not matter"
        )
    if library is TORCH and (overrides_functions(kind) or overrides_operators(kind)):
        raise ArgumentError(
            f"{argument} of type {kind.__module__}.{kind.__name__} is no plain tensor of torch, whose memory kernels "
            "could read: give a torch.Tensor"
        )
    if library is JAX and _is_traced(array):
        raise ArgumentError(
            f"{argument} is traced by JAX and has no memory: inside jax.jit, grad or vmap call "
            "flashgen.jax.attention(attention, q, k, v) in place of attention(q, k, v)"
        )


def _is_traced(array: Any) -> bool:
    """Whether JAX traces an array."""
    import jax

    return isinstance(array, jax.core.Tracer)


def overrides_functions(kind: Any) -> bool:
    """Whether a tensor class overrides torch's functions, as masked and nested tensors do."""
    import torch

    functions: Any = [each.__torch_function__ for each in (kind, torch.Tensor)]
    own, plain = (getattr(function, "__func__", function) for function in functions)
    return own is not plain and own is not torch._C._disabled_torch_function_impl


def overrides_operators(kind: Any) -> bool:
    """Whether a tensor class overrides torch's operators, as fake and distributed tensors do, which have no memory."""
    import torch

    return getattr(kind, "__torch_dispatch__", None) is not getattr(torch.Tensor, "__torch_dispatch__", None)


def give_back(library: Library, results: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns results of the library's maker as arrays of the library: those for JAX are CuPy arrays before."""
    if library is not JAX:
        return results
    import jax

    return {name: jax.dlpack.from_dlpack(array) for name, array in results.items()}
