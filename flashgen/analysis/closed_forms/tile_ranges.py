"""Closed forms over a tile: the keys that its queries may attend to, and the keys that all of them attend to.

`key_range` returns those of a tile of queries, `query_range` those of a tile of keys. Both hold for every length that a
call accepts and for every value of the captures. None means that the predicate has no closed form and needs tile lists.
The rules:

- An element that a captured array has for a sequence, such as lengths[b], is a number like a scalar capture.
- What an array read at q, k or h decides is left open if it concerns the same number of keys in sequences of any length
  (the tree of a draft after its prefix). These keys are visited and masked. If the number grows with the length, the
  result is None.
- The result is None if an integer may wrap, if a comparison is not supported, if the keys of a row are not provably one
  contiguous range (global tokens beside a window), if the ranges of neighbouring rows are far apart, or if the mask
  depends on the head and `per_head` is false.
- A comparison with a period of at most 16 in q and k (dilation) does not change the bounds and empties the FULL range.
- A condition on rows or on scalars selects between the bounds and an empty range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
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
    nonnegative,
)
from flashgen.analysis.closed_forms.normal_form import TooManyAlternatives, alternatives
from flashgen.analysis.closed_forms.open_parts import replace_open_parts
from flashgen.analysis.closed_forms.row_ranges import (
    KEYS,
    QUERIES,
    Condition,
    Direction,
    NotContiguous,
    RowRange,
    covers,
    limits_by_conditions,
    solve,
)
from flashgen.analysis.expression_text import to_text
from flashgen.analysis.integer_bounds import Bounds
from flashgen.language import operations as ops

__all__ = ["K_FIRST", "K_LAST", "Q_FIRST", "Q_LAST", "TileRange", "evaluate_range", "key_range", "query_range"]

_ZERO = sympy.Integer(0)
_LENGTHS, _QUERIES = (10**6, 10**7), 64  # sequence lengths and a query tile for which open keys are counted
_LARGEST = 2**31 - 1 - ops.OVERHANG  # int32 must hold a bound that is rounded up to a tile


@dataclass(frozen=True)
class TileRange:
    """Half-open ranges of keys for a tile of queries (or of queries for a tile of keys), as nodes of the language.

    No row of the tile attends to anything outside [begin, end), and every row attends to everything in [full_begin,
    full_end). 0 <= begin and end <= length; the same holds for the FULL range, which lies within [begin, end) unless it
    is empty. A range is empty if its end is at or before its begin: the end may then be negative, or the begin beyond
    the length. All four bounds fit in int32 even when rounded up to a tile. Their subexpressions may need int64.

    The nodes are over Q_FIRST and Q_LAST (the first and last row, included; K_FIRST and K_LAST for `query_range`), the
    lengths, BATCH and captures. They hold for every tile with first <= last, even if the last row exceeds the length.
    """

    begin: Node
    end: Node
    full_begin: Node
    full_end: Node

    @property
    def captures(self) -> tuple[ops.Capture, ...]:
        """The captures that the bounds read: numbers, and arrays with one element per sequence."""
        return ops.captures_of(self.begin, self.end, self.full_begin, self.full_end)

    def depends_on(self, symbol: Node) -> bool:
        """Returns whether a bound reads an index, a length or the end of a tile."""
        return any(contains(getattr(self, field.name), symbol) for field in fields(self))

    def __str__(self) -> str:
        return ", ".join(f"{field.name} = {to_text(getattr(self, field.name))}" for field in fields(self))


def key_range(mask: Node, per_head: bool = False) -> TileRange | None:
    """Returns the key range of a query tile Q_FIRST..Q_LAST, or None if the mask needs tile lists.

    Args:
        mask: A boolean node over indices, lengths and captures.
        per_head: Whether the bounds may read HEAD.
    """
    return _tile_range(mask, KEYS, per_head)


def query_range(mask: Node) -> TileRange | None:
    """Returns the query range of a key tile K_FIRST..K_LAST: `key_range` with queries and keys exchanged."""
    return _tile_range(mask, QUERIES, False)


def evaluate_range(
    tile_range: TileRange,
    first: Any,
    last: Any,
    len_q: int,
    len_k: int,
    captures: Mapping[str, Any] | None = None,
    batch: Any = 0,
    head: Any = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns begin, end, full_begin, full_end as int64 arrays, for arrays of first and last rows (queries or keys).

    A range is empty if its end is at or before its begin, as in `TileRange`.
    """
    from flashgen.language.evaluate import evaluate

    first, last = np.asarray(first, np.int64), np.asarray(last, np.int64)
    values = {
        Q_FIRST: first, Q_LAST: last, K_FIRST: first, K_LAST: last,
        ops.LEN_Q: np.int64(len_q), ops.LEN_K: np.int64(len_k), ops.BATCH: batch, ops.HEAD: head,
    }  # fmt: skip
    shape = np.broadcast_shapes(first.shape, last.shape, np.shape(batch), np.shape(head))
    begin, end, full_begin, full_end = (
        np.broadcast_to(np.asarray(evaluate(getattr(tile_range, field.name), values, captures or {}), np.int64), shape)
        for field in fields(tile_range)
    )
    return begin, end, full_begin, full_end


