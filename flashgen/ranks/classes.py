"""What is certain of a rectangle of the scores: which of it the mask leaves empty, and whether it leaves it whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import sympy

from flashgen.analysis.closed_forms.affine import affine
from flashgen.analysis.intervals.evaluation import EMPTY, FULL, PARTIAL, Evaluation
from flashgen.analysis.intervals.interval import Interval
from flashgen.language import operations as ops

_STEP = 128  # rows and keys are cut at multiples of it, which random bits, tiles and copies like
_MOST_STEPS = 64  # of a chunk: boxes that are looked at along each side
_ANY_FLOAT = Interval(np.float64(-np.inf), np.float64(np.inf), np.True_)


class Rectangle(NamedTuple):
    """Positions of queries from `q` on and of keys from `k` on."""

    q: int
    rows: int
    k: int
    keys: int


class Found(NamedTuple):
    """A rectangle without what is empty around it; its class, of the tile classes; the share of its boxes not empty."""

    rectangle: Rectangle
    kind: int
    share: float


class Whole(NamedTuple):
    """A mask and the sizes of the call that it is of; captures that are not known here may have any value."""

    mask: sympy.Basic
    len_q: int
    len_k: int
    batch: int
    heads: int
    captures: Mapping[str, Any]


def found_in(whole: Whole, given: Rectangle) -> Found:
    """What of a rectangle is not surely empty, cut at whole steps, and whether that is surely full.

    Steps are longer where there are many: so what is found is looked at once more, until no less is found.
    """
    if not (given.rows and given.keys):
        return Found(Rectangle(given.q, 0, given.k, 0), EMPTY, 0.0)
    rows, keys = _cuts(given.rows), _cuts(given.keys)
    queries = (given.q + rows[:-1, None], given.q + rows[1:, None] - 1)
    classes = np.broadcast_to(
        _classes(whole, queries, (given.k + keys[:-1], given.k + keys[1:] - 1)), (len(rows) - 1, len(keys) - 1)
    )
    visited = classes != EMPTY
    if not visited.any():
        return Found(Rectangle(given.q, 0, given.k, 0), EMPTY, 0.0)
    of_rows, of_keys = np.flatnonzero(visited.any(1)), np.flatnonzero(visited.any(0))
    first_row, last_row, first_key, last_key = of_rows[0], of_rows[-1] + 1, of_keys[0], of_keys[-1] + 1
    inside = classes[first_row:last_row, first_key:last_key]
    rectangle = Rectangle(
        given.q + int(rows[first_row]),
        int(rows[last_row] - rows[first_row]),
        given.k + int(keys[first_key]),
        int(keys[last_key] - keys[first_key]),
    )
    if rectangle != given:
        return found_in(whole, rectangle)
    return Found(rectangle, FULL if (inside == FULL).all() else PARTIAL, _share(inside))


def class_of(whole: Whole, rectangle: Rectangle) -> int:
    """EMPTY, FULL or PARTIAL, which is what is not certain."""
    found = found_in(whole, rectangle)
    return PARTIAL if found.kind == FULL and found.rectangle != rectangle else found.kind


def share_of(whole: Whole, rectangle: Rectangle) -> float:
    """About how much of a rectangle counts."""
    found = found_in(whole, rectangle)
    return found.share * found.rectangle.rows * found.rectangle.keys / max(rectangle.rows * rectangle.keys, 1)


def _share(classes: Any) -> float:
    """Scores that count: of a box that is cut by the mask's edge, half."""
    return float(((classes == FULL) + 0.5 * (classes == PARTIAL)).mean())


def _cuts(length: int) -> Any:
    """Where boxes begin and end along a side."""
    step = _STEP * max(1, -(-length // (_STEP * _MOST_STEPS)))
    return np.append(np.arange(0, length, step), length)


def _classes(whole: Whole, queries: tuple[Any, Any], keys: tuple[Any, Any]) -> Any:
    boxes = {
        ops.QUERY: queries,
        ops.KEY: keys,
        ops.LEN_Q: (whole.len_q, whole.len_q),
        ops.LEN_K: (whole.len_k, whole.len_k),
        ops.BATCH: (0, max(whole.batch - 1, 0)),
        ops.HEAD: (0, max(whole.heads - 1, 0)),
    }
    value = _WhateverIsCaptured(boxes, whole.captures).interval(whole.mask)
    always, never = np.broadcast_arrays(value.always, value.never)
    return np.where(always, FULL, np.where(never, EMPTY, PARTIAL))


class _WhateverIsCaptured(Evaluation):
    """Intervals in which a capture that is not given may have any value of its dtype."""

    def _leaf(self, node: sympy.Basic) -> Interval:
        if isinstance(node, ops.Capture) and node.name not in self.captures:
            return _any_of(node)
        return super()._leaf(node)

    def _by_operands(self, node: ops.Operation) -> Interval:
        if isinstance(node, ops.Load) and node.capture.name not in self.captures:
            for index in node.indices:
                self.interval(index)
            return _any_of(node.capture)
        return super()._by_operands(node)


def _any_of(capture: ops.Capture) -> Interval:
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


def is_of_distances(mask: sympy.Basic) -> bool:
    """Whether the mask is surely the same where queries and keys move on together, as one of k - q is."""
    moved = {ops.QUERY: ops.Add(ops.QUERY, _SHIFT), ops.KEY: ops.Add(ops.KEY, _SHIFT)}
    return _stays(mask.xreplace(moved))


def _stays(node: sympy.Basic) -> bool:
    if isinstance(node, _LOGIC):
        return all(_stays(operand) for operand in node.args)
    if isinstance(node, _COMPARISONS) and all(ops.kind_of(operand) == "int" for operand in node.args):
        return not (affine(node.args[0]) - affine(node.args[1])).mentions(_SHIFT)
    return _SHIFT not in node.free_symbols
