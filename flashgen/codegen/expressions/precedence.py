"""Precedence of C++ operators, and the infix operators."""

from __future__ import annotations

from flashgen.language import operations as op

# Precedence of C++ operators, lowest first.
CONDITIONAL, OR, AND, BIT_OR, BIT_XOR, BIT_AND, EQUALITY, RELATION, SHIFT, SUM, PRODUCT, UNARY, ATOM = range(13)

INFIX: dict[type, tuple[str, int]] = {
    op.Add: ("+", SUM),
    op.Sub: ("-", SUM),
    op.Mul: ("*", PRODUCT),
    op.BitAnd: ("&", BIT_AND),
    op.BitOr: ("|", BIT_OR),
    op.BitXor: ("^", BIT_XOR),
    op.Equal: ("==", EQUALITY),
    op.NotEqual: ("!=", EQUALITY),
    op.Xor: ("!=", EQUALITY),
    op.Less: ("<", RELATION),
    op.LessEqual: ("<=", RELATION),
    op.Greater: (">", RELATION),
    op.GreaterEqual: (">=", RELATION),
    # Not && and ||: a mask is evaluated for every score of a tile, and branches would cost more than they save.
    op.And: ("&", BIT_AND),
    op.Or: ("|", BIT_OR),
}

# Operators -> operand operators that get parentheses for clarity, although precedence does not require them; gcc warns
# about these, too.
COMPARED = {EQUALITY, RELATION, SHIFT, SUM}
CLARIFIED = {BIT_OR: {BIT_AND, *COMPARED}, BIT_AND: COMPARED, SHIFT: {SUM}}
