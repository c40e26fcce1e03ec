"""Arrays of a call that share memory: what it writes to must be apart from all that it reads, and writes besides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from typing import Any

import numpy as np

from flashgen.errors import ArgumentError
from flashgen.runtime.arrays import View, numpy_dtype
from flashgen.runtime.caching import Cache

_MOST_WORK = 100_000  # of the search for an element of both arrays: a few ms, and more than packed buffers take
_MAX_CACHED = 256  # distances of pairs that lie in each other's range
_ADDRESS = 2**62  # any: nothing is read there

Named = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where an array's elements lie: shape, strides in bytes, bytes of an element. No memory is kept alive by it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, view: View) -> _Layout:
        itemsize = numpy_dtype(view.dtype).itemsize
        return cls(view.shape, tuple(stride * itemsize for stride in view.strides), itemsize)

    @property
    def range(self) -> tuple[int, int]:
        """The bytes that the elements lie between, from the address: (first, one past the last)."""
        steps = [stride * (size - 1) for size, stride in zip(self.shape, self.strides, strict=True)]
        return sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps) + self.itemsize

    def at(self, address: int) -> np.ndarray[Any, Any]:
        """An array for NumPy to compare with others. No element of it may be read."""
        return np.asarray(_Described(self, address))


class _Described:
    """An array by NumPy's interface alone."""

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
    """An array that is written to and another. Their ranges overlap where the address of the first is more than `least`
    and less than `most` bytes past the other's.
    """

    written: str
    other: str
    least: int
    most: int


class Sharing:
    """The arrays that calls of the same shapes and strides write to, and what each of them must be apart from.

    Two arrays share memory where an element of one has a byte of an element of the other: slices of one packed buffer,
    whose rows take turns, share none. Where that takes too long to find out, they count as sharing.
    """

    def __init__(self, views: Mapping[str, View], written: Collection[str], named: Named) -> None:
        """views: all arrays of a call. written: the names of those that it writes to. named: for errors."""
        pairs = list(_to_be_apart(views, written))
        self._written, self._named = frozenset(written), named
        self._layouts = {name: _Layout.of(views[name]) for name in {name for pair in pairs for name in pair}}
        self._pairs = [self._pair(*pair) for pair in pairs]
        self._shared: Cache[tuple[_Pair, int], bool] = Cache(_MAX_CACHED)

    def check(self, pointers: Mapping[str, int]) -> None:
        """ArgumentError where arrays at these addresses share memory: for most pairs two comparisons."""
        for pair in self._pairs:
            distance = pointers[pair.written] - pointers[pair.other]
            if pair.least < distance < pair.most and self._shared.get_or_make(
                (pair, distance), partial(self._search, pair, distance)
            ):
                raise _refusal(pair.written, pair.other, self._written, self._named)

    def _pair(self, written: str, other: str) -> _Pair:
        (first, last), (other_first, other_last) = (self._layouts[name].range for name in (written, other))
        return _Pair(written, other, other_first - last, other_last - first)

    def _search(self, pair: _Pair, distance: int) -> bool:
        return _share(self._layouts[pair.written].at(_ADDRESS + distance), self._layouts[pair.other].at(_ADDRESS))


def check_on_host(arrays: Mapping[str, Any], written: Collection[str], named: Named) -> None:
    """ArgumentError where NumPy arrays among these share memory of which one is written to, as `Sharing` finds it."""
    there = {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}
    for name, other in _to_be_apart(there, [name for name in written if name in there]):
        if _share(there[name], there[other]):
            raise _refusal(name, other, written, named)


def _to_be_apart(arrays: Mapping[str, Any], written: Collection[str]) -> Iterator[tuple[str, str]]:
    """(one that is written to, another), of the arrays that hold any element."""
    held = [name for name, array in arrays.items() if all(array.shape)]
    results = [name for name in held if name in written]
    yield from product(results, [name for name in held if name not in written])
    yield from combinations(results, 2)


def _share(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    try:
        return bool(np.shares_memory(one, other, max_work=_MOST_WORK))  # type: ignore[arg-type]  # any integer
    except np.exceptions.TooHardError:
        return True


def _refusal(name: str, other: str, written: Collection[str], named: Named) -> ArgumentError:
    what = "writes to both" if other in written else f"reads {named(other)} while it writes to {named(name)}"
    return ArgumentError(
        f"{named(name)} shares memory with {named(other)}: a call {what}; give {named(name)} memory of its own"
    )
