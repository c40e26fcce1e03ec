"""Halos: where a rank reads nothing but rows next to its own, as under a window, these are joined with its own.

Rows of queries that see a neighbour's keys see those and some of their own rank's, which stand side by side in the
whole. So one block computes them over both, and no partial results are merged; all other rows need nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from flashgen.analysis.intervals.evaluation import EMPTY
from flashgen.ranks.blocks import Block, Step
from flashgen.ranks.classes import Rectangle, Whole, class_of, found_in, share_of
from flashgen.ranks.layout import Layout

_MOST = 2  # at most half of the rows may need neighbours: beyond that a ring has more to compute while keys travel


class Halo(NamedTuple):
    """What a rank receives of its neighbours, sends to them, and computes.

    before, behind: rows of the ranks before and behind it that it receives, the last ones and the first ones. first,
    last: its own that it sends to the rank before, and to the one behind. own, with_before, with_behind: blocks whose
    keys are its own, or joined with what it receives; their k is counted from its own first row, negative before it.
    """

    before: int
    behind: int
    first: int
    last: int
    own: tuple[Block, ...]
    with_before: Block | None
    with_behind: Block | None

    @property
    def received(self) -> int:
        """Rows that it receives."""
        return self.before + self.behind

    @property
    def sent(self) -> int:
        """Rows that it sends."""
        return self.first + self.last

    @property
    def joined(self) -> tuple[Block, ...]:
        """The blocks that need neighbours."""
        return tuple(block for block in (self.with_before, self.with_behind) if block)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All of them."""
        return self.own + self.joined

    def steps(self, rank: int, rows: int) -> tuple[Step, ...]:
        """The same by the owners of keys; rows: of a rank."""
        made = [Step(rank, self.own, ())]
        if self.with_before:
            made.append(Step(rank - 1, (self.with_before.moved(-rows),), ((rows - self.before, rows),)))
        if self.with_behind:
            made.append(Step(rank + 1, (self.with_behind.moved(rows),), ((0, self.behind),)))
        return tuple(made)


class _Seen(NamedTuple):
    """Rows of a rank, first and behind the last, that see a neighbour's keys, and how many of these."""

    first: int
    last: int
    keys: int


_NONE = _Seen(0, 0, 0)


def halos_of(whole: Whole, queries: Layout, keys: Layout, steps: Sequence[Sequence[Step]]) -> tuple[Halo, ...] | None:
    """The halo of each rank, given the steps of a ring; None where a rank reads more than that, or none reads any."""
    if queries.chunks_each > 1 or keys.chunks_each > 1:
        return None
    seen = [_seen(rank, keys.rows, steps[rank]) for rank in range(len(steps))]
    made = []
    for rank, found in enumerate(seen):
        if found is None:
            return None
        halo = _halo(whole, queries, keys, rank, *found)
        if halo is None:
            return None
        made.append(halo)
    if not any(halo.received for halo in made):
        return None
    ends = [Halo(0, 0, 0, 0, (), None, None)]
    around = [*ends, *made, *ends]
    return tuple(
        halo._replace(first=around[rank].behind, last=around[rank + 2].before) for rank, halo in enumerate(made)
    )


def _seen(rank: int, rows: int, steps: Sequence[Step]) -> tuple[_Seen, _Seen] | None:
    """What a rank sees of the ones before and behind it; None where there is more, or it is not beside its own rows."""
    before = behind = _NONE
    for step in steps[1:]:
        if not step.blocks:
            continue
        first, last = min(block.q for block in step.blocks), max(block.q + block.rows for block in step.blocks)
        piece, *more = step.pieces
        if more or step.owner not in (rank - 1, rank + 1):
            return None
        if step.owner == rank - 1 and piece[1] == rows:
            before = _Seen(first, last, rows - piece[0])
        elif step.owner == rank + 1 and piece[0] == 0:
            behind = _Seen(first, last, piece[1])
        else:
            return None
    return before, behind


def _halo(whole: Whole, queries: Layout, keys: Layout, rank: int, before: _Seen, behind: _Seen) -> Halo | None:
    """What a rank receives and computes; None where too many rows need neighbours, or some both."""
    apart = before.last <= behind.first or behind.last <= before.first or not (before.keys and behind.keys)
    waiting = before.last - before.first + behind.last - behind.first
    if not apart or waiting * _MOST > queries.rows:
        return None

    def block(first: int, last: int, more_before: int, more_behind: int) -> Block | None:
        """Of rows of queries, over all own keys that they see, and so many rows beside these."""
        (start_q,), (start_k,) = queries.starts(rank), keys.starts(rank)
        own = found_in(whole, Rectangle(start_q + first, last - first, start_k, keys.rows))
        begin = -more_before if more_before else own.rectangle.k - start_k
        end = keys.rows + more_behind if more_behind else own.rectangle.k + own.rectangle.keys - start_k
        if own.kind == EMPTY and more_before:
            end = 0
        elif own.kind == EMPTY and more_behind:
            begin = keys.rows
        if begin >= end:
            return None
        rectangle = Rectangle(start_q + first, last - first, start_k + begin, end - begin)
        kind, share = class_of(whole, rectangle), share_of(whole, rectangle)
        return Block(first, last - first, begin, end - begin, start_q + first, start_k + begin, kind, share)

    cuts = sorted({0, queries.rows, *(each for rim in (before, behind) if rim.keys for each in rim[:2])})
    rims = {(rim.first, rim.last) for rim in (before, behind) if rim.keys}
    inner = [block(a, b, 0, 0) for a, b in pairwise(cuts) if (a, b) not in rims]
    own = tuple(each for each in inner if each and each.kind != EMPTY)
    with_before = block(before.first, before.last, before.keys, 0) if before.keys else None
    with_behind = block(behind.first, behind.last, 0, behind.keys) if behind.keys else None
    return Halo(before.keys, behind.keys, 0, 0, own, with_before, with_behind)
