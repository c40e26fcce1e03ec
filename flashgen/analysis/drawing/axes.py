"""Axes of a grid of queries × keys: the positions of their ticks, and their SVG."""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.analysis.drawing.palette import INK, RULE

_DIGIT = 6  # pixels, at the font size of the axes
_TICK, _GAP = 4, 2  # length of a tick, and its distance to its number
_MIN_DISTANCE = 44  # minimum distance in pixels between two ticks; larger if their numbers are wider


def ticks(length: int, pixels: float) -> list[int]:
    """Returns the positions of ticks on an axis of `length`: multiples of a power of 2, like the edges of tiles."""
    if not length:
        return [0]
    step, min_distance = 1, max(_MIN_DISTANCE, number_width(length) + 8)
    while step * pixels / length < min_distance and step < length:
        step *= 2
    return list(range(0, length + 1, step))


def number_width(number: int) -> int:
    """Returns the width in pixels of a number at a tick."""
    return _DIGIT * len(str(number))


def left_margin(queries: int) -> int:
    """Returns the pixels that ticks, numbers and the name of the axis of queries take to the left of a grid."""
    return max(40, number_width(queries) + _TICK + _GAP)


def axes(left: float, top: float, width: float, height: float, extent: tuple[int, int], titled: bool) -> Iterator[str]:
    """Yields ticks and numbers to the left of and below a grid of (queries, keys); `titled` adds names of the axes."""
    queries, keys = extent
    yield f'<g class="axes" stroke="{RULE}" fill="{INK}" font-size="10">'
    for position in ticks(queries, height):
        y = top + height * position / max(queries, 1)
        yield _line(left - _TICK, y, left, y)
        yield _word(left - _TICK - _GAP, y + 3, "end", str(position))
    for position in ticks(keys, width):
        x = left + width * position / max(keys, 1)
        yield _line(x, top + height, x, top + height + _TICK)
        yield _word(x, top + height + _TICK + 10, "middle", str(position))
    if titled:
        yield _word(left + width, top + height + _TICK + 21, "end", "key →")
        yield _word(left - 34, top - 8, "start", "query ↓")
    yield "</g>"


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:g} {y1:.4g}L{x2:.4g} {y2:.4g}"/>'


def _word(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text stroke="none" x="{x:.4g}" y="{y:.4g}" text-anchor="{anchor}">{text}</text>'
