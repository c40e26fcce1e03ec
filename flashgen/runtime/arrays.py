"""Arrays in and out: what a kernel needs to know about an array, whichever library made it.

NumPy, CuPy and PyTorch arrays are read by their own attributes, JAX's and all others through DLPack or the CUDA array
interface. Strides are in elements. Nothing is copied, and no library is imported that the caller has not imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter, methodcaller
from typing import Any, Protocol

import numpy as np

from flashgen.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class View:
    """An array as a kernel sees it: address, shape, strides in elements, name of the dtype, GPU (or None)."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int | None
    owner: Any  # keeps the memory alive


class Maker(Protocol):
    """What `Library.maker` is."""

    def __call__(
        self, shape: tuple[int, ...], dtype: str, device: int, strides: tuple[int, ...] | None = None, /
    ) -> Callable[[], Any]: ...


@dataclass(frozen=True, slots=True)
class Library:
    """An array library: how to look at its arrays, make one like another, and find the stream that uses them.

    `look` is the quick look at each array of every call: (a hashable value that two arrays share only if they agree in
    library, shape, strides, dtype and device; the address). `view` is the thorough one, with errors that name the
    array. `maker` is of (shape, dtype, device, strides): what makes such an array whenever it is called, C-contiguous
    or of strides that `strides_like` gave.
    `pools_for_graphs` says whether what is made while a stream is captured is the graph's as long as that lives.
    """

    name: str
    pointer: Callable[[Any], int]
    look: Callable[[Any], tuple[Any, int]]
    view: Callable[[Any, str], View]
    maker: Maker
    stream: Callable[[Any], int]
    pools_for_graphs: bool

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        """One such array."""
        return self.maker(shape, dtype, device)()


def _element_strides(byte_strides: tuple[int, ...], itemsize: int, argument: str) -> tuple[int, ...]:
    if any(stride % itemsize for stride in byte_strides):
        raise ArgumentError(f"{argument}: strides {byte_strides} in bytes must be multiples of its {itemsize}")
    return tuple(stride // itemsize for stride in byte_strides)


def view_numpy(array: Any, argument: str) -> View:
    """A NumPy array, in host memory."""
    strides = _element_strides(array.strides, array.itemsize, argument)
    dtype = array.dtype.name if array.dtype.isnative else f"byte-swapped {array.dtype.name}"
    return View(array.ctypes.data, array.shape, strides, dtype, None, array)


def _look_cupy(array: Any) -> tuple[Any, int]:
    memory = array.data
    return (array.shape, array.strides, array.dtype, memory.device_id), memory.ptr


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
    """Anything with DLPack or the CUDA array interface, viewed through CuPy."""
    cupy = _cupy()
    try:
        seen = cupy.asarray(array) if hasattr(array, "__cuda_array_interface__") else cupy.from_dlpack(array)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise ArgumentError(f"{argument} of type {type(array).__name__} is not readable on the GPU: {error}") from error
    view = _view_cupy(seen, argument)
    return View(view.pointer, view.shape, view.strides, view.dtype, view.device, (array, seen))


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of that name; bfloat16 and the float8s are ml_dtypes'."""
    if name.startswith(("bfloat16", "float8")):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous array."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


def nesting(strides: tuple[int, ...]) -> tuple[int, ...]:
    """The axes from the outermost to the innermost, by their strides; axes of equal strides keep their order.

    An axis of stride 0 has no place by its stride, and has the one that it has in a C-contiguous array.
    """
    lengths = [abs(stride) for stride in strides]
    placed: list[int] = []
    for axis, length in enumerate(lengths):
        if length:  # no sort, which torch.compile has not for sizes that are symbols
            placed.insert(len([other for other in placed if lengths[other] >= length]), axis)
    outermost_first = iter(placed)
    return tuple([next(outermost_first) if length else axis for axis, length in enumerate(lengths)])


def inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation that undoes one."""
    return tuple(axes.index(axis) for axis in range(len(axes)))


def strides_like(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of an array without gaps whose axes nest as those of strides `like` do.

    A model splits one product into q, k and v and swaps heads and rows; an output in that order is joined again without
    a copy.
    """
    order = nesting(like)
    made = contiguous_strides(tuple(shape[axis] for axis in order))
    return tuple(made[place] for place in inverse(order))


def byte_strides(view: View) -> tuple[int, ...]:
    """Strides in bytes; 0 for an axis of one element, which is read at index 0 only."""
    itemsize = numpy_dtype(view.dtype).itemsize
    return tuple(0 if size == 1 else stride * itemsize for size, stride in zip(view.shape, view.strides, strict=True))


def _empty(
    empty: Callable[..., Any], shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None
) -> Callable[[], Any]:
    """What makes arrays by a function of a shape and a dtype."""
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
    return _empty(_cupy().empty, shape, dtype, strides)  # on the current device, which is the call's


def _maker_on_legacy_stream(
    shape: tuple[int, ...], dtype: str, device: int, strides: tuple[int, ...] | None = None
) -> Callable[[], Any]:
    """CuPy reuses memory in the order of the stream that was current when it was taken."""
    make = _maker_of_cupy(shape, dtype, device, strides)

    def make_there() -> Any:
        with _cupy().cuda.Stream.null:
            return make()

    return make_there


class _MemoryOfGraph:
    """Memory that a graph takes and frees whenever it runs. Made and dropped while its stream is captured."""

    def __init__(self, size: int, stream: int) -> None:
        self._free, self._stream = _cupy().cuda.runtime.freeAsync, stream
        self.pointer = int(_cupy().cuda.runtime.mallocAsync(size, stream))

    def __del__(self) -> None:
        self._free(self.pointer, self._stream)


def _maker_of_graph(
    stream: int, shape: tuple[int, ...], dtype: str, device: int, _strides: tuple[int, ...] | None = None
) -> Callable[[], Any]:
    """Of what only launches use, which is C-contiguous."""
    cuda, size = _cupy().cuda, max(math.prod(shape), 1) * numpy_dtype(dtype).itemsize

    def make() -> Any:
        owner = _MemoryOfGraph(size, stream)
        memory = cuda.UnownedMemory(owner.pointer, size, owner, device)
        return _cupy().ndarray(shape, numpy_dtype(dtype), cuda.MemoryPointer(memory, 0))

    return make


def _maker_of_torch(
    shape: tuple[int, ...], dtype: str, device: int, strides: tuple[int, ...] | None = None
) -> Callable[[], Any]:
    """By `empty_strided`, with which torch is quicker than with `empty`.

    It is quicker still without a dispatch, on the current device, which is the call's: as compiled graphs make their
    memory, by a function that is not documented. A torch without that makes the same the long way.
    """
    import torch

    strides, element = strides or contiguous_strides(shape), getattr(torch, dtype)
    quick = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)
    if quick is not None:
        return partial(quick, shape, strides, element)
    return partial(torch.empty_strided, shape, strides, dtype=element, device=torch.device("cuda", device))


