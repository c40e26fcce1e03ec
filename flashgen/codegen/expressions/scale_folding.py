"""Folds the softmax scale into a score function that only multiplies or divides the score by constants.

The function then takes the unscaled product q·k of the mma: softcap's `score / 20` becomes `product * (kScale / 20)`,
one multiplication instead of two.
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from flashgen.codegen.expressions.printer import float_literal
from flashgen.language import operations as ops
from flashgen.language.operations import SCORE

# Bounds on factors and their products with the scale, well within float32, so that folding gives no infinity or zero.
_SMALLEST, _LARGEST = 1e-30, 1e30


def folded_products(scale: float, *results: sympy.Basic) -> dict[sympy.Basic, str]:
    """Returns the text of each node that scales the score, in terms of `product` and kScale.

    It is empty if the score is also used in any other way.

    Args:
        scale: The value of kScale.
        results: The expressions of the score that one kernel computes.
    """
    found: dict[sympy.Basic, str] = {}
    if any(result == SCORE for result in results):
        return {}
    for node in _users_of_score(results):
        text = _folded(node, scale)
        if text is None:
            return {}
        found[node] = text
    return found


def _folded(node: ops.Operation, scale: float) -> str | None:
    """Returns score * constant, constant * score or score / constant as one product; None for any other node."""
    if not isinstance(node, (ops.Mul, ops.Divide)):
        return None
    first, second = node.args
    constant = second if first == SCORE else first
    if not isinstance(constant, (sympy.Integer, sympy.Float)) or (isinstance(node, ops.Divide) and first != SCORE):
        return None
    factor = float(constant)
    if not _SMALLEST < abs(factor) < _LARGEST:
        return None
    folded = scale * factor if isinstance(node, ops.Mul) else scale / factor
    if not _SMALLEST < abs(folded) < _LARGEST:
        return None
    return f"product * (kScale {'*' if isinstance(node, ops.Mul) else '/'} {float_literal(factor)})"


def _users_of_score(results: tuple[sympy.Basic, ...]) -> Iterator[ops.Operation]:
    """Yields each operation with the score as an operand, once."""
    seen: set[sympy.Basic] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        if node in seen or not isinstance(node, ops.Operation):
            continue
        seen.add(node)
        if SCORE in node.args:
            yield node
        stack.extend(node.args)
