"""Which tiles of keys the kernels of a spec visit: by a closed form, or by lists."""

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
    """The range of keys of a tile of queries, or None where tiles are listed.

    Over pages nothing is listed: a sequence's length is the device's alone, and a listing kernel knows one for all. A
    mask without a closed form there has all tiles of its sequence, and is evaluated for each score.
    """
    tiles = key_range(spec.mask.expression)
    return _ALL_PARTIAL if tiles is None and spec.page_size else tiles
