"""What an index says of the size of the dimension that it indexes."""

from __future__ import annotations

import sympy

from flashgen.language.operations import INDICES, Add, Capture, FloorDiv, Maximum, Minimum, Neg


def position_of(index: sympy.Basic) -> tuple[sympy.Symbol, int] | None:
    """(symbol, block) of an index `symbol // block`, or (symbol, 1) of b, h, q or k itself; else None.

    A dimension indexed so has an element for each position, or block, of the call, or one for all.
    """
    symbol, block = (index.args[0], index.args[1]) if isinstance(index, FloorDiv) else (index, sympy.Integer(1))
    if symbol not in INDICES or not isinstance(block, sympy.Integer) or block < 1:
        return None
    return symbol, int(block)


def distance_of(index: sympy.Basic) -> int | Capture | None:
    """D of an index clamp(x, -D, D) + D, an integer or a captured number; else None.

    A dimension indexed so has 2·D + 1 elements, as `relative_bias` documents, or one for all.
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
