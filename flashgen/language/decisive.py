"""Classifies floats: decisive ones are computed exactly as in float32, and tolerant ones are judged by a tolerance.

A mask is true or false, and so is a condition in a score function, so one extra rounding can change a whole element. A
float is decisive if it does not depend on the score, and a comparison, a floor or a conversion to an integer depends on
it. Decisive floats are float32, rounded after every operation, wherever they are computed: a GPU kernel does not fuse
their products with sums, and NumPy rounds as often as the kernel.

Values that depend on the score carry the rounding errors of q·k, and results are judged by a tolerance. If no
comparison, floor or conversion reads them, a kernel may round them once more or once less: it may contract a product
and a sum, or replace a division by a constant with a multiplication.
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
    """Returns the comparisons, floors, floored divisions and integer conversions that read floats but not the score."""
    operations, score_dependent = _operations(roots)
    return frozenset(node for node in _steps(operations) if node not in score_dependent)


def decisive(*roots: sympy.Basic) -> frozenset[sympy.Basic]:
    """Returns the deciding steps, and the float operations that they depend on."""
    return _with_float_operands(deciding_steps(*roots))


def tolerant(*roots: sympy.Basic) -> frozenset[sympy.Basic]:
    """Returns the operations that depend on the score and that no comparison, floor or conversion reads."""
    operations, score_dependent = _operations(roots)
    return frozenset(score_dependent.intersection(operations)) - _with_float_operands(_steps(operations))


def _steps(operations: Iterable[Operation]) -> Iterable[Operation]:
    return (node for node in operations if isinstance(node, _STEPS) and _reads_floats(node))


def _reads_floats(node: Operation) -> bool:
    return isinstance(node, ops.Floor) or any(kind_of(operand) == "float" for operand in node.args)


def _with_float_operands(steps: Iterable[Operation]) -> frozenset[sympy.Basic]:
    """Returns the steps, and the float operations that they depend on."""
    found: set[sympy.Basic] = set()
    waiting: list[sympy.Basic] = list(steps)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(arg for arg in node.args if isinstance(arg, Operation) and kind_of(arg) == "float")
    return frozenset(found)


def _operations(roots: tuple[sympy.Basic, ...]) -> tuple[list[Operation], set[sympy.Basic]]:
    """Returns every operation once, operands first, and the nodes that depend on the score."""
    order: dict[Operation, None] = {}
    score_dependent: set[sympy.Basic] = {ops.SCORE}
    stack = [root for root in roots if isinstance(root, Operation)]
    while stack:
        node = stack[-1]
        waiting = [operand for operand in node.args if isinstance(operand, Operation) and operand not in order]
        stack.extend(waiting)
        if not waiting:
            stack.pop()
            order[node] = None
            if any(operand in score_dependent for operand in node.args):
                score_dependent.add(node)
    return list(order), score_dependent
