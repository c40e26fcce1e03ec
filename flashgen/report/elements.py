"""The elements that the mask keeps in the partial tiles of a map, packed for a page, with each pattern stored once."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from flashgen.analysis.tile_classes import PARTIAL, TileMap
from flashgen.analysis.tile_elements import tile_elements

MAX_TILES, MAX_PATTERNS = 600, 48  # for each sequence and head, to keep the page small


@dataclass(frozen=True)
class Elements:
    """The distinct patterns of partial tiles, and the pattern of each tile.

    patterns: base64 of the bits in row-major order, 8 per byte, most significant bit first. tiles: maps "row,column"
    to the index of a pattern.
    """

    patterns: list[str]
    tiles: dict[str, int]


def mixed_elements(
    expression: sympy.Basic, tiles: TileMap, batch: int, head: int, captures: Mapping[str, Any]
) -> Elements:
    """Returns the patterns of the first MAX_TILES partial tiles.

    Only the first MAX_PATTERNS distinct patterns are stored; tiles with other patterns are left out.
    """
    numbers: dict[str, int] = {}
    found: dict[str, int] = {}
    positions = np.argwhere(tiles.of(batch, head) == PARTIAL)[:MAX_TILES]
    for row, column in positions.tolist():
        kept = tile_elements(expression, tiles, row, column, batch, head, captures).kept
        packed = base64.b64encode(np.packbits(_padded(kept, tiles.tile)).tobytes()).decode()
        if packed in numbers or len(numbers) < MAX_PATTERNS:
            found[f"{row},{column}"] = numbers.setdefault(packed, len(numbers))
    return Elements(list(numbers), found)


def _padded(kept: np.ndarray[Any, Any], tile: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Pads a boundary tile to the full tile size; elements beyond the lengths are not kept."""
    padded = np.zeros(tile, bool)
    padded[: kept.shape[0], : kept.shape[1]] = kept
    return padded
