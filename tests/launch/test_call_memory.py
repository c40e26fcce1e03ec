"""ArraySpec of a call: on a GPU one allocation, whose arrays are disjoint, aligned, and zeroed where needed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from flashgen.launch import memory
from flashgen.launch.argument_writer import Addresses
from flashgen.launch.memory import ArraySpec, GpuWorkspace, SeparateArrays
from flashgen.runtime import gpu
from flashgen.runtime.arrays import CUPY, NUMPY, TORCH, Library

ARRAYS = {
    "odd": ArraySpec((3, 5), "float32"),
    "sums": ArraySpec((7,), "int64", zeroed=True),
    "nothing": ArraySpec((2, 0), "int32"),
    "last": ArraySpec((1,), "int32"),
}


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(gpu, "clear", lambda *given: found.append(given))
    return found


def on_host() -> tuple[Library, list[np.ndarray[Any, Any]]]:
    """A mock GPU library with host memory, which records requests."""
    made: list[np.ndarray[Any, Any]] = []

    def maker(shape: tuple[int, ...], dtype: str, device: int) -> Any:
        assert (dtype, device) == ("uint8", 1)

        def make() -> np.ndarray[Any, Any]:
            made.append(np.empty(shape, dtype))
            return made[-1]

        return make

    return replace(NUMPY, maker=maker), made


def test_arrays_of_a_block_are_disjoint_and_aligned(cleared: list[tuple[Any, ...]]) -> None:
    library, made = on_host()
    block, taken = GpuWorkspace(ARRAYS, library, 1), Addresses(q=64)
    assert not made, "memory belongs to a call, not to a plan"
    block.take(taken, stream=7)
    (array,) = made
    begin = array.ctypes.data
    parts = sorted((taken[name] - begin, each.bytes) for name, each in ARRAYS.items())
    assert all(at % 256 == 0 for at, _ in parts) and parts[-1][0] + parts[-1][1] <= array.size
    assert all(at + size <= after for (at, size), (after, _) in pairwise(parts))
    assert taken["q"] == 64 and taken.owners == (array,)
    assert cleared == [(taken["sums"], (7,), (8,), 8, 7, 1)]


def test_each_call_keeps_its_block_while_its_addresses_live(cleared: list[tuple[Any, ...]]) -> None:
    library, made = on_host()
    block, first, second = GpuWorkspace(ARRAYS, library, 1), Addresses(), Addresses()
    for taken in (first, second):
        block.take(taken, 0)
    assert len(made) == 2 and first["last"] != second["last"] and first.owners[0] is not second.owners[0]
    assert Addresses().owners == ()


def test_empty_arrays_have_memory_too() -> None:
    library, made = on_host()
    taken = Addresses()
    GpuWorkspace({"nothing": ArraySpec((0,), "int32")}, library, 1).take(taken, 0)
    assert taken["nothing"] == made[0].ctypes.data and made[0].size == 1


@pytest.mark.parametrize("library", [CUPY, TORCH], ids=lambda library: library.name)
@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
def test_memory_of_a_graph_comes_from_the_graphs_pool(
    library: Library, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has pools for graphs and is not asked whether one is active; a graph must take nothing from CuPy's pool."""
    asked: list[int] = []
    own, made = on_host()
    like = replace(own, pools_for_graphs=library.pools_for_graphs)
    graphs, made_in_graphs = on_host()

    def is_capturing(stream: int) -> bool:
        asked.append(stream)
        return captured

    monkeypatch.setattr(gpu, "is_capturing", is_capturing)
    monkeypatch.setattr(memory, "of_graph", lambda library, stream: graphs)
    taken = Addresses()
    GpuWorkspace({"last": ARRAYS["last"]}, like, 1).take(taken, 7)
    assert asked == ([7] if library is CUPY else [])
    of_graph = captured and library is CUPY
    assert (len(made_in_graphs), len(made)) == ((1, 0) if of_graph else (0, 1))
    assert taken["last"] == (made_in_graphs if of_graph else made)[0].ctypes.data


def test_the_emulator_allocates_each_array_separately() -> None:
    taken: dict[str, Any] = {}
    SeparateArrays(ARRAYS).take(taken, 0)
    assert {name: (array.shape, array.dtype.name) for name, array in taken.items()} == {
        name: (each.shape, each.dtype) for name, each in ARRAYS.items()
    }
    assert not taken["sums"].any() and all(array.base is None for array in taken.values())
    unwritten = [array for name, array in taken.items() if not ARRAYS[name].zeroed]
    assert unwritten and all((array.reshape(-1).view(np.uint8) == 0xFF).all() for array in unwritten)
