"""Neighbourhoods on a canvas of rows × columns, with pixels in rows, in tiles or in Morton order; and sliding tiles.

A neighbourhood is the square of 2·radius + 1 around a pixel, its centre moved inwards so that the square lies on the
canvas (NATTEN, arXiv:2204.07143).

Sliding tiles are the same with tiles instead of pixels, in 2 or 3 dimensions, with text tokens after the image (STA,
arXiv:2502.04507).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

import flashgen.language as fg
from families.entry import Entry, longest, nowhere
from flashgen.verify import Shape

Place = Callable[[Any], tuple[Any, Any]]  # position -> (row, column)


def in_rows(columns: int) -> Place:
    return lambda i: (i // columns, i % columns)


def in_tiles(columns: int, tile_rows: int, tile_columns: int) -> Place:
    """Order of tiles in rows; within a tile, of pixels in rows."""
    across, area = columns // tile_columns, tile_rows * tile_columns

    def place(i: Any) -> tuple[Any, Any]:
        tile, inside = i // area, i % area
        row = tile // across * tile_rows + inside // tile_columns
        return row, tile % across * tile_columns + inside % tile_columns

    return place


def in_morton_order(i: Any) -> tuple[Any, Any]:
    """Z-order: the bits of column and row alternate, the column's first."""
    return _every_other_bit(i >> 1), _every_other_bit(i)


def _every_other_bit(i: Any) -> Any:
    i = i & 0x55555555
    i = (i | (i >> 1)) & 0x33333333
    i = (i | (i >> 2)) & 0x0F0F0F0F
    i = (i | (i >> 4)) & 0x00FF00FF
    return (i | (i >> 8)) & 0x0000FFFF


def neighbourhood(rows: int, columns: int, radius: int, place: Place, order: str) -> fg.Mask:
    def neighbourhood(b: Any, h: Any, q: Any, k: Any) -> Any:
        (row_q, column_q), (row_k, column_k) = place(q), place(k)
        row = fg.clamp(row_q, radius, rows - 1 - radius)
        column = fg.clamp(column_q, radius, columns - 1 - radius)
        return (abs(row - row_k) <= radius) & (abs(column - column_k) <= radius)

    return fg.trace_mask(neighbourhood, f"neighbourhood({rows}, {columns}, {radius}, {order})")


