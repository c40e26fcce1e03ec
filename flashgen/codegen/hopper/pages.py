"""Keys and values in pages, as Hopper's forward kernel copies them by TMA.

The maps of k and v have pages where those of other calls have sequences. A tile of keys is as many copies as it has
pages, or parts of pages: each is of as many keys as divide both, so that none reaches over the end of a page, and none
lies outside of the map. In shared memory a copy's rows must begin where a swizzle does, 8 rows apart, so that smaller
pages are for the kernels of mma.sync.

Starting a copy takes the loading warp longer than a small one takes to arrive. So all panels of a page's columns are
one copy, where each is whole: in their maps a row of 64 columns is followed by the next of 8 rows, these by those of
the next panel, and these by the next 8 rows. A tile in shared memory has the same order, in which groups of 8 rows are
equally far apart whatever the pages are, and more a product does not ask for. Panels are counted along all heads, so
that heads must begin whole panels apart.

A copy brings what its page holds, also behind a sequence's last key, where that may be anything. Scores there are -inf;
values are cleared by the warp that loads, before the warpgroups that compute hear of them.
"""

from __future__ import annotations

import math

from flashgen.language.spec import AttentionSpec

GROUP_ROWS = 8
"""Rows of a panel that stand together in shared memory: those after which a swizzle begins again."""

LEAST_PAGE = GROUP_ROWS
"""Keys of the smallest page that a copy brings."""

_SMALL_PAGE = 16


def has_small_pages(spec: AttentionSpec) -> bool:
    """Whether keys are in pages of at most 16, whose copies are small whatever the tile is."""
    return spec.page_size is not None and spec.page_size <= _SMALL_PAGE


def panels_joined(spec: AttentionSpec, width: int, panel: int) -> int:
    """Panels that one copy of keys or values of so many columns brings; 1 where each is one by itself."""
    return width // panel if spec.page_size and width % panel == 0 else 1


def box_keys(spec: AttentionSpec, tile_k: int) -> int:
    """Keys of a copy: of a tile, or of as much of it as a page holds."""
    return math.gcd(spec.page_size, tile_k) if spec.page_size else tile_k


def problem_of_cache(spec: AttentionSpec) -> str | None:
    """Why Hopper's own kernel does not read the keys and values of a spec; None where it does."""
    if spec.kv_dtype:
        return f"kv_dtype={spec.kv_dtype!r} is for the kernels of mma.sync, which widen keys in registers"
    if spec.page_size and spec.page_size < LEAST_PAGE:
        return f"page_size={spec.page_size} is for the kernels of mma.sync; TMA copies {LEAST_PAGE} keys or more"
    return None
