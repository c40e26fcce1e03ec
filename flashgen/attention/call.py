"""What a user gives to a pass, as one record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flashgen.attention.decode_schedule import ScheduledSizes
from flashgen.attention.problem import NO_BOUNDS, Bounds

Splits = int | ScheduledSizes | None
"""Into how many parts the keys of a call are split, or by which schedule; None: the sizes choose."""

_NONE: Mapping[str, Any] = {}


class Call(NamedTuple):
    """One call of a pass.

    Attributes:
        inputs: its arrays, by their names in the kernels' structs; the call's own, which what it makes is added to.
        captures: what the spec captures, by name.
        seed, offset: of the dropout.
        wanted: the results that are given back, by name.
        results: arrays to write them to, all of them, by name; none where new ones are made.
        tile_lists: what the attention made of the mask; None makes them.
        bounds: how many queries, and keys, a sequence of a ragged batch has at most, where the caller says.
        splits: parts into which the keys are split, or what a schedule was made for; None is as many parts as make
            the call fast.
    """

    inputs: dict[str, Any]
    captures: Mapping[str, Any]
    seed: Any
    offset: Any
    wanted: tuple[str, ...]
    results: Mapping[str, Any] = _NONE
    tile_lists: Any = None
    bounds: Bounds = NO_BOUNDS
    splits: Splits = None
