"""Evaluates the integer formulas of kernels/manifest.json, such as `ceil_div(len_q, 128) * heads_q`.

A formula has numbers, names of sizes, `+ - * /`, `min`, `max` and `ceil_div(a, b)`, which is a / b rounded up. `/`
rounds down. Nothing else is accepted, and no text is executed.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Mapping
from typing import Any

_OPERATORS: dict[Any, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}
_FUNCTIONS: dict[str, Any] = {"min": min, "max": max, "ceil_div": lambda a, b: -(-a // b)}


def evaluate(formula: str, sizes: Mapping[str, int]) -> int:
    """Returns the value of a formula for the sizes of a call."""
    return int(_value(_parse(formula), sizes))


@functools.lru_cache(maxsize=None)
def _parse(formula: str) -> Any:
    return ast.parse(formula, mode="eval").body


def _value(node: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _FUNCTIONS[node.func.id](*(_value(argument, sizes) for argument in node.args))
    raise ValueError(f"kernels/manifest.json has a formula with {ast.dump(node)}, which is no formula of sizes")
