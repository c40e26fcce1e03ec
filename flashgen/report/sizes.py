"""The sizes of the call that a report is about."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.codegen.costs import WorkSizes
from flashgen.errors import ArgumentError


@dataclass(frozen=True)
class CallSizes:
    """Batch, numbers of query and key heads, and lengths. Raises ArgumentError for sizes that are not valid."""

    len_q: int
    len_k: int
    batch: int = 1
    heads_q: int = 1
    heads_kv: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ArgumentError(f"{name}={value} must be at least 1")
        if self.heads_q % self.heads_kv:
            raise ArgumentError(f"heads_q={self.heads_q} must be a multiple of heads_kv={self.heads_kv}")

    def to_work(self, visited: float = 1.0) -> WorkSizes:
        """Returns the sizes of which costs are functions; elements of captured arrays are NaN: they are not known.

        visited: the share of the tiles that are visited.
        """
        queries, keys = self.batch * self.len_q, self.batch * self.len_k
        packed = {"total_q": queries, "total_k": keys, "pairs": queries * self.len_k}
        return WorkSizes(**asdict(self), **packed, count=math.nan, visited=visited)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
