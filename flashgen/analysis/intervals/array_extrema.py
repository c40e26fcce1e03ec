"""The least and greatest element of a captured array over boxes of indices."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.analysis.intervals.interval import Array, Interval, floats
from flashgen.errors import ArgumentError

# Above this many elements, ranges along all but points take the least and greatest of the whole array.
_MOST_ELEMENTS = 2**26


class RangeTable:
    """Reads a captured array by ranges of indices, each clamped to its dimension as in a kernel."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        # ml_dtypes' bfloat16 (kind V) and half precision have no fast minimum.
        self.array = array if array.dtype.kind in "biu" else array.astype(np.float32)
        self.is_float = self.array.dtype.kind == "f"
        self.nan = np.bool_(self.is_float and np.isnan(self.array).any())

    def over(self, *ranges: tuple[Array, Array]) -> Interval:
        """The interval of elements whose indices lie in the ranges (low, high), one for each dimension."""
        if not self.array.size:
            raise ArgumentError(f"a captured array has shape {self.array.shape}: nothing can be read from it")
        least = greatest = self.array
        places = []
        for axis, (low, high) in enumerate(ranges):
            size = self.array.shape[axis]
            low, high = np.broadcast_arrays(np.clip(low, 0, size - 1), np.clip(high, 0, size - 1))
            if np.array_equal(low, high):
                places.append(low)
                continue
            if self.array.size > _MOST_ELEMENTS:
                low, high = np.zeros_like(low), np.full_like(high, size - 1)
            pairs, place = np.unique(np.stack([low.ravel(), high.ravel()]), axis=1, return_inverse=True)
            places.append(place.reshape(low.shape))
            least = _reduced(least, axis, pairs, np.fmin)
            greatest = _reduced(greatest, axis, pairs, np.fmax)
        chosen = [bound[tuple(np.broadcast_arrays(*places))] for bound in (least, greatest)]
        if self.is_float:
            # Where all elements are NaN so is the bound, which `floats` takes for unknown.
            return floats(np.float64(chosen[0]), np.float64(chosen[1]), self.nan)
        return Interval(np.int64(chosen[0]), np.int64(chosen[1]))


def _reduced(array: Array, axis: int, pairs: Array, pick: np.ufunc) -> Array:
    """pick over [low, high] along the axis for each pair: a sparse table of doubling runs, one level at a time."""
    lows, highs = pairs
    array = np.moveaxis(array, axis, 0)
    result = np.empty((len(lows), *array.shape[1:]), array.dtype)
    levels = np.log2(highs - lows + 1).astype(int)
    for level in range(int(levels.max(initial=0)) + 1):
        now = levels == level
        if now.any():
            result[now] = pick(array[lows[now]], array[highs[now] - 2**level + 1])
        array = pick(array[: -(2**level)], array[2**level :])
    return np.moveaxis(result, 0, axis)
