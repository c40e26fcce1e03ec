"""The blocks of the score matrix that a rank computes, grouped by the ranks that own their keys."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple


class Block(NamedTuple):
    """A rectangle of the score matrix that one kernel call computes.

    Attributes:
        q: the first row, among the rank's own rows.
        rows: the number of rows.
        k: the first key, among the owner's rows, or among all keys if they are gathered. The block of a `BoundaryBlock`
            starts at 0 of the keys that are joined for it.
        keys: the number of keys.
        shard_q: the position of the first row in the full sequence.
        shard_k: the position of the first key in the full sequence.
        kind: FULL or PARTIAL.
        share: the approximate fraction of scores that are not masked.
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
        """The approximate number of scores that are not masked."""
        return self.rows * self.keys * self.share


class Step(NamedTuple):
    """The blocks that a rank computes with the keys of one owner.

    Attributes:
        owner: the rank that has the keys.
        blocks: the blocks, in order.
        pieces: the owner's rows that the rank receives, as half-open ranges (first, end).
    """

    owner: int
    blocks: tuple[Block, ...]
    pieces: tuple[tuple[int, int], ...]

    @property
    def received(self) -> int:
        """The number of rows that the rank receives."""
        return sum(last - first for first, last in self.pieces)

    @property
    def adds(self) -> bool:
        """Whether several blocks contribute to the gradients of a row of keys.

        If not, the one block that computes the gradients has already rounded them.
        """
        ranges = sorted((block.k, block.k + block.keys) for block in self.blocks)
        return any(first < end for (_, end), (first, _) in pairwise(ranges))


def joined_ranges(given: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Merges half-open ranges (first, end) that overlap or touch, and returns them in order."""
    ranges: list[tuple[int, int]] = []
    for first, last in sorted(given):
        if ranges and first <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(last, ranges[-1][1]))
        else:
            ranges.append((first, last))
    return tuple(ranges)


def gaps(given: Iterable[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Returns the rows of 0 to count that no half-open range (first, end) covers, as ranges in order."""
    uncovered, first = [], 0
    for begin, end in [*sorted(given), (count, count)]:
        if begin > first:
            uncovered.append((first, begin))
        first = max(first, end)
    return uncovered
