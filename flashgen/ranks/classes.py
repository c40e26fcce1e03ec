"""Classifies rectangles of the score matrix by interval analysis of the mask: EMPTY, FULL or PARTIAL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import sympy

from flashgen.analysis.closed_forms.affine import affine
from flashgen.analysis.intervals.evaluation import EMPTY, FULL, PARTIAL, Evaluation
from flashgen.analysis.intervals.interval import Interval
from flashgen.language import operations as ops

_BOX = 128  # rectangles are trimmed to multiples of it, which suits dropout bits, tiles and copies
_MAX_BOXES = 64  # boxes that are classified along each side of a rectangle
_ANY_FLOAT = Interval(np.float64(-np.inf), np.float64(np.inf), np.True_)


class Rectangle(NamedTuple):
    """`rows` query positions starting at `q`, and `keys` key positions starting at `k`."""

    q: int
    rows: int
    k: int
    keys: int


class TrimmedRectangle(NamedTuple):
    """A rectangle without its empty margins.

    kind: its tile class, EMPTY, FULL or PARTIAL. share: the approximate fraction of its scores that are not masked.
    """

    rectangle: Rectangle
    kind: int
    share: float


class ScoreMatrix(NamedTuple):
    """The scores of the unsharded call: its mask and sizes. Captures that are not given may have any value."""

    mask: sympy.Basic
    len_q: int
    len_k: int
    batch: int
    heads: int
    captures: Mapping[str, Any]


def trim(scores: ScoreMatrix, given: Rectangle) -> TrimmedRectangle:
    """Removes the margins of a rectangle that are proven empty, in units of boxes, and classifies the rest.

    A long rectangle is cut into larger boxes. The result is therefore trimmed again until it does not change.
    """
    if not (given.rows and given.keys):
        return TrimmedRectangle(Rectangle(given.q, 0, given.k, 0), EMPTY, 0.0)
    rows, keys = _cuts(given.rows), _cuts(given.keys)
    queries = (given.q + rows[:-1, None], given.q + rows[1:, None] - 1)
    classes = np.broadcast_to(
        _classes(scores, queries, (given.k + keys[:-1], given.k + keys[1:] - 1)), (len(rows) - 1, len(keys) - 1)
    )
    visited = classes != EMPTY
    if not visited.any():
        return TrimmedRectangle(Rectangle(given.q, 0, given.k, 0), EMPTY, 0.0)
    visited_rows, visited_keys = np.flatnonzero(visited.any(1)), np.flatnonzero(visited.any(0))
    first_row, last_row, first_key, last_key = (
        visited_rows[0],
        visited_rows[-1] + 1,
        visited_keys[0],
        visited_keys[-1] + 1,
    )
    inside = classes[first_row:last_row, first_key:last_key]
    rectangle = Rectangle(
        given.q + int(rows[first_row]),
        int(rows[last_row] - rows[first_row]),
        given.k + int(keys[first_key]),
        int(keys[last_key] - keys[first_key]),
    )
    if rectangle != given:
        return trim(scores, rectangle)
    return TrimmedRectangle(rectangle, FULL if (inside == FULL).all() else PARTIAL, _unmasked_share(inside))


def classify(scores: ScoreMatrix, rectangle: Rectangle) -> int:
    """Returns EMPTY or FULL if this is proven, else PARTIAL."""
    found = trim(scores, rectangle)
    return PARTIAL if found.kind == FULL and found.rectangle != rectangle else found.kind


def unmasked_share(scores: ScoreMatrix, rectangle: Rectangle) -> float:
    """Returns the approximate fraction of a rectangle's scores that are not masked."""
    found = trim(scores, rectangle)
    return found.share * found.rectangle.rows * found.rectangle.keys / max(rectangle.rows * rectangle.keys, 1)


def _unmasked_share(classes: Any) -> float:
    """Returns the fraction of scores that are not masked, counting half of each PARTIAL box."""
    return float(((classes == FULL) + 0.5 * (classes == PARTIAL)).mean())


def _cuts(length: int) -> Any:
    """Returns the boundaries of the boxes along a side."""
    step = _BOX * max(1, -(-length // (_BOX * _MAX_BOXES)))
    return np.append(np.arange(0, length, step), length)


def _classes(scores: ScoreMatrix, queries: tuple[Any, Any], keys: tuple[Any, Any]) -> Any:
    boxes = {
        ops.QUERY: queries,
        ops.KEY: keys,
        ops.LEN_Q: (scores.len_q, scores.len_q),
        ops.LEN_K: (scores.len_k, scores.len_k),
        ops.BATCH: (0, max(scores.batch - 1, 0)),
        ops.HEAD: (0, max(scores.heads - 1, 0)),
    }
    value = _UnknownCaptures(boxes, scores.captures).interval(scores.mask)
    always, never = np.broadcast_arrays(value.always, value.never)
    return np.where(always, FULL, np.where(never, EMPTY, PARTIAL))


class _UnknownCaptures(Evaluation):
    """Interval evaluation in which a capture that is not given may have any value of its dtype."""

    def _leaf(self, node: sympy.Basic) -> Interval:
        if isinstance(node, ops.Capture) and node.name not in self.captures:
            return _full_range(node)
        return super()._leaf(node)

    def _by_operands(self, node: ops.Operation) -> Interval:
        if isinstance(node, ops.Load) and node.capture.name not in self.captures:
            for index in node.indices:
                self.interval(index)
            return _full_range(node.capture)
        return super()._by_operands(node)


def _full_range(capture: ops.Capture) -> Interval:
    if capture.kind == "float":
        return _ANY_FLOAT
    if capture.dtype == "bool":
        return Interval(np.int64(0), np.int64(1))
    limits = np.iinfo(capture.dtype)
    return Interval(np.int64(limits.min), np.int64(limits.max))


# Shifts --------------------------------------------------------------------------------------------------------------

_SHIFT = sympy.Symbol("shift_of_both", integer=True)
_LOGIC = (ops.And, ops.Or, ops.Xor, ops.Not)
_COMPARISONS = (ops.Equal, ops.NotEqual, ops.Less, ops.LessEqual, ops.Greater, ops.GreaterEqual)


def depends_on_distance_only(mask: sympy.Basic) -> bool:
    """Returns whether the mask provably stays the same when q and k shift together, as a function of k - q does."""
    moved = {ops.QUERY: ops.Add(ops.QUERY, _SHIFT), ops.KEY: ops.Add(ops.KEY, _SHIFT)}
    return _is_shift_invariant(mask.xreplace(moved))


def _is_shift_invariant(node: sympy.Basic) -> bool:
    if isinstance(node, _LOGIC):
        return all(_is_shift_invariant(operand) for operand in node.args)
    if isinstance(node, _COMPARISONS) and all(ops.kind_of(operand) == "int" for operand in node.args):
        return not (affine(node.args[0]) - affine(node.args[1])).mentions(_SHIFT)
    return _SHIFT not in node.free_symbols
