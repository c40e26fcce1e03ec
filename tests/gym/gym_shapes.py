"""The sizes at which the suite runs: square and not, several tiles long, and of lengths that no tile divides."""

from __future__ import annotations

from families.entry import Entry
from flashgen.verify import Shape

DTYPES = ("float16", "bfloat16")
LENGTH, LARGE_LENGTH = 315, 1999  # the length for which windows, blocks and canvases are chosen

SHAPES = (Shape(315, 315, 2, 4, 2), Shape(203, 315, 2, 2, 2), Shape(315, 201, 2, 2, 1))
EMULATED_SHAPES = (Shape(315, 315, 1, 2, 1), Shape(203, 315, 1, 2, 2), Shape(315, 201, 1, 2, 2))
LARGE_SHAPES = (Shape(1999, 1999, 1, 2, 1), Shape(1001, 1999, 2, 2, 2))


def named(entry: Entry) -> str:
    return entry.name
