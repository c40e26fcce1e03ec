"""A rendered kernel, a stage of its pass: its text, and what is needed to launch it for calls of any size."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flashgen.codegen.arguments import ArgumentLayout
from flashgen.codegen.shared_memory import SharedMemoryLayout
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

Grid = tuple[Any, Any, Any]
"""Blocks along x, y and z: numbers, or formulas of named sizes."""
# The tiles of keys of each tile of queries, for the forward; the tiles of queries of each tile of keys.
Direction = Literal["keys", "queries"]


@dataclass(frozen=True)
class Cost:
    """Formulas of a call's sizes. flops: of products, and of what is done once a row. hbm: bytes, each array once."""

    flops: str
    hbm: str


def _always(sizes: Sizes) -> bool:
    return True


@dataclass(frozen=True)
class Workspace:
    """Memory that a pass makes for its own use, by the name of a pointer in its kernels' structs.

    shape: of the sizes of a call; of_capture: of the captured array of that name, `shape` then stands behind its shape.
    zeroed: whether it begins as zeros. wanted: by calls of which sizes; the pointer is null for others.
    """

    name: str
    shape: Callable[[Sizes], tuple[int, ...]]
    dtype: str
    zeroed: bool = False
    of_capture: str = ""
    wanted: Callable[[Sizes], bool] = _always


def _nothing(sizes: Sizes) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, repr=False)
class RenderedKernel:
    """A kernel's text and how it is launched. It prints as one line without its text; print `source` for that.

    Attributes:
        name: for folders and reports. entry: of the extern "C" function.
        shared: the layout of a block's dynamic shared memory.
        plan: whose tiles the kernel is for, a dataclass; None where it knows of no tiles.
        role: what the kernel is in its pass: "lists", "forward", "prepare", "keys", ...
        cost: None where it is small beside the others'.
        grid: of sizes.
        values: members of its struct that follow from sizes, beside those that bear the sizes' names.
        reads: which lists of tiles it reads; None where closed forms say what to visit.
        lists: of a kernel that makes lists, which.
        boxes: arrays that its struct holds tensor maps of -> (columns, rows) that one copy moves, or (columns, heads,
            rows) where heads are packed, or (columns of a panel, rows of a group, panels, groups) where one moves
            several panels.
        counts: how many counters its blocks count by, 0 before and after the launch; None where they never do.
        workspaces: memory that it is the first to need.
        pointers: members of its struct that are called otherwise in the pass.
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
    cost: Cost | None = field(default=None, kw_only=True)
    reads: Direction | None = field(default=None, kw_only=True)
    lists: Direction | None = field(default=None, kw_only=True)
    boxes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, kw_only=True)
    counts: Callable[[Sizes], int] | None = field(default=None, kw_only=True, compare=False)
    workspaces: tuple[Workspace, ...] = field(default=(), kw_only=True, compare=False)
    pointers: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def shared_bytes(self) -> int:
        """The dynamic shared memory of a block, in bytes."""
        return self.shared.total_bytes

    def __repr__(self) -> str:
        facts = (
            f"{self.threads} threads, {self.shared_bytes} bytes of shared memory, {self.source.count(chr(10))} lines"
        )
        return f"<{type(self).__name__} {self.name}: {self.target.name}, {facts}>"


def kernel_name(kind: str, target: Target, spec: AttentionSpec) -> str:
    """A readable name such as fwd-sm90-bf16-d128-causal-1a2b3c4d."""
    return f"{kind}-{target.name.replace('_', '')}-{spec.name}"


def entry_name(prefix: str, spec: AttentionSpec) -> str:
    """The name of a kernel's function: a C identifier."""
    return re.sub(r"\W+", "_", f"{prefix}_{spec.name}")
