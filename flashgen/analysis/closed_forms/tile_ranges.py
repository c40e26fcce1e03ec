"""Closed forms over a tile: which keys its queries may attend to, and which keys all of them attend to.

`key_range` answers for a tile of queries, `query_range` for a tile of keys. Both are sound for every length that a call
accepts and for every value of the captures; None means that the predicate is not of that kind and wants lists. The
policy:

- an element that a captured array has for a sequence, lengths[b], is a number as a scalar capture is;
- what an array read at q, k or h decides is left open where it decides of so many keys, however long the sequence is
  (the tree of a draft behind its prefix): these are visited and need their mask; None where of more of them;
- None where an integer may wrap; where a comparison is not understood; where the
  rows' runs are not provably one run (global tokens beside a window) or leap from row to row; where the head matters,
  unless `per_head` is given;
- a comparison with a period of at most 16 in q and k (dilation) leaves the bounds alone and empties the FULL stretch;
- a condition on whole rows or on scalars chooses between the bounds and nothing.
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
from flashgen.analysis.closed_forms.open_parts import settled
from flashgen.analysis.closed_forms.row_runs import (
    KEYS,
    QUERIES,
    Condition,
    Direction,
    NotOneRun,
    Run,
    covers,
    limits_by_conditions,
    solve,
)
from flashgen.analysis.expression_text import to_text
from flashgen.analysis.integer_bounds import Bounds
from flashgen.language import operations as ops

__all__ = ["K_FIRST", "K_LAST", "Q_FIRST", "Q_LAST", "TileRange", "evaluate_range", "key_range", "query_range"]

_ZERO = sympy.Integer(0)
_LONG, _QUERIES = (10**6, 10**7), 64  # sequences and a tile of queries by which open keys are counted
_LARGEST = 2**31 - 1 - ops.OVERHANG  # int32 must hold a bound that is rounded up to a tile


@dataclass(frozen=True)
class TileRange:
    """Half-open stretches of keys for a tile of queries (or of queries for a tile of keys), as nodes of the language.

    Nothing outside [begin, end) is attended by any row of the tile; everything in [full_begin, full_end) by every row.
    0 <= begin and end <= length; the same holds for the FULL stretch, which lies within [begin, end) unless empty. A
    stretch is empty where its end is at or before its begin: the end may then be negative, the begin beyond the length.
    All four are int32's, with room to round them up to a tile; what they are made of may need int64.

    The nodes are over Q_FIRST and Q_LAST (inclusive rows; K_FIRST and K_LAST for `query_range`), the lengths, BATCH and
    captures. They hold for every tile with first <= last, whether or not the last row lies within the length.
    """

    begin: Node
    end: Node
    full_begin: Node
    full_end: Node

    @property
    def captures(self) -> tuple[ops.Capture, ...]:
        """The captures that the bounds read: numbers, and arrays with an element for each sequence."""
        return ops.captures_of(self.begin, self.end, self.full_begin, self.full_end)

    def depends_on(self, symbol: Node) -> bool:
        """Whether a bound reads an index, a length or the end of a tile."""
        return any(contains(getattr(self, field.name), symbol) for field in fields(self))

    def __str__(self) -> str:
        return ", ".join(f"{field.name} = {to_text(getattr(self, field.name))}" for field in fields(self))


def key_range(mask: Node, per_head: bool = False) -> TileRange | None:
    """The keys of a tile of queries Q_FIRST..Q_LAST, or None where the mask wants lists.

    `mask` is a boolean node over indices, lengths and captures. With `per_head`, bounds may read HEAD.
    """
    return _tile_range(mask, KEYS, per_head)


def query_range(mask: Node, per_head: bool = False) -> TileRange | None:
    """The queries of a tile of keys K_FIRST..K_LAST: `key_range` with the roles of queries and keys exchanged."""
    return _tile_range(mask, QUERIES, per_head)


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
    """begin, end, full_begin, full_end as int64 arrays, for arrays of first and last rows (queries or keys alike).

    Ends at or before their begins are empty stretches, as in `TileRange`.
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
    if not all(_of_sequence(load, per_head) for load in mask.atoms(ops.Load)):
        return _of_open_mask(mask, direction, per_head) if _leaves_few_open(mask) else None
    if Bounds().wraps_within(mask):
        return None
    try:
        runs = solve(alternatives(mask, direction.solved), direction)
        found = _over_tile(runs, direction)
    except (NotOneRun, TooManyAlternatives):
        return None
    if found.depends_on(ops.HEAD) and not per_head:
        return None
    return _held(found, direction)


def _of_open_mask(mask: Node, direction: Direction, per_head: bool) -> TileRange | None:
    """The range where arrays decide of elements: what may be attended to, and what is whatever they hold."""
    within, without = (
        _tile_range(settled(mask, lambda load: not _of_sequence(load, per_head), value), direction, per_head)
        for value in (True, False)
    )
    if within is None or without is None:
        return None
    return TileRange(within.begin, within.end, without.full_begin, without.full_end)


@lru_cache(maxsize=256)
def _leaves_few_open(mask: Node) -> bool:
    """Whether arrays decide of as many keys of a query in a long sequence as in a longer one; else lists skip some."""
    found = _of_open_mask(mask, KEYS, False)
    if found is None or found.captures or found.depends_on(ops.BATCH):
        return False
    open_keys = []
    for len_k in _LONG:
        begin, end, full_begin, full_end = evaluate_range(found, 0, _QUERIES - 1, _QUERIES, len_k)
        if full_end <= full_begin:
            return False
        open_keys.append(int(end - begin - (full_end - full_begin)))
    return open_keys[0] == open_keys[1]