def _stream_cupy(_like: Any) -> int:
    return int(_cupy().cuda.get_current_stream().ptr)


def _stream_torch(like: Any) -> int:
    return _raw_stream_of_torch()(like.get_device())


@cache
def _raw_stream_of_torch() -> Callable[[int], int]:
    """torch's current stream of a device, as a handle.

    `torch.cuda.current_stream` makes an object of it, which takes more time than all else that a call asks of torch.
    What compiled graphs ask in its place is not documented; a torch without it is asked the long way, which says the
    same.
    """
    import torch

    quick: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return quick or (lambda device: int(torch.cuda.current_stream(device).cuda_stream))


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
    pools_for_graphs=True,  # which there are none of
)
CUPY = Library(
    "cupy",
    attrgetter("data.ptr"),
    _look_cupy,
    _view_cupy,
    _maker_of_cupy,
    _stream_cupy,
    pools_for_graphs=False,
)
TORCH = Library(
    "torch",
    methodcaller("data_ptr"),
    lambda tensor: ((tensor.shape, tensor.stride(), tensor.dtype, tensor.device), tensor.data_ptr()),
    _view_torch,
    _maker_of_torch,
    _stream_torch,
    pools_for_graphs=True,
)


def _through_cupy(name: str, stream: Callable[[Any], int], maker: Callable[..., Any]) -> Library:
    """A library whose arrays CuPy looks at, and whose outputs CuPy makes."""

    def look(array: Any) -> tuple[Any, int]:
        view = _view_interface(array, "an array")
        return (name, view.shape, view.strides, view.dtype, view.device), view.pointer

    def pointer(array: Any) -> int:
        return _view_interface(array, "an array").pointer

    return Library(name, pointer, look, _view_interface, maker, stream, pools_for_graphs=False)


JAX = _through_cupy("jax", lambda _like: 0, _maker_on_legacy_stream)  # on which JAX's arrays are ready
OTHER = _through_cupy("other", _stream_cupy, _maker_of_cupy)


@dataclass(frozen=True, slots=True)
class OfBytes:
    """An array on the GPU of a type that CuPy has not: CuPy's array of its bytes, and the name of the type."""

    bytes_: Any
    dtype: str


def _look_of_bytes(array: OfBytes) -> tuple[Any, int]:
    seen, pointer = _look_cupy(array.bytes_)
    return (array.dtype, seen), pointer


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
    """A copy of a NumPy array on the current GPU: CuPy's, or, of a type that CuPy has not, one of its bytes."""
    if array.dtype.name.startswith("float8"):
        return OfBytes(_cupy().asarray(array.view(np.uint8)), array.dtype.name)
    return _cupy().asarray(array)


def of_graph(library: Library, stream: int) -> Library:
    """The library, for arrays that only the launches of one call use, on a stream that is being captured.

    CuPy's pool gives such memory to others as soon as the call has returned, and every replay of the graph would write
    to it: the graph takes memory of its own. torch has a pool for each graph.
    """
    return library if library.pools_for_graphs else replace(library, maker=partial(_maker_of_graph, stream))


_BY_MODULE = {"numpy": NUMPY, "cupy": CUPY, "torch": TORCH, "jaxlib": JAX, "jax": JAX}
_BY_TYPE: dict[type, Library] = {OfBytes: OF_BYTES}


def library_of(array: Any, argument: str) -> Library:
    """The library of an array; ArgumentError for what no kernel can read."""
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
    """ArgumentError for a class of arrays of which the memory alone does not say what the elements are."""
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


def overrides_functions(kind: Any) -> bool:
    """Whether functions of torch mean something else for tensors of a class: those of a mask, or of several lengths."""
    import torch

    functions: Any = [each.__torch_function__ for each in (kind, torch.Tensor)]
    own, plain = (getattr(function, "__func__", function) for function in functions)
    return own is not plain and own is not torch._C._disabled_torch_function_impl


def overrides_operators(kind: Any) -> bool:
    """Whether a class of torch's tensors does itself what operators do: fake and distributed ones have no memory."""
    import torch

    return getattr(kind, "__torch_dispatch__", None) is not getattr(torch.Tensor, "__torch_dispatch__", None)


def give_back(library: Library, made: Mapping[str, Any]) -> Mapping[str, Any]:
    """Outputs that were made by the library, as the caller's kind of arrays."""
    if library is not JAX:
        return made
    import jax

    return {name: jax.dlpack.from_dlpack(array) for name, array in made.items()}
