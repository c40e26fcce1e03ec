"""Builds nodes of real arithmetic and simplifies them, so that derivatives are readable.

Nodes that a user wrote are kept as written, to the last rounding. A derivative has no original form to keep: factors of
1 and terms of 0 vanish, constants are multiplied in float64, signs move outwards, and `c · (x / c)` becomes x.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import sympy

from flashgen.language import operations as ops
from flashgen.language.operations import Operation, kind_of

Node: TypeAlias = sympy.Basic

# These two constants are SymPy's own objects; all others are Float.
ZERO, ONE = sympy.S.Zero, sympy.S.One

_SMALLEST, _LARGEST = 2.0**-126, 2.0**127  # the range of normal float32 numbers: constant folding stays inside it


def constant(value: float) -> Node:
    """Returns the node of a number."""
    return ZERO if value == 0 else ONE if value == 1 else sympy.Float(value)


def real(node: Node) -> Node:
    """Returns the node as a float. Integer constants become numbers; integer and boolean expressions are converted."""
    if isinstance(node, (sympy.Integer, sympy.Float)):
        return constant(float(node))
    return node if kind_of(node) == "float" else ops.ToFloat(node)


class Algebra:
    """Builds nodes. Equal nodes are the same object, so that comparing them does not traverse shared subexpressions."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[Any, ...], Operation] = {}
        # Quotients, and products with a constant, that this class built and may rearrange. The user's own nodes are not
        # among them, since a kernel computes those in any case.
        self._rearrangeable: set[Node] = set()

    def node(self, cls: type[Operation], *operands: Node) -> Operation:
        """Returns the operation on these operands, with 0 and 1 converted to floats."""
        floats = tuple(sympy.Float(float(operand)) if operand in (ZERO, ONE) else operand for operand in operands)
        key = (cls, *floats)
        if key not in self._nodes:
            self._nodes[key] = cls(*floats)
        return self._nodes[key]

    def total(self, left: Node, right: Node) -> Node:
        """Returns left + right."""
        if left is ZERO or right is ZERO:
            return left if right is ZERO else right
        if left == right:
            return self.product(constant(2.0), left)
        if _is_number(left) and _is_number(right) and _is_foldable(float(left) + float(right)):
            return constant(float(left) + float(right))
        if isinstance(right, ops.Neg):
            return self.node(ops.Sub, left, right.args[0])
        if isinstance(left, ops.Neg):
            return self.node(ops.Sub, right, left.args[0])
        return self.node(ops.Add, left, right)

    def product(self, left: Node, right: Node) -> Node:
        """Returns left · right, where `right` may be a derivative with a constant factor, a denominator or a sign."""
        if left is ZERO or right is ZERO:
            return ZERO
        if left is ONE or right is ONE:
            return left if right is ONE else right
        if _is_number(right):
            left, right = right, left
        if _is_number(left) and _is_number(right) and _is_foldable(float(left) * float(right)):
            return constant(float(left) * float(right))
        if _is_number(left) and float(left) == -1:
            return self.negation(right)
        if isinstance(right, ops.Neg):
            return self.negation(self.product(left, right.args[0]))
        if right not in self._rearrangeable:
            return self._product(left, right)
        first, second = right.args
        if isinstance(right, ops.Divide):
            return real(first) if left == second else self.quotient(self.product(left, real(first)), second)
        if not _is_number(left):
            return self.product(first, self.product(left, second))
        both = float(left) * float(first)
        return self.product(constant(both), second) if _is_foldable(both) else self._product(left, right)

    def _product(self, left: Node, right: Node) -> Node:
        node = self.node(ops.Mul, left, right)
        if _is_number(left):
            self._rearrangeable.add(node)
        return node

    def quotient(self, left: Node, right: Node) -> Node:
        """Returns left / right."""
        if left is ZERO or right is ONE:
            return left
        if isinstance(left, ops.Neg):
            return self.negation(self.quotient(left.args[0], right))
        node = self.node(ops.Divide, left, right)
        self._rearrangeable.add(node)
        return node

    def negation(self, operand: Node) -> Node:
        """Returns -operand."""
        if _is_number(operand):
            return constant(-float(operand))
        return operand.args[0] if isinstance(operand, ops.Neg) else self.node(ops.Neg, operand)

    def choice(self, condition: Node, then: Node, otherwise: Node) -> Node:
        """Returns `then` where the condition holds, else `otherwise`."""
        return then if then == otherwise else self.node(ops.Where, condition, then, otherwise)


def _is_number(node: Node) -> bool:
    return isinstance(node, (sympy.Integer, sympy.Float))


def _is_foldable(value: float) -> bool:
    """Returns whether a folded constant is 0 or a normal float32 number."""
    return value == 0 or _SMALLEST <= abs(value) <= _LARGEST
