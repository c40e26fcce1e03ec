"""The tile lists of the backward pass: for each tile of keys, and in the deterministic mode also of queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.attention.problem import Problem
from flashgen.attention.tile_lists import ListsLaunch, TileLister, TileLists
from flashgen.codegen.stages import Kernels
from flashgen.errors import ArgumentError
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Engine, Operands, Place, ScalarArguments
from flashgen.runtime.arrays import Library, View

_LISTS_OF = {"dkdv": "keys", "dq": "queries"}  # by the role of the kernel that reads them


@dataclass(frozen=True, eq=False)
class BackwardTileLists:
    """The lists that a backward call reads.

    keys: the tiles of queries for each tile of keys. queries: the tiles of keys for each tile of queries. Either is
    None if a closed form gives the tiles, or if the backward has no kernel that reads it.
    """

    keys: TileLists | None
    queries: TileLists | None

    @property
    def bytes(self) -> int:
        """The memory of the lists in bytes."""
        return sum(lists.bytes for lists in (self.keys, self.queries) if lists)


class BackwardListers:
    """Creates the lists of a backward call, for each kernel with the tiles of its own plan."""

    def __init__(self, spec: AttentionSpec, listers: Mapping[str, TileLister]) -> None:
        """listers: by the roles of the kernels that read their lists."""
        self.spec, self.listers = spec, listers

    @classmethod
    def of(cls, spec: AttentionSpec, stages: Kernels, engine: Engine, prebuild: str) -> BackwardListers | None:
        """Returns the listers of a pass; None if closed forms give the tiles of all of its kernels."""
        makers = {kernel.lists: kernel for kernel in stages.values() if kernel.lists}
        listers = {
            role: TileLister(spec, makers[kernel.reads], engine, prebuild)
            for role, kernel in stages.items()
            if kernel.reads
        }
        return cls(spec, listers) if listers else None

    def prepare(
        self, problem: Problem, captured: Mapping[str, View], library: Library, device: int
    ) -> dict[str, ListsLaunch]:
        """Prepares the launches for calls of these sizes and captured arrays on a device. library: that of q."""
        return {role: lister.prepare(problem, captured, library, device) for role, lister in self.listers.items()}

    def lists_for_call(
        self,
        prepared: Mapping[str, ListsLaunch],
        problem: Problem,
        operands: Operands,
        numbers: ScalarArguments,
        place: Place,
    ) -> Mapping[str, Operands]:
        """Returns the lists by the roles of the kernels that read them, created on the call's stream."""
        return {
            role: lister.lists_for_call(prepared[role], problem, operands, numbers, place)
            for role, lister in self.listers.items()
        }

    def check(
        self, lists: Any, prepared: Mapping[str, ListsLaunch], problem: Problem, place: Place
    ) -> Mapping[str, Operands]:
        """Returns the operands of given lists. Raises ArgumentError if they are not for this mask and these sizes."""
        if not isinstance(lists, BackwardTileLists):
            raise ArgumentError(
                f"tile_lists of type {type(lists).__name__}: give what attention.backward_tile_lists(...) made; "
                "attention.tile_lists(...) makes those of the forward"
            )
        given = {role: getattr(lists, name) for role, name in _LISTS_OF.items() if getattr(lists, name) is not None}
        if given.keys() != self.listers.keys():
            raise ArgumentError(
                f"tile_lists are for the kernels of {sorted(given)}, and this backward reads them in those of "
                f"{sorted(self.listers)}: make them by this attention's backward_tile_lists(...)"
            )
        return {
            role: lister.check(given[role], prepared[role], problem, place) for role, lister in self.listers.items()
        }

    def make(self, len_q: int, len_k: int, batch: int, heads: int, captures: Mapping[str, Any]) -> BackwardTileLists:
        """Creates lists for later calls, and waits until they are complete."""
        lists = {role: lister.make(len_q, len_k, batch, heads, captures) for role, lister in self.listers.items()}
        return BackwardTileLists(lists.get("dkdv"), lists.get("dq"))

    def without_layouts(self, captures: Mapping[str, Any], q: View, k: View) -> Mapping[str, Any]:
        """Returns the captures of a call with each BlockLayout replaced by its array on the device of q."""
        return next(iter(self.listers.values())).without_layouts(captures, q, k)
