"""The proven classes of a mask's tiles, compared with brute force."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from families.entry import Array, Captures, Entry
from flashgen.analysis.closed_forms.tile_ranges import TileRange, evaluate_range, key_range, query_range
from flashgen.analysis.intervals.evaluation import EMPTY, FULL, PARTIAL, classify
from flashgen.analysis.tile_classes import tile_map
from flashgen.language import operations as ops
from flashgen.verify import Shape


@dataclass(frozen=True)
class Tiles:
    """Classes of the tiles of (batch, heads), `proven` and by `truth`; a tile that extends beyond len_k is not FULL."""

    kind: str
    proven: Array
    truth: Array

    @property
    def lies(self) -> int:
        """Returns the tiles that are wrongly classified FULL or EMPTY."""
        return int(((self.proven != PARTIAL) & (self.proven != self.truth)).sum())

    @property
    def share_left(self) -> float:
        return float((self.proven != EMPTY).mean())

    def found(self, which: int) -> float:
        """Returns the fraction of EMPTY (or FULL) tiles that are classified so; 1 where there are none."""
        of_kind = self.truth == which
        return float((self.proven[of_kind] == which).mean()) if of_kind.any() else 1.0


def truth_of(allowed: Array, tile: tuple[int, int], overhang: tuple[bool, bool]) -> Array:
    """Returns the class of every tile of (..., len_q, len_k).

    overhang: whether rows, columns beyond the end exclude FULL.
    """

    def reduced(reduction: Callable[..., Any], beyond: tuple[bool, bool]) -> Array:
        result = allowed
        for axis, size, fill in zip((-2, -1), tile, beyond, strict=True):
            missing = -result.shape[axis] % size
            padding = [(0, 0)] * result.ndim
            padding[axis] = (0, missing)
            result = np.pad(result, padding, constant_values=fill)
            parts = list(result.shape)
            position = result.ndim + axis
            parts[position : position + 1] = [parts[position] // size, size]
            result = reduction(result.reshape(parts), axis=position + 1)
        return result

    some = reduced(np.any, (False, False))
    every = reduced(np.all, (not overhang[0], not overhang[1]))
    return np.where(every, FULL, np.where(some, PARTIAL, EMPTY))


def whole(entry: Entry, shape: Shape, captures: Captures) -> Array:
    assert entry.allowed is not None
    return np.broadcast_to(entry.allowed(shape, captures), (shape.batch, shape.heads_q, shape.len_q, shape.len_k))


def mapped(entry: Entry, shape: Shape, tile: tuple[int, int]) -> Tiles:
    """Returns the classes of `Attention.tiles`: by a range where there is one."""
    assert entry.mask is not None
    captures = entry.captures_for(shape)
    expression = entry.mask.expression
    needed = {capture.name: captures[capture.name] for capture in entry.mask.captures}
    tiles = tile_map(expression, tile, shape.len_q, shape.len_k, shape.batch, shape.heads_q, needed)
    truth = truth_of(whole(entry, shape, captures), tile, (False, True))
    kind = "lists" if key_range(expression) is None else "range"
    return Tiles(kind, np.broadcast_to(tiles.classes, truth.shape), truth)


def transposed(entry: Entry, shape: Shape, tile: tuple[int, int]) -> Tiles | None:
    """Returns the queries of each tile of keys by a range, or None if the mask has none in this direction."""
    assert entry.mask is not None
    found = query_range(entry.mask.expression)
    if found is None:
        return None
    captures = entry.captures_for(shape)
    truth = truth_of(whole(entry, shape, captures), tile, (True, False))
    classes = _by_query_range(found, shape, tile, captures)
    return Tiles("range", np.broadcast_to(classes, truth.shape), truth)


def _by_query_range(found: TileRange, shape: Shape, tile: tuple[int, int], captures: Captures) -> Array:
    first = np.arange(0, shape.len_k, tile[1])
    last = np.minimum(first + tile[1], shape.len_k) - 1
    bounds = evaluate_range(found, first, last, shape.len_q, shape.len_k, captures)
    begin, end, full_begin, full_end = bounds
    low = np.arange(0, shape.len_q, tile[0])[:, None]
    high = low + tile[0]
    visited = (low < end) & (high > begin) & (begin < end)
    full = visited & (low >= full_begin) & (high <= full_end)
    return np.where(full, FULL, np.where(visited, PARTIAL, EMPTY))


def by_intervals(entry: Entry, shape: Shape, tile: tuple[int, int]) -> Tiles:
    """Returns the classes from intervals only, without evaluating elements."""
    assert entry.mask is not None
    captures = entry.captures_for(shape)
    batch, head = np.arange(shape.batch).reshape(-1, 1, 1, 1), np.arange(shape.heads_q).reshape(-1, 1, 1)
    q, k = np.arange(0, shape.len_q, tile[0])[:, None], np.arange(0, shape.len_k, tile[1])
    boxes = {
        ops.BATCH: (batch, batch),
        ops.HEAD: (head, head),
        ops.QUERY: (q, np.minimum(q + tile[0], shape.len_q) - 1),
        ops.KEY: (k, np.minimum(k + tile[1], shape.len_k) - 1),
        ops.LEN_Q: (shape.len_q, shape.len_q),
        ops.LEN_K: (shape.len_k, shape.len_k),
    }
    classes = classify(entry.mask.expression, boxes, captures)
    truth = truth_of(whole(entry, shape, captures), tile, (False, False))
    return Tiles("intervals", np.broadcast_to(classes, truth.shape), truth)
