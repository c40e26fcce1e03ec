"""One run of positions per row: what a conjunction leaves of the solved index, as a function of the row.

For the keys of a query tile the solved index is k and a row is a query; for the queries of a key tile the other way
round. The union of alternatives is kept as one run only where it provably is one.
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

# A hole narrower than the narrowest tile of any kernel never empties a tile: bounds may ignore it.
FINE = 16
_ZERO = sympy.Integer(0)


class NotOneRun(Exception):
    """The predicate is not understood, or does not leave one run per row."""


@dataclass(frozen=True)
class Direction:
    """Which index is solved (0 <= solved < length), which one is the row, and the first and last row of a tile."""

    solved: Node
    row: Node
    length: Node
    first: Node
    last: Node


KEYS = Direction(ops.KEY, ops.QUERY, ops.LEN_K, Q_FIRST, Q_LAST)
QUERIES = Direction(ops.QUERY, ops.KEY, ops.LEN_Q, K_FIRST, K_LAST)


@dataclass(frozen=True)
class Run:
    """A row that meets all `conditions` holds nothing outside low <= index < high; any other row holds nothing.

    `full` are runs (low, high) in which such a row holds every index. Bounds are nodes over the row.
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
    """form >= 0, or the boolean `node` where form is None: true or false for a row as a whole."""

    form: Affine | None
    node: Node | None = None


def solve(choices: Alternatives, direction: Direction) -> list[Run]:
    """The runs of the alternatives, united where the union is one run. Raises NotOneRun."""
    runs = [run for run in (_conjunction_run(choice, direction) for choice in choices) if not _is_empty(run)]
    return _unite_all(runs)


def _is_empty(run: Run) -> bool:
    never = any(condition.form is not None and at_most(condition.form, _MINUS_ONE) for condition in run.conditions)
    return never or at_most(run.high, run.low)


_MINUS_ONE = Affine({}, -1)


def _conjunction_run(conjunction: Conjunction, direction: Direction) -> Run:
    lows: list[Node] = []
    highs: list[Node] = []
    conditions: list[Condition] = []
    exact = True
    for literal in _substitute_equal_quotients(conjunction, direction.solved):
        try:
            for form in _inequalities(literal):
                _bound(form, direction, lows, highs, conditions)
        except NotOneRun:
            if not _is_fine_grained(literal.origin):
                raise
            exact = False
    for bounds in (lows, highs):
        _refuse_turning(bounds, direction.row)
    _refuse_scattered(lows, highs, direction.row)
    low, high = maximum_of([_ZERO, *lows]), minimum_of([direction.length, *highs])
    return Run(low, high, tuple(dict.fromkeys(conditions)), ((low, high),) if exact else ())


def _substitute_equal_quotients(conjunction: Conjunction, solved: Node) -> list[Literal]:
    """Where a literal says k // B == q // B, the others get q // B for k // B: q % B >= k % B becomes q >= k."""
    literals = list(conjunction)
    for place, literal in enumerate(literals):
        known = _known_quotient(literal, solved)
        if known is not None:
            node, value = known
            literals = [
                other if index == place or other.form is None else replace(other, form=other.form.replace(node, value))
                for index, other in enumerate(literals)
            ]
    return literals


def _known_quotient(literal: Literal, solved: Node) -> tuple[Node, Affine] | None:
    """(k // B, value) of a literal k // B == value, where k is the solved index and stands in no other atom."""
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
    """Solves form >= 0 for the solved index: appends to the lower bounds (inclusive), the upper ones or conditions.

    Raises NotOneRun where it cannot, and where a bound turns within a tile: its end rows do not tell its extent.
    """
    solved = direction.solved
    if not isinstance(form, Affine):
        if contains(form, solved, direction.row):
            raise NotOneRun
        conditions.append(Condition(None, form))
        return
    holders = form.atoms_with(solved)
    if not holders:
        _trend(form.node(), direction.row)
        if not (form.is_constant and form.constant >= 0):
            conditions.append(Condition(form))
        return
    if len(holders) > 1:
        raise NotOneRun
    holder = holders[0]
    factor, rest = form.terms[holder], form.without(holder)
    # holder >= at_least where its factor is positive, else holder <= at_most.
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
        raise NotOneRun
    numerator, divisor = affine(holder.args[0]), int(holder.args[1])
    if factor > 0:
        inner = numerator - threshold * divisor
    else:
        inner = threshold * divisor + (divisor - 1) - numerator
    _bound(inner, direction, lows, highs, conditions)


