"""Intervals of integers, floats and truth values, as arrays of lower and upper bounds that broadcast as in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # an ndarray or a NumPy scalar

# The limits of int64. Integers whose arithmetic may exceed LIMIT may have wrapped, and may be any int64.
SMALLEST, LARGEST, LIMIT = -(2**63), 2**63 - 1, 2**62
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_TINY = float(np.finfo(np.float32).tiny)
# The relative error of a float32 operation, approximate division included, is below this.
_RELATIVE = 2.0**-20


@dataclass(frozen=True)
class Interval:
    """The values from low to high, both included: int64 for integers and truth values (0 or 1), float64 for floats.

    `nan` is whether the value may also be NaN, which is possible for floats only.
    """

    low: Array
    high: Array
    nan: Array = np.False_

    @property
    def is_float(self) -> bool:
        return bool(np.asarray(self.low).dtype == np.float64)

    @property
    def always(self) -> Array:
        """Whether a truth value is certainly true."""
        return self.low == 1

    @property
    def never(self) -> Array:
        """Whether a truth value is certainly false."""
        return self.high == 0


def point(value: Array) -> Interval:
    """Returns the interval of exactly this value."""
    if np.asarray(value).dtype.kind == "f":
        value = np.float64(value)
        nan = np.isnan(value)
        return Interval(np.where(nan, -np.inf, value), np.where(nan, np.inf, value), nan)
    value = np.int64(value)
    return Interval(value, value)


def truth(always: Array, never: Array) -> Interval:
    """Returns a truth value that is certainly true, certainly false, or unknown."""
    return Interval(np.asarray(always).astype(np.int64), 1 - np.asarray(never).astype(np.int64))


def integers(low: Array, high: Array, fits: Array = np.True_) -> Interval:
    """Returns the integers between two int64 arrays. Where they do not fit, the arithmetic may wrap to any integer."""
    return Interval(np.where(fits, low, SMALLEST), np.where(fits, high, LARGEST))


def fit(*values: Array) -> Array:
    """Returns whether integers, given as approximate floats, are far enough from the limits of int64 not to wrap."""
    return np.logical_and.reduce(np.broadcast_arrays(*(np.abs(np.float64(value)) < LIMIT for value in values)))


def floats(low: Array, high: Array, nan: Array = np.False_, absolute: float = 0.0) -> Interval:
    """Returns the floats between two bounds, widened to include the results of float32 arithmetic and of flush to zero.

    `absolute` is the additional absolute error of an approximate instruction. A NaN bound is unknown.
    """
    unknown = np.isnan(low) | np.isnan(high)
    widened_low = low * np.where(low > 0, 1 - _RELATIVE, 1 + _RELATIVE) - (_FLOAT32_TINY + absolute)
    widened_high = high * np.where(high > 0, 1 + _RELATIVE, 1 - _RELATIVE) + (_FLOAT32_TINY + absolute)
    low, high = np.where(unknown, -np.inf, widened_low), np.where(unknown, np.inf, widened_high)
    # Values that overflow float32 are infinite in a kernel, and large here.
    low = np.where(low < -_FLOAT32_MAX, -np.inf, np.minimum(low, _FLOAT32_MAX))
    high = np.where(high > _FLOAT32_MAX, np.inf, np.maximum(high, -_FLOAT32_MAX))
    return Interval(low, high, nan | unknown)


def as_float(value: Interval) -> Interval:
    """Converts an integer or truth value to a float. float32 rounds values that need more than 24 bits."""
    if value.is_float:
        return value
    low, high = np.float64(value.low), np.float64(value.high)
    exact = (np.abs(low) <= 2**24) & (np.abs(high) <= 2**24)
    wide = floats(low, high)
    return Interval(np.where(exact, low, wide.low), np.where(exact, high, wide.high))


def meet(a: Interval, b: Interval) -> Interval:
    """Returns the intersection, for a value that is known to be in both."""
    low, high = np.maximum(a.low, b.low), np.minimum(a.high, b.high)
    return Interval(low, high, a.nan & b.nan)


def hull(a: Interval, b: Interval) -> Interval:
    """Returns the convex hull of both, which is of floats if either is."""
    if a.is_float or b.is_float:
        a, b = as_float(a), as_float(b)
    return Interval(np.minimum(a.low, b.low), np.maximum(a.high, b.high), a.nan | b.nan)
