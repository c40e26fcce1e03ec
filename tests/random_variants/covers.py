"""Compares tile maps, ranges and lists with brute force: an EMPTY tile holds no element, a FULL one holds all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import sympy

from flashgen.analysis.closed_forms.tile_ranges import TileRange, evaluate_range, key_range, query_range
from flashgen.analysis.tile_classes import EMPTY, FULL, TileMap, tile_map
from flashgen.language.operations import BATCH
from random_variants.meaning import Sizes

Array = np.ndarray[Any, Any]

TILES = ((128, 128), (64, 64), (16, 48), (80, 32), (1, 1), (192, 17), (256, 128))
_MOST_TILES = 2**13


def mistake_in_map(tiles: TileMap, allowed: Array, sizes: Sizes, of_keys: bool = True) -> str | None:
    """The first tile whose class is wrong, in words; None where none is.

    of_keys: whether a kernel loops over the tiles of keys, so that one that overhangs the keys may not be FULL.
    """
    (rows, columns), classes = tiles.tile, tiles.classes
    if not classes.size:
        return None
    allowed = np.broadcast_to(allowed, (*allowed.shape[:2], sizes.len_q, sizes.len_k))
    some = np.asarray(_by_tiles(allowed, rows, columns, False).any(axis=(3, 5)))
    every = np.asarray(_by_tiles(allowed, rows, columns, True).all(axis=(3, 5)))
    if sizes.len_k % columns and of_keys:
        every[..., -1] = False  # keys that do not exist are never attended to
    wrong = ((classes == EMPTY) & some) | ((classes == FULL) & ~every)
    if not wrong.any():
        return None
    place = tuple(int(index) for index in np.argwhere(wrong)[0])
    name = "EMPTY" if np.broadcast_to(classes, wrong.shape)[place] == EMPTY else "FULL"
    return f"{int(wrong.sum())} of {wrong.size} tiles of {rows}x{columns} have a wrong class: {place} is called {name}"


def _by_tiles(allowed: Array, rows: int, columns: int, beyond: bool) -> Array:
    """(batch, heads, tiles_q, rows, tiles_k, columns); what overhangs counts as `beyond`."""
    overhang = [(0, 0), (0, 0), (0, -allowed.shape[2] % rows), (0, -allowed.shape[3] % columns)]
    padded = np.pad(allowed, overhang, constant_values=beyond)
    batch, heads, len_q, len_k = padded.shape
    return padded.reshape(batch, heads, len_q // rows, rows, len_k // columns, columns)


def mistake_in_analysis(
    mask: sympy.Basic, allowed: Array, sizes: Sizes, captures: Mapping[str, Any], turn: int = 0
) -> str | None:
    """What is wrong in the analysis of a mask, for tiles of two sizes and for both directions.

    turn: chooses the sizes, among those that do not cut the call into too many tiles.
    """
    few = [
        tile for tile in TILES if sizes.len_q * sizes.len_k * sizes.batch * sizes.heads <= math.prod(tile) * _MOST_TILES
    ]
    fitting = few or [TILES[-1]]
    for tile in {fitting[turn % len(fitting)], fitting[(turn + 1) % len(fitting)]}:
        tiles = tile_map(mask, tile, sizes.len_q, sizes.len_k, sizes.batch, sizes.heads, captures)
        mistake = mistake_in_map(tiles, allowed, sizes)
        if mistake:
            return mistake
    for name, made in (("keys", key_range(mask)), ("queries", query_range(mask))):
        mistake = _mistake_in_ranges(made, allowed, sizes, captures, transposed=name == "queries") if made else None
        if mistake:
            return f"the range of {name} {mistake}"
    return None


def _mistake_in_ranges(
    made: TileRange, allowed: Array, sizes: Sizes, captures: Mapping[str, Any], transposed: bool
) -> str | None:
    """A range that depends on the batch index is checked for each sequence, any other for all together."""
    shape = (sizes.batch, allowed.shape[1], sizes.len_q, sizes.len_k)
    sequences = np.broadcast_to(allowed, shape) if made.depends_on(BATCH) else [allowed.reshape(-1, *allowed.shape[2:])]
    for batch, of_heads in enumerate(sequences):
        some, every = (
            np.broadcast_to(each, (sizes.len_q, sizes.len_k)) for each in (of_heads.any(axis=0), of_heads.all(axis=0))
        )
        some, every = (some.T, every.T) if transposed else (some, every)
        mistake = _mistake_in_range(made, some, every, sizes, captures, batch)
        if mistake:
            return f"of sequence {batch} {mistake}" if made.depends_on(BATCH) else mistake
    return None


def _mistake_in_range(
    made: TileRange, some: Array, every: Array, sizes: Sizes, captures: Mapping[str, Any], batch: int
) -> str | None:
    """Checks the ranges of columns of tiles of rows, whichever of the two are queries."""
    for rows in (64, 17):
        first = np.arange(0, len(some), rows)
        last = np.minimum(first + rows, len(some)) - 1
        bounds = evaluate_range(made, first, last, sizes.len_q, sizes.len_k, captures, batch)
        for start, begin, end, full_begin, full_end in zip(first, *bounds, strict=True):
            columns = np.flatnonzero(some[start : start + rows].any(axis=0))
            if columns.size and not (begin <= columns[0] and columns[-1] < end):
                return f"of {start} to {start + rows} is {begin} to {end}, and {columns[0]} to {columns[-1]} count"
            stretch = every[start : start + rows, max(full_begin, 0) : max(full_end, 0)]
            if full_begin < full_end and not (full_end <= some.shape[1] and stretch.all()):
                return f"of {start} to {start + rows} is full from {full_begin} to {full_end}, where not all count"
    return None
