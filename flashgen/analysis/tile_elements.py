"""The elements of one tile: which of its scores a mask keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from flashgen.analysis.tile_classes import TileMap
from flashgen.errors import ArgumentError
from flashgen.language import operations as ops
from flashgen.language.evaluate import evaluate


@dataclass(frozen=True, eq=False)
class TileElements:
    """The elements of a tile of a map.

    Attributes:
        row: The number of the tile along the queries.
        column: The number of the tile along the keys.
        first_q: The first query of the tile.
        first_k: The first key of the tile.
        kind: The class of the tile in the map: EMPTY, PARTIAL or FULL.
        kept: bool of shape (queries, keys), for those positions of the tile that are within the lengths.
    """

    row: int
    column: int
    first_q: int
    first_k: int
    kind: int
    kept: np.ndarray[Any, Any]

    @property
    def share(self) -> float:
        """The fraction of the elements that the mask keeps."""
        return float(self.kept.mean())


def tile_elements(
    mask_expression: sympy.Basic,
    tile_map: TileMap,
    row: int,
    column: int,
    batch: int = 0,
    head: int = 0,
    captures: Mapping[str, Any] | None = None,
) -> TileElements:
    """Returns the elements of tile (row, column) of a map of this mask, for one batch element and head.

    Raises:
        ArgumentError: The tile is not in the map, or a capture is missing or has the wrong number of dimensions.
    """
    tiles_q, tiles_k = tile_map.classes.shape[2:]
    if not (0 <= row < tiles_q and 0 <= column < tiles_k):
        raise ArgumentError(
            f"tile {row},{column} is not in this map: give a row from 0 and below {tiles_q}, a column from 0 and "
            f"below {tiles_k}"
        )
    rows, columns = tile_map.tile
    queries = np.arange(row * rows, min((row + 1) * rows, tile_map.len_q))
    keys = np.arange(column * columns, min((column + 1) * columns, tile_map.len_k))
    values = {
        ops.BATCH: np.int64(batch), ops.HEAD: np.int64(head), ops.QUERY: queries[:, None], ops.KEY: keys,
        ops.LEN_Q: np.int64(tile_map.len_q), ops.LEN_K: np.int64(tile_map.len_k),
    }  # fmt: skip
    kept = np.broadcast_to(evaluate(mask_expression, values, captures), (len(queries), len(keys)))
    kind = int(tile_map.of(batch, head)[row, column])
    return TileElements(row, column, int(queries[0]), int(keys[0]), kind, kept)