def _of_sequence(load: ops.Load, per_head: bool) -> bool:
    """Whether an array is read at one element for a sequence (or for a head of it), whichever the row and the key."""
    return not contains(load, ops.QUERY, ops.KEY, *(() if per_head else (ops.HEAD,)))


def _held(found: TileRange, direction: Direction) -> TileRange | None:
    """The range with bounds that int32 holds; None where a bound may wrap on the way."""
    everywhere = Bounds()
    bounds = [getattr(found, field.name) for field in fields(found)]
    if any(everywhere.wraps_within(bound) for bound in bounds):
        return None
    # A stretch from past the length is as empty as one from the length; one that ends before 0, as one that ends at 0.
    within = [ops.Minimum(direction.length, bound) for bound in bounds[::2]]
    within += [ops.Maximum(_ZERO, bound) for bound in bounds[1::2]]
    begin, full_begin, end, full_end = (
        bound if max(map(abs, everywhere.of(bound))) <= _LARGEST else cut
        for bound, cut in zip(bounds[::2] + bounds[1::2], within, strict=True)
    )
    return TileRange(begin, end, full_begin, full_end)


def _over_tile(runs: Sequence[Run], direction: Direction) -> TileRange:
    if not runs:
        return TileRange(_ZERO, _ZERO, _ZERO, _ZERO)
    if len(runs) == 1:
        return _run_over_tile(runs[0], direction)
    if len(runs) == 2:  # a few rows with a wider run than the others: q < 4 beside a window
        for special, usual in ((runs[0], runs[1]), (runs[1], runs[0])):
            if special.conditions and not usual.conditions and covers(special, usual):
                return _special_rows_over_tile(special, usual, direction)
    raise NotOneRun


def _run_over_tile(run: Run, direction: Direction) -> TileRange:
    some, every = _over_rows(run.conditions, direction)
    begin, end = _bounds(run.low, run.high, direction, widest=True)
    lows, highs = limits_by_conditions(run, direction.row)
    begin, end = maximum_of([begin, *lows]), minimum_of([end, *highs])
    full_begin, full_end = _full_stretch(run, direction)
    return _tidy(begin, _choose(some, end, _ZERO), full_begin, _choose(every, full_end, _ZERO))


def _special_rows_over_tile(special: Run, usual: Run, direction: Direction) -> TileRange:
    some, every = _over_rows(special.conditions, direction)
    wide, narrow = (_bounds(run.low, run.high, direction, widest=True) for run in (special, usual))
    full_wide, full_narrow = (_full_stretch(run, direction) for run in (special, usual))
    return _tidy(
        *(_choose(some, a, b) for a, b in zip(wide, narrow, strict=True)),
        *(_choose(every, a, b) for a, b in zip(full_wide, full_narrow, strict=True)),
    )


def _tidy(begin: Node, end: Node, full_begin: Node, full_end: Node) -> TileRange:
    if at_most(full_end, full_begin):
        full_begin = full_end = _ZERO
    return TileRange(begin, end, full_begin, full_end)


def _full_stretch(run: Run, direction: Direction) -> tuple[Node, Node]:
    stretches = [_bounds(low, high, direction, widest=False) for low, high in run.full]
    stretches = [(begin, end) for begin, end in stretches if not at_most(end, begin)]
    if not stretches:
        return _ZERO, _ZERO
    # Any of several (keys beside a hole) is sound: the longest saves most.
    return stretches[0] if len(stretches) == 1 else max(stretches, key=_typical_length)


def _typical_length(stretch: tuple[Node, Node]) -> int:
    """The summed length over the tiles of a typical problem."""
    from flashgen.language.evaluate import evaluate

    first = np.arange(0, 4096, 128)
    values = {Q_FIRST: first, Q_LAST: first + 127, K_FIRST: first, K_LAST: first + 127}
    values |= {ops.LEN_Q: 4096, ops.LEN_K: 4096, ops.BATCH: 0, ops.HEAD: 0}
    captures = {capture.name: np.full((1,) * capture.ndim, 128) for capture in ops.captures_of(*stretch)}
    begin, end = (np.asarray(evaluate(bound, values, captures)) for bound in stretch)
    return int(np.maximum(end - begin, 0).sum())


def _bounds(low: Node, high: Node, direction: Direction, widest: bool) -> tuple[Node, Node]:
    """The hull of the rows' runs where `widest`, else their intersection."""
    return (
        maximum_of([_ZERO, _extreme(low, direction, largest=not widest).node()]),
        minimum_of([direction.length, _extreme(high, direction, largest=widest).node()]),
    )


def _choose(condition: Node, then: Node, otherwise: Node) -> Node:
    if condition == sympy.true or then == otherwise:
        return then
    return otherwise if condition == sympy.false else ops.Where(condition, then, otherwise)


def _over_rows(conditions: Sequence[Condition], direction: Direction) -> tuple[Node, Node]:
    """Booleans over the tile: some row may meet the conditions; every row does."""
    some = every = sympy.true
    for condition in conditions:
        if condition.form is None:
            if contains(condition.node, direction.row):
                raise NotOneRun
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
    """form >= 0 as a person writes it, the larger side without its negative terms."""
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
    """A bound of the value over the rows of a tile: its largest or smallest, exact for what is monotone in the row."""
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
    raise NotOneRun


def _extreme_of_scaled(node: ops.Operation, direction: Direction, largest: bool) -> Affine:
    """x // y or x * y, which is monotone in x where y does not depend on the row: rising if y is positive."""
    x, y = node.args
    if isinstance(node, ops.Mul) and contains(y, direction.row):
        x, y = y, x
    if contains(y, direction.row):
        raise NotOneRun
    low, high = (type(node)(_extreme(x, direction, side).node(), y) for side in (False, True))
    if at_most(_ZERO, y):
        return affine(high if largest else low)
    return affine((maximum_of if largest else minimum_of)([low, high]))
