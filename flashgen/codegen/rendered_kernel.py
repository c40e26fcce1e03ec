"""Rendered kernels: the text of a kernel, and what is needed to launch it for calls of any size."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flashgen.codegen.arguments import ArgumentLayout
from flashgen.codegen.costs import Cost
from flashgen.codegen.shared_memory import SharedMemoryLayout
from flashgen.codegen.sizes import Grid, Sizes
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

# What tile lists enumerate: "keys" lists the key tiles of each query tile, "queries" the query tiles of each key tile.
Direction = Literal["keys", "queries"]


def _always(sizes: Sizes) -> int:
    return 1


@dataclass(frozen=True)
class Workspace:
    """Memory that a pass allocates for its own use.

    Attributes:
        name: Name of the pointer in the kernels' structs.
        shape: Returns the shape for the sizes of a call.
        zeroed: Whether it must be zero before the first launch.
        of_capture: Name of a captured array; the shape of that array is then prepended to `shape`.
        wanted: Returns 0 if calls of these sizes do not need it; the pointer is then null.
    """

    name: str
    shape: Callable[[Sizes], tuple[int, ...]]
    dtype: str
    zeroed: bool = False
    of_capture: str = ""
    wanted: Callable[[Sizes], Any] = _always


def _nothing(sizes: Sizes) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, repr=False)
class RenderedKernel:
    """A kernel's text and its launch parameters. `repr` is one line without the text, which `source` holds.

    Attributes:
        name: Name in folders and reports.
        entry: Name of the extern "C" function.
        shared: The layout of a block's dynamic shared memory.
        plan: The plan, a dataclass, that gives the tile sizes; None for kernels without tiles.
        role: The kernel's role in its pass: "lists", "forward", "preprocess", "dkdv", ...
        grid: Returns the grid for sizes.
        values: Returns members of the struct that follow from sizes, in addition to those named after sizes.
        cost: None if it is negligible compared with the other kernels of the pass.
        reads: The tile lists that it reads; None if closed forms give the tiles to visit.
        lists: The tile lists that it writes; None if it writes none.
        boxes: Array with a tensor map -> box of one TMA copy: (columns, rows); (columns, heads, rows) with packed
            heads; (columns of a panel, rows of a group, panels, groups) if one copy moves several panels.
        l2_promotion: The bytes, 128 or 256, that TMA fetches at a time into the L2. More than a row of a box helps if
            other copies soon read the neighbouring bytes, and costs bandwidth if memory is the limit.
        counts: Returns the number of uint32 counters of its blocks, which are 0 before and after a launch. The pointer
            to them is null if this is 0. None if the kernel never has counters.
        workspaces: Workspaces that this kernel is the first in the pass to use.
        pointers: Member of its struct -> name of the array in the pass, if they differ.
        programmatic_launch: Whether it may start before the previous kernel of its stream has finished (programmatic
            dependent launch). It waits for that kernel itself.
        counts_elements: Name of the captured array whose elements `Sizes.count` counts, if no workspace says so.
    """

    name: str
    entry: str
    source: str
    target: Target
    layout: ArgumentLayout
    threads: int
    shared: SharedMemoryLayout
    plan: Any = field(kw_only=True)
    role: str = field(kw_only=True)
    grid: Callable[[Sizes], Grid] = field(kw_only=True, compare=False)
    values: Callable[[Sizes], Mapping[str, Any]] = field(default=_nothing, kw_only=True, compare=False)
    cost: Cost | None = field(default=None, kw_only=True, compare=False)
    reads: Direction | None = field(default=None, kw_only=True)
    lists: Direction | None = field(default=None, kw_only=True)
    boxes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, kw_only=True)
    l2_promotion: int = field(default=256, kw_only=True)
    counts: Callable[[Sizes], Any] | None = field(default=None, kw_only=True, compare=False)
    workspaces: tuple[Workspace, ...] = field(default=(), kw_only=True, compare=False)
    pointers: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    programmatic_launch: bool = field(default=False, kw_only=True)
    counts_elements: str = field(default="", kw_only=True)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes."""
        return self.shared.total_bytes

    def __repr__(self) -> str:
        facts = (
            f"{self.threads} threads, {self.shared_bytes} bytes of shared memory, {self.source.count(chr(10))} lines"
        )
        return f"<{type(self).__name__} {self.name}: {self.target.name}, {facts}>"


def kernel_name(kind: str, target: Target, spec: AttentionSpec) -> str:
    """Returns a readable name such as fwd-sm90-bf16-d128-causal-1a2b3c4d."""
    return f"{kind}-{target.name.replace('_', '')}-{spec.name}"


def entry_name(prefix: str, spec: AttentionSpec) -> str:
    """Returns the name of a kernel's function: a C identifier."""
    return re.sub(r"\W+", "_", f"{prefix}_{spec.name}")
