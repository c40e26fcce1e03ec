"""A mock GPU, which runs the code that only calls on a GPU run, with kernels on the emulator.

It has a GPU's counters, tensor maps and addresses; the address of an array without elements is null, as in CuPy and
torch. As with CUDA, a launch without blocks is an error, and so is a tensor map that the driver would reject.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from by_address import AddressRunner, ByAddress
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.launch.argument_writer import Addresses
from flashgen.launch.engines import Launch, Place, ScalarArguments
from flashgen.runtime import counters, gpu, tensor_maps
from flashgen.runtime.arrays import NUMPY, Library, View
from flashgen.runtime.tensor_maps import MAP_BYTES

_MULTIPROCESSORS = 132
_MOST_BLOCKS = (2**31 - 1, 65535, 65535)
_ADDRESSES, _LINE, _STRIDES, _SIZES, _BOX = 2**48, 16, 2**40, 2**32, 256
_INVALID = 1  # CUDA_ERROR_INVALID_VALUE


def _view(array: Any, argument: str) -> View:
    view = NUMPY.view(array, argument)
    return view if array.size else replace(view, pointer=0)


def _pointer(array: Any) -> int:
    return NUMPY.pointer(array) if array.size else 0


ON_CARD = replace(NUMPY, view=_view, pointer=_pointer, look=lambda array: (NUMPY.look(array)[0], _pointer(array)))


class _CardRunner(AddressRunner):
    """Writes the argument struct, as a GPU's runner does, before the emulator runs the kernel."""

    def launch(self, launch: Launch, operands: Addresses, numbers: ScalarArguments, place: Place) -> None:
        fits = all(0 < blocks <= most for blocks, most in zip(launch.grid, _MOST_BLOCKS, strict=True))
        assert fits, f"CUDA rejects the grid {launch.grid}"
        launch.writer.write_into(launch.writer.template.copy(), operands, numbers)
        super().launch(launch, operands, numbers, place)


@dataclass(frozen=True)
class MadeUpCard(ByAddress):
    """A card with 132 multiprocessors."""

    def runner(self, kernel: RenderedKernel, prebuild: str) -> Any:
        return _CardRunner(super(ByAddress, self).runner(kernel, prebuild), self.known)

    def library(self, array: Any, argument: str) -> Library:
        super().library(array, argument)
        return ON_CARD

    def add_operands(self, arrays: Any, operands: Any) -> None:
        operands.update({name: _pointer(array) for name, array in arrays.items()})
        self.known.update({operands[name]: array for name, array in arrays.items()})

    def bind(self, arrays: Any) -> Any:
        operands = Addresses()
        self.add_operands(arrays, operands)
        return operands

    def multiprocessors(self, device: int) -> int:
        return _MULTIPROCESSORS

    def card(self, device: int) -> gpu.Card:
        return gpu.Card("made up", _MULTIPROCESSORS)

    def counter(self, place: Place, count: int) -> Any:
        found = counters.counters(place.device).for_launch(place.stream, count)
        self.known[found.data.ptr] = found.memory
        return found.data.ptr


class _Words:
    """The part of a CuPy array that the counters use."""

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self.memory, self.size, self.data = memory, memory.size, SimpleNamespace(ptr=memory.ctypes.data)

    def __getitem__(self, which: slice) -> _Words:
        return _Words(self.memory[which])


class _Driver:
    """Encodes tensor maps, and rejects what a GPU's driver rejects."""

    def cuTensorMapEncodeTiled(
        self, at: Any, kind: int, rank: int, address: Any, sizes: Any, strides: Any, box: Any, steps: Any, *how: int
    ) -> int:
        line = 2 * box[0]
        taken = (
            0 < (address.value or 0) < _ADDRESSES
            and address.value % _LINE == 0
            and all(0 < size <= _SIZES for size in sizes)
            and all(0 <= stride < _STRIDES and stride % _LINE == 0 for stride in strides)
            and all(0 < length <= _BOX for length in box)
            and line % _LINE == 0
            and set(steps) == {1}
            and len(sizes) == len(box) == len(steps) == len(strides) + 1 == rank <= 5
        )
        if taken:
            ctypes.memset(at, 0xFF, MAP_BYTES)
        return 0 if taken else _INVALID


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the mock card in place of CuPy and the driver."""

    def allocated(size: int) -> np.ndarray[Any, Any]:
        return np.full(size // 4, 0xFFFFFFFF, np.uint32)

    cuda = SimpleNamespace(
        runtime=SimpleNamespace(
            streamIsCapturing=lambda stream: False,
            memsetAsync=lambda at, value, size, stream: ctypes.memset(at, value, size),
        ),
        Device=nullcontext,
        Memory=allocated,
        MemoryPointer=lambda memory, at: memory,
        Stream=lambda non_blocking: SimpleNamespace(ptr=0, synchronize=lambda: None),
    )
    module = SimpleNamespace(cuda=cuda, ndarray=lambda shape, dtype, memory: _Words(memory))
    monkeypatch.setattr(gpu, "cupy", lambda: module)
    monkeypatch.setattr(counters, "allowed_during_captures", nullcontext)
    own = counters.Counters(0)
    monkeypatch.setattr(counters, "counters", lambda device: own)
    monkeypatch.setattr(tensor_maps, "driver", _Driver)


def counts(engine_counters: counters.Counters) -> int:
    """Returns the number of counters that are not 0 between launches."""
    return sum(int(np.count_nonzero(words.memory)) for words in engine_counters._allocations)
