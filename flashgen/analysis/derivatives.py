"""Symbolic derivatives of score functions, by the score or by an element of a captured array.

A derivative is built of the nodes of the language and reuses nodes of the function: the derivative of tanh is 1 - t·t,
where t is the node of tanh itself, so a kernel that computes both computes tanh once. Derivatives are defined at kinks.
min and max take half of each operand's derivative where both are equal, as torch.minimum and torch.maximum do. |x| has
derivative 0 at 0. `where` takes the derivative of the selected branch. Step functions (floor, //, comparisons,
conversions to int) have derivative 0. The derivative of a % b by b is -floor(a / b). sqrt has +inf at 0, as its formula
gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from flashgen.analysis.derivative_algebra import ONE, ZERO, Algebra, Node, constant, real
from flashgen.language import operations as ops
from flashgen.language.operations import Load, Operation, kind_of
from flashgen.language.spec import AttentionSpec

# (algebra, the operation, the derivative of each operand) -> the derivative of the operation
Rule = Callable[..., Node]

_LN_2, _LOG2_E = constant(math.log(2)), constant(math.log2(math.e))


def derivative(expression: Node, wrt: Node, algebra: Algebra | None = None) -> Node:
    """Returns the derivative of an expression.

    Args:
        expression: An expression of the language.
        wrt: SCORE, or a Load of a floating capture, which is treated as a symbol wherever it occurs.
        algebra: Shared by several derivatives of one expression, so that their common subexpressions are the same
            object.

    Returns:
        An expression of the language. The constants 0 and 1 are SymPy's S.Zero and S.One. Shared subexpressions are the
        same object, so traverse the result as a graph: as a tree it may be exponentially larger.
    """
    return _Differentiation(wrt, algebra or Algebra()).derivative_of(expression)


def gathers(spec: AttentionSpec) -> tuple[Load, ...]:
    """Returns the distinct loads of captures with grad=True in the score function, in the order of its text."""
    if spec.score is None:
        return ()
    return tuple(node for node in _operations(spec.score.expression) if isinstance(node, Load) and node.capture.grad)


def _operations(root: Node) -> Iterator[Operation]:
    """Yields each operation of an expression once, operands first, from left to right."""
    seen: set[Node] = set()

    def visit(node: Node) -> Iterator[Operation]:
        if isinstance(node, Operation) and node not in seen:
            seen.add(node)
            for operand in node.args:
                yield from visit(operand)
            yield node

    return visit(root)


class _Differentiation:
    def __init__(self, wrt: Node, algebra: Algebra) -> None:
        self.wrt, self.algebra = wrt, algebra
        self.cache: dict[Node, Node] = {}

    def derivative_of(self, node: Node) -> Node:
        if node == self.wrt:
            return ONE
        if not isinstance(node, Operation) or kind_of(node) != "float":
            return ZERO
        if node not in self.cache:
            inner = [self.derivative_of(operand) for operand in node.args]
            changes = any(change is not ZERO for change in inner)
            self.cache[node] = RULES[type(node)](self.algebra, node, *inner) if changes else ZERO
        return self.cache[node]


def _constant(*_: Node) -> Node:
    return ZERO


def _product(algebra: Algebra, node: Operation, da: Node, db: Node) -> Node:
    a, b = map(real, node.args)
    return algebra.total(algebra.product(b, da), algebra.product(a, db))


def _quotient(algebra: Algebra, node: Operation, da: Node, db: Node) -> Node:
    b = real(node.args[1])
    return algebra.total(algebra.quotient(da, b), algebra.negation(algebra.quotient(algebra.product(node, db), b)))


def _modulo(algebra: Algebra, node: Operation, da: Node, db: Node) -> Node:
    return algebra.total(da, algebra.negation(algebra.product(algebra.node(ops.FloorDiv, *node.args), db)))


def _extreme(selects: type[Operation]) -> Rule:
    """Returns the rule of a minimum or maximum: the derivative of the selected operand, or the mean on a tie."""

    def rule(algebra: Algebra, node: Operation, da: Node, db: Node) -> Node:
        if da == db:
            return da
        both = algebra.product(constant(0.5), algebra.total(da, db))
        first, equal = (algebra.node(comparison, *node.args) for comparison in (selects, ops.Equal))
        return algebra.choice(first, da, algebra.choice(equal, both, db))

    return rule


def _magnitude(algebra: Algebra, node: Operation, da: Node) -> Node:
    below, above = (algebra.node(comparison, *node.args, ZERO) for comparison in (ops.Less, ops.Greater))
    return algebra.choice(above, da, algebra.choice(below, algebra.negation(da), ZERO))


def _tanh(algebra: Algebra, node: Operation, da: Node) -> Node:
    return algebra.product(algebra.node(ops.Sub, ONE, algebra.node(ops.Mul, node, node)), da)


def _sigmoid(algebra: Algebra, node: Operation, da: Node) -> Node:
    return algebra.product(algebra.node(ops.Mul, node, algebra.node(ops.Sub, ONE, node)), da)


# fmt: off
RULES: dict[type[Operation], Rule] = {
    ops.Add: lambda algebra, node, da, db: algebra.total(da, db),
    ops.Sub: lambda algebra, node, da, db: algebra.total(da, algebra.negation(db)),
    ops.Mul: _product,
    ops.Neg: lambda algebra, node, da: algebra.negation(da),
    ops.Abs: _magnitude,
    ops.Minimum: _extreme(ops.Less),
    ops.Maximum: _extreme(ops.Greater),
    ops.FloorDiv: _constant,
    ops.FloorMod: _modulo,
    ops.ShiftLeft: _constant, ops.ShiftRight: _constant,
    ops.BitAnd: _constant, ops.BitOr: _constant, ops.BitXor: _constant,
    ops.Divide: _quotient,
    ops.ToFloat: lambda algebra, node, da: da,
    ops.ToInt: _constant,
    ops.Floor: _constant,
    ops.Exp: lambda algebra, node, da: algebra.product(node, da),
    ops.Exp2: lambda algebra, node, da: algebra.product(node, algebra.product(_LN_2, da)),
    ops.Log: lambda algebra, node, da: algebra.quotient(da, real(node.args[0])),
    ops.Log2: lambda algebra, node, da: algebra.quotient(algebra.product(_LOG2_E, da), real(node.args[0])),
    ops.Tanh: _tanh, ops.FastTanh: _tanh,
    ops.Sigmoid: _sigmoid,
    ops.Sqrt: lambda algebra, node, da: algebra.quotient(algebra.product(constant(0.5), da), node),
    ops.Sin: lambda algebra, node, da: algebra.product(algebra.node(ops.Cos, *node.args), da),
    ops.Cos: lambda algebra, node, da: algebra.negation(algebra.product(algebra.node(ops.Sin, *node.args), da)),
    ops.Detach: _constant,
    ops.Surrogate: lambda algebra, node, da, db, dc: algebra.total(da, algebra.product(node.args[2], db)),
    ops.Equal: _constant, ops.NotEqual: _constant,
    ops.Less: _constant, ops.LessEqual: _constant, ops.Greater: _constant, ops.GreaterEqual: _constant,
    ops.And: _constant, ops.Or: _constant, ops.Xor: _constant, ops.Not: _constant,
    ops.Where: lambda algebra, node, _, then, otherwise: algebra.choice(node.args[0], then, otherwise),
    ops.Load: _constant,
}
# fmt: on
