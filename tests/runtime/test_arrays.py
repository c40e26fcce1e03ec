"""Array libraries: where memory is allocated, with a mock of CuPy, and which arrays are recognised."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashgen.dtypes import numpy_dtype
from flashgen.runtime import arrays
from flashgen.runtime.arrays import CUPY, JAX, OTHER, TORCH, Library


class MadeUpCuPy:
    """Records for each array the stream that was current at its allocation."""

    def __init__(self) -> None:
        self.current = 0x5560
        null = self.stream(0)
        self.cuda = SimpleNamespace(
            Stream=SimpleNamespace(null=null), get_current_stream=lambda: SimpleNamespace(ptr=self.current)
        )

    @contextmanager
    def stream(self, pointer: int) -> Iterator[None]:
        before, self.current = self.current, pointer
        yield
        self.current = before

    def empty(self, shape: tuple[int, ...], dtype: Any) -> int:
        return self.current


@pytest.mark.parametrize("library", [CUPY, JAX, OTHER], ids=lambda library: library.name)
def test_memory_is_allocated_on_the_stream_of_the_launch(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy reuses memory in the order of that stream; another stream would not wait for the launch."""
    made = MadeUpCuPy()
    monkeypatch.setattr(arrays, "_cupy", lambda: made)
    assert library.empty((3,), "float16", 0) == library.stream(None)
    assert made.current == 0x5560


def _cupy_array(
    cls: Any = None, device: int = 0, dtype: str = "float16", shape: Any = (4, 8), strides: Any = None
) -> Any:
    """Returns a CuPy array at an address that is never read, so that no GPU is needed."""
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(4096, 1024, None, device), 0)
    return (cls or cupy.ndarray)(shape, dtype, memory, strides=strides)


def test_arrays_of_cupy_are_recognised_by_what_a_launch_depends_on() -> None:
    cupy = pytest.importorskip("cupy")

    class Subclass(cupy.ndarray):
        pass

    others = [
        _cupy_array(shape=(8, 4)),
        _cupy_array(strides=(32, 2)),
        _cupy_array(dtype="int16"),
        _cupy_array(device=1),
        _cupy_array(Subclass),
    ]
    assert CUPY.recogniser
    recognises = CUPY.recogniser([_cupy_array(), _cupy_array(dtype="int32")])
    assert recognises(_cupy_array(), _cupy_array(dtype="int32"))
    assert not recognises(_cupy_array(dtype="int32"), _cupy_array())
    for other in others:
        assert not recognises(other, _cupy_array(dtype="int32"))


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "long"])
def test_torchs_stream_is_that_of_the_tensors_device(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each way in which torch versions return it."""
    streams = {0: 0x10, 1: 0x20}
    objects = SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=streams[device]))
    inside = SimpleNamespace(_cuda_getCurrentRawStream=streams.__getitem__) if quick else SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=objects, _C=inside))
    arrays._raw_stream_of_torch.cache_clear()
    try:
        found = [TORCH.stream(SimpleNamespace(get_device=lambda device=device: device)) for device in (0, 1)]
    finally:
        arrays._raw_stream_of_torch.cache_clear()
    assert found == [0x10, 0x20]


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "long"])
def test_memory_of_torch_is_contiguous_and_on_the_device(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each way in which torch versions allocate; nothing is allocated before it is needed."""
    made: list[tuple[Any, ...]] = []

    def empty_strided(shape: Any, strides: Any, dtype: Any, device: Any = "the current one") -> None:
        made.append((shape, strides, dtype, device))

    guards = SimpleNamespace(_empty_strided_cuda=empty_strided) if quick else SimpleNamespace()
    inside = SimpleNamespace(_dynamo=SimpleNamespace(guards=guards))
    torch = SimpleNamespace(_C=inside, float16="half", device=lambda *of: of, empty_strided=empty_strided)
    monkeypatch.setitem(sys.modules, "torch", torch)
    make = TORCH.maker((2, 0, 3), "float16", 1)
    assert not made
    make()
    assert made == [((2, 0, 3), (3, 3, 1), "half", "the current one" if quick else ("cuda", 1))]


def test_memory_of_a_graph_is_allocated_and_freed_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both happen during capture, so that the graph does it in each replay; torch does so by itself."""
    done: list[tuple[str, int, int]] = []
    runtime = SimpleNamespace(
        mallocAsync=lambda size, stream: done.append(("take", size, stream)) or 0x1000,
        freeAsync=lambda pointer, stream: done.append(("give back", pointer, stream)),
    )
    cuda = SimpleNamespace(
        runtime=runtime, UnownedMemory=lambda *given: given, MemoryPointer=lambda memory, offset: memory
    )
    made = SimpleNamespace(cuda=cuda, ndarray=lambda *given: given)
    monkeypatch.setattr(arrays, "_cupy", lambda: made)
    array = arrays.of_graph(CUPY, 7).empty((3, 5), "float32", 0)
    assert done == [("take", 60, 7)] and array[2][:2] == (0x1000, 60)
    del array
    assert done == [("take", 60, 7), ("give back", 0x1000, 7)]
    assert arrays.of_graph(TORCH, 7) is TORCH


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8", "bfloat16"])
def test_types_that_cupy_lacks_are_passed_as_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(SimpleNamespace):
        """Mimics CuPy's conversion of an array, which fails for 8-bit types."""

        def __init__(self, array: np.ndarray[Any, Any]) -> None:
            assert not array.dtype.name.startswith("float8"), f"Unsupported dtype {array.dtype.name}"
            memory = SimpleNamespace(ptr=4096, device_id=2)
            super().__init__(
                data=memory, shape=array.shape, strides=array.strides, dtype=array.dtype, itemsize=array.itemsize
            )

    OnGpu.__module__ = "cupy"
    monkeypatch.setattr(arrays, "_cupy", lambda: SimpleNamespace(asarray=OnGpu))
    array = np.zeros((3, 5, 16), numpy_dtype(name)).swapaxes(0, 1)
    there = arrays.on_gpu(array)
    library = arrays.library_of(there, "k")
    view = library.view(there, "k")
    itemsize = array.itemsize
    assert (view.dtype, view.shape, view.device, view.pointer) == (name, (5, 3, 16), 2, 4096)
    assert view.strides == tuple(stride // itemsize for stride in array.strides)
    look, pointer = library.look(there)
    assert pointer == library.pointer(there) == 4096 and name in str(look)
    assert (library is arrays.OF_BYTES) == name.startswith("float8")


def test_strides_of_a_contiguous_array() -> None:
    for shape in [(), (3,), (2, 3, 4), (2, 0, 4), (1, 5)]:
        array = np.empty(shape, np.float32)
        strides = arrays.contiguous_strides(shape)
        assert len(strides) == len(shape)
        if array.size:
            assert strides == tuple(stride // 4 for stride in array.strides)
