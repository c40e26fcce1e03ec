"""What a rank computes: rectangles of the scores, by the owners of their keys."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple


class Block(NamedTuple):
    """A rectangle of the scores that one call of a kernel computes.

    q, rows: of the rank's own rows, the first and how many. k, keys: of the owner's rows, or of all keys where they
    are gathered; a rim has all of the keys that are joined for it, from 0 on. shard_q, shard_k: where the firsts stand
    in the whole. kind: FULL or PARTIAL. share: about how much of it counts.
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


class Step(NamedTuple):
    """What a rank computes with the keys of one owner, and which rows (first, behind the last) of it it receives."""

    owner: int
    blocks: tuple[Block, ...]
    pieces: tuple[tuple[int, int], ...]

    @property
    def received(self) -> int:
        """How many rows it receives."""
        return sum(last - first for first, last in self.pieces)

    @property
    def adds(self) -> bool:
        """Whether gradients of a row of keys are of several blocks: else the one that has them has rounded them."""
        ranges = sorted((block.k, block.k + block.keys) for block in self.blocks)
        return any(first < end for (_, end), (first, _) in pairwise(ranges))


def joined_ranges(given: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges (first, behind the last) as ones that do not touch, in order."""
    ranges: list[tuple[int, int]] = []
    for first, last in sorted(given):
        if ranges and first <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(last, ranges[-1][1]))
        else:
            ranges.append((first, last))
    return tuple(ranges)


def gaps(given: Iterable[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """What of so many rows no range (first, behind the last) has, as ranges in order."""
    made, first = [], 0
    for begin, end in [*sorted(given), (count, count)]:
        if begin > first:
            made.append((first, begin))
        first = max(first, end)
    return made