@lru_cache(maxsize=1024)
def _tile_range(mask: Node, direction: Direction, per_head: bool) -> TileRange | None:
    if not all(_is_per_sequence(load, per_head) for load in mask.atoms(ops.Load)):
        return _range_with_open_parts(mask, direction, per_head) if _leaves_few_open(mask) else None
    if Bounds().wraps_within(mask):
        return None
    try:
        ranges = solve(alternatives(mask, direction.solved), direction)
        found = _over_tile(ranges, direction)
    except (NotContiguous, TooManyAlternatives):
        return None
    if found.depends_on(ops.HEAD) and not per_head:
        return None
    return _fit_int32(found, direction)


def _range_with_open_parts(mask: Node, direction: Direction, per_head: bool) -> TileRange | None:
    """Returns the range of a mask with open parts: begin and end for any values of the arrays, FULL for all values."""
    possible, certain = (
        _tile_range(
            replace_open_parts(mask, lambda load: not _is_per_sequence(load, per_head), value), direction, per_head
        )
        for value in (True, False)
    )
    if possible is None or certain is None:
        return None
    return TileRange(possible.begin, possible.end, certain.full_begin, certain.full_end)


@lru_cache(maxsize=256)
def _leaves_few_open(mask: Node) -> bool:
    """Returns whether the number of open keys does not grow with the length; otherwise tile lists skip more."""
    found = _range_with_open_parts(mask, KEYS, False)
    if found is None or found.captures or found.depends_on(ops.BATCH):
        return False
    open_keys = []
    for len_k in _LENGTHS:
        begin, end, full_begin, full_end = evaluate_range(found, 0, _QUERIES - 1, _QUERIES, len_k)
        if full_end <= full_begin:
            return False
        open_keys.append(int(end - begin - (full_end - full_begin)))
    return open_keys[0] == open_keys[1]


def _is_per_sequence(load: ops.Load, per_head: bool) -> bool:
    """Returns whether an array is read at one element per sequence (or per head), whatever the row and the key."""
    return not contains(load, ops.QUERY, ops.KEY, *(() if per_head else (ops.HEAD,)))


def _fit_int32(found: TileRange, direction: Direction) -> TileRange | None:
    """Returns the range with bounds that fit in int32, or None if a bound may wrap."""
    calls = Bounds()
    bounds = [getattr(found, field.name) for field in fields(found)]
    if any(calls.wraps_within(bound) for bound in bounds):
        return None
    # A range that begins beyond the length is empty, as is one that begins at it. The same holds for ends up to 0.
    within = [ops.Minimum(direction.length, bound) for bound in bounds[::2]]
    within += [ops.Maximum(_ZERO, bound) for bound in bounds[1::2]]
    begin, full_begin, end, full_end = (
        bound if max(map(abs, calls.limits(bound))) <= _LARGEST else cut
        for bound, cut in zip(bounds[::2] + bounds[1::2], within, strict=True)
    )
    return TileRange(begin, end, full_begin, full_end)


