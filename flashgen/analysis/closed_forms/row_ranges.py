"""The contiguous range of positions that a conjunction allows in a row, as a function of the row.

For the keys of a query tile, the solved index is k and a row is a query. For the queries of a key tile it is the other
way round. The union of alternatives is one range only if it is provably contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm

import sympy

from flashgen.analysis.closed_forms.affine import Affine, Node, affine, contains
from flashgen.analysis.closed_forms.inequalities import (
    K_FIRST,
    K_LAST,
    Q_FIRST,
    Q_LAST,
    at_most,
    maximum_of,
    minimum_of,
)
from flashgen.analysis.closed_forms.normal_form import Alternatives, Conjunction, Literal
from flashgen.language import operations as ops

# A hole that is narrower than the narrowest tile of any kernel never empties a tile, so bounds may ignore it.
FINE = 16
_ZERO = sympy.Integer(0)


class NotContiguous(Exception):
    """Raised if the analysis does not support a predicate, or it does not allow one contiguous range per row."""


@dataclass(frozen=True)
class Direction:
    """The solved index (0 <= solved < length), the index of the rows, and the first and last row of a tile."""

    solved: Node
    row: Node
    length: Node
    first: Node
    last: Node


KEYS = Direction(ops.KEY, ops.QUERY, ops.LEN_K, Q_FIRST, Q_LAST)
QUERIES = Direction(ops.QUERY, ops.KEY, ops.LEN_Q, K_FIRST, K_LAST)


@dataclass(frozen=True)
class RowRange:
    """The range low <= index < high that a row allows if it meets all `conditions`. Any other row allows nothing.

    `full` holds ranges (low, high) in which such a row allows every index. Bounds are nodes over the row.
    """

    low: Node
    high: Node
    conditions: tuple[Condition, ...] = ()
    full: tuple[tuple[Node, Node], ...] = ()

    @property
    def exact(self) -> bool:
        return (self.low, self.high) in self.full


@dataclass(frozen=True)
class Condition:
    """form >= 0, or the boolean `node` if form is None. It does not depend on the solved index."""

    form: Affine | None
    node: Node | None = None


def solve(choices: Alternatives, direction: Direction) -> list[RowRange]:
    """Returns the ranges of the alternatives, united where the union is contiguous. Raises NotContiguous."""
    ranges = (_conjunction_range(choice, direction) for choice in choices)
    return _unite_all([row_range for row_range in ranges if not _is_empty(row_range)])


def _is_empty(row_range: RowRange) -> bool:
    never = any(
        condition.form is not None and at_most(condition.form, _MINUS_ONE) for condition in row_range.conditions
    )
    return never or at_most(row_range.high, row_range.low)


_MINUS_ONE = Affine({}, -1)


def _conjunction_range(conjunction: Conjunction, direction: Direction) -> RowRange:
    lows: list[Node] = []
    highs: list[Node] = []
    conditions: list[Condition] = []
    exact = True
    for literal in _substitute_equal_quotients(conjunction, direction.solved):
        try:
            for form in _inequalities(literal):
                _bound(form, direction, lows, highs, conditions)
        except NotContiguous:
            if not _is_fine_grained(literal.origin):
                raise
            exact = False
    for bounds in (lows, highs):
        _require_monotone(bounds, direction.row)
    _require_adjacent(lows, highs, direction.row)
    low, high = maximum_of([_ZERO, *lows]), minimum_of([direction.length, *highs])
    return RowRange(low, high, tuple(dict.fromkeys(conditions)), ((low, high),) if exact else ())


def _substitute_equal_quotients(conjunction: Conjunction, solved: Node) -> list[Literal]:
    """Replaces k // B by q // B if a literal says k // B == q // B: q % B >= k % B then becomes q >= k."""
    literals = list(conjunction)
    for position, literal in enumerate(literals):
        quotient = _equal_quotient(literal, solved)
        if quotient is not None:
            node, value = quotient
            literals = [
                other
                if index == position or other.form is None
                else replace(other, form=other.form.replace(node, value))
                for index, other in enumerate(literals)
            ]
    return literals


def _equal_quotient(literal: Literal, solved: Node) -> tuple[Node, Affine] | None:
    """Returns (k // B, value) for a literal k // B == value, where no other atom contains the solved index k."""
    if literal.form is None or not literal.equality:
        return None
    for node, factor in literal.form.terms.items():
        rest = literal.form.without(node)
        if isinstance(node, ops.FloorDiv) and contains(node, solved) and abs(factor) == 1 and not rest.mentions(solved):
            return node, rest * -factor
    return None


