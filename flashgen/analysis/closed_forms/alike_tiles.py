"""Tiles whose scores all read the same elements of captured arrays: of a clipped bias those far from the diagonal.

Where an index rises, or falls, with q, and so it does with k, its least and its greatest value in a tile are at two
corners. Where these are the same, one element is all that the tile reads.
"""

from __future__ import annotations

from functools import reduce

import sympy

from flashgen.analysis.closed_forms.affine import Node, contains
from flashgen.analysis.closed_forms.inequalities import K_FIRST, K_LAST, Q_FIRST, Q_LAST
from flashgen.analysis.closed_forms.monotone import course
from flashgen.language import operations as ops

_ENDS = {ops.QUERY: (Q_FIRST, Q_LAST), ops.KEY: (K_FIRST, K_LAST)}
_LEVELLING = (ops.Minimum, ops.Maximum, ops.FloorDiv, ops.Where)


def alike_where(score: Node) -> Node | None:
    """A condition of a tile's ends under which a score function is the same one for all scores of the tile.

    None where that cannot be said: where an index is not proven to rise or fall with q and with k, or something else
    depends on them. And where an index never levels off, so that it would hold for tiles of one score alone.
    """
    loads = [load for load in score.atoms(ops.Load) if contains(load, *_ENDS)]
    if contains(score.xreplace({load: sympy.Dummy() for load in loads}), *_ENDS):
        return None
    conditions: dict[Node, None] = {}
    for index in (index for load in loads for index in load.indices if contains(index, *_ENDS)):
        least, greatest = _corner(index, lowest=True), _corner(index, lowest=False)
        if least is None or greatest is None or contains(index, ops.SCORE) or not index.has(*_LEVELLING):
            return None
        conditions[ops.Equal(least, greatest)] = None
    return reduce(ops.And, conditions) if conditions else None


def _corner(index: Node, lowest: bool) -> Node | None:
    """The index where it is least, or greatest, in a tile; None where it is not proven to rise or fall."""
    ends: dict[Node, Node] = {}
    for symbol, (first, last) in _ENDS.items():
        by = course(index.xreplace({symbol: first}))
        if not any(by):
            return None
        ends[symbol] = first if by.never_falls == lowest else last
    return index.xreplace(ends)
