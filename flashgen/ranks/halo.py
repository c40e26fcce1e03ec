"""Halos: where a rank reads nothing but rows next to its own, as under a window, these are joined with its own.

A rank's positions are stretches, each between two chunks of other ranks. Rows of queries at its ends that see keys of
such a chunk see those and some of their own stretch, which stand side by side in the whole: they are a *rim*. One block
computes it over both, and no partial results are merged; all other rows need nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from flashgen.analysis.intervals.evaluation import EMPTY
from flashgen.ranks.blocks import Block, Step
from flashgen.ranks.classes import Rectangle, Whole, class_of, found_in, share_of
from flashgen.ranks.layout import Layout, Stretch

_MOST = 2  # at most half of the rows may need others: beyond that a ring has more to compute while keys travel


class Rows(NamedTuple):
    """Of a rank's rows the first, and how many."""

    first: int
    length: int


class Rim(NamedTuple):
    """What a rank computes over keys that it receives and own ones beside them.

    block: its keys are these together, in the order of positions. owner, theirs: whose keys are received, and which of
    the owner's rows they are. own: the rank's rows beside them, of which there may be none. before: whether those that
    are received stand before them, or behind.
    """

    block: Block
    owner: int
    theirs: Rows
    own: Rows
    before: bool

    @property
    def theirs_at(self) -> int:
        """Where keys that are received begin among those of the block."""
        return 0 if self.before else self.own.length

    @property
    def own_at(self) -> int:
        """Where own ones begin."""
        return self.theirs.length if self.before else 0


class Lent(NamedTuple):
    """Rows that another rank's rim reads."""

    to: int
    rows: Rows


class Halo(NamedTuple):
    """What a rank computes, receives and sends.

    own: blocks over its own keys alone. rims: in the order of whose keys they receive. lent: what it sends, in the
    order of the ranks that receive it, and for each in the order of its rims: so both know what stands where in the one
    message between them.
    """

    own: tuple[Block, ...]
    rims: tuple[Rim, ...]
    lent: tuple[Lent, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All of them."""
        return self.own + tuple(rim.block for rim in self.rims)

    @property
    def received(self) -> int:
        """Rows that it receives."""
        return sum(rim.theirs.length for rim in self.rims)

    @property
    def sent(self) -> int:
        """Rows that it sends."""
        return sum(lent.rows.length for lent in self.lent)

    def steps(self, rank: int) -> tuple[Step, ...]:
        """The same by the owners of keys."""
        made = [Step(rank, self.own, ())]
        for owner, of_owner in groupby(self.rims, lambda rim: rim.owner):
            rims = list(of_owner)
            pieces = tuple((rim.theirs.first, rim.theirs.first + rim.theirs.length) for rim in rims)
            made.append(Step(owner, tuple(rim.block for rim in rims), pieces))
        return tuple(made)


def halos_of(whole: Whole, queries: Layout, keys: Layout) -> tuple[Halo, ...] | None:
    """The halo of each rank; None where one reads more than that, most of its rows would wait, or none reads any."""
    made = []
    for rank in range(queries.ranks):
        halo = _halo(whole, queries, keys, rank)
        if halo is None:
            return None
        made.append(halo)
    if not any(halo.rims for halo in made):
        return None
    return tuple(halo._replace(lent=_lent(made, rank)) for rank, halo in enumerate(made))


def _lent(halos: Sequence[Halo], rank: int) -> tuple[Lent, ...]:
    """What others receive of a rank."""
    return tuple(Lent(to, rim.theirs) for to, halo in enumerate(halos) for rim in halo.rims if rim.owner == rank)


def _halo(whole: Whole, queries: Layout, keys: Layout, rank: int) -> Halo | None:
    """What a rank computes and receives; None where it reads more than what is beside its own, or most rows wait."""
    own: list[Block] = []
    rims: list[Rim] = []
    for of_q, of_k in zip(queries.stretches(rank), keys.stretches(rank), strict=True):
        beside = _seen_beside(whole, keys.chunk, of_q, of_k)
        if beside is None:
            return None
        rims += [_rim(whole, keys, of_q, of_k, each) for each in beside]
        own += _own(whole, of_q, of_k, beside)
    if sum(rim.block.rows for rim in rims) * _MOST > queries.rows:
        return None
    return Halo(tuple(own), tuple(sorted(rims, key=lambda rim: rim.owner)), ())


def _seen_beside(whole: Whole, chunk: int, of_q: Stretch, of_k: Stretch) -> list[Rectangle] | None:
    """What a stretch sees of the chunks of keys before and behind it.

    None where it sees more, or not what touches it, or a row sees both.
    """

    def found(first: int, end: int) -> Rectangle:
        return found_in(whole, Rectangle(of_q.first, of_q.length, first, end - first)).rectangle

    first, end = max(of_k.first - chunk, 0), min(of_k.end + chunk, whole.len_k)
    if found(0, first).rows or found(end, whole.len_k).rows:
        return None
    before, behind = found(first, of_k.first), found(of_k.end, end)
    if (before.rows and before.k + before.keys != of_k.first) or (behind.rows and behind.k != of_k.end):
        return None
    apart = before.q + before.rows <= behind.q or behind.q + behind.rows <= before.q
    beside = [each for each in (before, behind) if each.rows]
    return beside if apart or len(beside) < 2 else None


def _rim(whole: Whole, keys: Layout, of_q: Stretch, of_k: Stretch, theirs: Rectangle) -> Rim:
    """The rim of queries that see a rectangle of another rank's keys."""
    owned = found_in(whole, theirs._replace(k=of_k.first, keys=of_k.length)).rectangle
    read = [each for each in (theirs, owned) if each.keys]
    first, end = min(each.k for each in read), max(each.k + each.keys for each in read)
    own_first, own_end = max(first, of_k.first), min(end, of_k.end)
    both = theirs._replace(k=first, keys=end - first)
    row, places = of_q.row_of(theirs.q), (theirs.q, first)
    owner, their_row = keys.place(theirs.k)
    return Rim(
        Block(row, both.rows, 0, both.keys, *places, class_of(whole, both), share_of(whole, both)),
        owner,
        Rows(their_row, theirs.keys),
        Rows(of_k.row_of(own_first), own_end - own_first),
        before=theirs.k < of_k.first,
    )


def _own(whole: Whole, of_q: Stretch, of_k: Stretch, beside: Sequence[Rectangle]) -> list[Block]:
    """The blocks of the other rows of a stretch."""
    rims = {(each.q, each.q + each.rows) for each in beside}
    cuts = sorted({of_q.first, of_q.end, *(cut for rim in rims for cut in rim)})
    made = []
    for first, end in (others for others in pairwise(cuts) if others not in rims):
        (q, rows, k, keys), kind, share = found_in(whole, Rectangle(first, end - first, of_k.first, of_k.length))
        if kind != EMPTY:
            made.append(Block(of_q.row_of(q), rows, of_k.row_of(k), keys, q, k, kind, share))
    return made