def _trend(node: Node, row: Node) -> int:
    """1 where the node rises with the row, -1 where it falls, 0 where it does not depend on it, else NotOneRun."""
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
        raise NotOneRun
    return _common_trend([_trend(atom, row) * (1 if factor > 0 else -1) for atom, factor in form.terms.items()])


def _common_trend(trends: list[int]) -> int:
    if 1 in trends and -1 in trends:
        raise NotOneRun
    return sum(trends) and (1 if sum(trends) > 0 else -1)


def _refuse_turning(bounds: list[Node], row: Node) -> None:
    """A tile's first and last row do not tell the extremes of a bound that turns between them: max(q, 200 - q)."""
    _common_trend([_trend(bound, row) for bound in bounds])


def limits_by_conditions(run: Run, row: Node) -> tuple[list[Node], list[Node]]:
    """Bounds without the row that follow from conditions: where only rows up to 99 count, k <= q means k <= 99."""
    first: list[Node] = []
    last: list[Node] = []
    for condition in run.conditions:
        if condition.form is not None and condition.form.atoms_with(row) == [row]:
            factor, rest = condition.form.terms[row], condition.form.without(row)
            if factor > 0:
                first.append((-rest + (factor - 1)).floor_divide(factor).node())
            else:
                last.append(rest.floor_divide(-factor).node())
    return _at_limits(run.low, first, last, row), _at_limits(run.high, last, first, row)


def _at_limits(bound: Node, rising: list[Node], falling: list[Node], row: Node) -> list[Node]:
    try:
        limits = {1: rising, -1: falling, 0: []}[_trend(bound, row)]
    except NotOneRun:
        return []
    return [affine(bound.xreplace({row: limit})).node() for limit in limits]


def _refuse_scattered(lows: list[Node], highs: list[Node], row: Node) -> None:
    """Runs of neighbouring rows that leap apart (k == 1000 * q) leave holes in a tile's hull: lists are better."""

    def next_row(node: Node) -> Affine:
        return affine(node.xreplace({row: ops.Add(row, sympy.Integer(1))}))

    for low in lows:
        for high in highs:
            rising = _slope(low, row) > 1 and _slope(high, row) > 1
            falling = _slope(low, row) < -1 and _slope(high, row) < -1
            if rising and not at_most(next_row(low), affine(high) + FINE):
                raise NotOneRun
            if falling and not at_most(low, next_row(high) + FINE):
                raise NotOneRun


def _slope(node: Node, row: Node) -> Fraction:
    """How steep the node is in the row, roughly: a policy, not a proof."""
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
    """Whether a comparison repeats every few queries and keys, as (q - k) % 4 == 0 does, and reads no array."""
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


def _unite_all(runs: list[Run]) -> list[Run]:
    """Unites pairs until none is left that is provably one run."""
    for place, first in enumerate(runs):
        for other in range(place + 1, len(runs)):
            united = _unite(first, runs[other])
            if united is not None:
                return _unite_all([*runs[:place], united, *runs[place + 1 : other], *runs[other + 1 :]])
    return runs


def covers(outer: Run, inner: Run) -> bool:
    return at_most(outer.low, inner.low) and at_most(inner.high, outer.high)


def _unite(a: Run, b: Run) -> Run | None:
    """The union of two runs under the same conditions, where it is one run (but for holes too narrow to matter)."""
    if set(a.conditions) != set(b.conditions):
        # A run that holds on more rows swallows those it covers.
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
    one_run = a.exact and b.exact and (same_low or same_high or _touch(a, b, 0))
    return Run(low, high, a.conditions, ((low, high),) if one_run else _all_full(a, b))


def _touch(a: Run, b: Run, gap: int) -> bool:
    return at_most(a.low, affine(b.high) + gap) and at_most(b.low, affine(a.high) + gap)


def _all_full(a: Run, b: Run) -> tuple[tuple[Node, Node], ...]:
    return tuple(dict.fromkeys(a.full + b.full))
