"""The scale folded into a score function that only ever multiplies or divides the score by constants.

Such a function takes the product q·k as the mma leaves it: softcap's `score / 20` is `product * (kScale / 20)`, one
multiplication where there were two.
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from flashgen.codegen.expressions.printer import float_literal
from flashgen.language import operations as ops
from flashgen.language.operations import SCORE

# Factors, and their products with the scale, that float32 holds with room to spare: folding makes no infinity or zero.
_SMALLEST, _LARGEST = 1e-30, 1e30


def folded_products(scale: float, *results: sympy.Basic) -> dict[sympy.Basic, str]:
    """Text for each node that scales the score, in terms of `product` and kScale; none where the score stands alone.

    scale: the value of kScale. results: the expressions that one kernel computes of the score.
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
    """score * constant, constant * score and score / constant as a product with a constant; None for all else."""
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
    """Each operation that has the score for an operand, once."""
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
