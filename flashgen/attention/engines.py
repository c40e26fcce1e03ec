"""Where kernels run: a GPU through CuPy, or the emulator. Both make memory and launch; nothing else differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

from flashgen.attention.launches import Launch
from flashgen.build.cache import Entry, default_cache
from flashgen.codegen.kernel import RenderedKernel
from flashgen.errors import ArgumentError, LaunchError
from flashgen.runtime import gpu
from flashgen.runtime.arrays import NUMPY, Library, View, library_of, view_numpy
from flashgen.runtime.schedule import Schedule

Arrays = Mapping[str, View]
Numbers = Mapping[str, int | float]


class Runner(Protocol):
    """A built kernel, ready to be launched."""

    def launch(self, launch: Launch, arrays: Arrays, numbers: Numbers, stream: int) -> None: ...


def _null_or_pointer(arrays: Arrays, names: Sequence[tuple[str, int]]) -> dict[str, int]:
    return {name: arrays[name].pointer if name in arrays else 0 for name, _ in names}


def build(kernel: RenderedKernel, prebuild: str) -> Entry:
    """The kernel's binary for its target: from the release folder, the cache, or compiled now."""
    return default_cache().load_or_compile(kernel.name, kernel.source, kernel.target.architecture, prebuild=prebuild)


class GpuRunner:
    """A kernel on the current GPU."""

    def __init__(self, kernel: RenderedKernel, prebuild: str) -> None:
        self._kernel = kernel
        self.entry = build(kernel, prebuild)

    @cached_property
    def _loaded(self) -> gpu.GpuKernel:
        target = self._kernel.target
        major, minor = gpu.compute_capability()
        if target.compute_capability // 10 != major or target.compute_capability % 10 > minor:
            raise LaunchError(
                f"the kernel was compiled for {target.name} and cannot run on this GPU, sm_{major}{minor}"
            )
        return gpu.GpuKernel(self.entry.cubin_path, self._kernel.entry, self._kernel.threads, self._kernel.shared_bytes)

    def launch(self, launch: Launch, arrays: Arrays, numbers: Numbers, stream: int) -> None:
        writer = launch.writer
        buffer = writer.write(_null_or_pointer(arrays, writer.pointer_offsets()), numbers)
        self._loaded.launch(launch.grid, bytes(buffer), stream)


class EmulatorRunner:
    """A kernel on the CPU."""

    def __init__(
        self, kernel: RenderedKernel, sanitize: Literal["address", "thread"] | None, schedule: Schedule
    ) -> None:
        from flashgen.build.host import compile_host

        self._kernel, self._schedule = kernel, schedule
        self._compiled = compile_host(kernel.source, kernel.entry, sanitize)

    def launch(self, launch: Launch, arrays: Arrays, numbers: Numbers, _stream: int) -> None:
        from flashgen.runtime import emulator

        writer = launch.writer
        names = writer.pointer_offsets()
        buffer = writer.write({name: 0 for name, _ in names}, numbers)
        pointers = [(offset, arrays[name].owner) for name, offset in names if name in arrays]
        threads, shared = self._kernel.threads, self._kernel.shared_bytes
        emulator.launch(
            self._compiled, (launch.grid, 1, 1), (threads, 1, 1), shared, bytes(buffer), pointers, self._schedule
        )


@dataclass(frozen=True)
class Gpu:
    """Runs kernels on the current GPU, on the caller's stream."""

    name: str = "gpu"

    def runner(self, kernel: RenderedKernel, prebuild: str) -> GpuRunner:
        return GpuRunner(kernel, prebuild)

    def library(self, array: Any, argument: str) -> Library:
        return library_of(array, argument)

    def l2_bytes(self, device: int | None) -> int:
        return gpu.l2_bytes(device or 0)


@dataclass(frozen=True)
class Emulator:
    """Runs kernels on the CPU, on NumPy arrays, under a schedule and, if asked, a sanitizer."""

    sanitize: Literal["address", "thread"] | None = None
    schedule: Schedule = Schedule()
    name: str = "emulator"

    def runner(self, kernel: RenderedKernel, prebuild: str) -> EmulatorRunner:
        return EmulatorRunner(kernel, self.sanitize, self.schedule)

    def library(self, array: Any, argument: str) -> Library:
        if not isinstance(array, np.ndarray):
            raise ArgumentError(
                f"{argument} of type {type(array).__name__}: the emulator takes NumPy arrays (bfloat16 as ml_dtypes.bfloat16)"
            )
        return NUMPY

    def l2_bytes(self, device: int | None) -> int:
        return 32 * 2**20


Engine = Gpu | Emulator

__all__ = ["Emulator", "Engine", "Gpu", "Runner", "build", "view_numpy"]