def _inequalities(literal: Literal) -> list[Affine | Node]:
    if literal.form is None:
        return [literal.origin]
    return [literal.form, -literal.form] if literal.equality else [literal.form]


def _bound(
    form: Affine | Node, direction: Direction, lows: list[Node], highs: list[Node], conditions: list[Condition]
) -> None:
    """Solves form >= 0 for the solved index.

    Appends the result to the lower bounds (inclusive), the upper bounds (exclusive) or the conditions. Raises
    NotContiguous if the form cannot be solved, or if a bound is not monotone in the row: the first and last row of a
    tile would then not determine its range.
    """
    solved = direction.solved
    if not isinstance(form, Affine):
        if contains(form, solved, direction.row):
            raise NotContiguous
        conditions.append(Condition(None, form))
        return
    holders = form.atoms_with(solved)
    if not holders:
        _trend(form.node(), direction.row)
        if not (form.is_constant and form.constant >= 0):
            conditions.append(Condition(form))
        return
    if len(holders) > 1:
        raise NotContiguous
    holder = holders[0]
    factor, rest = form.terms[holder], form.without(holder)
    # holder >= threshold if its factor is positive, else holder <= threshold.
    if factor > 0:
        threshold = (-rest + (factor - 1)).floor_divide(factor)
    else:
        threshold = rest.floor_divide(-factor)
    if holder == solved:
        bound = (threshold if factor > 0 else threshold + 1).node()
        _trend(bound, direction.row)
        (lows if factor > 0 else highs).append(bound)
        return
    if not isinstance(holder, ops.FloorDiv) or not isinstance(holder.args[1], sympy.Integer) or holder.args[1] <= 0:
        raise NotContiguous
    numerator, divisor = affine(holder.args[0]), int(holder.args[1])
    if factor > 0:
        inner = numerator - threshold * divisor
    else:
        inner = threshold * divisor + (divisor - 1) - numerator
    _bound(inner, direction, lows, highs, conditions)


def _trend(node: Node, row: Node) -> int:
    """Returns 1 if the node increases with the row, -1 if it decreases, 0 if it does not depend on it.

    Raises NotContiguous if none is proven.
    """
    if node == row:
        return 1
    if not contains(node, row):
        return 0
    if isinstance(node, (ops.FloorDiv, ops.Mul)):
        steady = [operand for operand in node.args if not contains(operand, row)]
        if len(steady) == 1 and (isinstance(node, ops.Mul) or steady[0] == node.args[1]):
            return next(_trend(operand, row) for operand in node.args if contains(operand, row))
    if isinstance(node, (ops.Minimum, ops.Maximum)):
        return _common_trend([_trend(operand, row) for operand in node.args])
    form = affine(node)
    if form.terms.keys() == {node}:
        raise NotContiguous
    return _common_trend([_trend(atom, row) * (1 if factor > 0 else -1) for atom, factor in form.terms.items()])


def _common_trend(trends: list[int]) -> int:
    if 1 in trends and -1 in trends:
        raise NotContiguous
    return sum(trends) and (1 if sum(trends) > 0 else -1)


def _require_monotone(bounds: list[Node], row: Node) -> None:
    """Raises NotContiguous if bounds together are not monotone in the row, such as max(q, 200 - q).

    The extremes over a tile are then not at its first and last row.
    """
    _common_trend([_trend(bound, row) for bound in bounds])


def limits_by_conditions(row_range: RowRange, row: Node) -> tuple[list[Node], list[Node]]:
    """Returns bounds that conditions imply, without the row: with rows up to 99, k <= q implies k <= 99."""
    first: list[Node] = []
    last: list[Node] = []
    for condition in row_range.conditions:
        if condition.form is not None and condition.form.atoms_with(row) == [row]:
            factor, rest = condition.form.terms[row], condition.form.without(row)
            if factor > 0:
                first.append((-rest + (factor - 1)).floor_divide(factor).node())
            else:
                last.append(rest.floor_divide(-factor).node())
    return _at_limits(row_range.low, first, last, row), _at_limits(row_range.high, last, first, row)


def _at_limits(bound: Node, rising: list[Node], falling: list[Node], row: Node) -> list[Node]:
    try:
        limits = {1: rising, -1: falling, 0: []}[_trend(bound, row)]
    except NotContiguous:
        return []
    return [affine(bound.xreplace({row: limit})).node() for limit in limits]


