"""How strongly C++ operators bind, and those that stand between two operands."""

from __future__ import annotations

from flashgen.language import operations as op

# Binding strength of C++ operators, weakest first.
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
    # Not && and ||: a mask is evaluated for every score of a tile, and their branches cost more than they save.
    op.And: ("&", BIT_AND),
    op.Or: ("|", BIT_OR),
}

# Operators whose operands read better in parentheses though precedence does not ask for them; gcc warns likewise.
COMPARED = {EQUALITY, RELATION, SHIFT, SUM}
CLARIFIED = {BIT_OR: {BIT_AND, *COMPARED}, BIT_AND: COMPARED, SHIFT: {SUM}}
