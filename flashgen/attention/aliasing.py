"""Aliasing checks: an array that a call writes to must not overlap any other array of the call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations, product
from typing import Any

import numpy as np

from flashgen.dtypes import numpy_dtype
from flashgen.errors import ArgumentError
from flashgen.runtime.arrays import View
from flashgen.runtime.caching import Cache

_MAX_WORK = 100_000  # candidates that np.shares_memory tries: a few ms; slices of packed buffers need far fewer
_MAX_CACHED = 256  # results of exact tests, one for each pair of arrays and difference of their addresses
_FAKE_ADDRESS = 2**62  # never read; its sum with any difference of two addresses is a signed 64-bit integer

DisplayName = Callable[[str], str]
"""Returns the name that an error message has for an argument of the call."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """The memory layout of an array: shape, strides in bytes, bytes of an element.

    Unlike a View it holds no reference to the memory.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, view: View) -> _Layout:
        itemsize = numpy_dtype(view.dtype).itemsize
        return cls(view.shape, tuple(stride * itemsize for stride in view.strides), itemsize)

    @property
    def byte_bounds(self) -> tuple[int, int]:
        """The bytes that the array spans, relative to its address: (first, one past the last)."""
        spans = [stride * (size - 1) for size, stride in zip(self.shape, self.strides, strict=True)]
        return sum(min(span, 0) for span in spans), sum(max(span, 0) for span in spans) + self.itemsize

    def at(self, address: int) -> np.ndarray[Any, Any]:
        """Returns an array at this address for np.shares_memory. Its elements must not be read."""
        return np.asarray(_ArrayInterface(self, address))


class _ArrayInterface:
    """An object with NumPy's array interface and no memory of its own."""

    def __init__(self, layout: _Layout, address: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{layout.itemsize}",  # opaque bytes: only the size of an element matters
            "data": (address, True),  # read-only
            "shape": layout.shape,
            "strides": layout.strides,
        }


@dataclass(frozen=True, slots=True)
class _Pair:
    """An array that is written to, and another one.

    Their bytes can overlap only if low < address of `written` - address of `other` < high.
    """

    written: str
    other: str
    low: int
    high: int


class AliasCheck:
    """The check of calls with the same shapes and strides, which differ in addresses only.

    Two arrays overlap if an element of one and an element of the other have a byte in common. Slices of one packed
    buffer with interleaved rows do not. If the exact test takes too long, two arrays count as overlapping.
    """

    def __init__(self, views: Mapping[str, View], written: Collection[str], display_name: DisplayName) -> None:
        """views: all arrays of a call. written: the names of those that it writes to."""
        name_pairs = list(_pairs_to_check(views, written))
        self._written, self._display_name = frozenset(written), display_name
        self._layouts = {name: _Layout.of(views[name]) for name in set(chain.from_iterable(name_pairs))}
        self._pairs = [self._make_pair(*names) for names in name_pairs]
        self._overlaps: Cache[tuple[_Pair, int], bool] = Cache(_MAX_CACHED)

    def check(self, pointers: Mapping[str, int]) -> None:
        """Raises ArgumentError if arrays at these addresses overlap. Most pairs take two comparisons."""
        for pair in self._pairs:
            distance = pointers[pair.written] - pointers[pair.other]
            if pair.low < distance < pair.high and self._overlaps.get_or_make(
                (pair, distance), partial(self._overlap_exactly, pair, distance)
            ):
                raise _overlap_error(pair.written, pair.other, self._written, self._display_name)

    def in_order(self, names: Sequence[str]) -> Callable[[Sequence[int]], None]:
        """Returns `check` as a function of a sequence of addresses. names: of the arrays, in that order."""
        positions = {name: position for position, name in enumerate(names)}
        ranges = [(positions[pair.written], positions[pair.other], pair.low, pair.high) for pair in self._pairs]

        def check(addresses: Sequence[int]) -> None:
            for written, other, low, high in ranges:
                if low < addresses[written] - addresses[other] < high:
                    self.check(dict(zip(names, addresses, strict=True)))
                    return

        return check

    def _make_pair(self, written: str, other: str) -> _Pair:
        (first, end), (other_first, other_end) = (self._layouts[name].byte_bounds for name in (written, other))
        return _Pair(written, other, other_first - end, other_end - first)

    def _overlap_exactly(self, pair: _Pair, distance: int) -> bool:
        written, other = self._layouts[pair.written], self._layouts[pair.other]
        return _overlap(written.at(_FAKE_ADDRESS + distance), other.at(_FAKE_ADDRESS))


def check_on_host(arrays: Mapping[str, Any], written: Collection[str], display_name: DisplayName) -> None:
    """Raises ArgumentError if one of the NumPy arrays is written to and overlaps another, as in `AliasCheck`."""
    on_host = {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}
    for name, other in _pairs_to_check(on_host, [name for name in written if name in on_host]):
        if _overlap(on_host[name], on_host[other]):
            raise _overlap_error(name, other, written, display_name)


def _pairs_to_check(arrays: Mapping[str, Any], written: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields once each pair of non-empty arrays of which the first is written to."""
    nonempty = [name for name, array in arrays.items() if all(array.shape)]
    outputs = [name for name in nonempty if name in written]
    yield from product(outputs, [name for name in nonempty if name not in written])
    yield from combinations(outputs, 2)


def _overlap(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Whether two arrays have a byte in common; True if this is not decided within _MAX_WORK."""
    try:
        return bool(np.shares_memory(one, other, max_work=_MAX_WORK))  # type: ignore[arg-type]  # the stubs allow -1, 0 and 1 only
    except np.exceptions.TooHardError:
        return True


def _overlap_error(name: str, other: str, written: Collection[str], display_name: DisplayName) -> ArgumentError:
    what = (
        "writes to both" if other in written else f"reads {display_name(other)} while it writes to {display_name(name)}"
    )
    shown = display_name(name)
    return ArgumentError(
        f"{shown} shares memory with {display_name(other)}: a call {what}; give {shown} memory of its own"
    )
