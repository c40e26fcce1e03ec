"""Where kernels run: a GPU through CuPy, or the emulator. Both make memory and launch; nothing else differs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from flashgen.build.cache import Entry, default_cache
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.errors import ArgumentError, LaunchError
from flashgen.launch.argument_writer import Addresses, ArgumentWriter
from flashgen.launch.memory import Block, Memory, SeparateArrays, Workspace
from flashgen.runtime import gpu
from flashgen.runtime.arrays import NUMPY, Library, byte_strides, inverse, library_of, nesting, numpy_dtype, on_gpu
from flashgen.runtime.caching import locked_cached_property
from flashgen.runtime.counters import counters
from flashgen.runtime.schedule import Schedule
from flashgen.runtime.streams import identity

_EMULATED = gpu.Card("emulator", multiprocessors=3)  # few and odd, so that a block meets tiles of several heads

Arrays = Mapping[str, Any]
Operands = Any
"""What launches take by the names of their structs' pointers: addresses on a GPU, arrays on the emulator."""
Numbers = Mapping[str, int | float]


class Place(NamedTuple):
    """Where a launch happens: a stream of a device. The emulator has neither."""

    stream: int = 0
    device: int = 0


@dataclass(frozen=True)
class Launch:
    """A kernel's grid and the writer of its arguments; `counts`: how many counters its blocks count by.

    idle: parameters of earlier launches on a GPU, which no launch uses now; as many as threads ever were in it at once.
    """

    grid: tuple[int, int, int]
    writer: ArgumentWriter
    counts: int = 0
    idle: list[gpu.Parameters] = field(default_factory=list, compare=False, repr=False)

    def by_position(self, positions: Mapping[str, int]) -> Launch:
        """The same for a GPU's addresses in a list; positions: in that, by name. It shares the parameters."""
        return replace(self, writer=self.writer.by_position(positions))


class Runner(Protocol):
    """A built kernel, ready to be launched."""

    def launch(self, launch: Launch, operands: Operands, numbers: Numbers, place: Place) -> None: ...


def build(kernel: RenderedKernel, prebuild: str) -> Entry:
    """The kernel's binary for its target: from the release folder, the cache, or compiled now."""
    return default_cache().load_or_compile(kernel.name, kernel.source, kernel.target.architecture, prebuild=prebuild)


class GpuRunner:
    """A kernel on the current GPU."""

    def __init__(self, kernel: RenderedKernel, prebuild: str) -> None:
        self._kernel = kernel
        self.entry = build(kernel, prebuild)

    @locked_cached_property
    def _loaded(self) -> gpu.GpuKernel:
        target = self._kernel.target
        major, minor = gpu.compute_capability()
        if not target.runs_on(major, minor):
            raise LaunchError(
                f"the kernel was compiled for {target.name} and cannot run on this GPU, sm_{major}{minor}; "
                "compile it without target=... here"
            )
        return gpu.GpuKernel(self.entry.cubin, self._kernel.entry, self._kernel.threads, self._kernel.shared_bytes)

    def launch(self, launch: Launch, operands: Addresses | list[int], numbers: Numbers, place: Place) -> None:
        try:
            parameters = launch.idle.pop()
        except IndexError:  # if it were asked first, another thread might take the last one in between
            parameters = gpu.Parameters(launch.writer.template)
        launch.writer.write_into(parameters.struct, operands, numbers)
        self._loaded.launch(launch.grid, parameters, place.stream, place.device)
        launch.idle.append(parameters)


class EmulatorRunner:
    """A kernel on the CPU."""

    def __init__(
        self, kernel: RenderedKernel, sanitize: Literal["address", "thread"] | None, schedule: Schedule
    ) -> None:
        from flashgen.build.host import compile_host

        self._kernel, self._schedule = kernel, schedule
        self._compiled = compile_host(kernel.source, kernel.entry, sanitize)

    def launch(self, launch: Launch, operands: Arrays, numbers: Numbers, place: Place) -> None:
        from flashgen.runtime import emulator

        writer = launch.writer
        pointers = [(writer.offsets[name], operands[name]) for name in writer.pointer_names if name in operands]
        threads, shared = self._kernel.threads, self._kernel.shared_bytes
        struct = bytes(writer.write_emulated(numbers))
        emulator.launch(self._compiled, launch.grid, (threads, 1, 1), shared, struct, pointers, self._schedule)


