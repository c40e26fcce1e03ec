"""Engines for tests that launch emulated kernels by array addresses, as on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.dtypes import numpy_dtype
from flashgen.launch.argument_writer import Addresses
from flashgen.launch.engines import Emulator, EmulatorRunner, Gpu, Launch, Place, ScalarArguments
from flashgen.launch.memory import ArraySpec, GpuWorkspace
from flashgen.runtime.arrays import NUMPY, Library


class AddressRunner:
    """Takes addresses and looks up the arrays at them."""

    def __init__(self, runner: EmulatorRunner, known: dict[int, Any]) -> None:
        self._runner, self._known = runner, known

    def launch(self, launch: Launch, operands: Addresses, numbers: ScalarArguments, place: Place) -> None:
        assert isinstance(operands, Addresses)
        arrays = {name: self._known[operands[name]] for name in launch.writer.pointer_names if operands[name]}
        self._runner.launch(launch, arrays, numbers, place)


class HostBlock(GpuWorkspace):
    """A GPU allocation in host memory, with uninitialized content; `known` maps addresses to the arrays in it."""

    def __init__(self, memory: Mapping[str, ArraySpec], known: dict[int, Any]) -> None:
        super().__init__(memory, NUMPY, 0)
        self._memory, self._known = memory, known

    def take(self, operands: Addresses, stream: int) -> None:
        super().take(operands, stream)
        for name, each in self._memory.items():
            at = self.offsets[name]
            assert operands[name] % 16 == 0 and at + each.bytes <= operands.owners[-1].size
            part = operands.owners[-1][at : at + each.bytes].view(numpy_dtype(each.dtype)).reshape(each.shape)
            part[...] = 0 if each.zeroed else part
            self._known[operands[name]] = part

    def _clear(self, address: int, memory: ArraySpec, stream: int) -> None:
        """Raised for an address without a registered array."""


@dataclass(frozen=True)
class ByAddress(Emulator):
    """The emulator, launched in the way that a GPU is launched."""

    known: dict[int, Any] = field(default_factory=dict, compare=False)

    def runner(self, kernel: RenderedKernel, prebuild: str) -> Any:
        return AddressRunner(super().runner(kernel, prebuild), self.known)

    def operands(self, arrays: dict[str, Any], addresses: Addresses) -> Any:
        self.known.update({addresses[name]: array for name, array in arrays.items()})
        return Gpu().operands(arrays, addresses)

    def add_operands(self, arrays: Mapping[str, Any], operands: Any) -> None:
        Gpu().add_operands(arrays, operands)
        self.known.update({operands[name]: array for name, array in arrays.items()})

    def bind(self, arrays: Mapping[str, Any]) -> Any:
        operands = Gpu().bind(arrays)
        self.known.update({operands[name]: array for name, array in arrays.items()})
        return operands

    def workspace(self, memory: Mapping[str, ArraySpec], library: Library, device: int) -> GpuWorkspace:
        return HostBlock(memory, self.known)

    def counter(self, place: Place, count: int) -> Any:
        counter = super().counter(place, count)
        self.known[counter.ctypes.data] = counter
        return counter.ctypes.data
