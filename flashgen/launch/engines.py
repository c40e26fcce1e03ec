"""The engines that allocate memory and launch kernels: a GPU through CuPy, or the emulator."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from flashgen.build.cache import Entry, default_cache
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.dtypes import numpy_dtype
from flashgen.errors import ArgumentError, LaunchError
from flashgen.launch.argument_writer import Addresses, ArgumentWriter
from flashgen.launch.memory import ArraySpec, GpuWorkspace, SeparateArrays, Workspace
from flashgen.runtime import gpu
from flashgen.runtime.arrays import NUMPY, Library, byte_strides, inverse, library_of, nesting, on_gpu
from flashgen.runtime.caching import locked_cached_property
from flashgen.runtime.counters import counters
from flashgen.runtime.schedule import Schedule
from flashgen.runtime.streams import identity

_EMULATED = gpu.Card("emulator", multiprocessors=3)  # few and odd, so that one CTA processes tiles of several heads

Arrays = Mapping[str, Any]
Operands = Any
"""The operands of launches, by the names of the structs' pointers: addresses on a GPU, arrays on the emulator."""
ScalarArguments = Mapping[str, int | float]
"""The scalar arguments of a launch, by the names of the structs' members."""


class Place(NamedTuple):
    """The stream and the device of a launch. The emulator ignores both."""

    stream: int = 0
    device: int = 0


@dataclass(frozen=True)
class Launch:
    """A kernel's grid and the writer of its arguments.

    num_counters: the number of counters that its CTAs use. idle: parameter buffers of earlier launches on a GPU that
    are free for reuse; there are at most as many as threads that ever launched at the same time.
    """

    grid: tuple[int, int, int]
    writer: ArgumentWriter
    num_counters: int = 0
    idle: list[gpu.Parameters] = field(default_factory=list, compare=False, repr=False)

    def by_position(self, positions: Mapping[str, int]) -> Launch:
        """Returns a launch that takes a list of addresses, and shares the parameter buffers.

        positions: the index of each pointer's address in that list, by the pointer's name.
        """
        return replace(self, writer=self.writer.by_position(positions))


class Runner(Protocol):
    """A built kernel, ready to be launched."""

    def launch(self, launch: Launch, operands: Operands, numbers: ScalarArguments, place: Place) -> None: ...


def build(kernel: RenderedKernel, prebuild: str) -> Entry:
    """Returns the kernel's binary for its target, from the release folder or the cache, or compiles it.

    prebuild: the command that builds it ahead of time, for the error message if it cannot be compiled here.
    """
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
        kernel = self._kernel
        block = kernel.threads, kernel.shared_bytes
        return gpu.GpuKernel(self.entry.cubin, kernel.entry, *block, kernel.programmatic_launch)

    def launch(self, launch: Launch, operands: Addresses | list[int], numbers: ScalarArguments, place: Place) -> None:
        try:
            parameters = launch.idle.pop()
        except IndexError:  # testing for emptiness first would race with other threads
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

    def launch(self, launch: Launch, operands: Arrays, numbers: ScalarArguments, place: Place) -> None:
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
        """Returns the operands that launches of this engine take for a call: here the addresses of its arrays."""
        return addresses

    def add_operands(self, arrays: Arrays, operands: Operands) -> None:
        """Adds the addresses of arrays that are not in `operands`. The caller keeps arrays alive until the launch."""
        for name, array in arrays.items():
            if name not in operands:
                operands[name] = library_of(array, name).pointer(array)

    def bind(self, arrays: Arrays) -> Operands:
        """Returns operands of these arrays only, which it keeps alive."""
        operands = Addresses()
        self.add_operands(arrays, operands)
        operands.owners = tuple(arrays.values())
        return operands

    def workspace(self, memory: Mapping[str, ArraySpec], library: Library, device: int) -> Workspace:
        """Prepares the workspace of calls on a device with arrays of a library."""
        return GpuWorkspace(memory, library, device)

    measures: ClassVar[bool] = True
    """Whether timing its launches measures a GPU."""

    host_library: ClassVar[Library | None] = NUMPY
    """Arrays of this library are copied to the device, and results are copied back. None if no arrays are."""

    def empty(self) -> Any:
        """Returns an array without elements. Its library allocates the results of calls without arrays."""
        return gpu.cupy().empty(0)

    def allocate_persistent(self, memory: Mapping[str, ArraySpec], place: Place) -> dict[str, Any]:
        """Allocates arrays that outlive the call, for use on its stream.

        They are CuPy arrays for calls of any library, because torch may allocate from a pool of CUDA graphs, which
        reclaims memory that the call does not return.
        """
        cupy = gpu.cupy()
        arrays = {}
        with cupy.cuda.Device(place.device):
            for name, each in memory.items():
                # Outside of CuPy's pool, which might reuse it before a reader on another stream has finished.
                unpooled = cupy.cuda.Memory(max(math.prod(each.shape) * np.dtype(each.dtype).itemsize, 1))
                arrays[name] = cupy.ndarray(each.shape, each.dtype, cupy.cuda.MemoryPointer(unpooled, 0))
        return arrays

    def to_device(self, array: Any, argument: str = "") -> Any:
        """Copies a NumPy array to the device of the kernels, and returns other values unchanged."""
        return on_gpu(array) if isinstance(array, np.ndarray) else array

    def fetch(self, array: Any, into: Any = None) -> Any:
        """Copies a CuPy array to a new NumPy array or to `into`. An `into` on the GPU holds the result already."""
        if into is None:
            order = nesting(array.strides)
            return gpu.cupy().asnumpy(array.transpose(order)).transpose(inverse(order))
        if isinstance(into, np.ndarray):
            into[...] = gpu.cupy().asnumpy(array)
        return into

    def is_current(self, device: int) -> bool:
        """Whether a device is the current one."""
        return gpu.current_device() == device

    def device_context(self, device: int) -> AbstractContextManager[Any]:
        """Returns a context manager that makes a device the current one."""
        return gpu.cupy().cuda.Device(device)

    def synchronize(self, place: Place) -> None:
        """Waits until the launches on a stream have finished, so that any stream may use their results."""
        gpu.stream_object(place.stream).synchronize()

    def multiprocessors(self, device: int) -> int:
        """Returns the number of multiprocessors of a device."""
        return gpu.multiprocessors(device)

    def current_device(self) -> int:
        """Returns the current device, for calls without arrays. Raises LaunchError without a GPU."""
        gpu.compute_capability()
        return gpu.current_device()

    def array_device(self) -> int | None:
        """Returns the GPU that `to_device` copies to, None for the CPU. Raises LaunchError if a GPU is missing."""
        return self.current_device()

    def card(self, device: int) -> gpu.Card:
        """Returns the model of a device."""
        return gpu.card(device)

    def counter(self, place: Place, count: int) -> Any:
        """Returns the operand of `count` uint32 counters for the next launch. They are 0 before and after a launch."""
        return counters(place.device).for_launch(place.stream, count).data.ptr

    def stream_key(self, place: Place) -> Hashable:
        """Returns a key of caches for a stream, which only launches on that stream share."""
        return identity(place.stream)

    def is_captured(self, place: Place) -> bool:
        """Whether the stream is being captured into a CUDA graph."""
        return gpu.is_capturing(place.stream)

    def clear(self, array: Any, place: Place) -> None:
        """Zeros an array on the stream."""
        view = library_of(array, "an array").view(array, "an array")
        itemsize = numpy_dtype(view.dtype).itemsize
        gpu.clear(view.pointer, view.shape, byte_strides(view), itemsize, place.stream, place.device)


