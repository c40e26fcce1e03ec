"""Which positions of a sequence each rank has, in the order in which its rows stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flashgen.errors import ArgumentError

SHARDS = ("zigzag", "plain")
"""How positions are dealt to ranks: see `Layout`."""


class Stretch(NamedTuple):
    """Positions that stand side by side on a rank: `length` from `first` on, which are its rows from `row` on."""

    first: int
    length: int
    row: int

    @property
    def end(self) -> int:
        """The position behind the last."""
        return self.first + self.length

    def row_of(self, position: int) -> int:
        """The row at a position."""
        return self.row + position - self.first


@dataclass(frozen=True)
class Layout:
    """A sequence of `length` positions on `ranks` ranks, which have chunks of equal length.

    shards: "plain" gives rank r the r-th part. "zigzag" makes 2·ranks chunks and gives rank r the r-th from the front
    and the r-th from the back, so that under a causal mask each has as much to compute.
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
                f"a length of {self.length} is no multiple of {self.chunks}, the chunks of {self.ranks} ranks with "
                f"shards={self.shards!r}: pad the sequence to {above}, and mask what was added"
            )

    @property
    def chunks(self) -> int:
        """Into how many chunks the sequence is cut."""
        return self.ranks * self.chunks_each

    @property
    def chunks_each(self) -> int:
        """Chunks of a rank."""
        return 2 if self.shards == "zigzag" else 1

    @property
    def chunk(self) -> int:
        """Positions of a chunk."""
        return self.length // self.chunks

    @property
    def rows(self) -> int:
        """Positions of a rank."""
        return self.length // self.ranks

    def starts(self, rank: int) -> tuple[int, ...]:
        """The first position of each chunk of a rank, in the order of its rows."""
        numbers = (rank, self.chunks - 1 - rank) if self.shards == "zigzag" else (rank,)
        return tuple(number * self.chunk for number in numbers)

    def stretches(self, rank: int) -> tuple[Stretch, ...]:
        """A rank's positions, in the order of its rows: its chunks, those that follow each other as one."""
        made: list[Stretch] = []
        for index, start in enumerate(self.starts(rank)):
            if made and made[-1].end == start:
                made[-1] = made[-1]._replace(length=made[-1].length + self.chunk)
            else:
                made.append(Stretch(start, self.chunk, index * self.chunk))
        return tuple(made)

    def place(self, position: int) -> tuple[int, int]:
        """(rank, its row) of a position."""
        rank, row = self.in_order()[position // self.chunk]
        return rank, row + position % self.chunk

    def in_order(self) -> list[tuple[int, int]]:
        """(rank, first of its rows) of each chunk, in the order of positions."""
        found = [
            (start, rank, index * self.chunk)
            for rank in range(self.ranks)
            for index, start in enumerate(self.starts(rank))
        ]
        return [(rank, row) for _, rank, row in sorted(found)]
