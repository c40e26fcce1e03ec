"""The tiles of keys that the kernels of a spec visit: given by a closed form, or by lists."""

from __future__ import annotations

from functools import lru_cache

import sympy

from flashgen.analysis.closed_forms.tile_ranges import TileRange, key_range
from flashgen.language.operations import LEN_K
from flashgen.language.spec import AttentionSpec

_NONE = sympy.Integer(0)
_ALL_PARTIAL = TileRange(begin=_NONE, end=LEN_K, full_begin=_NONE, full_end=_NONE)


@lru_cache(maxsize=256)
def visited_keys(spec: AttentionSpec) -> TileRange | None:
    """Returns the range of keys that a tile of queries visits, or None if tiles are read from lists.

    Tiles of paged keys are never listed: the lengths of sequences are known only on the device, and the list kernel
    takes one length for all. With a mask without a closed form, all tiles of a sequence are then visited, and the mask
    is evaluated for each score.
    """
    tiles = key_range(spec.mask.expression)
    return _ALL_PARTIAL if tiles is None and spec.page_size else tiles
