"""The targets: one frozen record per GPU architecture, which holds every fact of it that flashgen uses.

Nothing else in the package compares architecture numbers or repeats a limit or a rate: plans, templates, `show`,
`report`, `doctor` and `release` ask the record. A new target is therefore one more row of `TARGETS`; a test, or a
program that wants a target of its own, adds an entry to this dictionary.

Sources that the docstrings below name:

    guide        CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" and the table
                 "Throughput of Native Arithmetic Instructions"
    PTX          Parallel Thread Execution ISA, "Target ISA Notes" of the instruction
    whitepaper   NVIDIA's whitepaper of the GPU generation
    data sheet   NVIDIA's data sheet of a GPU
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from flashgen.errors import UnsupportedError


@dataclass(frozen=True)
class ReferenceGpu:
    """A GPU that represents a target in rooflines.

    Attributes:
        name: the name on the data sheet.
        tflops: peak rate of dense 16-bit matrix products with float32 accumulation, in TFLOP/s (data sheet).
        gb_per_second: peak bandwidth of device memory, in GB/s (data sheet).
    """

    name: str
    tflops: float
    gb_per_second: float

    @property
    def ridge(self) -> float:
        """The arithmetic intensity, in FLOPs per byte, above which matrix products limit a kernel, not memory."""
        return self.tflops * 1e3 / self.gb_per_second


@dataclass(frozen=True)
class Target:
    """A GPU architecture that kernels are generated for.

    "Multiprocessor" is NVIDIA's streaming multiprocessor (SM); it consists of four partitions, each with a warp
    scheduler, a tensor core and a special-function unit.

    Attributes:
        name: its name in `target=` and the compiler's `-arch`, such as "sm_80". The suffix `a` means that its kernels
            use instructions that later GPUs lack.
        compute_capability: 10 * major + minor.
        family, backward_family: the kernel families of the forward and the backward pass (see families.py).
        shared_per_block: the maximum dynamic shared memory that a block may request, in bytes (guide).
        shared_per_multiprocessor: shared memory of a multiprocessor, in bytes (guide).
        threads_per_multiprocessor: the maximum resident threads of a multiprocessor (guide).
        blocks_per_multiprocessor: the maximum resident blocks of a multiprocessor (guide).
        tensor_multiply_adds: multiply-adds per cycle of one tensor core, for dense 16-bit operands and float32
            accumulation (whitepaper).
        reference_gpu: the GPU whose roofline `report` draws; None draws no roofline.

    Class attributes, which are equal for all targets:
        threads_per_warp: lanes of a warp (guide).
        threads_per_block: the maximum threads of a block (guide).
        registers_per_multiprocessor: 32-bit registers of a multiprocessor, and the maximum of a block (guide).
        registers_per_thread: the maximum of 32-bit registers that an instruction can address (guide).
        register_granularity: registers of a thread are allocated in multiples of this (CUDA occupancy calculator).
        partitions: partitions of a multiprocessor (whitepaper).
        exponentials_per_cycle: results of `ex2` per cycle of a multiprocessor (guide).
    """

    name: str
    compute_capability: int
    family: str
    shared_per_block: int
    shared_per_multiprocessor: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    tensor_multiply_adds: int
    backward_family: str
    reference_gpu: ReferenceGpu | None = None

    threads_per_warp: ClassVar[int] = 32
    threads_per_block: ClassVar[int] = 1024
    registers_per_multiprocessor: ClassVar[int] = 65536
    registers_per_thread: ClassVar[int] = 255
    register_granularity: ClassVar[int] = 8
    partitions: ClassVar[int] = 4
    exponentials_per_cycle: ClassVar[int] = 16

    @property
    def architecture(self) -> str:
        """The compiler's name of the architecture."""
        return self.name

    @property
    def base_architecture(self) -> str:
        """The architecture without the suffix `a`, as NVRTC lists what it supports."""
        return self.name.removesuffix("a")

    @property
    def is_of_one_generation(self) -> bool:
        """Whether its kernels use instructions that no later GPU has (the suffix `a`)."""
        return self.name.endswith("a")

    def runs_on(self, major: int, minor: int) -> bool:
        """Whether a GPU of compute capability `major`.`minor` runs binaries that were compiled for this target."""
        own_major, own_minor = divmod(self.compute_capability, 10)
        return own_major == major and (own_minor == minor if self.is_of_one_generation else own_minor <= minor)

    @property
    def multiply_adds_per_cycle(self) -> int:
        """Multiply-adds per cycle of all tensor cores of a multiprocessor."""
        return self.partitions * self.tensor_multiply_adds

    @property
    def reserved_shared_per_block(self) -> int:
        """Bytes of shared memory that the system reserves for each resident block (guide)."""
        return 1024 if self.compute_capability >= 80 else 0

    @property
    def asynchronous_copies(self) -> bool:
        """Whether it has `cp.async`, copies from global to shared memory that bypass registers (PTX)."""
        return self.compute_capability >= 80

    @property
    def deep_mma(self) -> bool:
        """Whether `mma.sync.m16n8k16` takes 16-bit operands; otherwise only m16n8k8 does (PTX)."""
        return self.compute_capability >= 80

    @property
    def vector_reductions(self) -> bool:
        """Whether `red.global.add` takes a vector of four float32 values (PTX)."""
        return self.compute_capability >= 90

    @property
    def packed_conversion(self) -> bool:
        """Whether one `cvt` rounds two float32 values to a pair of 16-bit values (PTX)."""
        return self.compute_capability >= 80

    @property
    def float8_conversion(self) -> bool:
        """Whether one `cvt` widens a pair of float8 values (PTX)."""
        return self.compute_capability >= 89

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The element types that `mma.sync` multiplies with float32 accumulation (PTX)."""
        return ("float16", "bfloat16") if self.compute_capability >= 80 else ("float16",)

    @property
    def register_pressure(self) -> Literal["low", "normal", "high"]:
        """How many registers NVRTC's assembler needs for the same `mma.sync` kernel, compared with sm_80.

        Measured: the tests that compile every variant for every kind of target find spills if it is set too low.
        """
        if self.compute_capability >= 100:
            return "high"
        return "low" if self.compute_capability == 90 else "normal"


def _target(
    compute_capability: int,
    family: str,
    shared_kib: tuple[int, int],
    resident: tuple[int, int],
    tensor_multiply_adds: int,
    reference_gpu: ReferenceGpu | None = None,
) -> Target:
    """Returns a row of `TARGETS`.

    Args:
        shared_kib: shared memory in KiB, of a block and of a multiprocessor.
        resident: the maximum threads and blocks of a multiprocessor.
    """
    block_kib, multiprocessor_kib = shared_kib
    shared = (block_kib * 1024, multiprocessor_kib * 1024)
    name = f"sm_{compute_capability}"
    return Target(
        name, compute_capability, family, *shared, *resident, tensor_multiply_adds, family, reference_gpu=reference_gpu
    )


_SM_90 = _target(90, "ampere", (227, 228), (2048, 32), 512, ReferenceGpu("H200 SXM", 989, 4800))

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _target(75, "turing", (64, 64), (1024, 16), 128, ReferenceGpu("T4", 65, 320)),
        _target(80, "ampere", (163, 164), (2048, 32), 256, ReferenceGpu("A100 80GB SXM", 312, 2039)),
        _target(86, "ampere", (99, 100), (1536, 16), 128, ReferenceGpu("A10", 125, 600)),
        _target(87, "ampere", (163, 164), (1536, 16), 256),
        _target(89, "ampere", (99, 100), (1536, 24), 128, ReferenceGpu("L40S", 362, 864)),
        _SM_90,
        replace(_SM_90, name="sm_90a", family="hopper", backward_family="hopper"),  # with wgmma and setmaxnreg
        _target(100, "ampere", (227, 228), (2048, 32), 1024, ReferenceGpu("B200", 2250, 8000)),
        _target(103, "ampere", (227, 228), (2048, 32), 1024),
        _target(120, "ampere", (99, 100), (1536, 24), 128),
        _target(121, "ampere", (99, 100), (1536, 24), 128),
    )
}
"""Every target by its name, in ascending order of compute capability."""


def target_named(name: str) -> Target:
    """Returns the target of that name, such as "sm_80".

    Raises:
        UnsupportedError: no target has this name; the message lists those that exist.
    """
    try:
        return TARGETS[name]
    except (KeyError, TypeError):  # a list cannot even be looked up
        raise UnsupportedError(f"target={name!r} is not supported; choose one of {', '.join(TARGETS)}") from None


def target_of_capability(major: int, minor: int) -> Target:
    """Returns the default target of a GPU: the one with the suffix `a`, if there is one, otherwise the plain one.

    Raises:
        UnsupportedError: kernels are not generated for this compute capability; the message lists the targets.
    """
    name = f"sm_{major}{minor}"
    return TARGETS.get(f"{name}a") or target_named(name)