def _framework_hint(array: Any) -> str:
    """Returns a hint for CPU arrays of a framework, which the emulator does not take."""
    framework = type(array).__module__.partition(".")[0].removesuffix("lib")
    if framework not in ("torch", "jax"):
        return ""
    return f"; flashgen.{framework}.attention(spec, ..., emulate=True) takes {framework}'s"


@dataclass(frozen=True)
class Emulator:
    """Runs kernels on the CPU, on NumPy arrays, with a schedule and optionally a sanitizer."""

    sanitize: Literal["address", "thread"] | None = None
    schedule: Schedule = field(default_factory=Schedule)
    name: str = "emulator"

    def runner(self, kernel: RenderedKernel, prebuild: str) -> EmulatorRunner:
        return EmulatorRunner(kernel, self.sanitize, self.schedule)

    def library(self, array: Any, argument: str) -> Library:
        if not isinstance(array, np.ndarray):
            raise ArgumentError(
                f"{argument} of type {type(array).__name__}: the emulator takes NumPy arrays "
                f"(bfloat16 is ml_dtypes.bfloat16){_framework_hint(array)}"
            )
        return library_of(array, argument)

    def operands(self, arrays: dict[str, Any], addresses: Addresses) -> Operands:
        return arrays

    def add_operands(self, arrays: Arrays, operands: Operands) -> None:
        operands.update(arrays)

    def bind(self, arrays: Arrays) -> Operands:
        return dict(arrays)

    def workspace(self, memory: Mapping[str, ArraySpec], library: Library, device: int) -> Workspace:
        return SeparateArrays(memory)

    measures: ClassVar[bool] = False

    host_library: ClassVar[Library | None] = None

    def empty(self) -> Any:
        return np.empty(0)

    def allocate_persistent(self, memory: Mapping[str, ArraySpec], place: Place) -> dict[str, Any]:
        """Allocates arrays that outlive the call."""
        return {name: np.empty(each.shape, each.dtype) for name, each in memory.items()}

    def to_device(self, array: Any, argument: str = "") -> Any:
        self.library(array, argument)  # raises ArgumentError for arrays that the emulator cannot read
        return array

    def fetch(self, array: Any, into: Any = None) -> Any:
        return array

    def is_current(self, device: int) -> bool:
        return True

    def device_context(self, device: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def synchronize(self, place: Place) -> None:
        """Does nothing: launches on the emulator are synchronous."""

    def multiprocessors(self, device: int) -> int:
        return _EMULATED.multiprocessors

    def current_device(self) -> int:
        return 0

    def array_device(self) -> int | None:
        return None

    def card(self, device: int) -> gpu.Card:
        return _EMULATED

    def counter(self, place: Place, count: int) -> Any:
        return np.zeros(count, np.uint32)

    def stream_key(self, place: Place) -> Hashable:
        return place.stream

    def is_captured(self, place: Place) -> bool:
        return False

    def clear(self, array: Any, place: Place) -> None:
        array[...] = 0


Engine = Gpu | Emulator
