"""What a GPU has: one frozen record per architecture that kernels are generated for."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.errors import UnsupportedError


@dataclass(frozen=True)
class Target:
    """An architecture.

    family, backward_family: of the kernels that it takes for the forward and for the backward pass (families.py).
    shared_per_block: bytes, the most dynamic shared memory that a block may ask for.
    """

    name: str
    compute_capability: int
    family: str
    shared_per_block: int
    shared_per_multiprocessor: int
    backward_family: str

    @property
    def architecture(self) -> str:
        """The compiler's name of the architecture."""
        return self.name

    @property
    def is_of_one_generation(self) -> bool:
        """Whether it has instructions that no later GPU has: the suffix `a`."""
        return self.name.endswith("a")

    def runs_on(self, major: int, minor: int) -> bool:
        """Whether a GPU of that compute capability runs what was compiled for this target."""
        own_major, own_minor = divmod(self.compute_capability, 10)
        return own_major == major and (own_minor == minor if self.is_of_one_generation else own_minor <= minor)

    @property
    def asynchronous_copies(self) -> bool:
        """cp.async: copies from global to shared memory that do not pass through registers."""
        return self.compute_capability >= 80

    @property
    def vector_reductions(self) -> bool:
        """red.add of four floats at once."""
        return self.compute_capability >= 90

    @property
    def packed_conversion(self) -> bool:
        """One instruction that rounds two floats to a pair of 16-bit numbers."""
        return self.compute_capability >= 80

    @property
    def float8_conversion(self) -> bool:
        """One instruction that widens a pair of float8 numbers."""
        return self.compute_capability >= 89

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The element types that its tensor cores multiply."""
        return ("float16", "bfloat16") if self.compute_capability >= 80 else ("float16",)


def _target(compute_capability: int, family: str, block_kib: int, multiprocessor_kib: int) -> Target:
    shared = (block_kib * 1024, multiprocessor_kib * 1024)
    return Target(f"sm_{compute_capability}", compute_capability, family, *shared, backward_family=family)


# sm_90a is sm_90 with the instructions that only it has: wgmma, setmaxnreg.
# Shared memory by the CUDA programming guide's table of technical specifications per compute capability.
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _target(75, "turing", 64, 64),
        _target(80, "ampere", 163, 164),
        _target(86, "ampere", 99, 100),
        _target(87, "ampere", 163, 164),
        _target(89, "ampere", 99, 100),
        _target(90, "ampere", 227, 228),
        Target("sm_90a", 90, "hopper", 227 * 1024, 228 * 1024, backward_family="hopper"),
        _target(100, "ampere", 227, 228),
        _target(103, "ampere", 227, 228),
        _target(120, "ampere", 99, 100),
        _target(121, "ampere", 99, 100),
    )
}


def target_named(name: str) -> Target:
    """The target of that name, such as "sm_80"; UnsupportedError, with the list, for any other."""
    try:
        return TARGETS[name]
    except (KeyError, TypeError):  # a list cannot even be looked up
        raise UnsupportedError(f"target={name!r} is not supported; choose one of {', '.join(TARGETS)}") from None


def target_of_capability(major: int, minor: int) -> Target:
    """The target that a GPU takes by its compute capability: that of its generation's own instructions where there is.

    UnsupportedError, with the list of targets, for a GPU that kernels are not generated for.
    """
    name = f"sm_{major}{minor}"
    return TARGETS.get(f"{name}a") or target_named(name)
