"""Halo exchange: a rank that reads only key rows next to its own, as under a window, joins them with its own rows.

The positions of a rank form stretches, and each stretch lies between two chunks of other ranks. Queries at the ends of
a stretch may see keys of a neighbouring chunk and keys of their own stretch, which are adjacent in the sequence. Such
queries form a `BoundaryBlock`: one kernel call covers both sets of keys, so that no partial outputs have to be merged.
All other rows need no keys of other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from flashgen.analysis.intervals.evaluation import EMPTY
from flashgen.ranks.blocks import Block, Step
from flashgen.ranks.classes import Rectangle, ScoreMatrix, classify, trim, unmasked_share
from flashgen.ranks.layout import Layout, Stretch

_MAX_BOUNDARY = 0.5  # of the rows of a rank; beyond that a ring overlaps more computation with communication


class Rows(NamedTuple):
    """`length` rows of a rank, starting at row `first`."""

    first: int
    length: int


class BoundaryBlock(NamedTuple):
    """Queries over received keys and over the rank's own keys next to them.

    Attributes:
        block: the block to compute; its keys are the received and the own ones, joined in the order of positions.
        owner: the rank that sends keys.
        theirs: the rows that it sends.
        own: the rank's own rows next to them; may be empty.
        before: whether the received keys come before the own ones, else after them.
    """

    block: Block
    owner: int
    theirs: Rows
    own: Rows
    before: bool

    @property
    def theirs_at(self) -> int:
        """The index of the first received key among the keys of the block."""
        return 0 if self.before else self.own.length

    @property
    def own_at(self) -> int:
        """The index of the first own key among the keys of the block."""
        return self.theirs.length if self.before else 0


class Lent(NamedTuple):
    """Rows that a rank sends to rank `to`, for one boundary block of that rank."""

    to: int
    rows: Rows


class Halo(NamedTuple):
    """What a rank computes, receives and sends.

    Attributes:
        own: the blocks over the rank's own keys alone.
        boundary_blocks: the boundary blocks, in the order of the ranks that send keys.
        lent: the rows that the rank sends, in the order of the receiving ranks and, for each of them, of its
            boundary blocks. Sender and receiver thus agree on the order of rows in the one message between them.
    """

    own: tuple[Block, ...]
    boundary_blocks: tuple[BoundaryBlock, ...]
    lent: tuple[Lent, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks of the rank."""
        return self.own + tuple(boundary.block for boundary in self.boundary_blocks)

    @property
    def received(self) -> int:
        """The number of rows that the rank receives."""
        return sum(boundary.theirs.length for boundary in self.boundary_blocks)

    @property
    def sent(self) -> int:
        """The number of rows that the rank sends."""
        return sum(lent.rows.length for lent in self.lent)

    def steps(self, rank: int) -> tuple[Step, ...]:
        """Returns the blocks grouped by the owners of their keys, the rank itself first.

        Args:
            rank: the number of this rank.
        """
        steps = [Step(rank, self.own, ())]
        for owner, group in groupby(self.boundary_blocks, lambda boundary: boundary.owner):
            boundary_blocks = list(group)
            pieces = tuple(
                (boundary.theirs.first, boundary.theirs.first + boundary.theirs.length) for boundary in boundary_blocks
            )
            steps.append(Step(owner, tuple(boundary.block for boundary in boundary_blocks), pieces))
        return tuple(steps)


def build_halos(scores: ScoreMatrix, queries: Layout, keys: Layout) -> tuple[Halo, ...] | None:
    """Returns the halo of each rank, or None if a halo exchange does not apply.

    It does not apply if a rank reads keys that are not next to its own, if most of its rows would wait for other ranks,
    or if no rank reads keys of another one.
    """
    halos = []
    for rank in range(queries.ranks):
        halo = _build_halo(scores, queries, keys, rank)
        if halo is None:
            return None
        halos.append(halo)
    if not any(halo.boundary_blocks for halo in halos):
        return None
    return tuple(halo._replace(lent=_rows_sent(halos, rank)) for rank, halo in enumerate(halos))


def _rows_sent(halos: Sequence[Halo], rank: int) -> tuple[Lent, ...]:
    """Returns the rows that a rank sends to others."""
    return tuple(
        Lent(to, boundary.theirs)
        for to, halo in enumerate(halos)
        for boundary in halo.boundary_blocks
        if boundary.owner == rank
    )


