"""Formulas as MathML, which browsers render natively: the elements of formulas, and expressions of the language."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import sympy

from flashgen.language import operations as ops

_SIGNS = {
    ops.Add: ("+", 5), ops.Sub: ("−", 5), ops.Mul: ("·", 6), ops.FloorMod: ("mod", 6),
    ops.Equal: ("=", 4), ops.NotEqual: ("≠", 4), ops.Less: ("<", 4), ops.LessEqual: ("≤", 4),
    ops.Greater: (">", 4), ops.GreaterEqual: ("≥", 4), ops.And: ("∧", 3), ops.Or: ("∨", 1), ops.Xor: ("⊕", 2),
    ops.BitAnd: ("&", 3), ops.BitOr: ("|", 1), ops.BitXor: ("^", 2),
    ops.ShiftLeft: ("≪", 4.5), ops.ShiftRight: ("≫", 4.5),
}  # fmt: skip
_NAMES = {ops.Minimum: "min", ops.Maximum: "max", ops.FastTanh: "tanh", ops.ToInt: "int", ops.ToFloat: "float"}
_UNARY, _ATOM = 7, 9
_SYMBOLS = {"score": "s", "len_q": "N_q", "len_k": "N_k"}


def name(text: str) -> str:
    """Returns a variable. "N_q" gets the subscript q; a word of several letters is set upright."""
    base, _, below = text.partition("_")
    style = ' mathvariant="normal"' if len(base) > 1 else ""
    body = f"<mi{style}>{escape(base)}</mi>"
    return (
        f"<msub>{body}<mi>{escape(below)}</mi></msub>"
        if below and len(base) == 1
        else (f"<mi{style}>{escape(text)}</mi>" if below else body)
    )


def sign(text: str) -> str:
    return f"<mo>{escape(text)}</mo>"


def number(value: object) -> str:
    return f"<mn>{escape(str(value))}</mn>"


def words(text: str) -> str:
    return f"<mtext>{escape(text)}</mtext>"


def row(*parts: str) -> str:
    return f"<mrow>{''.join(parts)}</mrow>"


def over(above: str, below: str) -> str:
    return f"<mfrac>{above}{below}</mfrac>"


def power(base: str, exponent: str) -> str:
    return f"<msup>{base}{exponent}</msup>"


def sub(base: str, below: str) -> str:
    return f"<msub>{base}{below}</msub>"


def call(function: str, *arguments: str) -> str:
    inside = sign(",").join(arguments)
    return row(f'<mi mathvariant="normal">{escape(function)}</mi>', sign("("), inside, sign(")"))


def block(*parts: str) -> str:
    """Returns a formula on a line of its own."""
    return f'<math display="block">{"".join(parts)}</math>'


def expression(node: sympy.Basic) -> str:
    """Returns an expression of the language, such as a mask or a score function, as MathML."""
    return _drawn(node)[0]


def conjuncts(node: sympy.Basic) -> list[str]:
    """Returns the operands of a conjunction as MathML, in order and without duplicates, to be shown line by line.

    An operand that binds less tightly than a conjunction, such as a disjunction, has parentheses.
    """
    operands = list(dict.fromkeys(_operands(node)))
    if len(operands) == 1:
        return [expression(operands[0])]
    return [_within(operand, _SIGNS[ops.And][1]) for operand in operands]


def _operands(node: sympy.Basic) -> Iterator[sympy.Basic]:
    """Yields the operands of nested conjunctions."""
    if not isinstance(node, ops.And):
        yield node
        return
    for operand in node.args:
        yield from _operands(operand)


def _drawn(node: sympy.Basic) -> tuple[str, float]:
    kind = type(node)
    if kind in _SIGNS:
        text, precedence = _SIGNS[kind]
        left, right = node.args
        return row(_within(left, precedence), sign(text), _within(right, precedence + 0.5)), precedence
    if kind in (ops.Divide, ops.FloorDiv):
        fraction = over(expression(node.args[0]), expression(node.args[1]))
        return (row(sign("⌊"), fraction, sign("⌋")) if kind is ops.FloorDiv else fraction), _ATOM
    if kind in (ops.Neg, ops.Not):
        return row(sign("−" if kind is ops.Neg else "¬"), _within(node.args[0], _UNARY)), _UNARY
    if kind is ops.Abs:
        return row(sign("|"), expression(node.args[0]), sign("|")), _ATOM
    if kind in (ops.Exp, ops.Exp2):
        return power(name("e") if kind is ops.Exp else number(2), row(expression(node.args[0]))), _ATOM
    if kind is ops.Sqrt:
        return f"<msqrt>{expression(node.args[0])}</msqrt>", _ATOM
    if isinstance(node, ops.Load):
        return sub(name(node.capture.name), row(sign(",").join(map(expression, node.indices)))), _ATOM
    if isinstance(node, ops.Operation):
        return call(_NAMES.get(kind, kind.__name__.lower()), *map(expression, node.args)), _ATOM
    if isinstance(node, sympy.Symbol):
        return name(_SYMBOLS.get(str(node), str(node))), _ATOM
    if isinstance(node, ops.Capture):
        return name(node.name), _ATOM
    if isinstance(node, sympy.Number):
        text = f"{float(node):g}" if isinstance(node, sympy.Float) else str(node)
        return number(text), _UNARY if text.startswith("-") else _ATOM
    return name(str(node)), _ATOM


def _within(node: sympy.Basic, precedence: float) -> str:
    drawn, own = _drawn(node)
    return drawn if own >= precedence else row(sign("("), drawn, sign(")"))
