"""Writes nodes as infix text with Python's operators and no redundant parentheses."""

from __future__ import annotations

import sympy

from flashgen.language import operations as ops

# From operation to (sign, precedence), by Python's rules: a larger number binds tighter.
_INFIX = {
    ops.Or: ("|", 1), ops.Xor: ("^", 2), ops.And: ("&", 3),
    ops.BitOr: ("|", 1), ops.BitXor: ("^", 2), ops.BitAnd: ("&", 3),
    ops.ShiftLeft: ("<<", 4), ops.ShiftRight: (">>", 4), ops.Add: ("+", 5), ops.Sub: ("-", 5),
    ops.Mul: ("*", 6), ops.Divide: ("/", 6), ops.FloorDiv: ("//", 6), ops.FloorMod: ("%", 6),
    ops.Equal: ("==", 0), ops.NotEqual: ("!=", 0), ops.Less: ("<", 0), ops.LessEqual: ("<=", 0),
    ops.Greater: (">", 0), ops.GreaterEqual: (">=", 0),
}  # fmt: skip
_UNARY, _CALL = 7, 8
_PREFIX = {ops.Neg: "-", ops.Not: "~"}
_NAMES = {ops.Minimum: "min", ops.Maximum: "max"}


def to_text(node: sympy.Basic) -> str:
    """Returns the node as infix text: `min(len_k, q_last + len_k - len_q + 1)`."""
    return _text(node)[0]


def _text(node: sympy.Basic) -> tuple[str, int]:
    kind = type(node)
    if kind in _INFIX:
        sign, precedence = _INFIX[kind]
        left, right = node.args
        # A comparison inside another, and the right operand of a chain, need parentheses.
        return f"{_within(left, precedence + (precedence == 0))} {sign} {_within(right, precedence + 1)}", precedence
    if kind in _PREFIX:
        return _PREFIX[kind] + _within(node.args[0], _UNARY), _UNARY
    if isinstance(node, ops.Load):
        return f"{node.capture.name}[{', '.join(map(to_text, node.indices))}]", _CALL
    if isinstance(node, ops.Operation):
        name = _NAMES.get(kind, kind.__name__.lower())
        return f"{name}({', '.join(map(to_text, _flat(node)))})", _CALL
    text = f"{float(node):g}" if isinstance(node, sympy.Float) else str(node)
    return text, _UNARY if text.startswith("-") else _CALL


def _within(node: sympy.Basic, precedence: int) -> str:
    text, own = _text(node)
    return text if own >= precedence else f"({text})"


def _flat(node: ops.Operation) -> list[sympy.Basic]:
    """Returns the operands. A minimum within a minimum, or a maximum within a maximum, is flattened."""
    if type(node) not in _NAMES:
        return list(node.args)
    return [leaf for operand in node.args for leaf in (_flat(operand) if type(operand) is type(node) else [operand])]