@dataclass(frozen=True)
class Gpu:
    """Runs kernels on the current GPU, on the caller's stream."""

    name: str = "gpu"

    def runner(self, kernel: RenderedKernel, prebuild: str) -> GpuRunner:
        return GpuRunner(kernel, prebuild)

    library = staticmethod(library_of)

    def operands(self, arrays: dict[str, Any], addresses: Addresses) -> Operands:
        """What launches take of a call's arrays and their addresses, to be added to."""
        return addresses

    def add(self, arrays: Arrays, operands: Operands) -> None:
        """Adds those that are not there yet. Whoever gives them keeps them alive until they are launched on."""
        for name, array in arrays.items():
            if name not in operands:
                operands[name] = library_of(array, name).pointer(array)

    def bind(self, arrays: Arrays) -> Operands:
        """What launches take of these arrays, which it keeps alive, and of nothing else."""
        operands = Addresses()
        self.add(arrays, operands)
        operands.kept = tuple(arrays.values())
        return operands

    def workspace(self, memory: Mapping[str, Memory], library: Library, device: int) -> Workspace:
        """Memory for calls on the device whose arrays are the library's."""
        return Block(memory, library, device)

    measures: ClassVar[bool] = True
    """Whether the times of its launches are a GPU's."""

    copied: ClassVar[Library | None] = NUMPY
    """The library whose arrays are copied to where kernels run, and results back."""

    def empty(self) -> Any:
        """An array without elements, of the library that makes memory where no array of a call says which."""
        return gpu.cupy().empty(0)

    def allocate_persistent(self, memory: Mapping[str, Memory], place: Place) -> dict[str, Any]:
        """Arrays that outlive the call, ready on its stream.

        They are CuPy's whatever arrays the call has: torch may have its own memory come from a pool of CUDA graphs,
        which takes back what the call does not return.
        """
        cupy = gpu.cupy()
        arrays = {}
        with cupy.cuda.Device(place.device):
            for name, each in memory.items():
                # Of no pool, so that it is not used again before what reads it on another stream is done.
                own = cupy.cuda.Memory(max(math.prod(each.shape) * np.dtype(each.dtype).itemsize, 1))
                arrays[name] = cupy.ndarray(each.shape, each.dtype, cupy.cuda.MemoryPointer(own, 0))
        return arrays

    def bring(self, array: Any, argument: str = "") -> Any:
        """An array where kernels run: one of NumPy is copied there, anything else stays as it is."""
        return on_gpu(array) if isinstance(array, np.ndarray) else array

    def fetch(self, array: Any, into: Any = None) -> Any:
        """An array of CuPy as one of NumPy: a new one, or `into`, written over; one on the GPU was written to there."""
        if into is None:
            order = nesting(array.strides)
            return gpu.cupy().asnumpy(array.transpose(order)).transpose(inverse(order))
        if isinstance(into, np.ndarray):
            into[...] = gpu.cupy().asnumpy(array)
        return into

    def current(self, device: int) -> bool:
        """Whether memory is made and kernels are launched on that device now."""
        return gpu.current_device() == device

    def on(self, device: int) -> AbstractContextManager[Any]:
        """Makes a device the current one."""
        return gpu.cupy().cuda.Device(device)

    def wait(self, place: Place) -> None:
        """Until what was launched there has ended, so that any stream may use it."""
        gpu.stream_object(place.stream).synchronize()

    def multiprocessors(self, device: int) -> int:
        """How many multiprocessors the device has."""
        return gpu.multiprocessors(device)

    def here(self) -> int:
        """The device of calls whose arrays do not say; LaunchError where there is no GPU."""
        gpu.compute_capability()
        return gpu.current_device()

    def home(self) -> int | None:
        """The GPU that arrays are brought to, None where they stay on the CPU; LaunchError where there is no GPU."""
        return self.here()

    def card(self, device: int) -> gpu.Card:
        """What kind of GPU the device is."""
        return gpu.card(device)

    def counter(self, place: Place, count: int) -> Any:
        """So many uint32 that the next launch counts by, as launches take them: 0, and 0 again when it has ended."""
        return counters(place.device).of_launch(place.stream, count).data.ptr

    def stream(self, place: Place) -> Hashable:
        """What only launches on the stream of a place have: they follow each other."""
        return identity(place.stream)

    def is_captured(self, place: Place) -> bool:
        """Whether the stream is being captured into a CUDA graph."""
        return gpu.is_capturing(place.stream)

    def clear(self, array: Any, place: Place) -> None:
        """Zeros an array on the stream."""
        view = library_of(array, "an array").view(array, "an array")
        itemsize = numpy_dtype(view.dtype).itemsize
        gpu.clear(view.pointer, view.shape, byte_strides(view), itemsize, place.stream, place.device)