def _require_adjacent(lows: list[Node], highs: list[Node], row: Node) -> None:
    """Raises NotContiguous if the ranges of neighbouring rows are far apart, as for k == 1000 * q.

    The range of a tile would then have holes, and tile lists are better.
    """

    def next_row(node: Node) -> Affine:
        return affine(node.xreplace({row: ops.Add(row, sympy.Integer(1))}))

    for low in lows:
        for high in highs:
            rising = _slope(low, row) > 1 and _slope(high, row) > 1
            falling = _slope(low, row) < -1 and _slope(high, row) < -1
            if rising and not at_most(next_row(low), affine(high) + FINE):
                raise NotContiguous
            if falling and not at_most(low, next_row(high) + FINE):
                raise NotContiguous


def _slope(node: Node, row: Node) -> Fraction:
    """Returns the approximate slope of the node in the row. It is used for a heuristic, not for a proof."""
    if node == row:
        return Fraction(1)
    if not contains(node, row):
        return Fraction(0)
    if isinstance(node, ops.FloorDiv) and isinstance(node.args[1], sympy.Integer) and node.args[1] > 0:
        return _slope(node.args[0], row) / int(node.args[1])
    if isinstance(node, (ops.Minimum, ops.Maximum)):
        return max((_slope(operand, row) for operand in node.args), key=abs)
    form = affine(node)
    if form.terms.keys() == {node}:
        return Fraction(0)
    return sum((_slope(atom, row) * factor for atom, factor in form.terms.items()), Fraction(0))


def _is_fine_grained(origin: Node) -> bool:
    """Returns whether a comparison has short periods in q and k, as (q - k) % 4 == 0, and reads no array."""
    periods = [_period(origin, index) for index in (ops.QUERY, ops.KEY)]
    return not origin.atoms(ops.Load) and all(period is not None and period <= FINE for period in periods)


def _period(node: Node, index: Node) -> int | None:
    if not contains(node, index):
        return 1
    if isinstance(node, ops.FloorMod) and _is_polynomial(node.args[0]):
        modulus = node.args[1]
        return abs(int(modulus)) if isinstance(modulus, sympy.Integer) and modulus != 0 else None
    if not node.args:
        return None
    periods = [_period(operand, index) for operand in node.args]
    return None if None in periods else lcm(*(period for period in periods if period))


def _is_polynomial(node: Node) -> bool:
    if isinstance(node, (ops.Add, ops.Sub, ops.Mul, ops.Neg, ops.Abs)):
        return all(_is_polynomial(operand) for operand in node.args)
    return isinstance(node, (sympy.Integer, sympy.Symbol, ops.Capture))


def _unite_all(ranges: list[RowRange]) -> list[RowRange]:
    """Unites pairs of ranges until no union of two is provably contiguous."""
    for position, first in enumerate(ranges):
        for other in range(position + 1, len(ranges)):
            united = _unite(first, ranges[other])
            if united is not None:
                return _unite_all([*ranges[:position], united, *ranges[position + 1 : other], *ranges[other + 1 :]])
    return ranges


def covers(outer: RowRange, inner: RowRange) -> bool:
    return at_most(outer.low, inner.low) and at_most(inner.high, outer.high)


def _unite(a: RowRange, b: RowRange) -> RowRange | None:
    """Returns the union of two ranges under the same conditions if it is contiguous but for narrow holes, else None."""
    if set(a.conditions) != set(b.conditions):
        # A range that holds for more rows absorbs those that it covers.
        for outer, inner in ((a, b), (b, a)):
            if set(outer.conditions) < set(inner.conditions) and covers(outer, inner):
                return outer
        return None
    for outer, inner in ((a, b), (b, a)):
        if covers(outer, inner):
            return replace(outer, full=outer.full if outer.exact else _all_full(outer, inner))
    same_low = at_most(a.low, b.low) and at_most(b.low, a.low)
    same_high = at_most(a.high, b.high) and at_most(b.high, a.high)
    if not (same_low or same_high or _touch(a, b, FINE - 1)):
        return None
    low, high = minimum_of([a.low, b.low]), maximum_of([a.high, b.high])
    contiguous = a.exact and b.exact and (same_low or same_high or _touch(a, b, 0))
    return RowRange(low, high, a.conditions, ((low, high),) if contiguous else _all_full(a, b))


def _touch(a: RowRange, b: RowRange, gap: int) -> bool:
    return at_most(a.low, affine(b.high) + gap) and at_most(b.low, affine(a.high) + gap)


def _all_full(a: RowRange, b: RowRange) -> tuple[tuple[Node, Node], ...]:
    return tuple(dict.fromkeys(a.full + b.full))
