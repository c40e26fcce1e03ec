"""The minimum and maximum of a captured array over boxes of indices."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.analysis.intervals.interval import Array, Interval, floats
from flashgen.errors import ArgumentError

# For larger arrays, a range of more than one index is replaced by the full dimension.
_MAX_ELEMENTS = 2**26


class RangeTable:
    """Reads a captured array by ranges of indices. Each index is clamped to its dimension, as in a kernel."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        # The bfloat16 of ml_dtypes (kind V) and float16 have no fast minimum.
        self.array = array if array.dtype.kind in "biu" else array.astype(np.float32)
        self.is_float = self.array.dtype.kind == "f"
        self.nan = np.bool_(self.is_float and np.isnan(self.array).any())

    def over(self, *ranges: tuple[Array, Array]) -> Interval:
        """Returns the interval of the elements with indices in the ranges (low, high), one range per dimension."""
        if not self.array.size:
            raise ArgumentError(f"a captured array has shape {self.array.shape}: nothing can be read from it")
        minimum = maximum = self.array
        positions = []
        for axis, (low, high) in enumerate(ranges):
            size = self.array.shape[axis]
            low, high = np.broadcast_arrays(np.clip(low, 0, size - 1), np.clip(high, 0, size - 1))
            if np.array_equal(low, high):
                positions.append(low)
                continue
            if self.array.size > _MAX_ELEMENTS:
                low, high = np.zeros_like(low), np.full_like(high, size - 1)
            pairs, inverse = np.unique(np.stack([low.ravel(), high.ravel()]), axis=1, return_inverse=True)
            positions.append(inverse.reshape(low.shape))
            minimum = _reduce_ranges(minimum, axis, pairs, np.fmin)
            maximum = _reduce_ranges(maximum, axis, pairs, np.fmax)
        chosen = [bound[tuple(np.broadcast_arrays(*positions))] for bound in (minimum, maximum)]
        if self.is_float:
            # If all elements are NaN, the bound is NaN, which `floats` treats as unknown.
            return floats(np.float64(chosen[0]), np.float64(chosen[1]), self.nan)
        return Interval(np.int64(chosen[0]), np.int64(chosen[1]))


def _reduce_ranges(array: Array, axis: int, pairs: Array, pick: np.ufunc) -> Array:
    """Reduces [low, high] along the axis with `pick`, for each pair: a sparse table, computed one level at a time."""
    lows, highs = pairs
    array = np.moveaxis(array, axis, 0)
    result = np.empty((len(lows), *array.shape[1:]), array.dtype)
    levels = np.log2(highs - lows + 1).astype(int)
    for level in range(int(levels.max(initial=0)) + 1):
        selected = levels == level
        if selected.any():
            result[selected] = pick(array[lows[selected]], array[highs[selected] - 2**level + 1])
        array = pick(array[: -(2**level)], array[2**level :])
    return np.moveaxis(result, 0, axis)
