"""Derivatives of a score function by dual numbers: each value has a tangent, its derivative with respect to a seed.

A seed is SCORE, or a gather (a Load node) that is treated as a variable. Symbolic derivatives are not used here, so
that this module can check the symbolic derivatives of the kernels. Conventions where a function has no derivative:

    max, min    half of the derivative of each operand where the two are equal, as in torch.maximum and torch.minimum
    abs         0 at 0
    where       the derivative of the branch taken; the condition has no derivative
    floor, //, comparisons, integers    0
    a % b       1 with respect to a, -floor(a / b) with respect to b
    sqrt        infinite at 0, as in 1 / (2 sqrt(a))

The branch not taken contributes nothing, even where its derivative is infinite or NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import sympy
from numpy.typing import NDArray

from flashgen.language import operations as ops
from flashgen.language.decisive import deciding_steps
from flashgen.language.evaluate import evaluate, evaluate_operation
from flashgen.language.operations import SCORE, Load, Operation, kind_of

Array = NDArray[Any]
Tangent = Array | None  # None if the value does not depend on the seed
Rule = Callable[[Array, list[Array], list[Tangent]], Tangent]  # takes the result, the operands and their tangents
Rounding = Callable[[Any], Any]


def gathers(expression: sympy.Basic) -> tuple[Load, ...]:
    """Returns the distinct gathers from captures declared with grad=True, in the order of the expression."""
    nodes = sympy.preorder_traversal(expression)
    return tuple(dict.fromkeys(node for node in nodes if isinstance(node, Load) and node.capture.grad))


class Duals:
    """Evaluates a score function on a tile: the value and the tangents of each node, each computed once.

    values: an array or number for each symbol. captures: an array or number for each capture, by name, as for
    `evaluate`. rounding: if given, rounds the result of every float operation on the score, and its tangent. Operations
    on indices and captures alone stay exact, because an unfused implementation may hold them in float32 or integers.
    """

    def __init__(
        self, values: Mapping[sympy.Basic, Any], captures: Mapping[str, Any], rounding: Rounding | None = None
    ) -> None:
        self._values, self._captures, self._rounding = values, captures, rounding
        self._computed: dict[tuple[sympy.Basic, bool], Array] = {}
        self._steps: frozenset[sympy.Basic] = frozenset()

    def value(self, node: sympy.Basic) -> Array:
        """Returns the value of a node. It has size 1 along the indices that the node does not depend on."""
        self._steps |= deciding_steps(node)
        with np.errstate(all="ignore"):  # a Where evaluates both branches everywhere
            return self._value(node)

    def tangent(self, node: sympy.Basic, seed: sympy.Basic) -> Tangent:
        """Returns the derivative of a node by the seed, broadcast as little as possible; None if it is constant."""
        with np.errstate(all="ignore"):
            return self._tangent(node, seed, {})

    def _value(self, node: sympy.Basic, single: bool = False) -> Array:
        key = node, single and kind_of(node) == "float"
        if key not in self._computed:
            if isinstance(node, Operation):
                self._computed[key] = self._rounded(node, evaluate_operation(*key, self._value, self._steps))
            else:
                self._computed[key] = evaluate(node, self._values, self._captures)
        return self._computed[key]

    def _operands(self, node: Operation) -> list[Array]:
        operands = [self._value(operand) for operand in node.args]
        if isinstance(node, (ops.Arithmetic, ops.Transcendental)):  # a bool counts as 0 or 1, as in `evaluate`
            wide = np.float64 if "float" in map(kind_of, node.args) else np.int64
            operands = [np.asarray(operand).astype(wide, copy=False) for operand in operands]
        return operands

    def _tangent(self, node: sympy.Basic, seed: sympy.Basic, computed: dict[sympy.Basic, Tangent]) -> Tangent:
        if node == seed:
            return np.float64(1)  # type: ignore[return-value]
        if node not in computed:
            computed[node] = self._by_operands(node, seed, computed)
        return computed[node]

    def _by_operands(self, node: sympy.Basic, seed: sympy.Basic, computed: dict[sympy.Basic, Tangent]) -> Tangent:
        if not isinstance(node, Operation) or kind_of(node) != "float":
            return None
        tangents = [self._tangent(operand, seed, computed) for operand in node.args]
        if all(tangent is None for tangent in tangents):
            return None
        result = TANGENTS[type(node)](self._value(node), self._operands(node), tangents)
        return None if result is None else self._rounded(node, result)

    def _rounded(self, node: Operation, result: Any) -> Array:
        rounds = self._rounding is not None and kind_of(node) == "float" and SCORE in node.free_symbols
        return np.asarray(self._rounding(result) if rounds and self._rounding else result)


def _flat(_result: Array, _operands: list[Array], _tangents: list[Tangent]) -> Tangent:
    """The rule of step functions, integers and booleans: no dependence on the seed."""
    return None


def _smooth(partials: Callable[..., tuple[Any, ...]]) -> Rule:
    """Returns the chain rule. `partials` maps the result and the operands to the derivative by each operand."""

    def rule(result: Array, operands: list[Array], tangents: list[Tangent]) -> Tangent:
        pairs = zip(partials(result, *operands), tangents, strict=True)
        return sum(partial * tangent for partial, tangent in pairs if tangent is not None)

    return rule


def _select(_result: Array, operands: list[Array], tangents: list[Tangent]) -> Tangent:
    """The rule of Where: the tangent of the branch taken."""
    one, other = (0.0 if tangent is None else tangent for tangent in tangents[-2:])
    return np.where(operands[0], one, other)


def _extreme(beats: Callable[[Any, Any], Any]) -> Rule:
    """Returns the rule of a maximum or minimum: the tangent of the operand that `beats` the other.

    Where the second operand is NaN it is that of the first, and where both are equal it is the mean of the two.
    """

    def rule(_result: Array, operands: list[Array], tangents: list[Tangent]) -> Tangent:
        a, b = operands
        one, other = (0.0 if tangent is None else tangent for tangent in tangents)
        return np.where(a == b, (one + other) / 2, np.where(beats(a, b) | np.isnan(b), one, other))

    return rule


_LN2 = np.log(2)

# fmt: off
TANGENTS: dict[type[Operation], Rule] = {
    ops.Add: _smooth(lambda y, a, b: (1, 1)), ops.Sub: _smooth(lambda y, a, b: (1, -1)),
    ops.Mul: _smooth(lambda y, a, b: (b, a)), ops.Neg: _smooth(lambda y, a: (-1,)),
    ops.Abs: _smooth(lambda y, a: (np.sign(a),)),
    ops.Minimum: _extreme(np.less), ops.Maximum: _extreme(np.greater),
    ops.FloorDiv: _flat, ops.FloorMod: _smooth(lambda y, a, b: (1, -np.floor(a / b))),
    ops.ShiftLeft: _flat, ops.ShiftRight: _flat, ops.BitAnd: _flat, ops.BitOr: _flat, ops.BitXor: _flat,
    ops.Divide: _smooth(lambda y, a, b: (1 / b, -y / b)), ops.ToFloat: _smooth(lambda y, a: (1,)),
    ops.ToInt: _flat, ops.Floor: _flat,
    ops.Exp: _smooth(lambda y, a: (y,)), ops.Exp2: _smooth(lambda y, a: (y * _LN2,)),
    ops.Log: _smooth(lambda y, a: (1 / a,)), ops.Log2: _smooth(lambda y, a: (1 / (a * _LN2),)),
    ops.Tanh: _smooth(lambda y, a: (1 - y * y,)), ops.FastTanh: _smooth(lambda y, a: (1 - y * y,)),
    ops.Sigmoid: _smooth(lambda y, a: (y * (1 - y),)), ops.Sqrt: _smooth(lambda y, a: (0.5 / y,)),
    ops.Sin: _smooth(lambda y, a: (np.cos(a),)), ops.Cos: _smooth(lambda y, a: (-np.sin(a),)),
    ops.Detach: _flat, ops.Surrogate: _smooth(lambda y, a, b, c: (1, c, 0)),
    ops.Equal: _flat, ops.NotEqual: _flat, ops.Less: _flat, ops.LessEqual: _flat, ops.Greater: _flat,
    ops.GreaterEqual: _flat, ops.And: _flat, ops.Or: _flat, ops.Xor: _flat, ops.Not: _flat,
    ops.Where: _select,
    ops.Load: _flat,  # its indices are integers; a Load that is the seed is handled before the rules
}
# fmt: on