def _of_frameworks(array: Any) -> str:
    """Who takes arrays of a framework on the CPU, which the emulator does not."""
    framework = type(array).__module__.partition(".")[0].removesuffix("lib")
    if framework not in ("torch", "jax"):
        return ""
    return f"; flashgen.{framework}.attention(spec, ..., emulate=True) takes {framework}'s"


@dataclass(frozen=True)
class Emulator:
    """Runs kernels on the CPU, on NumPy arrays, under a schedule and, if asked, a sanitizer."""

    sanitize: Literal["address", "thread"] | None = None
    schedule: Schedule = field(default_factory=Schedule)
    name: str = "emulator"

    def runner(self, kernel: RenderedKernel, prebuild: str) -> EmulatorRunner:
        return EmulatorRunner(kernel, self.sanitize, self.schedule)

    def library(self, array: Any, argument: str) -> Library:
        if not isinstance(array, np.ndarray):
            raise ArgumentError(
                f"{argument} of type {type(array).__name__}: the emulator takes NumPy arrays "
                f"(bfloat16 is ml_dtypes.bfloat16){_of_frameworks(array)}"
            )
        return library_of(array, argument)

    def operands(self, arrays: dict[str, Any], addresses: Addresses) -> Operands:
        return arrays

    def add(self, arrays: Arrays, operands: Operands) -> None:
        operands.update(arrays)

    def bind(self, arrays: Arrays) -> Operands:
        return dict(arrays)

    def workspace(self, memory: Mapping[str, Memory], library: Library, device: int) -> Workspace:
        return SeparateArrays(memory)

    measures: ClassVar[bool] = False

    copied: ClassVar[Library | None] = None

    def empty(self) -> Any:
        return np.empty(0)

    def allocate_persistent(self, memory: Mapping[str, Memory], place: Place) -> dict[str, Any]:
        """Arrays that outlive the call."""
        return {name: np.empty(each.shape, each.dtype) for name, each in memory.items()}

    def bring(self, array: Any, argument: str = "") -> Any:
        self.library(array, argument)  # says so where the emulator cannot read it
        return array

    def fetch(self, array: Any, into: Any = None) -> Any:
        return array

    def current(self, device: int) -> bool:
        return True

    def on(self, device: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def wait(self, place: Place) -> None:
        """Every launch has ended when it returns."""

    def multiprocessors(self, device: int) -> int:
        return _EMULATED.multiprocessors

    def here(self) -> int:
        return 0

    def home(self) -> int | None:
        return None

    def card(self, device: int) -> gpu.Card:
        return _EMULATED

    def counter(self, place: Place, count: int) -> Any:
        return np.zeros(count, np.uint32)

    def stream(self, place: Place) -> Hashable:
        return place.stream

    def is_captured(self, place: Place) -> bool:
        return False

    def clear(self, array: Any, place: Place) -> None:
        array[...] = 0


Engine = Gpu | Emulator
