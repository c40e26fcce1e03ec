"""The record of the arguments of one call of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flashgen.attention.decode_schedule import ScheduledSizes
from flashgen.attention.problem import NO_BOUNDS, Bounds

Splits = int | ScheduledSizes | None
"""The number of splits of a call's keys (split-KV), or the sizes of its decode schedule; None: the sizes choose."""

_NONE: Mapping[str, Any] = {}


class Call(NamedTuple):
    """One call of a pass.

    Attributes:
        inputs: the arrays, by their names in the kernels' structs. The pass adds captured arrays to this dictionary.
        captures: the captured arrays and numbers of the spec, by name.
        seed, offset: of the dropout.
        wanted: the names of the results to return.
        results: the arrays to write all results to, by name; empty to allocate new ones.
        tile_lists: the tile lists that the caller created; None to create them in the call.
        bounds: the maximum numbers of queries and keys of a sequence of a varlen batch, where the caller gives them.
        splits: the number of splits of the keys, or the sizes of the decode schedule; None to choose the number that is
            fastest.
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
