"""Proves that the tiles that visit another tile are contiguous, from bounds that are monotone over the tiles."""

from __future__ import annotations

from typing import NamedTuple

import sympy

from flashgen.analysis.closed_forms.affine import Node, contains
from flashgen.analysis.closed_forms.inequalities import K_FIRST, K_LAST, Q_FIRST, Q_LAST, at_most
from flashgen.analysis.closed_forms.tile_ranges import TileRange
from flashgen.language import operations as ops

_ENDS = (Q_FIRST, Q_LAST, K_FIRST, K_LAST)


class Monotonicity(NamedTuple):
    """What is proven of a value from one tile to the next. A condition counts as the number 0 or 1."""

    never_decreases: bool
    never_increases: bool

    @property
    def reversed(self) -> Monotonicity:
        return Monotonicity(self.never_increases, self.never_decreases)

    def combined_with(self, other: Monotonicity) -> Monotonicity:
        """Returns the monotonicity of a sum, a minimum or a maximum of both, or of a combination of two conditions."""
        return Monotonicity(
            self.never_decreases and other.never_decreases, self.never_increases and other.never_increases
        )


_CONSTANT, _INCREASING, _UNKNOWN = Monotonicity(True, True), Monotonicity(True, False), Monotonicity(False, False)


def visitors_are_contiguous(visited: TileRange) -> bool:
    """Returns whether the tiles that visit any one tile are proven to be contiguous."""
    return all(any(monotonicity(bound)) for bound in (visited.begin, visited.end))


def monotonicity(node: Node) -> Monotonicity:
    """Returns the monotonicity of a value or a condition of a tile's ends."""
    if not contains(node, *_ENDS):
        return _CONSTANT
    if node in _ENDS:
        return _INCREASING
    trends = [monotonicity(operand) for operand in node.args]
    match node:
        case ops.Add() | ops.Minimum() | ops.Maximum() | ops.And() | ops.Or():
            return trends[0].combined_with(trends[1])
        case ops.Sub() | ops.Greater() | ops.GreaterEqual():
            return trends[0].combined_with(trends[1].reversed)
        case ops.Less() | ops.LessEqual():
            return trends[0].reversed.combined_with(trends[1])
        case ops.Neg() | ops.Not():
            return trends[0].reversed
        case ops.Mul() | ops.FloorDiv():
            return _scaled(node, trends)
        case ops.Where():
            return _chosen(node, *trends)
    return _UNKNOWN


def _scaled(node: ops.Operation, trends: list[Monotonicity]) -> Monotonicity:
    """Returns the monotonicity of x * y or x // y: that of x if y is constant and positive."""
    (x, y), (trend_x, trend_y) = node.args, trends
    if isinstance(node, ops.Mul) and trend_x == _CONSTANT:
        x, y, trend_x, trend_y = y, x, trend_y, trend_x
    return trend_x if trend_y == _CONSTANT and at_most(sympy.Integer(1), y) else _UNKNOWN


def _chosen(node: ops.Where, condition: Monotonicity, then: Monotonicity, otherwise: Monotonicity) -> Monotonicity:
    """Returns the monotonicity of a `where`. A condition that changes once selects one branch first, then the other."""
    both = then.combined_with(otherwise)
    if condition == _CONSTANT:
        return both
    first, second = node.args[1:] if condition.never_increases else node.args[:0:-1]
    if not any(condition):
        return _UNKNOWN
    return both.combined_with(Monotonicity(at_most(first, second), at_most(second, first)))
