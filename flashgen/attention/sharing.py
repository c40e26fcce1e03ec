"""Checks for shared memory: an array that a call writes to must not overlap any other array of the call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from typing import Any

import numpy as np

from flashgen.dtypes import numpy_dtype
from flashgen.errors import ArgumentError
from flashgen.runtime.arrays import View
from flashgen.runtime.caching import Cache

_MAX_WORK = 100_000  # of the search for a common element: a few ms, and more than slices of packed buffers need
_MAX_CACHED = 256  # distances of pairs of arrays with overlapping ranges
_ADDRESS = 2**62  # an arbitrary address, which is never read

Namer = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class _Layout:
    """The memory layout of an array: shape, strides in bytes, bytes of an element. It keeps no memory alive."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, view: View) -> _Layout:
        itemsize = numpy_dtype(view.dtype).itemsize
        return cls(view.shape, tuple(stride * itemsize for stride in view.strides), itemsize)

    @property
    def range(self) -> tuple[int, int]:
        """The range of the elements in bytes, relative to the address: (first, one past the last)."""
        steps = [stride * (size - 1) for size, stride in zip(self.shape, self.strides, strict=True)]
        return sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps) + self.itemsize

    def at(self, address: int) -> np.ndarray[Any, Any]:
        """Returns an array that NumPy can compare with others. Its elements must not be read."""
        return np.asarray(_ArrayInterface(self, address))


class _ArrayInterface:
    """An object with NumPy's array interface and no memory of its own."""

    def __init__(self, layout: _Layout, address: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{layout.itemsize}",
            "data": (address, True),
            "shape": layout.shape,
            "strides": layout.strides,
        }


@dataclass(frozen=True, slots=True)
class _Pair:
    """An array that is written to, and another one.

    Their ranges overlap if the address of the first minus that of the other is between `low` and `high`, exclusive.
    """

    written: str
    other: str
    low: int
    high: int


class Sharing:
    """The pairs of arrays that must not share memory in calls of the same shapes and strides.

    Two arrays share memory if an element of one and an element of the other have a byte in common. Slices of one packed
    buffer with interleaved rows do not. If the search takes too long, two arrays count as sharing.
    """

    def __init__(self, views: Mapping[str, View], written: Collection[str], namer: Namer) -> None:
        """views: all arrays of a call. written: the names of those that it writes to. namer: gives names for errors."""
        pairs = list(_pairs_to_check(views, written))
        self._written, self._namer = frozenset(written), namer
        self._layouts = {name: _Layout.of(views[name]) for name in {name for pair in pairs for name in pair}}
        self._pairs = [self._pair(*pair) for pair in pairs]
        self._shared: Cache[tuple[_Pair, int], bool] = Cache(_MAX_CACHED)

    def check(self, pointers: Mapping[str, int]) -> None:
        """Raises ArgumentError if arrays at these addresses share memory. Most pairs take two comparisons."""
        for pair in self._pairs:
            distance = pointers[pair.written] - pointers[pair.other]
            if pair.low < distance < pair.high and self._shared.get_or_make(
                (pair, distance), partial(self._search, pair, distance)
            ):
                raise _overlap_error(pair.written, pair.other, self._written, self._namer)

    def _pair(self, written: str, other: str) -> _Pair:
        (first, last), (other_first, other_last) = (self._layouts[name].range for name in (written, other))
        return _Pair(written, other, other_first - last, other_last - first)

    def _search(self, pair: _Pair, distance: int) -> bool:
        return _share(self._layouts[pair.written].at(_ADDRESS + distance), self._layouts[pair.other].at(_ADDRESS))


def check_on_host(arrays: Mapping[str, Any], written: Collection[str], namer: Namer) -> None:
    """Raises ArgumentError if one of the NumPy arrays is written to and shares memory with another, as in `Sharing`."""
    on_host = {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}
    for name, other in _pairs_to_check(on_host, [name for name in written if name in on_host]):
        if _share(on_host[name], on_host[other]):
            raise _overlap_error(name, other, written, namer)


def _pairs_to_check(arrays: Mapping[str, Any], written: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields (an array that is written to, another one) for all arrays with elements."""
    nonempty = [name for name, array in arrays.items() if all(array.shape)]
    results = [name for name in nonempty if name in written]
    yield from product(results, [name for name in nonempty if name not in written])
    yield from combinations(results, 2)


def _share(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    try:
        return bool(np.shares_memory(one, other, max_work=_MAX_WORK))  # type: ignore[arg-type]  # any integer
    except np.exceptions.TooHardError:
        return True


def _overlap_error(name: str, other: str, written: Collection[str], namer: Namer) -> ArgumentError:
    what = "writes to both" if other in written else f"reads {namer(other)} while it writes to {namer(name)}"
    return ArgumentError(
        f"{namer(name)} shares memory with {namer(other)}: a call {what}; give {namer(name)} memory of its own"
    )
