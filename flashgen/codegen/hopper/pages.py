"""How Hopper's forward kernel loads a paged KV cache by TMA.

The tensor maps of k and v have an axis of pages in place of the batch axis. A tile of keys is loaded by several copies.
The number of keys of a copy divides both the tile and the page, so that no copy crosses the end of a page or leaves the
map. In shared memory the rows of a copy must begin at a multiple of 8 rows, where the swizzle pattern repeats, so pages
of fewer keys are left to the kernels of mma.sync.

Issuing a copy takes the producer warp longer than a small copy takes to arrive. So one copy loads all panels of a
page's columns if these are full panels. The order of the axes in the map is: 64 columns, 8 rows, panels, groups of 8
rows. A tile in shared memory has the same order. Its groups of 8 rows are equally spaced whatever the page size is,
which is all that wgmma requires. The map's axis of panels runs through all heads, so the stride between heads must be a
multiple of the columns of a panel. `panels_between_heads` raises ArgumentError otherwise.

The copies of a last page also load its rows beyond the last key, which may hold any bits. Scores of these keys are
-inf. Their values are zeroed by the producer warp, before it signals the consumer warpgroups.
"""

from __future__ import annotations

import math

from flashgen.codegen.padding import is_wide
from flashgen.language.spec import AttentionSpec

GROUP_ROWS = 8
"""Rows of a panel that are contiguous in shared memory, after which the swizzle pattern repeats."""

MIN_PAGE = GROUP_ROWS
"""Keys of the smallest page that TMA can load."""

_SMALL_PAGE = 16


def has_small_pages(spec: AttentionSpec) -> bool:
    """Whether pages have at most 16 keys, so that copies of 16-bit K and V are small whatever the tile is.

    False with kv_dtype: TMA does not copy K and V of 8 bits.
    """
    return spec.page_size is not None and not spec.kv_dtype and spec.page_size <= _SMALL_PAGE


def panels_joined(spec: AttentionSpec, width: int, panel: int) -> int:
    """Returns how many panels one copy of keys or values loads; 1 if each has its own copy.

    Each panel has its own copy if rows have more than 256 columns (`is_wide`), or if K and V are not paged.

    Args:
        width: Columns of a row of K, or of V.
        panel: Columns of a panel.
    """
    return width // panel if spec.page_size and width % panel == 0 and not is_wide(spec) else 1


def box_keys(spec: AttentionSpec, tile_k: int) -> int:
    """Returns the keys of a copy: those of a tile, or with pages the largest number that divides tile and page."""
    return math.gcd(spec.page_size, tile_k) if spec.page_size else tile_k


def cache_problem(spec: AttentionSpec, converts_records: bool = False) -> str | None:
    """Returns why Hopper's own forward kernel cannot read the KV cache of a spec; None if it can.

    Args:
        converts_records: Whether the kernel reads a cache of `KvRecord`, as the decode kernel does.
    """
    if spec.kv_dtype and not (spec.kv_record and converts_records):
        return f"kv_dtype={spec.kv_dtype!r} is for the kernels of mma.sync, which widen keys in registers"
    if spec.page_size and spec.page_size < MIN_PAGE:
        return f"page_size={spec.page_size} is for the kernels of mma.sync; TMA copies {MIN_PAGE} keys or more"
    return None
