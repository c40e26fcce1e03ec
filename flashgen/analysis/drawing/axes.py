"""Axes of a grid of queries × keys: where their ticks stand, and how they look in SVG."""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.analysis.drawing.palette import INK, RULE

_LEAST_BETWEEN = 44.0  # pixels between two ticks' numbers
_TICK = 4


def ticks(length: int, pixels: float) -> list[int]:
    """Positions of an axis of `length`: multiples of a power of 2, as tiles are, with room for their numbers."""
    if not length:
        return [0]
    step = 1
    while step * pixels / length < _LEAST_BETWEEN and step < length:
        step *= 2
    return list(range(0, length + 1, step))


def axes(left: float, top: float, width: float, height: float, extent: tuple[int, int], titled: bool) -> Iterator[str]:
    """Ticks and numbers at the left of and below a grid of (queries, keys); `titled` names what they count."""
    queries, keys = extent
    yield f'<g class="axes" stroke="{RULE}" fill="{INK}" font-size="10">'
    for position in ticks(queries, height):
        y = top + height * position / max(queries, 1)
        yield _line(left - _TICK, y, left, y)
        yield _word(left - _TICK - 2, y + 3, "end", str(position))
    for position in ticks(keys, width):
        x = left + width * position / max(keys, 1)
        yield _line(x, top + height, x, top + height + _TICK)
        yield _word(x, top + height + _TICK + 10, "middle", str(position))
    if titled:
        yield _word(left + width, top + height + _TICK + 21, "end", "key →")
        yield _word(left - 34, top - 5, "start", "query ↓")
    yield "</g>"


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:g} {y1:.4g}L{x2:.4g} {y2:.4g}"/>'


def _word(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text stroke="none" x="{x:.4g}" y="{y:.4g}" text-anchor="{anchor}">{text}</text>'
