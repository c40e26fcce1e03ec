"""Repeated calls: launches of earlier calls, found without reading the properties of the arrays in Python.

A model calls an attention in each layer with arrays that differ in their addresses only. The library of the arrays
recognises them (`Library.recogniser`), and a replay launches the kernels with the new addresses. Everything else that a
launch depends on is compared: the other arguments, the alignment of the arrays, the current device, and the generation
of the launch cache. Streams, counters and workspaces are those of each call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from itertools import count
from operator import itemgetter, or_
from typing import Any, NamedTuple

from flashgen.attention.call import Call
from flashgen.attention.call_pass import Pass
from flashgen.attention.captures import is_in_memory
from flashgen.attention.replay import Replay
from flashgen.launch.engines import ScalarArguments
from flashgen.runtime.arrays import Library

_ALIGNMENT = 16  # bytes
_MAX_SHAPES = 64
_MAX_RECENT = 8  # of a shape: a lookup compares a call with each of them
_CALLS_PER_REPLACEMENT = 8
_NO_NUMBERS: ScalarArguments = {}
_CONSTANTS = (type(None), bool, int)  # if equal in type and value, they make equal calls

Location = tuple[int, int]
"""The position of the source of an array among the sources of a call, and the offset of its address in bytes."""


class RepeatedLaunch(NamedTuple):
    """The launches of all calls with one entry of the launch cache and sources of the same shapes and strides.

    The sources of a call are its arrays, or arrays that these are views of.

    Attributes:
        key: the arguments of a call that are not arrays.
        recognises: whether sources are like those of the first call, which were aligned.
        library: that of the arrays.
        locations: the locations of the arrays in the sources; None if the sources are the arrays, in order.
        check: raises ArgumentError if arrays at these addresses overlap; None if the call writes to none of them.
        replay: launches the kernels, given the addresses.
        pass_, generation: the pass, and the generation of its launch cache when the entry was found.
    """

    key: Hashable
    recognises: Callable[..., bool]
    library: Library
    locations: Sequence[Location] | None
    check: Callable[[Sequence[int]], None] | None
    replay: Replay
    pass_: Pass[Any]
    generation: int

    @property
    def is_stale(self) -> bool:
        """Whether the launch cache was cleared."""
        return self.generation != self.pass_.generation

    def launch(self, sources: Sequence[Any], numbers: ScalarArguments = _NO_NUMBERS) -> Sequence[Any] | None:
        """Launches. Returns the results that it allocated, which are none if the call has `out`.

        numbers: the seed and offset of the dropout, by their names in the structs.

        None if a source is misaligned or another device is the current one. Raises ArgumentError if an array of results
        overlaps another one.
        """
        addresses: Sequence[int] = [*map(self.library.pointer, sources)]
        if reduce(or_, addresses) % _ALIGNMENT:
            return None
        if self.locations is not None:
            addresses = [addresses[source] + offset for source, offset in self.locations]
        if self.check is not None:
            self.check(addresses)
        return self.replay(addresses, self.library.stream(sources[0]), numbers)

    def with_sources(
        self, key: Hashable, sources: Sequence[Any], locations: Sequence[Location]
    ) -> RepeatedLaunch | None:
        """Returns this launch for calls with other sources; None if these are misaligned or cannot be recognised.

        locations: those of the old sources in the new ones.
        """
        recognises = _recogniser(self.library, sources)
        if recognises is None:
            return None
        old = [(position, 0) for position in range(len(locations))] if self.locations is None else self.locations
        new = [(locations[source][0], locations[source][1] + offset) for source, offset in old]
        return self._replace(key=key, recognises=recognises, locations=new)


def _recogniser(library: Library, sources: Sequence[Any]) -> Callable[..., bool] | None:
    """Returns a function that recognises sources like these; None if one is misaligned, or the library has none."""
    if library.recogniser is None or reduce(or_, map(library.pointer, sources)) % _ALIGNMENT:
        return None
    return library.recogniser(sources)


def _launch_of(pass_: Pass[Any], key: Hashable, arrays: Sequence[Any], call: Call) -> RepeatedLaunch | None:
    """Returns the launch of a call that has been run; None if such calls do more than launch kernels.

    arrays: those of the call, each of them once.
    """
    library, generation = pass_.engine.library(arrays[0], ""), pass_.generation
    if any(pass_.engine.library(array, "") is not library for array in arrays):
        return None
    recognises = _recogniser(library, arrays)
    if recognises is None:
        return None
    prepared, by_name = pass_.prepared_of(call)
    if prepared is None:
        return None
    positions = {id(array): position for position, array in enumerate(arrays)}
    by_position = sorted((positions[id(array)], name) for name, array in by_name.items())
    names = [name for _, name in by_position]
    replay = pass_.create_replay(prepared, names, () if call.results else call.wanted, library.pointer)
    if replay is None:
        return None
    locations = None if len(names) == len(arrays) else [(position, 0) for position, _ in by_position]
    check = prepared.alias_check.in_order(names) if call.results else None
    return RepeatedLaunch(key, recognises, library, locations, check, replay, pass_, generation)


class RepeatedLaunches:
    """The last launches of one kind of caller, by the shape of the first source. Many threads may use them at once."""

    def __init__(self) -> None:
        self._recent: dict[Any, tuple[RepeatedLaunch, ...]] = {}  # replaced as a whole
        self._misses = count()

    def find(self, key: Hashable, sources: Sequence[Any]) -> RepeatedLaunch | None:
        """Returns the launch of calls with this key and with sources like these; None if there is none."""
        for each in self._recent.get(sources[0].shape, ()):
            if each.key == key and each.recognises(*sources) and not each.is_stale:
                return each
        return None

    def has_room(self, sources: Sequence[Any]) -> bool:
        """Whether to add the launch of a call that was not found, which takes longer than a few calls.

        If another launch must go, only one of several calls is added, for callers that have more shapes in turns.
        """
        recent = self._recent.get(sources[0].shape)
        is_full = len(self._recent) >= _MAX_SHAPES if recent is None else len(recent) >= _MAX_RECENT
        return not is_full or next(self._misses) % _CALLS_PER_REPLACEMENT == 0

    def add(self, launch: RepeatedLaunch, sources: Sequence[Any]) -> None:
        """Adds a launch, in front of others of the same shape. The oldest ones go."""
        shape, others = sources[0].shape, self._recent.copy()
        same = [each for each in others.pop(shape, ()) if not each.is_stale]
        while len(others) >= _MAX_SHAPES:
            del others[next(iter(others))]
        self._recent = others | {shape: (launch, *same[: _MAX_RECENT - 1])}


class _Form(NamedTuple):
    """The names and types of the arguments of a call, and functions that return its arrays and its other arguments."""

    form: tuple[Any, ...]
    arrays: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    constants: Callable[[tuple[Any, ...]], tuple[Any, ...]]


class RepeatedCalls:
    """The last calls of an attention, by their arguments other than the seed and offset of a dropout.

    Methods take all arguments of a call in a tuple `given`: first those that each call has, then its captures. `names`
    are those of the captures.
    """

    @classmethod
    def of(cls, pass_: Pass[Any]) -> RepeatedCalls | None:
        """Returns one for the calls of a pass; None if these do more than launch kernels."""
        return cls(pass_) if pass_.repeats_launches else None

    def __init__(self, pass_: Pass[Any]) -> None:
        self._pass, self._library, self._launches = pass_, pass_.engine.library, RepeatedLaunches()
        self._forms: tuple[_Form, ...] = ()

    def takes(self, q: Any, seed: Any) -> bool:
        """Whether the library of an array recognises arrays, and the seed of a dropout is a number.

        Raises ArgumentError for an object that is no array.
        """
        return self._library(q, "q").recogniser is not None and not (self._pass.spec.dropout and is_in_memory(seed))

    def find(self, names: tuple[str, ...], given: tuple[Any, ...]) -> tuple[RepeatedLaunch | None, tuple[Any, ...]]:
        """Returns the launch that a call repeats, or None; and the arrays of the call, as the launch takes them."""
        form = (*names, *map(type, given))
        for each in self._forms:
            if each.form == form:
                arrays = each.arrays(given)
                return self._launches.find((each.form, each.constants(given)), arrays), arrays
        return None, ()

    def launch(self, names: tuple[str, ...], given: tuple[Any, ...], seed: Any, offset: Any) -> Sequence[Any] | None:
        """Launches a call that repeats an earlier one. Returns the results that it allocated; None if there is none.

        Raises ArgumentError if a spec with dropout needs another seed or offset.
        """
        repeated, arrays = self.find(names, given)
        return None if repeated is None else repeated.launch(arrays, self._pass.seed_numbers(seed, offset))

    def remember(self, names: tuple[str, ...], given: tuple[Any, ...], call: Call) -> None:
        """Remembers a call that has been run, if its arguments other than arrays are integers or None."""
        wanted = (*names, *map(type, given))
        form = next((each for each in self._forms if each.form == wanted), None) or _form_of(wanted, given, call)
        if form is None:
            return
        arrays = form.arrays(given)
        if len({*map(id, arrays)}) < len(arrays) or not self._launches.has_room(arrays):
            return
        launch = _launch_of(self._pass, (form.form, form.constants(given)), arrays, call)
        if launch is not None:
            self._launches.add(launch, arrays)
        if form not in self._forms:
            self._forms = (form, *self._forms[: _MAX_RECENT - 1])


def _form_of(form: tuple[Any, ...], given: tuple[Any, ...], call: Call) -> _Form | None:
    """Returns the form of a call; None if an argument is neither an array of the call, nor an integer or None."""
    held = {*map(id, call.inputs.values()), *map(id, call.results.values())}
    arrays = [position for position, value in enumerate(given) if id(value) in held]
    others = [position for position in range(len(given)) if position not in arrays]
    if not all(type(given[position]) in _CONSTANTS for position in others):
        return None
    return _Form(form, _items(arrays), _items(others))


def _items(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Returns a function that returns the items of a tuple at these positions."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda given: tuple(given[position] for position in positions)
