"""Whether bounds of a tile rise or fall from tile to tile: then the tiles that visit another one stand side by side.

Where begin and end of a `TileRange` are monotone, each by itself, "begin is at most x" holds for all tiles up to one,
or from one on, and so does "end is beyond x". The tiles that visit x are those of both: one run, without a gap.
"""

from __future__ import annotations

from typing import NamedTuple

import sympy

from flashgen.analysis.closed_forms.affine import Node, contains
from flashgen.analysis.closed_forms.inequalities import K_FIRST, K_LAST, Q_FIRST, Q_LAST, at_most
from flashgen.analysis.closed_forms.tile_ranges import TileRange
from flashgen.language import operations as ops

_ENDS = (Q_FIRST, Q_LAST, K_FIRST, K_LAST)


class Course(NamedTuple):
    """What is proven of a value from each tile to the next; of a condition, what it is as the number 0 or 1."""

    never_falls: bool
    never_rises: bool

    @property
    def reversed(self) -> Course:
        return Course(self.never_rises, self.never_falls)

    def with_(self, other: Course) -> Course:
        """Of a sum, a minimum, a maximum of both, or of both conditions."""
        return Course(self.never_falls and other.never_falls, self.never_rises and other.never_rises)


_CONSTANT, _RISING, _UNKNOWN = Course(True, True), Course(True, False), Course(False, False)


def visitors_are_one_run(visited: TileRange) -> bool:
    """Whether the tiles that visit any one tile are proven to stand side by side."""
    return all(any(course(bound)) for bound in (visited.begin, visited.end))


def course(node: Node) -> Course:
    """What is proven of a value or a condition of a tile's ends, from each tile to the next."""
    if not contains(node, *_ENDS):
        return _CONSTANT
    if node in _ENDS:
        return _RISING
    courses = [course(operand) for operand in node.args]
    match node:
        case ops.Add() | ops.Minimum() | ops.Maximum() | ops.And() | ops.Or():
            return courses[0].with_(courses[1])
        case ops.Sub() | ops.Greater() | ops.GreaterEqual():
            return courses[0].with_(courses[1].reversed)
        case ops.Less() | ops.LessEqual():
            return courses[0].reversed.with_(courses[1])
        case ops.Neg() | ops.Not():
            return courses[0].reversed
        case ops.Mul() | ops.FloorDiv():
            return _scaled(node, courses)
        case ops.Where():
            return _chosen(node, *courses)
    return _UNKNOWN


def _scaled(node: ops.Operation, courses: list[Course]) -> Course:
    """x * y and x // y rise as x does where y stays the same and is positive."""
    (x, y), (of_x, of_y) = node.args, courses
    if isinstance(node, ops.Mul) and of_x == _CONSTANT:
        x, y, of_x, of_y = y, x, of_y, of_x
    return of_x if of_y == _CONSTANT and at_most(sympy.Integer(1), y) else _UNKNOWN


def _chosen(node: ops.Where, condition: Course, then: Course, otherwise: Course) -> Course:
    """Where a condition changes once, the values are those of one branch, and then of the other."""
    both = then.with_(otherwise)
    if condition == _CONSTANT:
        return both
    first, second = node.args[1:] if condition.never_rises else node.args[:0:-1]
    if not any(condition):
        return _UNKNOWN
    return both.with_(Course(at_most(first, second), at_most(second, first)))
