"""A tile map as text for a terminal, and as SVG."""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import Any

import numpy as np

from flashgen.analysis.tiles import EMPTY, FULL, PARTIAL, TileMap
from flashgen.errors import ArgumentError

_GLYPHS = {EMPTY: "·", PARTIAL: "▒", FULL: "█"}
_NAMES = {EMPTY: "empty", PARTIAL: "partial", FULL: "full"}
_COLOURS = {PARTIAL: "#f2a541", FULL: "#2b6cb0"}
_GROUND, _INK = "#f3f4f6", "#1f2937"


def to_text(tile_map: TileMap, width: int = 80, batch: int = 0, head: int = 0) -> str:
    """The map of one batch and head in characters, queries downwards and keys to the right, with a legend.

    A tile is as many characters wide as keeps its shape, where a character is twice as tall as wide. A map wider than
    `width` is scaled down: a cell of several tiles is PARTIAL unless all of them are alike.
    """
    classes = _plane(tile_map, batch, head)
    rows, columns = tile_map.tile
    characters = max(1, round(2 * columns / rows))
    group = max(1, -(-classes.shape[1] * characters // max(width, characters)))
    lines = ["".join(_GLYPHS[kind] * characters for kind in line) for line in _grouped(classes, group)]
    return "\n".join([*lines, *_legend(tile_map, classes, group)])


def to_svg(tile_map: TileMap, title: str = "", width: int = 480, batch: int = 0, head: int = 0) -> str:
    """The map of one batch and head as the text of an SVG image, `width` pixels wide, with a title and a legend."""
    classes = _plane(tile_map, batch, head)
    rows, columns = tile_map.tile
    group = max(1, -(-max(classes.shape, default=1) // 256))
    cells = _grouped(classes, group)
    scale = width / max(1, classes.shape[1] * columns)
    height = max(1.0, classes.shape[0] * rows * scale)
    top = 28 if title else 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 16}" height="{_number(top + height + 48)}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{_INK}">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    if title:
        parts.append(f'<text x="8" y="19" font-weight="600">{escape(title)}</text>')
    parts.append(f'<rect x="8" y="{top}" width="{width}" height="{_number(height)}" fill="{_GROUND}"/>')
    parts.append(f'<g transform="translate(8 {top})" shape-rendering="crispEdges">')
    parts += _rectangles(cells, columns * scale * group, rows * scale * group, width, height)
    parts.append("</g>")
    parts += _svg_legend(tile_map, classes, top + height + 20)
    parts.append("</svg>\n")
    return "\n".join(parts)


def _plane(tile_map: TileMap, batch: int, head: int) -> Any:
    """(tiles_q, tiles_k) of one batch and head; a map that is the same for all takes any."""
    place = []
    for name, index, size in zip(("batch", "head"), (batch, head), tile_map.classes.shape[:2], strict=True):
        if index < 0 or (size > 1 and index >= size):
            raise ArgumentError(f"{name}={index} is not in this map: give 0 to {size - 1}")
        place.append(index if size > 1 else 0)
    return tile_map.classes[tuple(place)]


def _grouped(classes: Any, group: int) -> Any:
    """Cells of group × group tiles: a class that all their tiles share, else PARTIAL."""
    if group == 1 or not classes.size:
        return classes
    starts = [np.arange(0, size, group) for size in classes.shape]

    def over(pick: np.ufunc) -> Any:
        return pick.reduceat(pick.reduceat(classes, starts[0], axis=0), starts[1], axis=1)

    least, greatest = over(np.minimum), over(np.maximum)
    return np.where(least == greatest, least, PARTIAL)


def _shares(classes: Any) -> dict[Any, str]:
    return {kind: f"{(classes == kind).mean() if classes.size else 0.0:.1%}" for kind in _GLYPHS}


def _legend(tile_map: TileMap, classes: Any, group: int) -> list[str]:
    shares = _shares(classes)
    kinds = "   ".join(f"{glyph} {_NAMES[kind]} {shares[kind]}" for kind, glyph in _GLYPHS.items())
    lines = [kinds, _summary(tile_map, classes)]
    if group > 1:
        lines.append(f"a cell stands for {group} × {group} tiles")
    return lines


def _summary(tile_map: TileMap, classes: Any) -> str:
    visited = float((classes != EMPTY).mean()) if classes.size else 0.0
    rows, columns = tile_map.tile
    return (
        f"{visited:.1%} of the work: {tile_map.len_q} queries (down) × {tile_map.len_k} keys (right), "
        f"tiles of {rows} × {columns}"
    )


def _rectangles(cells: Any, cell_width: float, cell_height: float, width: float, height: float) -> list[str]:
    """One rectangle for each stretch of equal cells in a row; the last cells end where the map does."""
    found = []
    for row, line in enumerate(cells):
        top, bottom = row * cell_height, min((row + 1) * cell_height, height)
        column = 0
        for kind, stretch in groupby(line.tolist()):
            start, column = column, column + len(list(stretch))
            if kind != EMPTY:
                left, right = start * cell_width, min(column * cell_width, width)
                found.append(
                    f'<rect x="{_number(left)}" y="{_number(top)}" width="{_number(right - left)}" '
                    f'height="{_number(bottom - top)}" fill="{_COLOURS[kind]}"/>'
                )
    return found


def _svg_legend(tile_map: TileMap, classes: Any, top: float) -> list[str]:
    shares = _shares(classes)
    parts = []
    for place, kind in enumerate((FULL, PARTIAL, EMPTY)):
        left = 8 + place * 120
        parts.append(
            f'<rect x="{left}" y="{_number(top - 10)}" width="11" height="11" fill="{_COLOURS.get(kind, _GROUND)}"/>'
        )
        parts.append(f'<text x="{left + 16}" y="{_number(top)}">{_NAMES[kind]} {shares[kind]}</text>')
    parts.append(f'<text x="8" y="{_number(top + 18)}" font-size="11">{escape(_summary(tile_map, classes))}</text>')
    return parts


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
