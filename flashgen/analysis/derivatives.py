"""Derivatives of score functions, by the score or by an element that they gather from a captured array.

They are symbolic, over the language's own nodes and those that are differentiated: the derivative of tanh is 1 - t·t,
where t is the very tanh of the function, so that a kernel which computes both computes tanh once. Where a function has
a kink, the derivative is defined nevertheless: min and max have half of each operand's where both are equal, as
torch.minimum and torch.maximum have; |x| has 0 at 0, `where` has that of the branch taken, and what steps (floor, //,
comparisons, conversions to int) has 0. The derivative of a % b by b is -floor(a / b); sqrt has +inf at 0, as its
formula gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from flashgen.analysis.derivative_algebra import ONE, ZERO, Algebra, Node, constant, real
from flashgen.language import operations as ops
from flashgen.language.operations import Load, Operation, kind_of
from flashgen.language.spec import AttentionSpec

# (algebra, the operation, the derivative of each operand) -> the derivative of the operation.
Rule = Callable[..., Node]

_LN_2, _LOG2_E = constant(math.log(2)), constant(math.log2(math.e))


def derivative(expression: Node, wrt: Node, algebra: Algebra | None = None) -> Node:
    """The derivative of an expression.

    Args:
        expression: an expression of the language.
        wrt: SCORE, or a Load of a floating capture, which then is a symbol of its own wherever it occurs.
        algebra: for several derivatives of one expression, so that what they have in common is one object.

    Returns an expression of the language; the constants 0 and 1 are SymPy's S.Zero and S.One. What is shared in it is
    one object: walk it as a graph, for as a tree it may be exponentially larger.
    """
    return _Differentiation(wrt, algebra or Algebra()).of(expression)


def gathers(spec: AttentionSpec) -> tuple[Load, ...]:
    """The distinct elements that the score function gathers from captures with grad=True, in the order of its text."""
    if spec.score is None:
        return ()
    return tuple(node for node in _operations(spec.score.expression) if isinstance(node, Load) and node.capture.grad)


def _operations(root: Node) -> Iterator[Operation]:
    """Each operation of an expression once, operands first, from left to right."""
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
        self.known: dict[Node, Node] = {}

    def of(self, node: Node) -> Node:
        if node == self.wrt:
            return ONE
        if not isinstance(node, Operation) or kind_of(node) != "float":
            return ZERO
        if node not in self.known:
            inner = [self.of(operand) for operand in node.args]
            changes = any(change is not ZERO for change in inner)
            self.known[node] = RULES[type(node)](self.algebra, node, *inner) if changes else ZERO
        return self.known[node]


def _constant(*_: Node) -> Node:
    return ZERO


def _product(algebra: Algebra, node: Operation, da: Node, db: Node) -> Node:
    a, b = map(real, node.args)
    return algebra.total(algebra.product(b, da), algebra.product(a, db))


def _quotient(algebra: Algebra, node: Operation, da: Node, db: Node) -> Node:
    b = real(node.args[1])
    return algebra.total(algebra.quotient(da, b), algebra.negated(algebra.quotient(algebra.product(node, db), b)))


def _modulo(algebra: Algebra, node: Operation, da: Node, db: Node) -> Node:
    return algebra.total(da, algebra.negated(algebra.product(algebra.node(ops.FloorDiv, *node.args), db)))


def _extreme(beats: type[Operation]) -> Rule:
    """The derivative of the operand that beats the other, strictly; half of each's where both are equal."""

    def rule(algebra: Algebra, node: Operation, da: Node, db: Node) -> Node:
        if da == db:
            return da
        both = algebra.product(constant(0.5), algebra.total(da, db))
        first, equal = (algebra.node(comparison, *node.args) for comparison in (beats, ops.Equal))
        return algebra.choice(first, da, algebra.choice(equal, both, db))

    return rule


def _magnitude(algebra: Algebra, node: Operation, da: Node) -> Node:
    below, above = (algebra.node(comparison, *node.args, ZERO) for comparison in (ops.Less, ops.Greater))
    return algebra.choice(above, da, algebra.choice(below, algebra.negated(da), ZERO))


def _tanh(algebra: Algebra, node: Operation, da: Node) -> Node:
    return algebra.product(algebra.node(ops.Sub, ONE, algebra.node(ops.Mul, node, node)), da)


def _sigmoid(algebra: Algebra, node: Operation, da: Node) -> Node:
    return algebra.product(algebra.node(ops.Mul, node, algebra.node(ops.Sub, ONE, node)), da)


# fmt: off
RULES: dict[type[Operation], Rule] = {
    ops.Add: lambda algebra, node, da, db: algebra.total(da, db),
    ops.Sub: lambda algebra, node, da, db: algebra.total(da, algebra.negated(db)),
    ops.Mul: _product,
    ops.Neg: lambda algebra, node, da: algebra.negated(da),
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
    ops.Cos: lambda algebra, node, da: algebra.negated(algebra.product(algebra.node(ops.Sin, *node.args), da)),
    ops.Detach: _constant,
    ops.Surrogate: lambda algebra, node, da, db, dc: algebra.total(da, algebra.product(node.args[2], db)),
    ops.Equal: _constant, ops.NotEqual: _constant,
    ops.Less: _constant, ops.LessEqual: _constant, ops.Greater: _constant, ops.GreaterEqual: _constant,
    ops.And: _constant, ops.Or: _constant, ops.Xor: _constant, ops.Not: _constant,
    ops.Where: lambda algebra, node, _, then, otherwise: algebra.choice(node.args[0], then, otherwise),
    ops.Load: _constant,
}
# fmt: on
