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

import re
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
        gpus: GPUs whose default target it is, and their generation, for the error about a target named like a GPU.

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
    gpus: tuple[str, ...] = ()

    threads_per_warp: ClassVar[int] = 32
    threads_per_block: ClassVar[int] = 1024
    registers_per_multiprocessor: ClassVar[int] = 65536
    registers_per_thread: ClassVar[int] = 255
    register_granularity: ClassVar[int] = 8
    partitions: ClassVar[int] = 4
    exponentials_per_cycle: ClassVar[int] = 16

    @classmethod
    def registers_of_launch(cls, threads: int) -> int:
        """Returns the most registers of a thread with which this many threads fit a multiprocessor."""
        step = cls.register_granularity
        return min(cls.registers_per_multiprocessor // threads // step * step, cls.registers_per_thread)

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
    def programmatic_launches(self) -> bool:
        """Whether it has `griddepcontrol`, for programmatic dependent launches (PTX)."""
        return self.compute_capability >= 90

    @property
    def bulk_copies(self) -> bool:
        """Whether it has `cp.async.bulk`: copies of contiguous bytes that complete transactions of mbarriers (PTX)."""
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
    gpus: str = "",
) -> Target:
    """Returns a row of `TARGETS`.

    Args:
        shared_kib: shared memory in KiB, of a block and of a multiprocessor.
        resident: the maximum threads and blocks of a multiprocessor.
        gpus: names of GPUs, comma-separated.
    """
    block_kib, multiprocessor_kib = shared_kib
    shared = (block_kib * 1024, multiprocessor_kib * 1024)
    name = f"sm_{compute_capability}"
    names = tuple(filter(None, gpus.split(", ")))
    return Target(
        name, compute_capability, family, *shared, *resident, tensor_multiply_adds, family, reference_gpu, names
    )


_T4, _A100 = ReferenceGpu("T4", 65, 320), ReferenceGpu("A100 80GB SXM", 312, 2039)
_A10, _L40S = ReferenceGpu("A10", 125, 600), ReferenceGpu("L40S", 362, 864)
_H200, _B200 = ReferenceGpu("H200 SXM", 989, 4800), ReferenceGpu("B200", 2250, 8000)
_SM_90 = _target(90, "ampere", (227, 228), (2048, 32), 512, _H200)
_SM_90A = replace(  # with wgmma and setmaxnreg
    _SM_90, name="sm_90a", family="hopper", backward_family="hopper", gpus=("H100", "H200", "H800", "H20", "Hopper")
)
_AMPERE = "A10, A16, A2, A40, RTX 3050, RTX 3060, RTX 3070, RTX 3080, RTX 3090, RTX A4000, RTX A5000, RTX A6000"
_ADA = "L4, L40S, L40, L20, RTX 4050, RTX 4060, RTX 4070, RTX 4080, RTX 4090, RTX 6000 Ada, Ada"
_BLACKWELL = "RTX 5050, RTX 5060, RTX 5070, RTX 5080, RTX 5090, RTX PRO 6000"

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _target(75, "turing", (64, 64), (1024, 16), 128, _T4, "T4, RTX 2060, RTX 2070, RTX 2080, Turing"),
        _target(80, "ampere", (163, 164), (2048, 32), 256, _A100, "A100, A800, A30, Ampere"),
        _target(86, "ampere", (99, 100), (1536, 16), 128, _A10, _AMPERE),
        _target(87, "ampere", (163, 164), (1536, 16), 256, gpus="Orin"),
        _target(89, "ampere", (99, 100), (1536, 24), 128, _L40S, _ADA),
        _SM_90,
        _SM_90A,
        _target(100, "ampere", (227, 228), (2048, 32), 1024, _B200, "B200, B100, Blackwell"),
        _target(103, "ampere", (227, 228), (2048, 32), 1024, gpus="B300"),
        _target(120, "ampere", (99, 100), (1536, 24), 128, gpus=_BLACKWELL),
        _target(121, "ampere", (99, 100), (1536, 24), 128, gpus="GB10, DGX Spark"),
    )
}
"""Every target by its name, in ascending order of compute capability."""


def target_named(name: str) -> Target:
    """Returns the target of that name, such as "sm_80".

    Raises:
        UnsupportedError: no target has this name; the message lists those that exist, and names the one of a GPU.
    """
    try:
        return TARGETS[name]
    except (KeyError, TypeError):  # a list cannot even be looked up
        meant = _meant(name) if isinstance(name, str) else ""
        raise UnsupportedError(f"target={name!r} is not supported; choose one of {', '.join(TARGETS)}{meant}") from None


_BRANDS = r"(?:nvidia|geforce|tesla|quadro|jetson|agx|[ _-])*"


def _meant(name: str) -> str:
    """Returns a hint at the target of a GPU ("RTX-4090") or of another spelling ("sm90"); "" if there is none."""
    text = name.lower()
    number = re.fullmatch(r"(?:sm|compute)?[ _-]?(\d+)[a-z]?", text)
    spelled = [each for each in TARGETS if number and each in (f"sm_{number[1]}", f"sm_{number[1]}a")]
    if spelled:
        return f"; did you mean {' or '.join(spelled)}?"
    for architecture, gpu in ((target.name, gpu) for target in TARGETS.values() for gpu in target.gpus):
        pattern = gpu.lower().replace("rtx ", "(?:rtx )?").replace(" ", "[ _-]?")
        if re.match(rf"{_BRANDS}(?:g(?=[hb]\d00))?{pattern}(?![0-9])", text):
            return f"; the target of {gpu} GPUs is {architecture}"
    return ""


def target_of_capability(major: int, minor: int) -> Target:
    """Returns the default target of a GPU: the one with the suffix `a`, if there is one, otherwise the plain one.

    Raises:
        UnsupportedError: kernels are not generated for this compute capability; the message lists the targets.
    """
    name = f"sm_{major}{minor}"
    return TARGETS.get(f"{name}a") or target_named(name)