def _over_tile(ranges: Sequence[RowRange], direction: Direction) -> TileRange:
    if not ranges:
        return TileRange(_ZERO, _ZERO, _ZERO, _ZERO)
    if len(ranges) == 1:
        return _range_over_tile(ranges[0], direction)
    if len(ranges) == 2:  # a few rows with a wider range than the others: q < 4 beside a window
        for special, usual in ((ranges[0], ranges[1]), (ranges[1], ranges[0])):
            if special.conditions and not usual.conditions and covers(special, usual):
                return _two_ranges_over_tile(special, usual, direction)
    raise NotContiguous


def _range_over_tile(row_range: RowRange, direction: Direction) -> TileRange:
    some, every = _over_rows(row_range.conditions, direction)
    begin, end = _bounds(row_range.low, row_range.high, direction, widest=True)
    lows, highs = limits_by_conditions(row_range, direction.row)
    begin, end = maximum_of([begin, *lows]), minimum_of([end, *highs])
    full_begin, full_end = _full_range(row_range, direction)
    return _tidy(begin, _choose(some, end, _ZERO), full_begin, _choose(every, full_end, _ZERO))


def _two_ranges_over_tile(special: RowRange, usual: RowRange, direction: Direction) -> TileRange:
    some, every = _over_rows(special.conditions, direction)
    wide, narrow = (_bounds(row_range.low, row_range.high, direction, widest=True) for row_range in (special, usual))
    full_wide, full_narrow = (_full_range(row_range, direction) for row_range in (special, usual))
    return _tidy(
        *(_choose(some, a, b) for a, b in zip(wide, narrow, strict=True)),
        *(_choose(every, a, b) for a, b in zip(full_wide, full_narrow, strict=True)),
    )


def _tidy(begin: Node, end: Node, full_begin: Node, full_end: Node) -> TileRange:
    if at_most(full_end, full_begin):
        full_begin = full_end = _ZERO
    return TileRange(begin, end, full_begin, full_end)


def _full_range(row_range: RowRange, direction: Direction) -> tuple[Node, Node]:
    full_ranges = [_bounds(low, high, direction, widest=False) for low, high in row_range.full]
    full_ranges = [(begin, end) for begin, end in full_ranges if not at_most(end, begin)]
    if not full_ranges:
        return _ZERO, _ZERO
    # Each of several FULL ranges (on both sides of a hole) is valid. The longest saves most.
    return full_ranges[0] if len(full_ranges) == 1 else max(full_ranges, key=_typical_length)


def _typical_length(full_range: tuple[Node, Node]) -> int:
    """Returns the total length over the tiles of a typical problem."""
    from flashgen.language.evaluate import evaluate

    first = np.arange(0, 4096, 128)
    values = {Q_FIRST: first, Q_LAST: first + 127, K_FIRST: first, K_LAST: first + 127}
    values |= {ops.LEN_Q: 4096, ops.LEN_K: 4096, ops.BATCH: 0, ops.HEAD: 0}
    captures = {capture.name: np.full((1,) * capture.ndim, 128) for capture in ops.captures_of(*full_range)}
    begin, end = (np.asarray(evaluate(bound, values, captures)) for bound in full_range)
    return int(np.maximum(end - begin, 0).sum())


def _bounds(low: Node, high: Node, direction: Direction, widest: bool) -> tuple[Node, Node]:
    """Returns the hull of the ranges of the rows if `widest`, else their intersection."""
    return (
        maximum_of([_ZERO, _extreme(low, direction, largest=not widest).node()]),
        minimum_of([direction.length, _extreme(high, direction, largest=widest).node()]),
    )


