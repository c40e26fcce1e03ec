"""A grid of coloured cells, queries downwards and keys to the right: how a tile map and a tile's elements are drawn.

As SVG with a title, a legend and a summary; as PNG without words on it, with a bar of the shares instead (the words
stand in the file's own Title and Description).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

import numpy as np

from flashgen.analysis.drawing import digits, png
from flashgen.analysis.drawing.axes import axes, ticks
from flashgen.analysis.drawing.palette import GROUND, INK, PAPER, RULE

_MARGIN = 8  # in pixels, like all lengths below
_NUMBERS_LEFT, _NUMBERS_BELOW = 40, 16  # room for the numbers of the axes
_THINNEST = 12.0  # the shorter side, where there are few queries and many keys or the reverse
_LEAST_GRIDDED = 5.0  # smaller cells have no lines between them
_LEAST_WITH_LEGEND = 320  # smaller pictures have one line of text
_LEGEND_STEP = 120
_BAR, _BAR_GAP = 10, 8
_DIGIT, _TICK = 2, 4  # pixels of a dot of a PNG's digits, and of a tick
_NARROWEST = 160  # a PNG's bar of shares needs some room

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Kind:
    """What a cell may be, its colour, and which fraction of the whole is so."""

    name: str
    colour: str
    share: float


@dataclass(frozen=True, eq=False)
class Picture:
    """cells: int8 (rows, columns), keys of `kinds`, which stand in the order of the legend.
    cell: (queries, keys) of a cell. extent: (queries, keys) of the whole; the last cells end there.
    summary: a line of text; short: the same for a small picture.
    """

    cells: Array
    cell: tuple[int, int]
    extent: tuple[int, int]
    kinds: Mapping[int, Kind]
    title: str
    summary: str
    short: str

    def to_svg(self, size: int) -> str:
        """SVG, the longer side of the grid `size` pixels."""
        height, width = _scaled(self.extent, size)
        large = size >= _LEAST_WITH_LEGEND
        top = (28 if self.title else _MARGIN) + (12 if large else 0)
        foot = top + height + _NUMBERS_BELOW + (12 if large else 0)
        words = self._legend(foot + 20) if large else self._caption(foot + 15)
        bottom = foot + (48 if large else 24)
        across = max(width, size) + _NUMBERS_LEFT + 2 * _MARGIN
        title = [f'<text x="8" y="19" font-weight="600">{escape(self.title)}</text>'] if self.title else []
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_number(across)}" height="{_number(bottom)}" '
            f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">',
            f'<rect width="100%" height="100%" fill="{PAPER}"/>',
            *title,
            f'<rect x="{_NUMBERS_LEFT}" y="{top}" width="{_number(width)}" height="{_number(height)}" '
            f'fill="{GROUND}"/>',
            *self._grid(top, height, width),
            *axes(_NUMBERS_LEFT, top, width, height, self.extent, large),
            *words,
            "</svg>\n",
        ])  # fmt: skip

    def to_png(self, size: int) -> bytes:
        """PNG, the longer side of the grid about `size` pixels: cells of one size are whole pixels."""
        rows, columns = (_pixels(self, axis, size) for axis in (0, 1))
        colours = np.array([_rgb(self.kinds[kind].colour) for kind in range(len(self.kinds))], np.uint8)
        grid = colours[self.cells[np.ix_(_numbered(rows), _numbered(columns))]]
        for axis, sizes in enumerate((rows, columns)):
            if sizes.size and sizes[0] >= _LEAST_GRIDDED:
                _rule(grid, axis, sizes)
        height, width = max(grid.shape[0], 1), max(grid.shape[1], min(_NARROWEST, size))
        foot = height + _MARGIN + _NUMBERS_BELOW
        page = np.full(
            (foot + _MARGIN + _BAR_GAP + _BAR, width + _NUMBERS_LEFT + 2 * _MARGIN, 3), _rgb(PAPER), np.uint8
        )
        page[_MARGIN : _MARGIN + grid.shape[0], _NUMBERS_LEFT : _NUMBERS_LEFT + grid.shape[1]] = grid
        _number_axes(page, grid.shape[:2], self.extent)
        page[foot + _BAR_GAP : foot + _BAR_GAP + _BAR, _NUMBERS_LEFT : _NUMBERS_LEFT + width] = self._bar(width)
        shares = ", ".join(f"{kind.name} {kind.share:.1%}" for kind in self.kinds.values())
        return png.encode(page, {"Title": self.title, "Description": f"{self.summary}; {shares}"})

    def to_bare_svg(self) -> str:
        """The cells alone, in queries and keys, for a page that has axes and a legend of its own and zooms.

        Colours are the page's variables --full, --partial, ... by the names of the kinds, if it has such.
        """
        queries, keys = self.extent
        paths = "".join(self._paths())
        for kind in self.kinds.values():
            paths = paths.replace(f'"{kind.colour}"', f'"var(--{kind.name}, {kind.colour})"')
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {keys} {queries}" preserveAspectRatio="none" '
            f'shape-rendering="crispEdges">{paths}</svg>'
        )

    def _grid(self, top: float, height: float, width: float) -> Iterator[str]:
        """A path for each colour, in queries and keys, and the lines between the cells."""
        queries, keys = self.extent
        if not self.cells.size:
            return
        down, across = height / queries, width / keys
        place = f"translate({_NUMBERS_LEFT} {top}) scale({across:.6g} {down:.6g})"
        yield f'<g transform="{place}" shape-rendering="crispEdges">'
        yield from self._paths()
        if min(down * self.cell[0], across * self.cell[1]) >= _LEAST_GRIDDED:
            lines = [f"M0 {at}h{keys}" for at in range(self.cell[0], queries, self.cell[0])]
            lines += [f"M{at} 0v{queries}" for at in range(self.cell[1], keys, self.cell[1])]
            yield f'<path stroke="{PAPER}" vector-effect="non-scaling-stroke" d="{"".join(lines)}"/>'
        yield "</g>"

    def _paths(self) -> Iterator[str]:
        runs = list(_runs(self.cells))
        for kind, described in self.kinds.items():
            found = "".join(self._rectangle(*run) for is_of, *run in runs if is_of == kind)
            if found and described.colour != GROUND:
                yield f'<path fill="{described.colour}" d="{found}"/>'

    def _rectangle(self, top: int, bottom: int, left: int, right: int) -> str:
        first_q, last_q = (min(row * self.cell[0], self.extent[0]) for row in (top, bottom))
        first_k, last_k = (min(column * self.cell[1], self.extent[1]) for column in (left, right))
        return f"M{first_k} {first_q}h{last_k - first_k}v{last_q - first_q}H{first_k}z"

    def _legend(self, top: float) -> Iterator[str]:
        for place, kind in enumerate(self.kinds.values()):
            left = _MARGIN + place * _LEGEND_STEP
            yield f'<rect x="{left}" y="{_number(top - 10)}" width="11" height="11" fill="{kind.colour}"/>'
            yield f'<text x="{left + 16}" y="{_number(top)}">{kind.name} {kind.share:.1%}</text>'
        yield f'<text x="8" y="{_number(top + 18)}" font-size="11">{escape(self.summary)}</text>'

    def _caption(self, top: float) -> Iterator[str]:
        yield f'<text x="8" y="{_number(top)}" font-size="12">{escape(self.short)}</text>'

    def _bar(self, width: int) -> Array:
        """The shares side by side, (width, 3)."""
        row = np.full((width, 3), _rgb(GROUND), np.uint8)
        end = 0.0
        for kind in self.kinds.values():
            begin, end = end, end + kind.share
            row[round(begin * width) : round(end * width)] = _rgb(kind.colour)
        return row


def _scaled(extent: tuple[int, int], size: int) -> tuple[float, float]:
    """Height and width in pixels."""
    scale = size / max(1, *extent)
    height, width = (max(length * scale, min(_THINNEST, size)) for length in extent)
    return height, width


def _pixels(picture: Picture, axis: int, size: int) -> Array:
    """How many pixels each row (or column) of cells takes: all alike but for the last, which may be cut short."""
    count, cell, length = picture.cells.shape[axis], picture.cell[axis], picture.extent[axis]
    if not count:
        return np.zeros(0, int)
    each = max(1, round(_scaled(picture.extent, size)[axis] * cell / length))
    sizes = np.full(count, each)
    sizes[-1] = max(1, round(each * (length - (count - 1) * cell) / cell))
    return sizes


def _numbered(sizes: Array) -> Array:
    """The number of each pixel's cell."""
    return np.repeat(np.arange(len(sizes)), sizes)


