"""Numbers that expose mistakes: the ends of int32, borders of tiles, floats whose rounding float32 shows."""

from __future__ import annotations

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

SMALL = (0, 1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256)
# fmt: off
EXTREMES = (
    INT32_MAX, INT32_MIN, INT32_MAX - 1, INT32_MIN + 1, INT32_MAX - 127, INT32_MIN + 128, 2**30, -(2**30),
    2**24 + 1, -(2**24) - 1, 65536, -65536, 3_000_000, 1_000_003,
)
# n * (1 / n) is not 1 in float32 for most of these; the rest are their neighbours.
AWKWARD = (41, 47, 55, 61, 82, 83, 94, 97, 107, 3, 7, 10, 49)
FINITE = (
    *map(float, AWKWARD), 0.1, 1 / 3, 0.7, -0.1, 0.5, -1.5, 0.0, -0.0, 1.0, 16777217.0, 16777215.0, 1e-45, -1e-45,
    1.1754942e-38, 1e-30, 1e30, -1e30, 3.4028234663852886e38, 2147483648.0, -2147483648.0, 1e9,
)
# fmt: on
FLOATS = (*FINITE, float("inf"), float("-inf"))
SHIFTS = (0, 1, 2, 3, 4, 5, 7, 15, 16, 30, 31)
DIVISORS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 32, 41, 64, 100, 128, -1, -2, -3, -7, -64, 65536, INT32_MAX, INT32_MIN)
BITMASKS = (1, 3, 7, 5, 15, 31, 63, 64, -4, -64, -1, 0x55555555, INT32_MAX, INT32_MIN)
