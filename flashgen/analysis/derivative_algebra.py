"""Nodes of real arithmetic, built with the clean-up that a derivative needs to be readable.

The language's own nodes keep what the user wrote, to the last rounding. A derivative has no such text to keep: 0 and 1
vanish, constants are multiplied in float64, signs move outwards, and `c · (x / c)` is x.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import sympy

from flashgen.language import operations as ops
from flashgen.language.operations import Operation, kind_of

Node: TypeAlias = sympy.Basic

# The two constants that vanish are SymPy's own; every other one is a Float.
ZERO, ONE = sympy.S.Zero, sympy.S.One

_SMALLEST, _LARGEST = 2.0**-126, 2.0**127  # the normal numbers of float32: no folding leaves them


def constant(value: float) -> Node:
    """The node of a number."""
    return ZERO if value == 0 else ONE if value == 1 else sympy.Float(value)


def real(node: Node) -> Node:
    """The node as a float: an integer constant as a number, an integer or boolean expression converted."""
    if isinstance(node, (sympy.Integer, sympy.Float)):
        return constant(float(node))
    return node if kind_of(node) == "float" else ops.ToFloat(node)


class Algebra:
    """Builds nodes; equal ones are one object, so that comparing them never walks what they share."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Operation] = {}
        # Quotients, and products with a constant, made here. The user's own are kept: they are computed anyway.
        self._loose: set[Node] = set()

    def node(self, cls: type[Operation], *operands: Node) -> Operation:
        """The operation on these operands, 0 and 1 among them as floats."""
        floats = tuple(sympy.Float(float(operand)) if operand in (ZERO, ONE) else operand for operand in operands)
        key = (cls, *floats)
        if key not in self._made:
            self._made[key] = cls(*floats)
        return self._made[key]

    def total(self, left: Node, right: Node) -> Node:
        """left + right."""
        if left is ZERO or right is ZERO:
            return left if right is ZERO else right
        if left == right:
            return self.product(constant(2.0), left)
        if _is_number(left) and _is_number(right) and _holds(float(left) + float(right)):
            return constant(float(left) + float(right))
        if isinstance(right, ops.Neg):
            return self.node(ops.Sub, left, right.args[0])
        if isinstance(left, ops.Neg):
            return self.node(ops.Sub, right, left.args[0])
        return self.node(ops.Add, left, right)

    def product(self, left: Node, right: Node) -> Node:
        """left · right, where `right` may be a derivative with a constant factor, a denominator or a sign."""
        if left is ZERO or right is ZERO:
            return ZERO
        if left is ONE or right is ONE:
            return left if right is ONE else right
        if _is_number(right):
            left, right = right, left
        if _is_number(left) and _is_number(right) and _holds(float(left) * float(right)):
            return constant(float(left) * float(right))
        if _is_number(left) and float(left) == -1:
            return self.negated(right)
        if isinstance(right, ops.Neg):
            return self.negated(self.product(left, right.args[0]))
        if right not in self._loose:
            return self._product(left, right)
        first, second = right.args
        if isinstance(right, ops.Divide):
            return real(first) if left == second else self.quotient(self.product(left, real(first)), second)
        if not _is_number(left):
            return self.product(first, self.product(left, second))
        both = float(left) * float(first)
        return self.product(constant(both), second) if _holds(both) else self._product(left, right)

    def _product(self, left: Node, right: Node) -> Node:
        made = self.node(ops.Mul, left, right)
        if _is_number(left):
            self._loose.add(made)
        return made

    def quotient(self, left: Node, right: Node) -> Node:
        """left / right."""
        if left is ZERO or right is ONE:
            return left
        if isinstance(left, ops.Neg):
            return self.negated(self.quotient(left.args[0], right))
        made = self.node(ops.Divide, left, right)
        self._loose.add(made)
        return made

    def negated(self, operand: Node) -> Node:
        """-operand."""
        if _is_number(operand):
            return constant(-float(operand))
        return operand.args[0] if isinstance(operand, ops.Neg) else self.node(ops.Neg, operand)

    def choice(self, condition: Node, then: Node, otherwise: Node) -> Node:
        """`then` where the condition holds, else `otherwise`."""
        return then if then == otherwise else self.node(ops.Where, condition, then, otherwise)


def _is_number(node: Node) -> bool:
    return isinstance(node, (sympy.Integer, sympy.Float))


def _holds(value: float) -> bool:
    """Whether float32 holds a number that is to replace an expression."""
    return value == 0 or _SMALLEST <= abs(value) <= _LARGEST
