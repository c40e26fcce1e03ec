"""Which floats decide, and which are judged by a tolerance.

A mask is true or false, and so are the conditions of a score function: one rounding more or less is a whole element
more or less. A float decides if it does not depend on the score, and a comparison, a floor or a conversion to an
integer is made of it: it is float32, operation by operation, wherever it is computed. On a GPU no such product is fused
with a sum, and NumPy rounds as often as the kernel does.

What depends on the score carries the roundings of q·k, and a result is judged by a tolerance. Where no step reads it, a
kernel may round it once more or once less: contract a product and a sum, or divide by a constant with a product.
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from flashgen.language import operations as ops
from flashgen.language.operations import Operation, kind_of

_STEPS = (
    *(ops.Equal, ops.NotEqual, ops.Less, ops.LessEqual, ops.Greater, ops.GreaterEqual),
    *(ops.Floor, ops.FloorDiv, ops.FloorMod, ops.ToInt),
)


def deciding_steps(*roots: sympy.Basic) -> frozenset[sympy.Basic]:
    """The comparisons, floors, divisions and conversions to integers that read floats, without the score."""
    operations, of_score = _operations(roots)
    return frozenset(node for node in _steps(operations) if node not in of_score)


def decisive(*roots: sympy.Basic) -> frozenset[sympy.Basic]:
    """The deciding steps, and the float operations that they are made of."""
    return _made_of(deciding_steps(*roots))


def tolerant(*roots: sympy.Basic) -> frozenset[sympy.Basic]:
    """The operations that depend on the score and that no step reads."""
    operations, of_score = _operations(roots)
    return frozenset(of_score.intersection(operations)) - _made_of(_steps(operations))


def _steps(operations: Iterable[Operation]) -> Iterable[Operation]:
    return (node for node in operations if isinstance(node, _STEPS) and _reads_floats(node))


def _reads_floats(node: Operation) -> bool:
    return isinstance(node, ops.Floor) or any(kind_of(operand) == "float" for operand in node.args)


def _made_of(steps: Iterable[Operation]) -> frozenset[sympy.Basic]:
    """The steps, and the float operations that they are made of."""
    found: set[sympy.Basic] = set()
    waiting: list[sympy.Basic] = list(steps)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(arg for arg in node.args if isinstance(arg, Operation) and kind_of(arg) == "float")
    return frozenset(found)


def _operations(roots: tuple[sympy.Basic, ...]) -> tuple[list[Operation], set[sympy.Basic]]:
    """Every operation once, operands first, and the nodes that depend on the score."""
    order: dict[Operation, None] = {}
    of_score: set[sympy.Basic] = {ops.SCORE}
    stack = [root for root in roots if isinstance(root, Operation)]
    while stack:
        node = stack[-1]
        waiting = [operand for operand in node.args if isinstance(operand, Operation) and operand not in order]
        stack.extend(waiting)
        if not waiting:
            stack.pop()
            order[node] = None
            if any(operand in of_score for operand in node.args):
                of_score.add(node)
    return list(order), of_score
