"""Interval evaluation with three truth values: what is certain of an expression over boxes of indices.

The evaluation is conservative: a truth value is certain only if it holds for every element of the box; otherwise it is
unknown. Integers are int64, and one that may have wrapped may be any int64. Floats are widened, so that a result holds
for both the float64 reference and a kernel's float32. Boxes are arrays of lower and upper bounds, so all tiles of a map
are evaluated at once. The arrays broadcast lazily: bounds of queries need not be repeated for every key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import sympy

from flashgen.analysis.closed_forms.affine import Affine, affine
from flashgen.analysis.intervals.array_extrema import RangeTable
from flashgen.analysis.intervals.interval import (
    LARGEST,
    LIMIT,
    SMALLEST,
    Array,
    Interval,
    as_float,
    fit,
    floats,
    hull,
    integers,
    meet,
    point,
    truth,
)
from flashgen.language import operations as ops
from flashgen.language.evaluate import evaluate

EMPTY, PARTIAL, FULL = 0, 1, 2

Rule = Callable[..., Interval]
Test = Callable[[Interval, Interval], Array]


def classify(
    mask: sympy.Basic, boxes: Mapping[sympy.Basic, tuple[Any, Any]], captures: Mapping[str, Any] | None = None
) -> Array:
    """Returns EMPTY, FULL or PARTIAL (unknown), as int8, for a boolean node over boxes; see `interval_of`."""
    value = interval_of(mask, boxes, captures)
    always, never = np.broadcast_arrays(value.always, value.never)
    return np.where(always, FULL, np.where(never, EMPTY, PARTIAL)).astype(np.int8)


def interval_of(
    node: sympy.Basic, boxes: Mapping[sympy.Basic, tuple[Any, Any]], captures: Mapping[str, Any] | None = None
) -> Interval:
    """Returns the interval of a node's values over boxes.

    Args:
        node: An expression of the language.
        boxes: (low, high), both included, for each symbol that the node reads. The arrays must broadcast.
        captures: An array or number for each capture, by name.

    Raises:
        ArgumentError: A capture is missing or has the wrong number of dimensions.
        KeyError: A symbol is missing.
    """
    return Evaluation(boxes, captures or {}).interval(node)


class Evaluation:
    """Intervals of nodes over boxes, each computed once. `wrapping` holds the nodes in which some integer may wrap."""

    def __init__(self, boxes: Mapping[sympy.Basic, tuple[Any, Any]], captures: Mapping[str, Any]) -> None:
        self.boxes, self.captures = boxes, captures
        self.cache: dict[sympy.Basic, Interval] = {}
        self.wrapping: set[sympy.Basic] = set()
        self.tables: dict[ops.Capture, RangeTable] = {}

    def interval(self, node: sympy.Basic) -> Interval:
        """Returns the interval of a node."""
        if node not in self.cache:
            with np.errstate(all="ignore"):
                self.cache[node] = self._operation(node) if isinstance(node, ops.Operation) else self._leaf(node)
        return self.cache[node]

    def _leaf(self, node: sympy.Basic) -> Interval:
        if isinstance(node, ops.Capture):
            return point(evaluate(node, {}, self.captures))
        if isinstance(node, sympy.Integer) and not -LIMIT < int(node) < LIMIT:  # from an affine form with large factors
            self.wrapping.add(node)
            return Interval(np.int64(SMALLEST), np.int64(LARGEST))
        if isinstance(node, sympy.Symbol):
            low, high = self.boxes[node]
            kind = np.float64 if ops.kind_of(node) == "float" else np.int64
            return Interval(kind(low), kind(high))
        value = point(evaluate(node, {}))
        return floats(value.low, value.high) if value.is_float and np.isfinite(value.low) else value

    def _operation(self, node: ops.Operation) -> Interval:
        value = self._by_operands(node)
        if may_wrap(node, value) or any(operand in self.wrapping for operand in node.args):
            self.wrapping.add(node)
            return value
        if not self._uses_affine_form(node):
            return value
        # Occurrences of one symbol are correlated. The affine form takes this into account: q - k + 1 - q.
        if node.kind == "int":
            form = affine(node)
            return value if node in form.terms else meet(value, self._affine(form))
        if isinstance(node, _COMPARISONS) and all(ops.kind_of(operand) == "int" for operand in node.args):
            difference = self._affine(affine(node.args[0]) - affine(node.args[1]))
            return meet(value, MEANINGS[type(node)](difference, point(0)))
        return value

    def _uses_affine_form(self, node: ops.Operation) -> bool:
        """Returns whether the affine form of the node may have a tighter interval than its operands give."""
        return _repeats_a_symbol(node)

    def _by_operands(self, node: ops.Operation) -> Interval:
        if isinstance(node, ops.Load):
            return MEANINGS[ops.Load](self._table(node.capture), *(self.interval(index) for index in node.indices))
        operands = [self.interval(operand) for operand in node.args]
        if isinstance(node, ops.Arithmetic) and node.kind == "float":
            operands = [as_float(operand) for operand in operands]
        value = MEANINGS[type(node)](*operands)
        return self._bounded(node, value) if isinstance(node, ops.Where) else value

    def _bounded(self, node: ops.Where, value: Interval) -> Interval:
        """Tightens the interval of `bound where x < bound, else x` (or <=, >, >=), a maximum or minimum of both."""
        condition, bound, x = node.args
        if type(condition) not in _EXTREMES or condition.args != (x, bound):
            return value
        operands = (
            as_float(self.interval(operand)) if value.is_float else self.interval(operand) for operand in (x, bound)
        )
        return meet(value, MEANINGS[_EXTREMES[type(condition)]](*operands))

    def _affine(self, form: Affine) -> Interval:
        anything = Interval(np.int64(SMALLEST), np.int64(LARGEST))
        if not all(-LIMIT < number < LIMIT for number in (form.constant, *form.terms.values())):
            return anything
        total = point(form.constant)
        for atom, factor in form.terms.items():
            value = self._by_operands(atom) if isinstance(atom, ops.Operation) else self.interval(atom)
            if any(operand in self.wrapping for operand in atom.args):
                return anything
            total = _add(total, _multiply(value, point(factor)))
        return total

    def _table(self, capture: ops.Capture) -> RangeTable:
        if capture not in self.tables:
            self.tables[capture] = RangeTable(evaluate(capture, {}, self.captures))
        return self.tables[capture]


_MAY_WRAP = (ops.Add, ops.Sub, ops.Mul, ops.Neg, ops.Abs, ops.FloorDiv, ops.ShiftLeft)


def may_wrap(node: ops.Operation, value: Interval) -> bool:
    """Returns whether an integer operation with this interval may itself exceed int64, for any of the boxes."""
    if node.kind != "int" or not isinstance(node, _MAY_WRAP):
        return False
    return bool(np.any((value.low == SMALLEST) & (value.high == LARGEST)))


def _repeats_a_symbol(node: sympy.Basic) -> bool:
    seen: set[sympy.Basic] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if isinstance(current, sympy.Symbol):
            if current in seen:
                return True
            seen.add(current)
        stack.extend(current.args)
    return False


def _add(a: Interval, b: Interval) -> Interval:
    if a.is_float or b.is_float:
        return floats(a.low + b.low, a.high + b.high, a.nan | b.nan | _opposite_infinities(a, b))
    fits = fit(np.float64(a.low) + np.float64(b.low), np.float64(a.high) + np.float64(b.high))
    return integers(a.low + b.low, a.high + b.high, fits)


def _opposite_infinities(a: Interval, b: Interval) -> Array:
    return (np.isposinf(a.high) & np.isneginf(b.low)) | (np.isneginf(a.low) & np.isposinf(b.high))


def _negate(a: Interval) -> Interval:
    if a.is_float:
        return Interval(-a.high, -a.low, a.nan)
    return integers(-a.high, -a.low, fit(a.low, a.high))


def _subtract(a: Interval, b: Interval) -> Interval:
    if a.is_float or b.is_float:
        return _add(a, _negate(b))
    fits = fit(np.float64(a.low) - np.float64(b.high), np.float64(a.high) - np.float64(b.low))
    return integers(a.low - b.high, a.high - b.low, fits)


def _multiply(a: Interval, b: Interval) -> Interval:
    pairs = [(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    if a.is_float or b.is_float:
        infinite = np.isinf(a.low) | np.isinf(a.high) | np.isinf(b.low) | np.isinf(b.high)
        # 0 * inf at a corner: the product is unknown.
        corners = [np.float64(x) * np.float64(y) for x, y in pairs]
        zero = (a.low <= 0) & (a.high >= 0) | (b.low <= 0) & (b.high >= 0)
        return floats(_lowest(corners), _highest(corners), a.nan | b.nan | (infinite & zero))
    fits = fit(*(np.float64(x) * np.float64(y) for x, y in pairs))
    exact = [np.int64(x) * np.int64(y) for x, y in pairs]
    return integers(_lowest(exact), _highest(exact), fits)


def _lowest(values: list[Array]) -> Array:
    result = values[0]
    for value in values[1:]:
        result = np.minimum(result, value)
    return result


def _highest(values: list[Array]) -> Array:
    result = values[0]
    for value in values[1:]:
        result = np.maximum(result, value)
    return result


def _absolute(a: Interval) -> Interval:
    low = np.where((a.low <= 0) & (a.high >= 0), a.low * 0, np.minimum(np.abs(a.low), np.abs(a.high)))
    high = np.maximum(np.abs(a.low), np.abs(a.high))
    if a.is_float:
        return Interval(np.where(np.isnan(low), 0.0, low), high, a.nan)
    return integers(low, high, fit(a.low, a.high))


def _extreme(pick: Callable[[Array, Array], Array]) -> Rule:
    def rule(a: Interval, b: Interval) -> Interval:
        picked = Interval(pick(a.low, b.low), pick(a.high, b.high), a.nan | b.nan)
        either = hull(a, b)  # the number, where the other operand is NaN
        return Interval(
            np.where(picked.nan, either.low, picked.low), np.where(picked.nan, either.high, picked.high), picked.nan
        )

    return rule


def _floor_divide(a: Interval, b: Interval) -> Interval:
    if a.is_float or b.is_float:
        quotient = _divide(a, b)
        return Interval(np.floor(quotient.low), np.floor(quotient.high), quotient.nan)
    # For divisors of one sign the extremes are at the corners. A quotient by 0 is 0.
    corners = [_quotient(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    low, high = _lowest(corners), _highest(corners)
    crosses = (b.low <= 0) & (b.high >= 0)
    largest = np.maximum(np.abs(a.low), np.abs(a.high))
    low = np.where(crosses, np.where(b.low < 0, -largest, np.minimum(a.low, 0)), low)
    high = np.where(crosses, np.where(b.low < 0, largest, np.maximum(a.high, 0)), high)
    by_minus_one = (b.low <= -1) & (b.high >= -1)  # wraps for the smallest integer
    return integers(low, high, ~by_minus_one | fit(a.low, a.high))


def _quotient(x: Array, y: Array) -> Array:
    return np.where(y == 0, 0, np.floor_divide(x, np.where(y == 0, 1, y)))


_MAX_QUOTIENT = 2.0**126  # above this, a / b may overflow float32, so that the remainder is infinite or NaN


def _floor_modulo(a: Interval, b: Interval) -> Interval:
    if a.is_float or b.is_float:
        least, magnitude = (pick(np.abs(b.low), np.abs(b.high)) for pick in (np.minimum, np.maximum))
        largest = np.maximum(np.abs(a.low), np.abs(a.high))
        infinite = np.isinf(largest) | np.isinf(magnitude) | ((b.low <= 0) & (b.high >= 0))
        infinite |= largest >= least * _MAX_QUOTIENT
        # In float32, a - b * floor(a / b) may leave [0, b) by a rounding error that grows with a.
        slack = (largest + magnitude) * 2.0**-18
        unknown = np.where(infinite, np.inf, magnitude * 2 + slack)
        low, high = np.where(b.low > 0, -slack, -unknown), np.where(b.high < 0, slack, unknown)
        return floats(np.where(infinite, -np.inf, low), np.where(infinite, np.inf, high), a.nan | b.nan | infinite)
    # Within one period of a constant divisor the remainder is an interval. Otherwise it lies between 0 and the divisor,
    # exclusive. A remainder by 0 is 0.
    steady = (b.low == b.high) & (_quotient(a.low, b.low) == _quotient(a.high, b.low)) & (b.low != 0)
    shift = np.where(steady, _quotient(a.low, b.low) * b.low, 0)
    low = np.where(steady, a.low - shift, np.minimum(b.low + 1, 0))
    high = np.where(steady, a.high - shift, np.maximum(b.high - 1, 0))
    # The remainder of a nonnegative dividend by a positive divisor is at most the dividend.
    small = ~steady & (a.low >= 0) & (b.low > 0)
    return integers(low, np.where(small, np.minimum(high, a.high), high))


def _clamped_shift(b: Interval) -> tuple[Array, Array]:
    return np.clip(b.low, 0, 31), np.clip(b.high, 0, 31)


def _shift_left(a: Interval, b: Interval) -> Interval:
    low, high = _clamped_shift(b)
    return _multiply(a, Interval(np.int64(1) << low, np.int64(1) << high))


def _shift_right(a: Interval, b: Interval) -> Interval:
    low, high = _clamped_shift(b)
    return _floor_divide(a, Interval(np.int64(1) << low, np.int64(1) << high))


_Bits = tuple[Array, Array]  # (bits that are certainly set, bits that may be set)


def _bitwise(
    exact: Callable[[Array, Array], Array],
    keeps: Callable[[Interval, Interval, Array], Any],
    by_bits: Callable[[_Bits, _Bits], _Bits],
) -> Rule:
    """Returns the rule of a bit operation.

    Args:
        exact: The operation, for intervals of one value.
        keeps: Bounds of the result, given all bits up to the highest that may be set.
        by_bits: The bits of the result that are certain or possible, given those of the operands.
    """

    def rule(a: Interval, b: Interval) -> Interval:
        points = (a.low == a.high) & (b.low == b.high)
        value = exact(a.low, b.low)
        mask = _all_bits(_highest([_magnitude(bound) for bound in (a.low, a.high, b.low, b.high)]))
        low, high = keeps(a, b, mask)
        # Bits above the highest differing bit of the bounds are certain. Morton orders and bit masks rely on this.
        sure, possible = by_bits(_bits(a), _bits(b))
        signed = (sure < 0) == (possible < 0)
        low, high = np.where(signed, np.maximum(low, sure), low), np.where(signed, np.minimum(high, possible), high)
        return integers(np.where(points, value, low), np.where(points, value, high))

    return rule


def _magnitude(bound: Array) -> Array:
    """Returns the bits of x, or of ~x where x is negative."""
    return np.where(bound < 0, ~np.int64(bound), bound)


def _all_bits(value: Array) -> Array:
    """Returns the smallest 2**n - 1 that is not below the value."""
    for shift in (1, 2, 4, 8, 16, 32):
        value = value | (value >> shift)
    return value


def _bits(a: Interval) -> _Bits:
    differing = a.low ^ a.high
    free = np.where(differing < 0, -1, _all_bits(np.maximum(differing, 0)))
    return a.low & ~free, a.low | free


def _xor_bits(a: _Bits, b: _Bits) -> _Bits:
    return a[0] & ~b[1] | b[0] & ~a[1], a[1] & ~b[0] | b[1] & ~a[0]


def _and_bounds(a: Interval, b: Interval, mask: Array) -> tuple[Array, Array]:
    positive_a, positive_b = a.low >= 0, b.low >= 0
    high = np.where(positive_a, a.high, np.where(positive_b, b.high, mask))
    high = np.where(positive_a & positive_b, np.minimum(a.high, b.high), high)
    return np.where(positive_a | positive_b, 0, -mask - 1), high


def _or_bounds(a: Interval, b: Interval, mask: Array) -> tuple[Array, Array]:
    both = (a.low >= 0) & (b.low >= 0)
    return np.where(both, np.maximum(a.low, b.low), -mask - 1), mask


def _xor_bounds(a: Interval, b: Interval, mask: Array) -> tuple[Array, Array]:
    return np.where((a.low >= 0) & (b.low >= 0), 0, -mask - 1), mask


def _divide(a: Interval, b: Interval) -> Interval:
    a, b = as_float(a), as_float(b)
    crosses = (b.low <= 0) & (b.high >= 0)
    infinite = np.isinf(a.low) | np.isinf(a.high)
    corners = [x / y for x in (a.low, a.high) for y in (b.low, b.high)]
    unknown = crosses | _any_nan(corners)
    nan = a.nan | b.nan | crosses | (infinite & (np.isinf(b.low) | np.isinf(b.high)))
    return floats(
        np.where(unknown, -np.inf, _lowest(corners)),
        np.where(unknown, np.inf, _highest(corners)),
        nan,
    )


def _any_nan(values: list[Array]) -> Array:
    return np.isnan(sum(values[1:], values[0] * 0) + values[0])


def _to_int(a: Interval) -> Interval:
    if not a.is_float:
        return a
    bounds = [np.trunc(np.clip(bound, -(2.0**31), 2.0**31 - 1)).astype(np.int64) for bound in (a.low, a.high)]
    # NaN becomes 0.
    low, high = bounds
    return Interval(np.where(a.nan, np.minimum(low, 0), low), np.where(a.nan, np.maximum(high, 0), high))


def _floor(a: Interval) -> Interval:
    a = as_float(a)
    return Interval(np.floor(a.low), np.floor(a.high), a.nan)


def _rising(function: Callable[[Array], Array], lower_limit: float = -np.inf, absolute: float = 0.0) -> Rule:
    """Returns the rule of a function that increases from `lower_limit` on and is NaN below."""

    def rule(a: Interval) -> Interval:
        a = _widened(a)
        low, high = (function(np.maximum(bound, lower_limit)) for bound in (a.low, a.high))
        return floats(low, high, a.nan | (a.low < lower_limit), absolute)

    return rule


def _widened(a: Interval) -> Interval:
    """Widens the argument of a float32 function, which is scaled and reduced in float32 first."""
    a = as_float(a)
    return floats(a.low, a.high, a.nan)


# The absolute error of approximate instructions is below this (2**-11 for tanh.approx).
_APPROXIMATE = 2.0**-10


def _wave(phase: float) -> Rule:
    """Returns the rule of cos(a - phase): 1 or -1 is reached if a full or half turn lies between the bounds."""

    def rule(a: Interval) -> Interval:
        a = _widened(a)
        ends = [np.cos(a.low - phase), np.cos(a.high - phase)]
        tops = _contains_multiple_of_2_pi(a, phase)
        bottoms = _contains_multiple_of_2_pi(a, phase + np.pi)
        # Larger float32 arguments are too coarse for any bound.
        unknown = ~((np.abs(a.low) < 2.0**12) & (np.abs(a.high) < 2.0**12))
        low = np.where(bottoms | unknown, -1.0, _lowest(ends))
        high = np.where(tops | unknown, 1.0, _highest(ends))
        return floats(low, high, a.nan | np.isinf(a.low) | np.isinf(a.high), _APPROXIMATE)

    return rule


def _contains_multiple_of_2_pi(a: Interval, phase: float) -> Array:
    return np.floor((a.high - phase) / (2 * np.pi)) > np.floor((a.low - phase) / (2 * np.pi))


def _comparison(certain: Test, opposite: Test) -> Rule:
    """Returns the rule of a comparison. It is false with a NaN.

    Args:
        certain: Whether the comparison holds for all pairs of numbers.
        opposite: Whether it holds for none.
    """

    def rule(a: Interval, b: Interval) -> Interval:
        if a.is_float or b.is_float:
            a, b = as_float(a), as_float(b)
        return truth(certain(a, b) & ~(a.nan | b.nan), opposite(a, b))

    return rule


def _below(a: Interval, b: Interval) -> Array:
    return a.high < b.low


def _not_above(a: Interval, b: Interval) -> Array:
    return a.high <= b.low


def _equal_points(a: Interval, b: Interval) -> Array:
    return (a.low == a.high) & (b.low == b.high) & (a.low == b.low)


def _disjoint(a: Interval, b: Interval) -> Array:
    return _below(a, b) | _below(b, a)


def _not(a: Interval) -> Interval:
    return Interval(1 - a.high, 1 - a.low)


def _swapped(test: Test) -> Test:
    return lambda a, b: test(b, a)


def _and(a: Interval, b: Interval) -> Interval:
    return Interval(np.minimum(a.low, b.low), np.minimum(a.high, b.high))


def _or(a: Interval, b: Interval) -> Interval:
    return Interval(np.maximum(a.low, b.low), np.maximum(a.high, b.high))


_equal = _comparison(_equal_points, _disjoint)


def _not_equal(a: Interval, b: Interval) -> Interval:
    return _not(_equal(a, b))  # true with a NaN, unlike equality


def _where(condition: Interval, then: Interval, otherwise: Interval) -> Interval:
    either = hull(then, otherwise)
    if either.is_float:
        then, otherwise = as_float(then), as_float(otherwise)

    def chosen(a: Array, b: Array, unknown: Array) -> Array:
        return np.where(condition.always, a, np.where(condition.never, b, unknown))

    return Interval(
        chosen(then.low, otherwise.low, either.low),
        chosen(then.high, otherwise.high, either.high),
        chosen(then.nan, otherwise.nan, either.nan),
    )


def _load(table: RangeTable, *indices: Interval) -> Interval:
    return table.over(*((index.low, index.high) for index in indices))


MEANINGS: dict[type[ops.Operation], Rule] = {
    ops.Add: _add,
    ops.Sub: _subtract,
    ops.Mul: _multiply,
    ops.Neg: _negate,
    ops.Abs: _absolute,
    ops.Minimum: _extreme(np.minimum),
    ops.Maximum: _extreme(np.maximum),
    ops.FloorDiv: _floor_divide,
    ops.FloorMod: _floor_modulo,
    ops.ShiftLeft: _shift_left,
    ops.ShiftRight: _shift_right,
    ops.BitAnd: _bitwise(np.bitwise_and, _and_bounds, lambda a, b: (a[0] & b[0], a[1] & b[1])),
    ops.BitOr: _bitwise(np.bitwise_or, _or_bounds, lambda a, b: (a[0] | b[0], a[1] | b[1])),
    ops.BitXor: _bitwise(np.bitwise_xor, _xor_bounds, _xor_bits),
    ops.Divide: _divide,
    ops.ToFloat: as_float,
    ops.ToInt: _to_int,
    ops.Floor: _floor,
    ops.Exp: _rising(np.exp),
    ops.Exp2: _rising(np.exp2),
    ops.Log: _rising(np.log, 0.0, _APPROXIMATE),
    ops.Log2: _rising(np.log2, 0.0, _APPROXIMATE),
    ops.Tanh: _rising(np.tanh, absolute=_APPROXIMATE),
    ops.FastTanh: _rising(np.tanh, absolute=2.0**-10),
    ops.Sigmoid: _rising(lambda a: 1 / (1 + np.exp(-a)), absolute=_APPROXIMATE),
    ops.Sqrt: _rising(np.sqrt, 0.0),
    ops.Sin: _wave(np.pi / 2),
    ops.Cos: _wave(0.0),
    ops.Detach: as_float,
    ops.Surrogate: lambda a, b, c: as_float(a),
    ops.Equal: _equal,
    ops.NotEqual: _not_equal,
    ops.Less: _comparison(_below, _swapped(_not_above)),
    ops.LessEqual: _comparison(_not_above, _swapped(_below)),
    ops.Greater: _comparison(_swapped(_below), _not_above),
    ops.GreaterEqual: _comparison(_swapped(_not_above), _below),
    ops.And: _and,
    ops.Or: _or,
    ops.Xor: _not_equal,
    ops.Not: _not,
    ops.Where: _where,
    ops.Load: _load,
}
_EXTREMES = {
    **dict.fromkeys((ops.Less, ops.LessEqual), ops.Maximum),
    **dict.fromkeys((ops.Greater, ops.GreaterEqual), ops.Minimum),
}
_COMPARISONS = (ops.Equal, ops.NotEqual, ops.Less, ops.LessEqual, ops.Greater, ops.GreaterEqual)
