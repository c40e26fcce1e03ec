"""Intervals of integers, floats and truth values, as arrays of lows and highs that broadcast like NumPy's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # an ndarray or a NumPy scalar

# What int64 holds. Integers whose arithmetic may go beyond LIMIT may have wrapped, and are any of these.
SMALLEST, LARGEST, LIMIT = -(2**63), 2**63 - 1, 2**62
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_TINY = float(np.finfo(np.float32).tiny)
# A float32 operation, approximate division included, is within this of the float64 one.
_RELATIVE = 2.0**-20


@dataclass(frozen=True)
class Interval:
    """The values from low to high, both included: int64 for integers and truth values (0 or 1), float64 for floats.

    `nan` says whether the value may be NaN instead, which only floats may be.
    """

    low: Array
    high: Array
    nan: Array = np.False_

    @property
    def is_float(self) -> bool:
        return bool(np.asarray(self.low).dtype == np.float64)

    @property
    def always(self) -> Array:
        """Whether a truth value is surely true."""
        return self.low == 1

    @property
    def never(self) -> Array:
        """Whether a truth value is surely false."""
        return self.high == 0


def point(value: Array) -> Interval:
    """Exactly this value."""
    if np.asarray(value).dtype.kind == "f":
        value = np.float64(value)
        nan = np.isnan(value)
        return Interval(np.where(nan, -np.inf, value), np.where(nan, np.inf, value), nan)
    value = np.int64(value)
    return Interval(value, value)


def truth(always: Array, never: Array) -> Interval:
    """A truth value that is known true, known false, or unknown."""
    return Interval(np.asarray(always).astype(np.int64), 1 - np.asarray(never).astype(np.int64))


def integers(low: Array, high: Array, fits: Array = np.True_) -> Interval:
    """The integers between two int64 arrays; where they do not fit, any integer: the arithmetic may wrap."""
    return Interval(np.where(fits, low, SMALLEST), np.where(fits, high, LARGEST))


def fit(*values: Array) -> Array:
    """Whether integers, computed roughly as floats, are so far from the ends of int64 that they do not wrap."""
    return np.logical_and.reduce(np.broadcast_arrays(*(np.abs(np.float64(value)) < LIMIT for value in values)))


def floats(low: Array, high: Array, nan: Array = np.False_, absolute: float = 0.0) -> Interval:
    """The floats between two bounds, widened so that float32 arithmetic (and flush to zero) stays inside.

    `absolute` is the absolute error that an approximate instruction may have besides. A NaN bound is an unknown one.
    """
    unknown = np.isnan(low) | np.isnan(high)
    least = low * np.where(low > 0, 1 - _RELATIVE, 1 + _RELATIVE) - (_FLOAT32_TINY + absolute)
    greatest = high * np.where(high > 0, 1 + _RELATIVE, 1 - _RELATIVE) + (_FLOAT32_TINY + absolute)
    low, high = np.where(unknown, -np.inf, least), np.where(unknown, np.inf, greatest)
    # What overflows float32 is infinite in a kernel, and large here.
    low = np.where(low < -_FLOAT32_MAX, -np.inf, np.minimum(low, _FLOAT32_MAX))
    high = np.where(high > _FLOAT32_MAX, np.inf, np.maximum(high, -_FLOAT32_MAX))
    return Interval(low, high, nan | unknown)


def as_float(value: Interval) -> Interval:
    """An integer (or truth value) as a float: float32 rounds what needs more than 24 bits."""
    if value.is_float:
        return value
    low, high = np.float64(value.low), np.float64(value.high)
    exact = (np.abs(low) <= 2**24) & (np.abs(high) <= 2**24)
    wide = floats(low, high)
    return Interval(np.where(exact, low, wide.low), np.where(exact, high, wide.high))


def meet(a: Interval, b: Interval) -> Interval:
    """The intersection: both hold for one value."""
    low, high = np.maximum(a.low, b.low), np.minimum(a.high, b.high)
    return Interval(low, high, a.nan & b.nan)


def hull(a: Interval, b: Interval) -> Interval:
    """The hull of both, of floats if either is."""
    if a.is_float or b.is_float:
        a, b = as_float(a), as_float(b)
    return Interval(np.minimum(a.low, b.low), np.maximum(a.high, b.high), a.nan | b.nan)
