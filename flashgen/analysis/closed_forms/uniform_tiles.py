"""Finds tiles in which all scores read the same elements of captured arrays.

An example is a clipped relative bias far from the diagonal. If an index is monotone in q and in k, its minimum and
maximum over a tile are at two corners. If these are equal, all scores of the tile read the same element.
"""

from __future__ import annotations

from functools import reduce

import sympy

from flashgen.analysis.closed_forms.affine import Node, contains
from flashgen.analysis.closed_forms.inequalities import K_FIRST, K_LAST, Q_FIRST, Q_LAST
from flashgen.analysis.closed_forms.monotonicity import monotonicity
from flashgen.language import operations as ops

_ENDS = {ops.QUERY: (Q_FIRST, Q_LAST), ops.KEY: (K_FIRST, K_LAST)}
_CAN_BE_CONSTANT = (ops.Minimum, ops.Maximum, ops.FloorDiv, ops.Where)


def uniform_condition(score: Node) -> Node | None:
    """Returns a condition on a tile's ends under which a score function is the same for all scores of the tile.

    Returns None if there is no proof: an index is not known to be monotone in q and in k, or something other than an
    index depends on them. Returns None as well if an index is never constant over a range, since the condition would
    then hold only for tiles of one score.
    """
    loads = [load for load in score.atoms(ops.Load) if contains(load, *_ENDS)]
    if contains(score.xreplace({load: sympy.Dummy() for load in loads}), *_ENDS):
        return None
    conditions: dict[Node, None] = {}
    for index in (index for load in loads for index in load.indices if contains(index, *_ENDS)):
        minimum, maximum = _corner(index, lowest=True), _corner(index, lowest=False)
        if minimum is None or maximum is None or contains(index, ops.SCORE) or not index.has(*_CAN_BE_CONSTANT):
            return None
        conditions[ops.Equal(minimum, maximum)] = None
    return reduce(ops.And, conditions) if conditions else None


def _corner(index: Node, lowest: bool) -> Node | None:
    """Returns the minimum or maximum of the index over a tile, or None if it is not proven to be monotone."""
    ends: dict[Node, Node] = {}
    for symbol, (first, last) in _ENDS.items():
        trend = monotonicity(index.xreplace({symbol: first}))
        if not any(trend):
            return None
        ends[symbol] = first if trend.never_decreases == lowest else last
    return index.xreplace(ends)
