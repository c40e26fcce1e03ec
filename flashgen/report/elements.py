"""The elements of a map's mixed tiles, packed for a page: which scores the mask keeps, each pattern once."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from flashgen.analysis.tile_classes import PARTIAL, TileMap
from flashgen.analysis.tile_elements import tile_elements

MOST_TILES, MOST_PATTERNS = 600, 48  # of one sequence and head, so that a page stays small


@dataclass(frozen=True)
class Elements:
    """Patterns of tiles, and which tile has which.

    patterns: base64 of bits, row by row, 8 in a byte, the highest first. tiles: "row,column" -> a pattern's number.
    """

    patterns: list[str]
    tiles: dict[str, int]


def mixed_elements(
    expression: sympy.Basic, tiles: TileMap, batch: int, head: int, captures: Mapping[str, Any]
) -> Elements:
    """The patterns of the first MOST_TILES mixed tiles; of a tile that shows one too many, nothing."""
    numbers: dict[str, int] = {}
    found: dict[str, int] = {}
    places = np.argwhere(tiles.of(batch, head) == PARTIAL)[:MOST_TILES]
    for row, column in places.tolist():
        kept = tile_elements(expression, tiles, row, column, batch, head, captures).kept
        packed = base64.b64encode(np.packbits(_whole(kept, tiles.tile)).tobytes()).decode()
        if packed in numbers or len(numbers) < MOST_PATTERNS:
            found[f"{row},{column}"] = numbers.setdefault(packed, len(numbers))
    return Elements(list(numbers), found)


def _whole(kept: np.ndarray[Any, Any], tile: tuple[int, int]) -> np.ndarray[Any, Any]:
    """A tile that overhangs the lengths, with nothing kept beyond them."""
    whole = np.zeros(tile, bool)
    whole[: kept.shape[0], : kept.shape[1]] = kept
    return whole
