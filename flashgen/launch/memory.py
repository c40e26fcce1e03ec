"""Workspaces of a call: one block of memory for all arrays on a GPU, an array for each on the emulator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from flashgen.dtypes import numpy_dtype
from flashgen.launch.argument_writer import Addresses
from flashgen.runtime import gpu
from flashgen.runtime.arrays import Library, of_graph

_ALIGNMENT = 256  # bytes: the alignment of the driver's allocations, and more than any copy needs


@dataclass(frozen=True)
class ArraySpec:
    """Describes an array that a call allocates: shape, dtype, and whether it is set to zero."""

    shape: tuple[int, ...]
    dtype: str
    zeroed: bool = False

    @property
    def bytes(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


class Workspace(Protocol):
    """The arrays that calls of one shape use as a workspace."""

    def take(self, operands: Any, stream: int) -> None:
        """Allocates the arrays for a call on a stream, and adds them to its operands, which keep them alive."""


class GpuWorkspace:
    """A workspace on a GPU: one allocation of the caller's library, which holds all arrays one after the other.

    offsets: of the arrays in the allocation, in bytes, in order.
    """

    def __init__(self, memory: Mapping[str, ArraySpec], library: Library, device: int) -> None:
        self._library, self._device = library, device
        self.offsets: dict[str, int] = {}
        size = 0
        for name, each in memory.items():
            self.offsets[name] = size
            size += -(-each.bytes // _ALIGNMENT) * _ALIGNMENT
        self._block = ((max(size, 1),), "uint8", device)
        self._make = library.maker(*self._block)
        self._zeroed = [(position, each) for position, each in enumerate(memory.values()) if each.zeroed]

    def allocate(self, stream: int) -> tuple[Any, list[int]]:
        """Allocates for a call on a stream of the current device. Returns the allocation and the arrays' addresses."""
        # During a stream capture, a library without pools for graphs gets memory that the graph owns.
        graph = not self._library.pools_for_graphs and gpu.is_capturing(stream)
        block = of_graph(self._library, stream).empty(*self._block) if graph else self._make()
        begin = self._library.pointer(block)
        addresses = [begin + offset for offset in self.offsets.values()]
        for position, each in self._zeroed:
            self._clear(addresses[position], each, stream)
        return block, addresses

    def take(self, operands: Addresses, stream: int) -> None:
        """See `Workspace.take`."""
        block, addresses = self.allocate(stream)
        operands.owners += (block,)
        operands.update(zip(self.offsets, addresses, strict=True))

    def _clear(self, address: int, memory: ArraySpec, stream: int) -> None:
        itemsize = numpy_dtype(memory.dtype).itemsize
        gpu.clear(address, (math.prod(memory.shape),), (itemsize,), itemsize, stream, self._device)


class SeparateArrays:
    """A workspace on the emulator: an array each, so that accesses out of bounds are found.

    Arrays that are not zeroed hold NaN in every float format, so that reads before the first write show up.
    """

    def __init__(self, memory: Mapping[str, ArraySpec]) -> None:
        self._memory = memory

    def take(self, operands: dict[str, Any], stream: int) -> None:
        """See `Workspace.take`."""
        for name, each in self._memory.items():
            operands[name] = np.empty(each.shape, numpy_dtype(each.dtype))
            operands[name].reshape(-1).view(np.uint8).fill(0 if each.zeroed else 0xFF)
