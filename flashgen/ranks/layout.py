"""The sharding of a sequence: which positions each rank has, in the order of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flashgen.errors import ArgumentError

SHARDS = ("zigzag", "plain")
"""How positions are distributed over ranks: see `Layout`."""


class Stretch(NamedTuple):
    """Contiguous positions on a rank: `length` positions starting at `first`, stored in its rows starting at `row`."""

    first: int
    length: int
    row: int

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.first + self.length

    def row_of(self, position: int) -> int:
        """Returns the row of a position."""
        return self.row + position - self.first


@dataclass(frozen=True)
class Layout:
    """A sequence of `length` positions, sharded over `ranks` ranks in chunks of equal length.

    shards: "plain" gives rank r the r-th of `ranks` chunks. "zigzag" makes 2·ranks chunks and gives rank r the r-th
    chunk from the front and the r-th from the back, which balances the computation under a causal mask.

    Attributes:
        ranks: the number of ranks.
        length: the number of positions.
    """

    ranks: int
    length: int
    shards: str = "zigzag"

    def __post_init__(self) -> None:
        if self.shards not in SHARDS:
            raise ArgumentError(f"shards={self.shards!r} must be one of {', '.join(SHARDS)}, or a tensor of positions")
        if self.ranks < 1:
            raise ArgumentError(f"ranks={self.ranks} must be at least 1")
        if self.length % self.chunks:
            above = -(-self.length // self.chunks) * self.chunks
            raise ArgumentError(
                f"a length of {self.length} is not a multiple of {self.chunks}, the chunks of {self.ranks} ranks with "
                f"shards={self.shards!r}: pad the sequence to {above}, and mask what was added"
            )

    @property
    def chunks(self) -> int:
        """The number of chunks of the sequence."""
        return self.ranks * self.chunks_each

    @property
    def chunks_each(self) -> int:
        """The number of chunks of each rank."""
        return 2 if self.shards == "zigzag" else 1

    @property
    def chunk(self) -> int:
        """The number of positions of a chunk."""
        return self.length // self.chunks

    @property
    def rows(self) -> int:
        """The number of positions of each rank."""
        return self.length // self.ranks

    def starts(self, rank: int) -> tuple[int, ...]:
        """Returns the first position of each chunk of a rank, in the order of its rows.

        Args:
            rank: the number of the rank.
        """
        numbers = (rank, self.chunks - 1 - rank) if self.shards == "zigzag" else (rank,)
        return tuple(number * self.chunk for number in numbers)

    def stretches(self, rank: int) -> tuple[Stretch, ...]:
        """Returns the positions of a rank in the order of its rows, with adjacent chunks joined.

        Args:
            rank: the number of the rank.
        """
        stretches: list[Stretch] = []
        for index, start in enumerate(self.starts(rank)):
            if stretches and stretches[-1].end == start:
                stretches[-1] = stretches[-1]._replace(length=stretches[-1].length + self.chunk)
            else:
                stretches.append(Stretch(start, self.chunk, index * self.chunk))
        return tuple(stretches)

    def place(self, position: int) -> tuple[int, int]:
        """Returns the rank that has a position, and the row of the position on this rank.

        Args:
            position: a position of the sequence.
        """
        rank, row = self.in_order()[position // self.chunk]
        return rank, row + position % self.chunk

    def in_order(self) -> list[tuple[int, int]]:
        """Returns (rank, first row on this rank) of each chunk, in the order of positions."""
        chunks = [
            (start, rank, index * self.chunk)
            for rank in range(self.ranks)
            for index, start in enumerate(self.starts(rank))
        ]
        return [(rank, row) for _, rank, row in sorted(chunks)]
