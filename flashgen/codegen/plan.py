"""What every forward plan says of itself, whatever its family: how it is checked, ranked and shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from flashgen.codegen.shared_memory import SharedMemoryLayout
from flashgen.codegen.targets import Target
from flashgen.errors import UnsupportedError
from flashgen.language.spec import AttentionSpec


class _Checkable(Protocol):
    @property
    def problem(self) -> Callable[..., str | None]: ...
    @property
    def shared_memory(self) -> Callable[..., SharedMemoryLayout]: ...


class Checked:
    """What the plans of every family and pass have in common."""

    def shared_bytes(self: _Checkable, *given: Any, **options: Any) -> int:
        """The dynamic shared memory of a block, in bytes; takes the arguments of `shared_memory`."""
        return self.shared_memory(*given, **options).total_bytes

    def check(self: _Checkable, *given: Any) -> None:
        """UnsupportedError where there is a problem; takes what `problem` does."""
        problem = self.problem(*given)
        if problem:
            raise UnsupportedError(f"{self}: {problem}")


def shared_memory_problem(taken: int, target: Target, remedy: str) -> str | None:
    """What a plan says whose blocks take so many bytes of shared memory, if a block of the target has fewer."""
    if taken <= target.shared_per_block:
        return None
    return (
        f"it takes {taken} bytes of shared memory and a block of {target.name} has {target.shared_per_block}: {remedy}"
    )


class Plan(Protocol):
    """How a forward kernel divides its work: a frozen dataclass of each family, chosen by spec and target.

    Attributes:
        tile_q, tile_k: queries of a tile, keys of a step. stages: tiles of K, and of V, that shared memory holds.
        blocks: thread blocks that should fit on a multiprocessor. threads: of a block.
        packed_heads: query heads that are rows of one tile.
        register_budget: registers that a thread which computes may have.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def tile_q(self) -> int: ...
    @property
    def tile_k(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def packed_heads(self) -> int: ...
    @property
    def register_budget(self) -> int: ...
    def __hash__(self) -> int: ...

    def show_options(self, spec: AttentionSpec) -> str:
        """What `flashgen show` is told so that it shows the kernel of a default plan changed like this one."""

    def registers(self, spec: AttentionSpec) -> int:
        """Registers of a thread that computes, by estimate."""

    def matrix_cycles(self, spec: AttentionSpec) -> float:
        """Cycles of a step's products on a multiprocessor."""

    def exposed(self, blocks: int) -> float:
        """The share of the shorter of products and softmax that the other does not hide, with so many blocks."""

    def summary(self, spec: AttentionSpec) -> str:
        """One line for the kernel's header."""

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """The layout of a block's dynamic shared memory."""

    def shared_bytes(self, spec: AttentionSpec) -> int:
        """The dynamic shared memory of a block, in bytes."""

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Why the plan contradicts itself, or does not fit the spec or the target; None where it does."""

    def check(self, spec: AttentionSpec, target: Target) -> None:
        """UnsupportedError where there is a problem."""