def sliding_tile(canvas: tuple[int, ...], tile: tuple[int, ...], reach: tuple[int, ...], text: int) -> fg.Mask:
    """canvas, tile: pixels in each dimension; reach: tiles on either side. Text sees all, and all see it."""
    tiles = [size // step for size, step in zip(canvas, tile, strict=True)]
    image, area = int(np.prod(canvas)), int(np.prod(tile))

    def tile_of(i: Any) -> list[Any]:
        number = i // area
        places = []
        for count in reversed(tiles):
            places.append(number % count)
            number = number // count
        return places[::-1]

    def sliding_tile(b: Any, h: Any, q: Any, k: Any) -> Any:
        near: Any = (q < image) & (k < image)
        for at_q, at_k, count, distance in zip(tile_of(q), tile_of(k), tiles, reach, strict=True):
            near = near & (abs(fg.clamp(at_q, distance, count - 1 - distance) - at_k) <= distance)
        is_text = (k >= image) & (k < image + text)
        return near | ((q < image) & is_text) | ((q >= image) & (k < image + text))

    shown = ", ".join("x".join(map(str, sizes)) for sizes in (canvas, tile, reach))
    return fg.trace_mask(sliding_tile, f"sliding_tile({shown}, {text})")


# The second definition: orders as lists of pixels, built explicitly; neighbourhoods as sets of rows and columns.


def rows_walked(rows: int, columns: int) -> list[tuple[int, int]]:
    return [(row, column) for row in range(rows) for column in range(columns)]


def tiles_walked(rows: int, columns: int, tile_rows: int, tile_columns: int) -> list[tuple[int, int]]:
    return [
        (top + row, left + column)
        for top in range(0, rows, tile_rows)
        for left in range(0, columns, tile_columns)
        for row in range(tile_rows)
        for column in range(tile_columns)
    ]


def morton_walked(side: int) -> list[tuple[int, int]]:
    """A square whose side is a power of two: its four quarters, each in the same order."""
    if side == 1:
        return [(0, 0)]
    half, quarter = side // 2, morton_walked(side // 2)
    return [(row + down, column + right) for down in (0, half) for right in (0, half) for row, column in quarter]


def interval_around(at: int, radius: int, size: int) -> range:
    first = min(max(at - radius, 0), size - 1 - 2 * radius)
    return range(first, first + 2 * radius + 1)


def neighbours(shape: Shape, walk: list[tuple[int, int]], rows: int, columns: int, radius: int) -> np.ndarray:
    """`walk` is at least as long as the sequences, and continues below the canvas if they do."""
    allowed = nowhere(shape)
    number = {pixel: i for i, pixel in enumerate(walk)}
    for q, (row, column) in enumerate(walk[: shape.len_q]):
        square = (interval_around(row, radius, rows), interval_around(column, radius, columns))
        keys = [number[pixel] for pixel in itertools.product(*square) if pixel in number]
        allowed[q, [k for k in keys if k < shape.len_k]] = True
    return allowed


def slid(shape: Shape, canvas: tuple[int, ...], tile: tuple[int, ...], reach: tuple[int, ...], text: int) -> np.ndarray:
    allowed = nowhere(shape)
    counts = [size // step for size, step in zip(canvas, tile, strict=True)]
    image, area = int(np.prod(canvas)), int(np.prod(tile))
    for i, at in enumerate(itertools.product(*(range(count) for count in counts))):
        around = [interval_around(*where) for where in zip(at, reach, counts, strict=True)]
        for j, other in enumerate(itertools.product(*(range(count) for count in counts))):
            if all(place in near for place, near in zip(other, around, strict=True)):
                allowed[i * area : (i + 1) * area, j * area : (j + 1) * area] = True
    allowed[:, image : image + text] = True
    allowed[image:, : image + text] = True
    return allowed


def entries(length: int) -> tuple[Entry, ...]:
    return (*neighbourhoods(length), *sliding_tiles(length))


def neighbourhoods(length: int) -> tuple[Entry, ...]:
    """Canvases of about `length` pixels: the sequences end inside some and continue below others."""
    large = length >= 1000
    side, radius = (32, 5) if large else (16, 3)
    short, long = (24, 80) if large else (12, 24)

    def entry(name: str, rows: int, columns: int, place: Place, walk: Callable[[int], list[tuple[int, int]]]) -> Entry:
        mask = neighbourhood(rows, columns, radius, place, name.removeprefix("neighbourhood_"))
        return Entry(name, mask, allowed=lambda s, c: neighbours(s, walk(longest(s)), rows, columns, radius))

    def rowwise(columns: int) -> Callable[[int], list[tuple[int, int]]]:
        return lambda total: rows_walked(-(-total // columns), columns)

    def tilewise(columns: int) -> Callable[[int], list[tuple[int, int]]]:
        return lambda total: tiles_walked(4 * -(-total // (4 * columns)), columns, 4, 8)

    def mortonwise(total: int) -> list[tuple[int, int]]:
        return morton_walked(64)

    return (
        entry("neighbourhood_square", side, side, in_rows(side), rowwise(side)),
        entry("neighbourhood_wide", short, long, in_rows(long), rowwise(long)),
        entry("neighbourhood_tall", long, short, in_rows(short), rowwise(short)),
        entry("neighbourhood_tiled_square", side, side, in_tiles(side, 4, 8), tilewise(side)),
        entry("neighbourhood_tiled_wide", short, long, in_tiles(long, 4, 8), tilewise(long)),
        entry("neighbourhood_morton_square", side, side, in_morton_order, mortonwise),
        entry("neighbourhood_morton_wide", side, 2 * side, in_morton_order, mortonwise),
    )


def sliding_tiles(length: int) -> tuple[Entry, ...]:
    if length < 1000:
        flat = ((12, 20), (4, 4), (1, 1), 37)
        deep = ((6, 8, 6), (2, 2, 3), (1, 1, 0), 21)
    else:
        flat = ((32, 48), (8, 8), (1, 1), 77)
        deep = ((8, 12, 16), (2, 4, 4), (1, 1, 1), 77)
    return tuple(
        Entry(name, sliding_tile(*sizes), allowed=lambda s, c, sizes=sizes: slid(s, *sizes))
        for name, sizes in (("sliding_tile_2d", flat), ("sliding_tile_3d", deep))
    )
