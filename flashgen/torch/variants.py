"""Maps the key of traced functions to a spec, and decides which of its numbers are constants of the kernel.

The numbers of the first call with a key are constants, which allows closed forms and divisions by powers of two. A
number that has another value in a later call with the same key becomes a Scalar, and all its values share one kernel.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import sympy

from flashgen.language.captures import Scalar, Tensor
from flashgen.language.expression_json import ARRAY, FLOAT, INTEGER, node_from_trace
from flashgen.language.modifiers import Mask, Score
from flashgen.language.operations import Capture
from flashgen.language.spec import AttentionSpec
from flashgen.language.well_formed import literal
from flashgen.runtime.caching import Cache
from flashgen.torch.negative_indices import any_below_zero, counting_from_the_end, open_indices, sizes_of
from flashgen.torch.registered import Registered

_MAX_VARIANTS = 1024
_MAX_CALLS = 1024  # whose choice is cached
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
Numbers = tuple[Any, ...]
_Found = tuple[Registered, list[int], list[float]]


def spec_text(
    head_dim: int, value_dim: int, dtype: str, scale: float | None, layout: str, emulate: bool, deterministic: bool
) -> str:
    """Returns the part of a key that does not depend on the functions. The scales 0.0 and -0.0 are one."""
    shown = "null" if scale is None else repr(float(scale) + 0.0)
    flags = f"{'true' if emulate else 'false'},{'true' if deterministic else 'false'}"
    return f'{head_dim},{value_dim},"{dtype}",{shown},"{layout}",{flags}'


def is_variant(key: str) -> bool:
    """Whether a key is that of traced functions, not of a registered spec."""
    return key.startswith("[")


class Chosen(NamedTuple):
    """What runs the calls of some sizes and numbers.

    Attributes:
        found: the entry and the numbers that are its operands.
        axes: the axes whose lengths are further integers, each as the position of the array and the axis; or None.
    """

    found: _Found
    axes: list[tuple[int, int]] | None

    def with_lengths(self, arrays: Sequence[Any]) -> _Found:
        """Returns `found`, with the lengths of `axes` in these arrays."""
        if self.axes is None:
            return self.found
        entry, integers, floats = self.found
        return entry, [*integers, *(arrays[position].shape[axis] for position, axis in self.axes)], floats


class _Entry:
    """A spec of a key, in two versions: negative indices are clamped to 0, or count from the end if a call has any.

    Attributes:
        clamping: the registered entry of the first version.
    """

    def __init__(self, key: str, spec: AttentionSpec, options: dict[str, Any], names: list[str]) -> None:
        self._key, self._spec, self._options, self._names = key, spec, options, names
        self.clamping = Registered(key, spec, None, **options)
        self._open = open_indices(spec, names)

    def at(self, integers: list[int], floats: list[float], q: Any, k: Any) -> Chosen:
        """Returns the version that runs a call, for the numbers that are operands in it."""
        if not self._open or not self._counts_from_the_end(integers, floats, q, k):
            return Chosen((self.clamping, integers, floats), None)
        axes = sorted({each.size: (self._names.index(each.name), each.axis) for each in self._open}.items())
        return Chosen((self._from_the_end, integers, floats), [axis for _, axis in axes])

    @cached_property
    def _from_the_end(self) -> Registered:
        return Registered(self._key, counting_from_the_end(self._spec, self._open), None, **self._options)

    def _counts_from_the_end(self, integers: list[int], floats: list[float], q: Any, k: Any) -> bool:
        named = zip((*self.clamping.integers, *self.clamping.floats), (*integers, *floats), strict=False)
        numbers = {capture.name: value for capture, value in named}
        return any_below_zero(self._open, sizes_of(q, k), numbers)


class Variant:
    """The specs of one key, which differ in the numbers that are operands.

    Attributes:
        key: the key (`call_keys.call_key`).
    """

    def __init__(self, key: str) -> None:
        self.key = key
        *self._fields, self._score, self._mask, self._slots = json.loads(key)
        self._lock = threading.Lock()
        self._first: tuple[Numbers, Numbers] | None = None
        self._varying: tuple[int, ...] = ()
        self._entries: dict[tuple[int, ...], _Entry] = {}

    def choose(self, integers: Sequence[int], floats: Sequence[float], q: Any, k: Any) -> Chosen:
        """Returns what runs a call with q and k of (batch, heads, length, dim)."""
        numbers = (tuple(integers), tuple(floats))
        first = self._first
        if first == numbers:
            return self._entry((), numbers).at([], [], q, k)
        if first is None:
            with self._lock:
                self._first = first = self._first or numbers
            return self.choose(integers, floats, q, k)
        values, before = [*integers, *floats], [*first[0], *first[1]]
        changed = {position for position, (new, old) in enumerate(zip(values, before, strict=True)) if new != old}
        varying = self._varying
        if not changed <= set(varying):
            with self._lock:
                self._varying = varying = tuple(sorted(changed.union(self._varying)))
        # Equal numbers are one operand: `q // n == k // n` is known in closed form for one n.
        shared: dict[Any, int] = {}
        count = len(integers)
        operands = [shared.setdefault((values[position], position < count), position) for position in varying]
        pairs = list(zip(varying, operands, strict=True))
        chosen = [position for position, operand in pairs if position == operand]
        entry = self._entry(tuple(number for pair in pairs for number in pair), numbers)
        integer_operands: list[Any] = [values[position] for position in chosen if position < count]
        return entry.at(integer_operands, [values[position] for position in chosen if position >= count], q, k)

    @cached_property
    def general(self) -> Registered:
        """The entry with every number as an operand, for callers that do not depend on numbers."""
        count = len(self._number_kinds)
        pattern = tuple(number for position in range(count) for number in (position, position))
        ints = sum(kind == INTEGER for kind in self._number_kinds)
        return self._entry(pattern, ((0,) * ints, (0.0,) * (count - ints))).clamping

    @cached_property
    def _number_kinds(self) -> list[str]:
        return [leaf for leaf in _leaves([self._score, self._mask]) if leaf in (INTEGER, FLOAT)]

    def _entry(self, pattern: tuple[int, ...], numbers: tuple[Numbers, Numbers]) -> _Entry:
        found = self._entries.get(pattern)
        if found is None:
            found = _Entry(self.key, self._spec(pattern, numbers), self._options, _names_of_arrays(self._slots))
            found = self._entries.setdefault(pattern, found)
        return found

    @property
    def _options(self) -> dict[str, Any]:
        return {"target": None, "emulate": self._fields[5], "deterministic": self._fields[6]}

    def _spec(self, pattern: tuple[int, ...], numbers: tuple[Numbers, Numbers]) -> AttentionSpec:
        head_dim, value_dim, dtype, scale, layout = self._fields[:5]
        nodes = iter(self._number_nodes(pattern, numbers))
        arrays = iter(self._captures())
        score, mask = None, None
        if self._score is not None:
            score = Score(self._score[0], node_from_trace(json.dumps(self._score[1]), nodes, arrays))
        if self._mask is not None:
            mask = Mask(self._mask[0], node_from_trace(json.dumps(self._mask[1]), nodes, arrays))
        return AttentionSpec(head_dim, dtype, value_dim, scale, layout, score=score, mask=mask)

    def _number_nodes(self, pattern: tuple[int, ...], numbers: tuple[Numbers, Numbers]) -> list[sympy.Basic]:
        """Returns the node of each number in the order of the key: a constant, or the Scalar of its operand."""
        operand_of = dict(zip(pattern[::2], pattern[1::2], strict=True))
        operands = sorted(set(operand_of.values()))
        count = len(numbers[0])
        integer_operands = [position for position in operands if position < count]
        float_operands = [position for position in operands if position >= count]
        names = dict(zip(integer_operands, _named("integer", len(integer_operands)), strict=True))
        names |= dict(zip(float_operands, _named("number", len(float_operands)), strict=True))
        nodes, next_position = [], {INTEGER: iter(range(count)), FLOAT: iter(range(count, count + len(numbers[1])))}
        values = (*numbers[0], *numbers[1])
        for kind in self._number_kinds:
            position = next(next_position[kind])
            if position in operand_of:
                dtype = "int32" if kind == INTEGER else "float32"
                nodes.append(Scalar(names[operand_of[position]], dtype).node)
            else:
                nodes.append(literal(values[position]))
        return nodes

    def _captures(self) -> list[Capture]:
        return _captures_of([self._score, self._mask], self._slots)


class TextOfMask(NamedTuple):
    """A traced mask function without its arrays. slots: for each read in the text, the position of the array."""

    name: str
    text: str
    numbers: tuple[Any, ...]
    slots: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        """The names of the captures, in the order of the arrays."""
        return _names_of_arrays(self.slots)

    def node(self) -> sympy.Basic:
        """Returns the expression, with numbers as constants."""
        captures = _captures_of(json.loads(self.text), self.slots)
        return node_from_trace(self.text, map(literal, self.numbers), captures)


def _captures_of(data: Any, slots: Sequence[int]) -> list[Capture]:
    """Returns the capture of each read in the text. Sorting the names gives the order of a call's arrays."""
    leaves = [leaf for leaf in _leaves(data) if isinstance(leaf, tuple)]
    names = _names_of_arrays(slots)
    return [
        Tensor(names[slot], dtype, ndim, grad).capture
        for slot, (_, dtype, ndim, grad) in zip(slots, leaves, strict=True)
    ]


