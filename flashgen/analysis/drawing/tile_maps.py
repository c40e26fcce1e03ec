"""Draws a tile map, or the elements of one tile, as text for a terminal or as SVG."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.analysis.drawing import palette
from flashgen.analysis.drawing.cell_grid import Kind, Picture
from flashgen.analysis.drawing.palette import GROUND
from flashgen.analysis.tile_classes import EMPTY, FULL, PARTIAL, TileMap
from flashgen.analysis.tile_elements import TileElements

Drawable = TileMap | TileElements

_GLYPHS = {EMPTY: "·", PARTIAL: "▒", FULL: "█"}
_NAMES = {EMPTY: "empty", PARTIAL: "partial", FULL: "full"}
_COLOURS = {EMPTY: GROUND, PARTIAL: palette.PARTIAL, FULL: palette.FULL}
_MAX_CELLS = 256  # maximum along a side; in a longer map a cell stands for several tiles
# Two by two elements in a character: bit 0 is upper left, bit 1 upper right, bit 2 lower left, bit 3 lower right.
_QUADRANTS = np.array(list(" ▘▝▀▖▌▞▛▗▚▐▜▄▙▟█"))


def to_text(drawn: Drawable, width: int = 80, batch: int = 0, head: int = 0, legend: bool = True) -> str:
    """Returns a drawing in characters, queries downwards and keys to the right.

    A map is drawn for one batch and head; `legend` adds the shares and the summary below it. A tile takes as many
    characters as keep its shape, since a character is twice as tall as wide. A map wider than `width` is scaled down:
    a cell of several tiles is PARTIAL unless all of them have the same class.

    A single tile is drawn element by element. A character holds two elements, one above the other, or four if two
    would make the text wider than `width`; a masked element is blank.
    """
    if isinstance(drawn, TileElements):
        return _elements_text(drawn, width)
    classes = drawn.of(batch, head)
    rows, columns = drawn.tile
    characters = max(1, round(2 * columns / rows))
    group = max(1, -(-classes.shape[1] * characters // max(width, characters)))
    lines = ["".join(_GLYPHS[kind] * characters for kind in line) for line in _grouped(classes, group)]
    return "\n".join([*lines, *(_legend(drawn, classes, group, _selection(drawn, batch, head)) if legend else ())])


def to_svg(drawn: Drawable, title: str = "", width: int = 480, batch: int = 0, head: int = 0) -> str:
    """Returns an SVG image with a title and a legend; the longer side of its grid has `width` pixels.

    An image narrower than 320 pixels has a line of text instead of the legend.
    """
    return _picture(drawn, title, batch, head).to_svg(width)


def to_mask_svg(elements: TileMap, title: str = "", width: int = 480) -> str:
    """Returns an SVG image like `to_svg` of the mask of the first batch and head, from its map in tiles of 1 × 1.

    In a long map a cell stands for several scores, and is drawn as kept if the mask keeps any of them.
    """
    classes = elements.of(0, 0)
    group = max(1, -(-max(classes.shape, default=1) // _MAX_CELLS))
    kept = _reduced(np.maximum, (classes != EMPTY).astype(np.int8), group) if classes.size else classes
    share = _visited(classes)
    picture = Picture(
        cells=kept,
        cell=(group, group),
        extent=(elements.len_q, elements.len_k),
        kinds={1: Kind("kept", _COLOURS[FULL], share), 0: Kind("masked", GROUND, 1 - share)},
        title=title,
        summary=f"{elements.len_q} queries (down) × {elements.len_k} keys (right)",
        short=f"{share:.1%} kept",
    )
    return picture.to_svg(width)


def to_bare_svg(tiles: TileMap, batch: int = 0, head: int = 0) -> str:
    """Returns SVG text of the tiles of one batch and head alone, for a page that draws its own axes and legend."""
    return _picture(tiles, "", batch, head).to_bare_svg()


def summary(drawn: Drawable, batch: int = 0, head: int = 0) -> str:
    """Returns one line: the share of tiles that a map visits, or the position and the class of a tile."""
    if isinstance(drawn, TileElements):
        return _elements_summary(drawn)
    return _summary(drawn, drawn.of(batch, head), _selection(drawn, batch, head))


def _picture(drawn: Drawable, title: str, batch: int, head: int) -> Picture:
    if isinstance(drawn, TileElements):
        return _elements_picture(drawn, title)
    classes = drawn.of(batch, head)
    group = max(1, -(-max(classes.shape, default=1) // _MAX_CELLS))
    rows, columns = drawn.tile
    shares = _shares(classes)
    return Picture(
        cells=_grouped(classes, group),
        cell=(rows * group, columns * group),
        extent=(drawn.len_q, drawn.len_k),
        kinds={kind: Kind(_NAMES[kind], _COLOURS[kind], shares[kind]) for kind in (FULL, PARTIAL, EMPTY)},
        title=title,
        summary=_summary(drawn, classes, _selection(drawn, batch, head)),
        short=f"{_visited(classes):.1%} of the work",
    )


def _grouped(classes: Any, group: int) -> Any:
    """Merges group × group tiles into a cell: their common class, or PARTIAL if the classes differ."""
    if group == 1 or not classes.size:
        return classes
    lowest, highest = _reduced(np.minimum, classes, group), _reduced(np.maximum, classes, group)
    return np.where(lowest == highest, lowest, PARTIAL)


def _reduced(reduce: np.ufunc, cells: Any, group: int) -> Any:
    """Reduces each group × group cells to one."""
    rows, columns = (np.arange(0, size, group) for size in cells.shape)
    return reduce.reduceat(reduce.reduceat(cells, rows, axis=0), columns, axis=1)


def _shares(classes: Any) -> dict[int, float]:
    return {kind: float((classes == kind).mean()) if classes.size else 0.0 for kind in _GLYPHS}


def _visited(classes: Any) -> float:
    return float((classes != EMPTY).mean()) if classes.size else 0.0


def _selection(tile_map: TileMap, batch: int, head: int) -> str:
    """Returns the text that names the batch and the head, empty for a map with one of each."""
    batches, heads = tile_map.classes.shape[:2]
    words = [f"batch {batch} of {batches}"] if batches > 1 else []
    words += [f"head {head} of {heads}"] if heads > 1 else []
    return f"; {', '.join(words)} ({_visited(tile_map.classes):.1%} over all)" if words else ""


def _legend(tile_map: TileMap, classes: Any, group: int, selection: str) -> list[str]:
    shares = _shares(classes)
    kinds = "   ".join(f"{glyph} {_NAMES[kind]} {shares[kind]:.1%}" for kind, glyph in _GLYPHS.items())
    lines = [kinds, _summary(tile_map, classes, selection)]
    if group > 1:
        lines.append(f"a cell stands for {group} × {group} tiles")
    return lines


def _summary(tile_map: TileMap, classes: Any, selection: str) -> str:
    rows, columns = tile_map.tile
    return (
        f"{_visited(classes):.1%} of the work: {tile_map.len_q} queries (down) × {tile_map.len_k} keys (right), "
        f"tiles of {rows} × {columns}{selection}"
    )


def _elements_text(elements: TileElements, width: int) -> str:
    kept = elements.kept.astype(np.int64)
    if kept.shape[1] <= width:
        kept = np.repeat(kept, 2, axis=1)
    kept = np.pad(kept, [(0, size % 2) for size in kept.shape])
    codes = kept[0::2, 0::2] + 2 * kept[0::2, 1::2] + 4 * kept[1::2, 0::2] + 8 * kept[1::2, 1::2]
    framed = [f"│{''.join(line)}│" for line in _QUADRANTS[codes]]
    edge = "─" * codes.shape[1]
    return "\n".join([f"┌{edge}┐", *framed, f"└{edge}┘", f"█ kept {elements.share:.1%}", _elements_summary(elements)])


def _elements_summary(elements: TileElements) -> str:
    queries, keys = elements.kept.shape
    return (
        f"tile {elements.row},{elements.column}, {_NAMES[elements.kind]}: queries {elements.first_q} to "
        f"{elements.first_q + queries - 1} (down) × keys {elements.first_k} to {elements.first_k + keys - 1} (right)"
    )


def _elements_picture(elements: TileElements, title: str) -> Picture:
    return Picture(
        cells=elements.kept.astype(np.int8),
        cell=(1, 1),
        extent=(elements.kept.shape[0], elements.kept.shape[1]),
        kinds={1: Kind("kept", _COLOURS[FULL], elements.share), 0: Kind("masked", GROUND, 1 - elements.share)},
        title=title,
        summary=_elements_summary(elements),
        short=f"{elements.share:.1%} kept",
    )
