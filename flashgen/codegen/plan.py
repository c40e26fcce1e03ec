"""The interface of forward plans of all families: how a plan is checked, ranked and shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar, Protocol

from flashgen.codegen.shared_memory import SharedMemoryLayout
from flashgen.codegen.targets import Target
from flashgen.errors import PlanError, UnsupportedError
from flashgen.language.spec import CACHED_DIM, AttentionSpec


class _Checkable(Protocol):
    @property
    def problem(self) -> Callable[..., str | None]: ...
    @property
    def shared_memory(self) -> Callable[..., SharedMemoryLayout]: ...


class Checked:
    """Methods that the plans of all families and passes share."""

    def shared_bytes(self: _Checkable, *given: Any, **options: Any) -> int:
        """Returns the dynamic shared memory of a block, in bytes. Takes the arguments of `shared_memory`."""
        return self.shared_memory(*given, **options).total_bytes

    def check(self: _Checkable, *given: Any) -> None:
        """Raises PlanError if `problem` returns a problem for these arguments."""
        problem = self.problem(*given)
        if problem:
            raise PlanError(f"{self}: {problem}")


def shared_memory_problem(taken: int, target: Target, remedy: str) -> str | None:
    """Returns the problem of a plan whose blocks take more shared memory than the target has; None if it fits."""
    if taken <= target.shared_per_block:
        return None
    return (
        f"it takes {taken} bytes of shared memory and a block of {target.name} has {target.shared_per_block}: {remedy}"
    )


def too_wide(
    kernel: str, spec: AttentionSpec, target: Target, fits: Callable[[AttentionSpec], bool]
) -> UnsupportedError:
    """Returns the error for a spec whose rows have too many columns for the plans of a target.

    Args:
        kernel: What the plans are for, for the message.
        fits: Whether some plan fits a spec. The error names the largest dim, of head and value alike, that fits.
    """
    given = {each.name: getattr(spec, each.name) for each in fields(spec)}
    step = CACHED_DIM if spec.kv_dtype else 8
    narrower = range(spec.max_dim - spec.max_dim % step, 0, -step)
    largest = next(dim for dim in narrower if fits(AttentionSpec(**{**given, "head_dim": dim, "value_dim": dim})))
    return UnsupportedError(
        f"{spec.widest}: a block of {target.name} has {target.shared_per_block} bytes of shared memory, which hold "
        f"{kernel} tiles of up to {largest} columns"
    )


class Plan(Protocol):
    """The tile sizes and launch shape of a forward kernel: a frozen dataclass per family, chosen by spec and target.

    Attributes:
        tile_q: Query rows of a tile.
        tile_k: Keys of a tile, which one mainloop step processes.
        stages: Pipeline stages: tiles of K, and of V, that shared memory holds.
        blocks: Thread blocks that should be resident on a multiprocessor.
        threads: Threads of a block.
        packed_heads: Query heads of one KV head that are stacked as rows of a tile.
        register_budget: Maximum registers of a thread that computes (not of a producer).
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
        """Returns the options with which `flashgen show` selects this variant of a default plan."""

    def registers(self, spec: AttentionSpec) -> int:
        """Returns the estimated registers of a thread that computes."""

    def matrix_cycles(self, spec: AttentionSpec) -> float:
        """Returns the cycles that the matrix products of a step take on a multiprocessor."""

    def exposed(self, blocks: int) -> float:
        """Returns the fraction of the shorter of products and softmax that is not hidden, with `blocks` resident."""

    def summary(self, spec: AttentionSpec) -> str:
        """Returns a line about the plan for the kernel's header comment."""

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """Returns the layout of a block's dynamic shared memory."""

    def shared_bytes(self, spec: AttentionSpec) -> int:
        """Returns the dynamic shared memory of a block, in bytes."""

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Returns why the plan is inconsistent or does not fit the spec or the target; None if it fits."""

    def check(self, spec: AttentionSpec, target: Target) -> None:
        """Raises UnsupportedError if there is a problem."""
