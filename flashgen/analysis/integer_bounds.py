"""Which values an integer of an expression may have in any call: whether int32 holds it, and whether it may wrap.

The integers of the language are int64's. A kernel computes in int32 where that is proven to be the same for every
length that a call accepts, every index and every value of the captures.
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
# Positions in the whole of which a call is a shard: a query, a key and the place of the first in it, added.
_WHOLE_QUERY, _WHOLE_KEY = sympy.symbols("query_of_the_whole key_of_the_whole", integer=True)
_EVERYWHERE = {
    **dict.fromkeys((ops.QUERY, ops.KEY, Q_FIRST, Q_LAST, K_FIRST, K_LAST), _POSITION),
    **dict.fromkeys((_WHOLE_QUERY, _WHOLE_KEY), _POSITION),
    **dict.fromkeys((ops.LEN_Q, ops.LEN_K), (0, ops.LONGEST)),
    **dict.fromkeys((ops.BATCH, ops.HEAD), (0, ops.MAX_HEADS - 1)),
    ops.SCORE: (-np.inf, np.inf),
}
_LENGTHS = {
    **dict.fromkeys((ops.QUERY, Q_FIRST, Q_LAST), ops.LEN_Q),
    **dict.fromkeys((ops.KEY, K_FIRST, K_LAST), ops.LEN_K),
    _WHOLE_QUERY: shards.WHOLE_Q,
    _WHOLE_KEY: shards.WHOLE_K,
}
_IN_THE_WHOLE = {
    **dict.fromkeys((ops.QUERY, Q_FIRST, Q_LAST), (shards.SHARD_Q, _WHOLE_QUERY)),
    **dict.fromkeys((ops.KEY, K_FIRST, K_LAST), (shards.SHARD_K, _WHOLE_KEY)),
}
_PLACES = {
    **dict.fromkeys((shards.SHARD_Q, shards.SHARD_K, shards.WHOLE_Q, shards.WHOLE_K), (0, ops.LONGEST)),
    **dict.fromkeys((shards.SHARD_B, shards.SHARD_H), (0, ops.MAX_HEADS - 1)),
}
"""What calls check of the numbers of a shard."""
_TO_ITS_LENGTH = Interval(np.int64(-ops.LONGEST), np.int64(ops.OVERHANG - 1))


class Bounds:
    """Bounds of the integers of expressions. What several of them share is computed once.

    With `related`, what is known of indices and lengths together counts: q + len_k - len_q is a position, and q - q is
    0. Without it the bounds are those of each operation by itself, as code that evaluates intervals finds them.
    """

    def __init__(self, related: bool = True) -> None:
        self._everywhere = _Everywhere(related)

    def of(self, node: sympy.Basic) -> tuple[int, int]:
        """The least and the greatest value, both possible as far as is known, of an integer (or boolean) node."""
        value = self._everywhere.of(node)
        return int(value.low), int(value.high)

    def fit_int32(self, node: sympy.Basic) -> bool:
        """Whether the value is an int32."""
        low, high = self.of(node)
        return low >= INT32_MIN and high <= INT32_MAX

    def wraps(self, node: sympy.Basic) -> bool:
        """Whether the operation itself may leave int64."""
        return isinstance(node, ops.Operation) and may_wrap(node, self._everywhere.of(node))

    def wraps_within(self, node: sympy.Basic) -> bool:
        """Whether any integer of the expression may leave int64, so that it is not what affine arithmetic says."""
        self._everywhere.of(node)
        return node in self._everywhere.wrapping


class _Everywhere(Evaluation):
    """Intervals over all that a call may bring."""

    def __init__(self, related: bool) -> None:
        super().__init__(_EVERYWHERE, {})
        self.related = related

    def _leaf(self, node: sympy.Basic) -> Interval:
        if isinstance(node, ops.Capture):
            return _of_dtype(node)
        if isinstance(node, sympy.Symbol) and node not in self.boxes:
            return Interval(np.int64(SMALLEST), np.int64(LARGEST))
        return super()._leaf(node)

    def _by_operands(self, node: ops.Operation) -> Interval:
        if isinstance(node, ops.Load):
            for index in node.indices:
                self.of(index)
            return _of_dtype(node.capture)
        return super()._by_operands(node)

    def _moves_together(self, node: ops.Operation) -> bool:
        return self.related

    def _affine(self, form: Affine) -> Interval:
        """The form's interval, in which an index and its own length move together."""
        low = high = 0
        form = _of_the_whole(form)
        for index, length in _LENGTHS.items():
            factor, against = form.terms.get(index, 0), form.terms.get(length, 0)
            if factor * against < 0:
                shared = min(abs(factor), abs(against)) * (1 if factor > 0 else -1)
                ends = [int(end) * shared for end in (_TO_ITS_LENGTH.low, _TO_ITS_LENGTH.high)]
                low, high = low + min(ends), high + max(ends)
                form = form - Affine({index: shared, length: -shared})
        rest = super()._affine(form)
        return _shifted(rest, low, high)


def _of_the_whole(form: Affine) -> Affine:
    """The form with a position of the whole for each index that stands there with the place of its shard."""
    for index, (place, whole) in _IN_THE_WHOLE.items():
        factor, beside = form.terms.get(index, 0), form.terms.get(place, 0)
        if factor * beside > 0:
            shared = min(abs(factor), abs(beside)) * (1 if factor > 0 else -1)
            form = form - Affine({index: shared, place: shared}) + Affine({whole: shared})
    return form


def _shifted(value: Interval, low: int, high: int) -> Interval:
    low, high = int(value.low) + low, int(value.high) + high
    fits = low > SMALLEST // 2 and high < LARGEST // 2
    return integers(np.int64(low if fits else 0), np.int64(high if fits else 0), np.bool_(fits))


def _of_dtype(capture: ops.Capture) -> Interval:
    """Any value of a capture's dtype, and of a shard's numbers any that calls take."""
    if capture in _PLACES:
        return Interval(*map(np.int64, _PLACES[capture]))
    if capture.kind == "float":
        return Interval(np.float64(-np.inf), np.float64(np.inf), np.True_)
    if capture.dtype == "bool":
        return Interval(np.int64(0), np.int64(1))
    limits = np.iinfo(capture.dtype)
    return Interval(np.int64(limits.min), np.int64(limits.max))
