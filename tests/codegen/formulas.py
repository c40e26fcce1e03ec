"""Evaluates formulas of emitted constants."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # the same as C++ division, for nonnegative integers
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
}


def evaluate(formula: str, names: Mapping[str, float]) -> float:
    """Returns the value of a formula of +, -, *, /, %, << and parentheses.

    / is the integer division of C++ for nonnegative operands. Raises ValueError for any other syntax, and for a
    name that `names` does not have.
    """
    try:
        tree = ast.parse(formula.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"the formula {formula!r} cannot be read: {error.msg}") from None
    return _value(tree.body, names, formula)


def _value(node: ast.AST, names: Mapping[str, float], formula: str) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, names, formula), _value(node.right, names, formula)
        value: float = _OPERATORS[type(node.op)](left, right)
        return value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, names, formula)
    raise ValueError(f"the formula {formula!r} has a part that is not a number: {ast.unparse(node)}")
