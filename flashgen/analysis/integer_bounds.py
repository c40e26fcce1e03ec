"""Bounds of the integers in an expression over all calls: whether int32 holds them, and whether they may wrap.

The integers of the language are int64. A kernel computes in int32 where this is proven to give the same result for
every length that a call accepts, every index and every value of the captures.
"""

from __future__ import annotations

import numpy as np
import sympy

from flashgen.analysis.closed_forms.affine import Affine
from flashgen.analysis.closed_forms.inequalities import K_FIRST, K_LAST, Q_FIRST, Q_LAST
from flashgen.analysis.intervals.evaluation import Evaluation, may_wrap
from flashgen.analysis.intervals.interval import LARGEST, SMALLEST, Interval, integers
from flashgen.language import operations as ops
from flashgen.language import shards

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

_POSITION = (0, ops.LONGEST + ops.OVERHANG - 1)
# Global positions in a sharded call: an index plus the offset of its shard.
_GLOBAL_QUERY, _GLOBAL_KEY = sympy.symbols("global_query global_key", integer=True)
_EVERYWHERE = {
    **dict.fromkeys((ops.QUERY, ops.KEY, Q_FIRST, Q_LAST, K_FIRST, K_LAST), _POSITION),
    **dict.fromkeys((_GLOBAL_QUERY, _GLOBAL_KEY), _POSITION),
    **dict.fromkeys((ops.LEN_Q, ops.LEN_K), (0, ops.LONGEST)),
    **dict.fromkeys((ops.BATCH, ops.HEAD), (0, ops.MAX_HEADS - 1)),
    ops.SCORE: (-np.inf, np.inf),
}
_LENGTHS = {
    **dict.fromkeys((ops.QUERY, Q_FIRST, Q_LAST), ops.LEN_Q),
    **dict.fromkeys((ops.KEY, K_FIRST, K_LAST), ops.LEN_K),
    _GLOBAL_QUERY: shards.WHOLE_Q,
    _GLOBAL_KEY: shards.WHOLE_K,
}
_GLOBAL_POSITIONS = {
    **dict.fromkeys((ops.QUERY, Q_FIRST, Q_LAST), (shards.SHARD_Q, _GLOBAL_QUERY)),
    **dict.fromkeys((ops.KEY, K_FIRST, K_LAST), (shards.SHARD_K, _GLOBAL_KEY)),
}
_SHARD_RANGES = {
    **dict.fromkeys((shards.SHARD_Q, shards.SHARD_K, shards.WHOLE_Q, shards.WHOLE_K), (0, ops.LONGEST)),
    **dict.fromkeys((shards.SHARD_B, shards.SHARD_H), (0, ops.MAX_HEADS - 1)),
}
"""The ranges of a shard's numbers, which calls check."""
_INDEX_MINUS_LENGTH = Interval(np.int64(-ops.LONGEST), np.int64(ops.OVERHANG - 1))


class Bounds:
    """Bounds of the integers of expressions. Shared subexpressions are computed once.

    With `related`, the bounds use what is known of indices and lengths together: q + len_k - len_q is bounded like a
    position, and q - q is 0. Without it, each operation is bounded by itself, as in generated code that evaluates
    intervals.
    """

    def __init__(self, related: bool = True) -> None:
        self._everywhere = _Everywhere(related)

    def limits(self, node: sympy.Basic) -> tuple[int, int]:
        """Returns bounds (minimum, maximum), both included, of an integer or boolean node."""
        value = self._everywhere.interval(node)
        return int(value.low), int(value.high)

    def fit_int32(self, node: sympy.Basic) -> bool:
        """Returns whether the value always fits in int32."""
        low, high = self.limits(node)
        return low >= INT32_MIN and high <= INT32_MAX

    def wraps(self, node: sympy.Basic) -> bool:
        """Returns whether the result of this operation may exceed int64."""
        return isinstance(node, ops.Operation) and may_wrap(node, self._everywhere.interval(node))

    def wraps_within(self, node: sympy.Basic) -> bool:
        """Returns whether any integer of the expression may exceed int64, which rules out affine arithmetic."""
        self._everywhere.interval(node)
        return node in self._everywhere.wrapping


class _Everywhere(Evaluation):
    """Intervals over all values that a call may supply."""

    def __init__(self, related: bool) -> None:
        super().__init__(_EVERYWHERE, {})
        self.related = related

    def _leaf(self, node: sympy.Basic) -> Interval:
        if isinstance(node, ops.Capture):
            return _range_of_capture(node)
        if isinstance(node, sympy.Symbol) and node not in self.boxes:
            return Interval(np.int64(SMALLEST), np.int64(LARGEST))
        return super()._leaf(node)

    def _by_operands(self, node: ops.Operation) -> Interval:
        if isinstance(node, ops.Load):
            for index in node.indices:
                self.interval(index)
            return _range_of_capture(node.capture)
        return super()._by_operands(node)

    def _uses_affine_form(self, node: ops.Operation) -> bool:
        return self.related

    def _affine(self, form: Affine) -> Interval:
        """Returns the form's interval, using that an index and its own length are related."""
        low = high = 0
        form = _with_global_positions(form)
        for index, length in _LENGTHS.items():
            factor, against = form.terms.get(index, 0), form.terms.get(length, 0)
            if factor * against < 0:
                shared = min(abs(factor), abs(against)) * (1 if factor > 0 else -1)
                ends = [int(end) * shared for end in (_INDEX_MINUS_LENGTH.low, _INDEX_MINUS_LENGTH.high)]
                low, high = low + min(ends), high + max(ends)
                form = form - Affine({index: shared, length: -shared})
        rest = super()._affine(form)
        return _shifted(rest, low, high)


def _with_global_positions(form: Affine) -> Affine:
    """Returns the form with a global position in place of each sum of an index and the offset of its shard."""
    for index, (offset, position) in _GLOBAL_POSITIONS.items():
        factor, beside = form.terms.get(index, 0), form.terms.get(offset, 0)
        if factor * beside > 0:
            shared = min(abs(factor), abs(beside)) * (1 if factor > 0 else -1)
            form = form - Affine({index: shared, offset: shared}) + Affine({position: shared})
    return form


def _shifted(value: Interval, low: int, high: int) -> Interval:
    low, high = int(value.low) + low, int(value.high) + high
    fits = low > SMALLEST // 2 and high < LARGEST // 2
    return integers(np.int64(low if fits else 0), np.int64(high if fits else 0), np.bool_(fits))


def _range_of_capture(capture: ops.Capture) -> Interval:
    """Returns the range of a capture's dtype or, for the numbers of a shard, the range that calls accept."""
    if capture in _SHARD_RANGES:
        return Interval(*map(np.int64, _SHARD_RANGES[capture]))
    if capture.kind == "float":
        return Interval(np.float64(-np.inf), np.float64(np.inf), np.True_)
    if capture.dtype == "bool":
        return Interval(np.int64(0), np.int64(1))
    limits = np.iinfo(capture.dtype)
    return Interval(np.int64(limits.min), np.int64(limits.max))
