"""Draws a grid of coloured cells as SVG: the picture of a tile map and of the elements of one tile.

Queries run downwards and keys to the right. The picture has a title, axes, a legend and a line of text below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

import numpy as np

from flashgen.analysis.drawing.axes import axes, left_margin
from flashgen.analysis.drawing.palette import GROUND, INK, PAPER, RULE

# All lengths are in pixels.
_MARGIN = 8
_NUMBERS_BELOW = 16  # space for the numbers of the axis of keys
_MIN_SIDE = 12.0  # minimum of the shorter side, for few queries and many keys or the reverse
_MIN_CELL_WITH_LINES = 5.0  # smaller cells are drawn without lines between them
_MIN_SIZE_WITH_LEGEND = 320  # smaller pictures have one line of text instead of a legend
_LEGEND_STEP = 120

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of cell: its name, its colour, and the fraction of all cells that are of this kind."""

    name: str
    colour: str
    share: float


@dataclass(frozen=True, eq=False)
class Picture:
    """A grid of cells with its texts.

    Attributes:
        cells: int8 array (rows, columns) of keys of `kinds`.
        cell: the (queries, keys) that a cell covers.
        extent: the (queries, keys) of the whole grid, at which the last cells are clipped.
        kinds: the kinds of cells, in the order of the legend.
        title: the text above the grid; may be empty.
        summary: the line of text below the legend.
        short: the text that replaces legend and summary in a small picture.
    """

    cells: Array
    cell: tuple[int, int]
    extent: tuple[int, int]
    kinds: Mapping[int, Kind]
    title: str
    summary: str
    short: str

    def to_svg(self, size: int) -> str:
        """Returns the picture as SVG text; the longer side of the grid has `size` pixels."""
        height, width = _scaled(self.extent, size)
        large = size >= _MIN_SIZE_WITH_LEGEND
        left, top = left_margin(self.extent[0]), (28 if self.title else _MARGIN) + (12 if large else 0)
        foot = top + height + _NUMBERS_BELOW + (12 if large else 0)
        words = self._legend(foot + 20) if large else self._caption(foot + 15)
        bottom = foot + (48 if large else 24)
        across = max(width, size) + left + 2 * _MARGIN
        title = [f'<text x="8" y="19" font-weight="600">{escape(self.title)}</text>'] if self.title else []
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_number(across)}" height="{_number(bottom)}" '
            f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">',
            f'<rect width="100%" height="100%" fill="{PAPER}"/>',
            *title,
            f'<rect x="{left}" y="{top}" width="{_number(width)}" height="{_number(height)}" '
            f'fill="{GROUND}"/>',
            *self._grid(left, top, height, width),
            *axes(left, top, width, height, self.extent, large),
            *words,
            "</svg>\n",
        ])  # fmt: skip

    def to_bare_svg(self) -> str:
        """Returns SVG text of the cells alone, in units of queries and keys, for a page that draws its own axes.

        Colours are the CSS variables --full, --partial, ... named after the kinds; the palette's colours are their
        defaults.
        """
        queries, keys = self.extent
        paths = "".join(self._paths())
        for kind in self.kinds.values():
            paths = paths.replace(f'"{kind.colour}"', f'"var(--{kind.name}, {kind.colour})"')
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {keys} {queries}" preserveAspectRatio="none" '
            f'shape-rendering="crispEdges">{paths}</svg>'
        )

    def _grid(self, left: float, top: float, height: float, width: float) -> Iterator[str]:
        """Yields one path per colour, in units of queries and keys, and the lines between the cells."""
        queries, keys = self.extent
        if not self.cells.size:
            return
        down, across = height / queries, width / keys
        transform = f"translate({left} {top}) scale({across:.6g} {down:.6g})"
        yield f'<g transform="{transform}" shape-rendering="crispEdges">'
        yield from self._paths()
        if min(down * self.cell[0], across * self.cell[1]) >= _MIN_CELL_WITH_LINES:
            lines = [f"M0 {at}h{keys}" for at in range(self.cell[0], queries, self.cell[0])]
            lines += [f"M{at} 0v{queries}" for at in range(self.cell[1], keys, self.cell[1])]
            yield f'<path stroke="{PAPER}" vector-effect="non-scaling-stroke" d="{"".join(lines)}"/>'
        yield "</g>"

    def _paths(self) -> Iterator[str]:
        rectangles = list(_rectangles(self.cells))
        for number, kind in self.kinds.items():
            found = "".join(self._rectangle(*sides) for value, *sides in rectangles if value == number)
            if found and kind.colour != GROUND:
                yield f'<path fill="{kind.colour}" d="{found}"/>'

    def _rectangle(self, top: int, bottom: int, left: int, right: int) -> str:
        """Returns the SVG path of a rectangle of cells, in units of queries and keys."""
        first_q, last_q = (min(row * self.cell[0], self.extent[0]) for row in (top, bottom))
        first_k, last_k = (min(column * self.cell[1], self.extent[1]) for column in (left, right))
        return f"M{first_k} {first_q}h{last_k - first_k}v{last_q - first_q}H{first_k}z"

    def _legend(self, top: float) -> Iterator[str]:
        for index, kind in enumerate(self.kinds.values()):
            left = _MARGIN + index * _LEGEND_STEP
            square = f'x="{left}" y="{_number(top - 10)}" width="11" height="11"'
            yield f'<rect {square} fill="{kind.colour}" stroke="{RULE}"/>'
            yield f'<text x="{left + 16}" y="{_number(top)}">{kind.name} {kind.share:.1%}</text>'
        yield f'<text x="8" y="{_number(top + 18)}" font-size="11">{escape(self.summary)}</text>'

    def _caption(self, top: float) -> Iterator[str]:
        yield f'<text x="8" y="{_number(top)}" font-size="12">{escape(self.short)}</text>'


def _scaled(extent: tuple[int, int], size: int) -> tuple[float, float]:
    """Returns the height and the width in pixels of a grid whose longer side has `size` pixels."""
    scale = size / max(1, *extent)
    height, width = (max(length * scale, min(_MIN_SIDE, size)) for length in extent)
    return height, width


def _rectangles(cells: Array) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields rectangles of equal cells as (kind, top, bottom, left, right), where bottom and right are exclusive.

    A rectangle is a run of equal cells in a row, extended downwards as long as the same run occurs in the next row.
    """
    opened: dict[tuple[int, int, int], int] = {}  # (kind, left, right) of each open rectangle -> its top
    for number, line in enumerate(cells.tolist()):
        found, column = set(), 0
        for kind, group in groupby(line):
            start, column = column, column + len(list(group))
            found.add((kind, start, column))
        for run in [run for run in opened if run not in found]:
            yield run[0], opened.pop(run), number, run[1], run[2]
        for run in sorted(found - opened.keys()):
            opened[run] = number
    for run, top in opened.items():
        yield run[0], top, len(cells), run[1], run[2]


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
