"""What a rank computes: rectangles of the scores, by the owners of their keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Block(NamedTuple):
    """A rectangle of the scores that one call of a kernel computes.

    q, rows: of the rank's own rows, the first and how many. k, keys: of the owner's rows, or of all keys where they
    are gathered. Where a halo is joined with the rank's own rows these count as rows before the owner's first, or
    behind its last: positions go on there. shard_q, shard_k: where the firsts stand in the whole. kind: FULL or
    PARTIAL. share: about how much of it counts.
    """

    q: int
    rows: int
    k: int
    keys: int
    shard_q: int
    shard_k: int
    kind: int
    share: float

    @property
    def work(self) -> float:
        """About how many scores count."""
        return self.rows * self.keys * self.share

    def moved(self, rows: int) -> Block:
        """The same block where keys are counted from `rows` further on."""
        return self._replace(k=self.k - rows)


class Step(NamedTuple):
    """What a rank computes with the keys of one owner, and which rows (first, behind the last) of it it receives."""

    owner: int
    blocks: tuple[Block, ...]
    pieces: tuple[tuple[int, int], ...]


def joined_ranges(given: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges (first, behind the last) as ones that do not touch, in order."""
    ranges: list[tuple[int, int]] = []
    for first, last in sorted(given):
        if ranges and first <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(last, ranges[-1][1]))
        else:
            ranges.append((first, last))
    return tuple(ranges)