def _rule(grid: Array, axis: int, sizes: Array) -> None:
    """Lines on the first pixel of every row (or column) of cells but the first."""
    starts = np.cumsum(sizes)[:-1]
    grid[(slice(None),) * axis + (starts,)] = _rgb(PAPER)


def _number_axes(page: Array, size: tuple[int, int], extent: tuple[int, int]) -> None:
    """Ticks and numbers at the left of and below a grid of `size` pixels whose corner is at the margins."""
    for position in ticks(extent[0], size[0]):
        at = _MARGIN + round(size[0] * position / max(extent[0], 1))
        page[min(at, _MARGIN + size[0] - 1), _NUMBERS_LEFT - _TICK : _NUMBERS_LEFT] = _rgb(RULE)
        word = digits.drawn(position, _DIGIT)
        _ink(page, word, at - word.shape[0] // 2, _NUMBERS_LEFT - _TICK - 2 - word.shape[1])
    below = _MARGIN + size[0]
    for position in ticks(extent[1], size[1]):
        at = _NUMBERS_LEFT + round(size[1] * position / max(extent[1], 1))
        page[below : below + _TICK, min(at, _NUMBERS_LEFT + size[1] - 1)] = _rgb(RULE)
        word = digits.drawn(position, _DIGIT)
        _ink(page, word, below + _TICK + 2, at - word.shape[1] // 2)


def _ink(page: Array, word: Array, top: int, left: int) -> None:
    """Lays a word over the page, moved inwards where it would not fit."""
    top = min(max(top, 0), page.shape[0] - word.shape[0])
    left = min(max(left, 0), page.shape[1] - word.shape[1])
    page[top : top + word.shape[0], left : left + word.shape[1]][word] = _rgb(INK)


def _runs(cells: Array) -> Iterator[tuple[int, int, int, int, int]]:
    """(kind, top, bottom, left, right), ends excluded: stretches of equal cells, as far down as they are the same."""
    opened: dict[tuple[int, int, int], int] = {}
    for number, line in enumerate(cells.tolist()):
        found, column = set(), 0
        for kind, stretch in groupby(line):
            start, column = column, column + len(list(stretch))
            found.add((kind, start, column))
        for run in [run for run in opened if run not in found]:
            yield run[0], opened.pop(run), number, run[1], run[2]
        for run in sorted(found - opened.keys()):
            opened[run] = number
    for run, top in opened.items():
        yield run[0], top, len(cells), run[1], run[2]


def _rgb(colour: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return red, green, blue


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