def _names_of_arrays(slots: Sequence[int]) -> list[str]:
    return _named("table", max(slots, default=-1) + 1)


def _named(stem: str, count: int) -> list[str]:
    """Returns `count` names for captures, in sorted order."""
    if count <= 1:
        return [stem] * count
    letters = [*_LETTERS] if count <= len(_LETTERS) else [a + b for a in _LETTERS for b in _LETTERS]
    return [f"{stem}_{letter}" for letter in letters[:count]]


def _leaves(data: Any) -> list[Any]:
    """Returns the open numbers and arrays of a text in order; an array as its whole leaf in a tuple."""
    if isinstance(data, list):
        if data[:1] == [ARRAY]:
            return [tuple(data)]
        return [leaf for item in data for leaf in _leaves(item)]
    return [data] if data in (INTEGER, FLOAT) else []


_VARIANTS: Cache[str, Variant] = Cache(_MAX_VARIANTS)
CALLS: Cache[Any, Chosen] = Cache(_MAX_CALLS)
"""What runs a call, by all that the choice depends on: functions, numbers, sizes and the other fields of a spec."""


def variant_of(key: str) -> Variant:
    """Returns the cached variant of a key."""
    return _VARIANTS.get(key) or _VARIANTS.get_or_make(key, lambda: Variant(key))
