"""Derives the size of a dimension of a captured array from the index expression that reads it."""

from __future__ import annotations

import sympy

from flashgen.language.operations import INDICES, Add, Capture, FloorDiv, Maximum, Minimum, Neg


def position_of(index: sympy.Basic) -> tuple[sympy.Symbol, int] | None:
    """Returns (symbol, block) for an index `symbol // block`, (symbol, 1) for b, h, q or k itself, else None.

    A dimension with this index has one element per position, or per block, of the call; or size 1, which broadcasts.
    """
    symbol, block = (index.args[0], index.args[1]) if isinstance(index, FloorDiv) else (index, sympy.Integer(1))
    if symbol not in INDICES or not isinstance(block, sympy.Integer) or block < 1:
        return None
    return symbol, int(block)


def distance_of(index: sympy.Basic) -> int | Capture | None:
    """Returns D for an index clamp(x, -D, D) + D, an integer or a captured number, else None.

    A dimension with this index has 2·D + 1 elements, as in `relative_bias`; or size 1, which broadcasts.
    """
    if not (isinstance(index, Add) and isinstance(index.args[0], Minimum)):
        return None
    clamped, shift = index.args
    inner, high = clamped.args
    if not isinstance(inner, Maximum) or high != shift:
        return None
    low = inner.args[1]
    if isinstance(shift, sympy.Integer):
        return int(shift) if low == -shift and shift >= 0 else None
    return shift if isinstance(shift, Capture) and low == Neg(shift) else None
