"""The class of every tile of a mask: EMPTY tiles are skipped, PARTIAL ones are masked, FULL ones need no mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sympy

from flashgen.analysis.closed_forms.affine import contains
from flashgen.analysis.closed_forms.tile_ranges import TileRange, evaluate_range, key_range
from flashgen.analysis.intervals.evaluation import EMPTY, FULL, PARTIAL, classify
from flashgen.errors import ArgumentError
from flashgen.language import operations as ops
from flashgen.language.evaluate import evaluate

__all__ = ["EMPTY", "FULL", "PARTIAL", "TileMap", "depends_on", "tile_map"]

_MAX_TILES = 2**30  # of a map
_TILES_AT_ONCE = 2**17  # classified by intervals
_ELEMENTS_AT_ONCE = 2**20  # evaluated, which takes about 100 MB

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class TileMap:
    """The classes of the tiles of a mask.

    Attributes:
        tile: (rows of queries, columns of keys) of a tile.
        classes: int8 of shape (batch or 1, heads or 1, tiles_q, tiles_k): EMPTY 0, PARTIAL 1, FULL 2. Size 1 means that
            the mask does not depend on the batch or the head.
        len_q: The number of queries, which the last row of tiles may exceed.
        len_k: The number of keys, which the last column of tiles may exceed.
    """

    tile: tuple[int, int]
    classes: Array
    len_q: int
    len_k: int

    @property
    def share(self) -> float:
        """The fraction of tiles that are visited; 0 if there are none."""
        return float((self.classes != EMPTY).mean()) if self.classes.size else 0.0

    def of(self, batch: int = 0, head: int = 0) -> Array:
        """Returns the classes (tiles_q, tiles_k) of one batch element and head.

        A dimension of size 1 accepts any index.

        Raises:
            ArgumentError: The index is outside of the map.
        """
        position = []
        for name, index, size in zip(("batch", "head"), (batch, head), self.classes.shape[:2], strict=True):
            if index < 0 or (size > 1 and index >= size):
                raise ArgumentError(f"{name}={index} is not in this map: give 0 to {size - 1}")
            position.append(index if size > 1 else 0)
        return self.classes[tuple(position)]

    def at(self, batch: int | None = None, head: int | None = None) -> TileMap:
        """Returns the map of one batch element, one head or both. None keeps all. Raises ArgumentError like `of`."""
        self.of(batch or 0, head or 0)
        classes = self.classes
        if batch is not None and classes.shape[0] > 1:
            classes = classes[batch : batch + 1]
        if head is not None and classes.shape[1] > 1:
            classes = classes[:, head : head + 1]
        return replace(self, classes=classes)

    def count(self, kind: int) -> int:
        """Returns the number of tiles of a class, over the batch and heads of the map."""
        return int((self.classes == kind).sum())

    def work(self, batch: int = 1, heads: int = 1) -> int:
        """Returns the number of scores that a kernel computes, counted in full tiles.

        batch and heads multiply it where the map has size 1 in their dimension.
        """
        map_batch, map_heads = self.classes.shape[:2]
        repeats = (batch if map_batch == 1 else 1) * (heads if map_heads == 1 else 1)
        return int((self.classes != EMPTY).sum()) * self.tile[0] * self.tile[1] * repeats


def depends_on(expression: sympy.Basic, symbol: sympy.Basic) -> bool:
    """Returns whether the value of the expression may depend on the symbol."""
    return contains(expression, symbol)


def tile_map(
    mask_expression: sympy.Basic,
    tile: tuple[int, int],
    len_q: int,
    len_k: int,
    batch: int = 1,
    heads: int = 1,
    captures: Mapping[str, Any] | None = None,
) -> TileMap:
    """Returns the class of each tile of a mask.

    If the mask has a closed form (`key_range`), the classes are those of its range, with the last row of a tile limited
    to len_q - 1. They may be PARTIAL where all or no elements are kept. Otherwise the classes are exact: intervals
    decide where they can, and the elements of the other tiles are evaluated, a limited number at a time. A tile that
    exceeds len_k is never FULL, since its last keys do not exist. A tile that exceeds len_q may be FULL, since its last
    rows are never written.

    Args:
        mask_expression: A boolean expression of the language.
        tile: (rows of queries, columns of keys) of a tile.
        len_q: The number of queries.
        len_k: The number of keys.
        batch: The number of batch elements.
        heads: The number of query heads.
        captures: An array or number for each capture, by name.

    Raises:
        ArgumentError: A size is not an integer; a tile size, the batch or the heads are less than 1; a length is
            negative; a size exceeds the limit of calls; there are more than 2**30 tiles; or a capture is missing or has
            the wrong number of dimensions.
    """
    rows, columns = _check_sizes(tile, len_q, len_k, batch, heads)
    grid = _TileGrid(rows, columns, len_q, len_k)
    tile_range = key_range(mask_expression)
    if tile_range is not None:
        batch = batch if tile_range.depends_on(ops.BATCH) else 1
        _check_num_tiles(grid, batch)
        classes = _classes_of_range(tile_range, grid, captures or {}, batch)[:, None]
    else:
        batch = batch if depends_on(mask_expression, ops.BATCH) else 1
        heads = heads if depends_on(mask_expression, ops.HEAD) else 1
        _check_num_tiles(grid, batch * heads)
        classes = np.empty((batch, heads, grid.tiles_q, grid.tiles_k), np.int8)
        _fill_classes(mask_expression, grid, captures or {}, classes)
    return TileMap((rows, columns), classes, len_q, len_k)


def _check_sizes(tile: tuple[int, int], len_q: int, len_k: int, batch: int, heads: int) -> tuple[int, int]:
    """Returns the rows and columns of a tile. Raises ArgumentError for sizes that `tile_map` does not take."""
    rows, columns = tile
    for name, value, minimum in (
        ("tile rows", rows, 1), ("tile columns", columns, 1), ("len_q", len_q, 0), ("len_k", len_k, 0),
        ("batch", batch, 1), ("heads", heads, 1),
    ):  # fmt: skip
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise ArgumentError(f"{name}={value!r} must be an integer")
        if value < minimum:
            raise ArgumentError(f"{name}={value} must be at least {minimum}")
        if value > ops.LONGEST:
            raise ArgumentError(f"{name}={value} must be at most {ops.LONGEST}")
    return int(rows), int(columns)


def _check_num_tiles(grid: _TileGrid, maps: int) -> None:
    """Raises ArgumentError for a map with more tiles than are stored."""
    if maps * grid.tiles_q * grid.tiles_k > _MAX_TILES:
        of = f"{maps} x " if maps > 1 else ""
        raise ArgumentError(
            f"len_q={grid.len_q}, len_k={grid.len_k}: a map of {of}{grid.tiles_q} x {grid.tiles_k} tiles has more "
            f"than {_MAX_TILES} tiles; give shorter lengths"
        )


@dataclass(frozen=True)
class _TileGrid:
    """The tiles of len_q × len_k scores."""

    rows: int
    columns: int
    len_q: int
    len_k: int

    @property
    def tiles_q(self) -> int:
        return -(-self.len_q // self.rows)

    @property
    def tiles_k(self) -> int:
        return -(-self.len_k // self.columns)

    def queries(self, tiles: Array) -> tuple[Array, Array]:
        """Returns the first and last query of tiles, both included, from their indices."""
        return tiles * self.rows, np.minimum((tiles + 1) * self.rows, self.len_q) - 1

    def keys(self, tiles: Array) -> tuple[Array, Array]:
        """Returns the first and last key of tiles, both included, from their indices."""
        return tiles * self.columns, np.minimum((tiles + 1) * self.columns, self.len_k) - 1

    def values(self) -> dict[sympy.Basic, Any]:
        """Returns the values of the symbols that masks have for the lengths."""
        return {ops.LEN_Q: np.int64(self.len_q), ops.LEN_K: np.int64(self.len_k)}


def _classes_of_range(tile_range: TileRange, grid: _TileGrid, captures: Mapping[str, Any], batch: int) -> Array:
    """Returns the classes, of shape (batch, tiles_q, tiles_k)."""
    first, last = grid.queries(np.arange(grid.tiles_q))
    batches = np.arange(batch)[:, None]
    bounds = evaluate_range(tile_range, first, last, grid.len_q, grid.len_k, captures, batches)
    begin, end, full_begin, full_end = (bound[..., None] for bound in bounds)
    low = np.arange(grid.tiles_k) * grid.columns
    high = low + grid.columns
    visited = (low < end) & (high > begin) & (begin < end)
    full = visited & (low >= full_begin) & (high <= full_end)
    return np.where(full, np.int8(FULL), np.where(visited, np.int8(PARTIAL), np.int8(EMPTY)))


def _fill_classes(mask: sympy.Basic, grid: _TileGrid, captures: Mapping[str, Any], classes: Array) -> None:
    """Fills `classes`, a few rows of tiles at a time: by intervals, then PARTIAL tiles by their elements."""
    if not classes.size:
        return
    step = max(1, _TILES_AT_ONCE // (classes.size // grid.tiles_q))
    for first in range(0, grid.tiles_q, step):
        part = classes[:, :, first : first + step]
        part[...] = _classify_by_intervals(mask, grid, captures, np.arange(first, first + part.shape[2]), part.shape)
        unknown = np.argwhere(part == PARTIAL)
        unknown[:, 2] += first
        at_once = max(1, _ELEMENTS_AT_ONCE // (grid.rows * grid.columns))
        for chunk in (unknown[start : start + at_once] for start in range(0, len(unknown), at_once)):
            classes[tuple(chunk.T)] = _classify_by_elements(mask, grid, captures, chunk)
    if grid.len_k % grid.columns:
        last = classes[..., -1]
        last[last == FULL] = PARTIAL


def _classify_by_intervals(
    mask: sympy.Basic, grid: _TileGrid, captures: Mapping[str, Any], tiles_q: Array, shape: tuple[int, ...]
) -> Array:
    """Classifies rows of tiles by intervals of indices. A tile that they cannot decide is PARTIAL.

    tiles_q: the indices of the rows. shape: that of the result, (batch, heads, len(tiles_q), tiles_k).
    """

    def along(axis: int, size: int) -> Array:
        """Returns the indices of an axis of the result, for broadcasting."""
        return np.arange(size).reshape([-1 if axis == own else 1 for own in range(4)])

    queries = tuple(bound[:, None] for bound in grid.queries(tiles_q))
    intervals = {symbol: (value, value) for symbol, value in grid.values().items()}
    intervals |= {ops.QUERY: queries, ops.KEY: grid.keys(np.arange(grid.tiles_k))}
    # Each batch and head index is its own lower and upper bound.
    intervals |= {symbol: (along(axis, shape[axis]),) * 2 for axis, symbol in enumerate((ops.BATCH, ops.HEAD))}
    return np.broadcast_to(classify(mask, intervals, captures), shape)


def _classify_by_elements(mask: sympy.Basic, grid: _TileGrid, captures: Mapping[str, Any], tiles: Array) -> Array:
    """Classifies tiles of shape (n, 4) by their elements. Rows and columns beyond the lengths repeat the last one."""
    batch, head, tile_q, tile_k = (column[:, None, None] for column in tiles.T)
    (first_q, last_q), (first_k, last_k) = grid.queries(tile_q), grid.keys(tile_k)
    values = grid.values() | {
        ops.BATCH: batch,
        ops.HEAD: head,
        ops.QUERY: np.minimum(first_q + np.arange(grid.rows)[:, None], last_q),
        ops.KEY: np.minimum(first_k + np.arange(grid.columns), last_k),
    }
    # A mask that does not read k (or q) gives fewer elements than the tile has, with the same result.
    holds = evaluate(mask, values, captures)
    holds = holds.reshape((1,) * (3 - holds.ndim) + holds.shape)
    some, every = holds.any(axis=(1, 2)), holds.all(axis=(1, 2))
    return np.broadcast_to(np.where(every, FULL, np.where(some, PARTIAL, EMPTY)), len(tiles))
