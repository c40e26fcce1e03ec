"""Memory that a call takes for its own use: on a GPU one block for all of its arrays, on the emulator an array each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from flashgen.launch.argument_writer import Addresses
from flashgen.runtime import gpu
from flashgen.runtime.arrays import Library, numpy_dtype, of_graph

_ALIGNMENT = 256  # bytes: that of every allocation of the driver, and more than any copy asks


@dataclass(frozen=True)
class Memory:
    """An array that a call makes: shape, dtype, and whether it begins as zeros."""

    shape: tuple[int, ...]
    dtype: str
    zeroed: bool = False

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


class Workspace(Protocol):
    """Arrays for the launches of a call, prepared for calls of one shape."""

    def take(self, operands: Any, stream: int) -> None:
        """Adds them to what the launches of a call on that stream take, by name. They live as long as that does."""


class Block:
    """The arrays of a workspace on a GPU, one behind the other in one allocation of the caller's library.

    offsets: where they begin in it, in bytes, in their order.
    """

    def __init__(self, memory: Mapping[str, Memory], library: Library, device: int) -> None:
        self._library, self._device = library, device
        self.offsets: dict[str, int] = {}
        size = 0
        for name, each in memory.items():
            self.offsets[name] = size
            size += -(-each.bytes // _ALIGNMENT) * _ALIGNMENT
        self._block = ((max(size, 1),), "uint8", device)
        self._make = library.maker(*self._block)
        self._zeroed = [(position, each) for position, each in enumerate(memory.values()) if each.zeroed]

    def lay(self, stream: int) -> tuple[Any, list[int]]:
        """The allocation for a call on that stream, on the current device, and the addresses of the arrays in it."""
        graph = not self._library.pools_for_graphs and gpu.is_capturing(stream)
        block = of_graph(self._library, stream).empty(*self._block) if graph else self._make()
        begin = self._library.pointer(block)
        addresses = [begin + offset for offset in self.offsets.values()]
        for position, each in self._zeroed:
            self._clear(addresses[position], each, stream)
        return block, addresses

    def take(self, operands: Addresses, stream: int) -> None:
        """As of any workspace."""
        block, addresses = self.lay(stream)
        operands.kept += (block,)
        operands.update(zip(self.offsets, addresses, strict=True))

    def _clear(self, address: int, memory: Memory, stream: int) -> None:
        itemsize = numpy_dtype(memory.dtype).itemsize
        gpu.clear(address, (math.prod(memory.shape),), (itemsize,), itemsize, stream, self._device)


class SeparateArrays:
    """The arrays of a workspace on the emulator, which sees where each of them ends.

    What is not zeroed holds NaN in every float format, so that whoever reads it before it is written is found.
    """

    def __init__(self, memory: Mapping[str, Memory]) -> None:
        self._memory = memory

    def take(self, operands: dict[str, Any], stream: int) -> None:
        """As of any workspace."""
        for name, each in self._memory.items():
            operands[name] = np.empty(each.shape, numpy_dtype(each.dtype))
            operands[name].reshape(-1).view(np.uint8).fill(0 if each.zeroed else 0xFF)
