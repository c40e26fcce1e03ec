"""The tile lists of the backward pass: those of each tile of keys, and in the deterministic mode of queries too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.attention.problem import Problem
from flashgen.attention.tile_lists import ListsLaunch, TileLister, TileLists
from flashgen.codegen.stages import Kernels
from flashgen.errors import ArgumentError
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Engine, Numbers, Operands, Place
from flashgen.runtime.arrays import Library, View

_PARTS = ("keys", "queries")


@dataclass(frozen=True, eq=False)
class BackwardTileLists:
    """The lists that a backward call reads, by the kernels that read them.

    keys: of each tile of keys, the tiles of queries. queries: of each tile of queries, the tiles of keys. None where
    a closed form says the tiles, or there is no such kernel.
    """

    keys: TileLists | None
    queries: TileLists | None

    @property
    def bytes(self) -> int:
        """Memory of the lists."""
        return sum(lists.bytes for lists in (self.keys, self.queries) if lists)


class BackwardListers:
    """Makes the lists of a backward call, each kernel's for the tiles of its own plan."""

    def __init__(self, spec: AttentionSpec, listers: Mapping[str, TileLister]) -> None:
        """`listers`: by the roles of the kernels that read their lists."""
        self.spec, self.listers = spec, listers

    @classmethod
    def of(cls, spec: AttentionSpec, stages: Kernels, engine: Engine, prebuild: str) -> BackwardListers | None:
        """Those of a pass; None where closed forms say what each of its kernels visits."""
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
        """The launches for calls of these sizes and captured arrays on a device, whose q is of a library."""
        return {part: lister.prepare(problem, captured, library, device) for part, lister in self.listers.items()}

    def lists_for_call(
        self,
        prepared: Mapping[str, ListsLaunch],
        problem: Problem,
        operands: Operands,
        numbers: Numbers,
        place: Place,
    ) -> Mapping[str, Operands]:
        """The lists by the kernels that read them, made on the call's stream."""
        return {
            part: lister.lists_for_call(prepared[part], problem, operands, numbers, place)
            for part, lister in self.listers.items()
        }

    def check(
        self, lists: Any, prepared: Mapping[str, ListsLaunch], problem: Problem, place: Place
    ) -> Mapping[str, Operands]:
        """The lists that a call was given; ArgumentError where they are not this mask's at these sizes."""
        if not isinstance(lists, BackwardTileLists):
            raise ArgumentError(
                f"tile_lists of type {type(lists).__name__}: give what attention.backward_tile_lists(...) made; "
                "attention.tile_lists(...) makes those of the forward"
            )
        given = {part: getattr(lists, part) for part in _PARTS if getattr(lists, part) is not None}
        if given.keys() != self.listers.keys():
            raise ArgumentError(
                f"tile_lists are for the kernels of {sorted(given)}, and this backward reads them in those of "
                f"{sorted(self.listers)}: make them by this attention's backward_tile_lists(...)"
            )
        return {
            part: lister.check(given[part], prepared[part], problem, place) for part, lister in self.listers.items()
        }

    def make(self, len_q: int, len_k: int, batch: int, heads: int, captures: Mapping[str, Any]) -> BackwardTileLists:
        """Lists without gaps between them. Waits for the device."""
        made = {part: lister.make(len_q, len_k, batch, heads, captures) for part, lister in self.listers.items()}
        return BackwardTileLists(made.get("keys"), made.get("queries"))

    def without_layouts(self, captures: Mapping[str, Any], q: View, k: View) -> Mapping[str, Any]:
        """The captures of a call, a BlockLayout replaced by its array where q is."""
        return next(iter(self.listers.values())).without_layouts(captures, q, k)
