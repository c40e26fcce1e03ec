"""Recognises arrays whose axes of heads and of rows are swapped: "bshd" arrays of a "bhsd" spec, and the reverse.

Many swapped calls have valid shapes and give a result, which is wrong. Only the sizes can tell. These functions run in
the checks of a call, which a repeated call does not run again.
"""

from __future__ import annotations

import warnings

from flashgen.codegen.sizes import Sizes
from flashgen.errors import FlashgenWarning
from flashgen.language.spec import AttentionSpec

_MANY_HEADS = 512
"""More heads than those of any published model; sequences usually have at least as many rows."""
_FEW_ROWS = 128
"""The most heads of published models, which are the rows of swapped arrays."""


def fits_swapped(heads_q: int, heads_kv: int, rows_q: int, rows_k: int) -> bool:
    """Whether arrays of these sizes would be valid, and have more rows than heads, with heads and rows swapped."""
    return 0 < rows_k <= rows_q and rows_q % rows_k == 0 and min(heads_q, heads_kv) > max(rows_q, rows_k)


def warn_if_swapped(spec: AttentionSpec, sizes: Sizes) -> None:
    """Emits a FlashgenWarning if heads and rows of valid arrays are almost certainly swapped.

    This is assumed of equally many heads of q and k if they are at least 512, and at least 8 for each row of q, of
    which there are at most 128. Keys in pages have axes of their own, which the checks of shapes cover.
    """
    heads, rows = sizes.heads_q, sizes.total_q
    if spec.page_size or heads != sizes.heads_kv or heads < _MANY_HEADS or rows > _FEW_ROWS or heads < 8 * rows:
        return
    if fits_swapped(heads, sizes.heads_kv, rows, sizes.total_k):
        warnings.warn(
            f"q has {heads} heads of {rows} rows in arrays ({', '.join(spec.batch_layout.axes)}), which looks as if "
            f"heads and rows were swapped; if so, {spec.batch_layout.swap_advice}",
            FlashgenWarning,
            stacklevel=8,  # the caller of a compiled attention
        )