def _build_halo(scores: ScoreMatrix, queries: Layout, keys: Layout, rank: int) -> Halo | None:
    """Returns what a rank computes and receives, or None if it reads distant keys or most of its rows would wait."""
    own: list[Block] = []
    boundary_blocks: list[BoundaryBlock] = []
    for stretch_q, stretch_k in zip(queries.stretches(rank), keys.stretches(rank), strict=True):
        neighbours = _visible_neighbours(scores, keys.chunk, stretch_q, stretch_k)
        if neighbours is None:
            return None
        boundary_blocks += [
            _build_boundary_block(scores, keys, stretch_q, stretch_k, rectangle) for rectangle in neighbours
        ]
        own += _own_blocks(scores, stretch_q, stretch_k, neighbours)
    if sum(boundary.block.rows for boundary in boundary_blocks) > _MAX_BOUNDARY * queries.rows:
        return None
    return Halo(tuple(own), tuple(sorted(boundary_blocks, key=lambda boundary: boundary.owner)), ())


def _visible_neighbours(
    scores: ScoreMatrix, chunk: int, stretch_q: Stretch, stretch_k: Stretch
) -> list[Rectangle] | None:
    """Returns the rectangles in which a stretch sees keys of the chunks before and after it.

    Returns None if the stretch sees other keys, if the visible keys are not adjacent to it, or if one row sees both
    chunks.
    """

    def visible(first: int, end: int) -> Rectangle:
        return trim(scores, Rectangle(stretch_q.first, stretch_q.length, first, end - first)).rectangle

    first, end = max(stretch_k.first - chunk, 0), min(stretch_k.end + chunk, scores.len_k)
    if visible(0, first).rows or visible(end, scores.len_k).rows:
        return None
    before, after = visible(first, stretch_k.first), visible(stretch_k.end, end)
    if (before.rows and before.k + before.keys != stretch_k.first) or (after.rows and after.k != stretch_k.end):
        return None
    disjoint = before.q + before.rows <= after.q or after.q + after.rows <= before.q
    neighbours = [rectangle for rectangle in (before, after) if rectangle.rows]
    return neighbours if disjoint or len(neighbours) < 2 else None


def _build_boundary_block(
    scores: ScoreMatrix, keys: Layout, stretch_q: Stretch, stretch_k: Stretch, theirs: Rectangle
) -> BoundaryBlock:
    """Returns the boundary block of the queries that see the rectangle `theirs` of another rank's keys."""
    owned = trim(scores, theirs._replace(k=stretch_k.first, keys=stretch_k.length)).rectangle
    read = [rectangle for rectangle in (theirs, owned) if rectangle.keys]
    first, end = min(rectangle.k for rectangle in read), max(rectangle.k + rectangle.keys for rectangle in read)
    own_first, own_end = max(first, stretch_k.first), min(end, stretch_k.end)
    both = theirs._replace(k=first, keys=end - first)
    row, positions = stretch_q.row_of(theirs.q), (theirs.q, first)
    owner, their_row = keys.place(theirs.k)
    return BoundaryBlock(
        Block(row, both.rows, 0, both.keys, *positions, classify(scores, both), unmasked_share(scores, both)),
        owner,
        Rows(their_row, theirs.keys),
        Rows(stretch_k.row_of(own_first), own_end - own_first),
        before=theirs.k < stretch_k.first,
    )


def _own_blocks(
    scores: ScoreMatrix, stretch_q: Stretch, stretch_k: Stretch, neighbours: Sequence[Rectangle]
) -> list[Block]:
    """Returns the blocks of the rows of a stretch that see no neighbour."""
    boundary_blocks = {(rectangle.q, rectangle.q + rectangle.rows) for rectangle in neighbours}
    cuts = sorted({stretch_q.first, stretch_q.end, *(cut for boundary in boundary_blocks for cut in boundary)})
    blocks = []
    for first, end in (others for others in pairwise(cuts) if others not in boundary_blocks):
        (q, rows, k, keys), kind, share = trim(scores, Rectangle(first, end - first, stretch_k.first, stretch_k.length))
        if kind != EMPTY:
            blocks.append(Block(stretch_q.row_of(q), rows, stretch_k.row_of(k), keys, q, k, kind, share))
    return blocks