def _choose(condition: Node, then: Node, otherwise: Node) -> Node:
    if condition == sympy.true or then == otherwise:
        return then
    return otherwise if condition == sympy.false else ops.Where(condition, then, otherwise)


def _over_rows(conditions: Sequence[Condition], direction: Direction) -> tuple[Node, Node]:
    """Returns two booleans for the tile: whether some row may meet the conditions, and whether every row meets them."""
    some = every = sympy.true
    for condition in conditions:
        if condition.form is None:
            if contains(condition.node, direction.row):
                raise NotContiguous
            some, every = _and(some, condition.node), _and(every, condition.node)
            continue
        some = _and(some, _not_negative(_extreme(condition.form, direction, largest=True)))
        every = _and(every, _not_negative(_extreme(condition.form, direction, largest=False)))
    return some, every


def _and(left: Node, right: Node) -> Node:
    if sympy.false in (left, right):
        return sympy.false
    return right if left == sympy.true else left if right == sympy.true else ops.And(left, right)


def _not_negative(form: Affine) -> Node:
    """Returns form >= 0 as a person writes it, without negative terms on the larger side."""
    if nonnegative(form):
        return sympy.true
    if nonnegative(-form - 1):
        return sympy.false
    positive = Affine({node: factor for node, factor in form.terms.items() if factor > 0})
    negative = positive - (form - form.constant)
    if positive.is_constant:
        return ops.Less(negative.node(), sympy.Integer(form.constant + 1))
    if form.constant > 0:
        return ops.LessEqual(negative.node(), (positive + form.constant).node())
    if form.constant == -1 and not negative.is_constant:
        return ops.Greater(positive.node(), negative.node())
    return ops.GreaterEqual(positive.node(), (negative - form.constant).node())


def _extreme(value: Node | Affine, direction: Direction, largest: bool) -> Affine:
    """Returns the maximum or minimum of the value over the rows of a tile, exact if it is monotone in the row."""
    form = value if isinstance(value, Affine) else affine(value)
    result = Affine({}, form.constant)
    for node, factor in form.terms.items():
        result = result + _extreme_of_atom(node, direction, largest == (factor > 0)) * factor
    return result


def _extreme_of_atom(node: Node, direction: Direction, largest: bool) -> Affine:
    if node == direction.row:
        return affine(direction.last if largest else direction.first)
    if not contains(node, direction.row):
        return affine(node)
    pick = maximum_of if largest else minimum_of
    if isinstance(node, (ops.Minimum, ops.Maximum)):
        join = minimum_of if isinstance(node, ops.Minimum) else maximum_of
        return affine(join([_extreme(operand, direction, largest).node() for operand in node.args]))
    if isinstance(node, ops.Where) and node.kind == "int":
        return affine(pick([_extreme(operand, direction, largest).node() for operand in node.args[1:]]))
    if isinstance(node, ops.Abs):
        low, high = (_extreme(node.args[0], direction, side) for side in (False, True))
        if largest:
            return affine(maximum_of([high.node(), (-low).node()]))
        return affine(maximum_of([_ZERO, low.node(), (-high).node()]))
    if isinstance(node, (ops.FloorDiv, ops.Mul)):
        return _extreme_of_scaled(node, direction, largest)
    raise NotContiguous


def _extreme_of_scaled(node: ops.Operation, direction: Direction, largest: bool) -> Affine:
    """Returns the extreme of x // y or x * y, which is monotone in x if y does not depend on the row."""
    x, y = node.args
    if isinstance(node, ops.Mul) and contains(y, direction.row):
        x, y = y, x
    if contains(y, direction.row):
        raise NotContiguous
    low, high = (type(node)(_extreme(x, direction, side).node(), y) for side in (False, True))
    if at_most(_ZERO, y):
        return affine(high if largest else low)
    return affine((maximum_of if largest else minimum_of)([low, high]))
