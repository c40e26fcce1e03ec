"""A call of the kernel that lists tiles, on the emulator, with its text changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashgen.language as fg
from flashgen import attention
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.runtime.schedule import Schedule
from planting import Result


@dataclass(frozen=True)
class ListsSubject:
    """Lists the tiles of one tile of queries.

    Attributes:
        length: number of keys, which is more tiles of 16 than the warps of a block handle in one iteration.
    """

    length: int = 2200

    def _compiled(self, **options: Any) -> attention.Attention:
        spec = fg.AttentionSpec(16, mask=fg.document("ids"))
        return attention.compile(spec, target="sm_80", emulate=True, plan=ForwardPlan(32, 16, 2), **options)

    def texts(self) -> dict[str, str]:
        return {"lists": next(iter(self._compiled().sources.values()))}

    def run(
        self, texts: Mapping[str, str] | None, *, sanitize: Any, schedule: Schedule, shared_bytes: int = 0
    ) -> Result:
        ids = np.arange(self.length, dtype=np.int32) // 300
        compiled = self._compiled(source=texts, sanitize=sanitize, schedule=schedule)
        compiled.tile_lists(32, self.length, ids=ids)
        return Result(True)


def lists_subjects() -> dict[str, ListsSubject]:
    return {"documents": ListsSubject()}
