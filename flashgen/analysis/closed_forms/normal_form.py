"""Converts a predicate to a disjunction of conjunctions of literals: affine comparisons and opaque booleans.

Negations are pushed down to the comparisons and invert them. Absolute values, minima, maxima and `where`s that contain
the solved index are split into the comparisons that they stand for.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import sympy

from flashgen.analysis.closed_forms.affine import Affine, Node, affine, contains
from flashgen.language import operations as ops

MAX_ALTERNATIVES = 64


class TooManyAlternatives(Exception):
    """Raised if a predicate has more alternatives than the limit."""


@dataclass(frozen=True)
class Literal:
    """form >= 0, or form == 0 with `equality`, or the boolean `origin` itself if `form` is None.

    `origin` is the comparison as it was traced. The literal remains valid if the analysis replaces `form`.
    """

    form: Affine | None
    equality: bool
    origin: Node


Conjunction = tuple[Literal, ...]
Alternatives = tuple[Conjunction, ...]
ALWAYS: Alternatives = ((),)
NEVER: Alternatives = ()


def alternatives(node: Node, solved: Node) -> Alternatives:
    """Returns the predicate as alternatives, to be solved for the index `solved`. Raises TooManyAlternatives."""
    return _Normaliser(solved).split(node, True)


def _either(*choices: Alternatives) -> Alternatives:
    found = tuple(dict.fromkeys(conjunction for choice in choices for conjunction in choice))
    if () in found:
        return ALWAYS
    if len(found) > MAX_ALTERNATIVES:
        raise TooManyAlternatives
    return found


def _both(left: Alternatives, right: Alternatives) -> Alternatives:
    return _either(tuple(tuple(dict.fromkeys(a + b)) for a, b in product(left, right)))


class _Normaliser:
    def __init__(self, solved: Node) -> None:
        self.solved = solved

    def split(self, node: Node, positive: bool) -> Alternatives:
        """Returns the alternatives of the node, or of its negation if `positive` is false."""
        if node in (sympy.true, sympy.false):
            return ALWAYS if (node == sympy.true) == positive else NEVER
        if isinstance(node, ops.Not):
            return self.split(node.args[0], not positive)
        if isinstance(node, (ops.And, ops.Or)):
            join = _both if isinstance(node, ops.And) == positive else _either
            return join(*(self.split(operand, positive) for operand in node.args))
        if isinstance(node, ops.Xor):
            return self.differ(node.args, positive)
        if isinstance(node, ops.Where):
            condition, then, otherwise = node.args
            return self.choose(condition, self.split(then, positive), self.split(otherwise, positive))
        if type(node) in _COMPARISONS:
            return self.compare(node, positive)
        return ((Literal(None, False, node if positive else ops.Not(node)),),)

    def differ(self, operands: tuple[Node, ...], positive: bool) -> Alternatives:
        left, right = operands
        return _either(
            _both(self.split(left, True), self.split(right, not positive)),
            _both(self.split(left, False), self.split(right, positive)),
        )

    def choose(self, condition: Node, then: Alternatives, otherwise: Alternatives) -> Alternatives:
        return _either(
            _both(self.split(condition, True), then),
            _both(self.split(condition, False), otherwise),
        )

    def compare(self, node: Node, positive: bool) -> Alternatives:
        kinds = {ops.kind_of(operand) for operand in node.args}
        if kinds == {"bool"} and isinstance(node, (ops.Equal, ops.NotEqual)):
            return self.differ(node.args, isinstance(node, ops.NotEqual) == positive)
        if "float" in kinds:
            return ((Literal(None, False, node if positive else ops.Not(node)),),)
        relation = type(node) if positive else _OPPOSITE[type(node)]
        difference = affine(node.args[0]) - affine(node.args[1])
        origin = relation(*node.args)
        if relation is ops.Equal:
            return self.equal(difference, origin)
        if relation is ops.NotEqual:
            return _either(self.at_least(difference - 1, origin), self.at_least(-difference - 1, origin))
        if relation in (ops.Less, ops.LessEqual):
            difference = -difference
        strict = relation in (ops.Less, ops.Greater)
        return self.at_least(difference - 1 if strict else difference, origin)

    def equal(self, form: Affine, origin: Node) -> Alternatives:
        if form.is_constant:
            return ALWAYS if form.constant == 0 else NEVER
        if any(isinstance(node, _SPLIT) and contains(node, self.solved) for node in form.terms):
            return _both(self.at_least(form, origin), self.at_least(-form, origin))
        return ((Literal(form, True, origin),),)

    def at_least(self, form: Affine, origin: Node) -> Alternatives:
        """Returns the alternatives of form >= 0, with the splits that solving needs or that add no alternative."""
        if form.is_constant:
            return ALWAYS if form.constant >= 0 else NEVER
        for node, factor in form.terms.items():
            if not isinstance(node, _SPLIT):
                continue
            is_needed = contains(node, self.solved)
            if isinstance(node, ops.Where):
                if is_needed:
                    sides = (self.at_least(form.replace(node, affine(value)), origin) for value in node.args[1:])
                    return self.choose(node.args[0], *sides)
                continue
            all_hold = isinstance(node, ops.Minimum) == (factor > 0)
            if is_needed or all_hold:
                join = _both if all_hold else _either
                return join(*(self.at_least(form.replace(node, value), origin) for value in _values(node)))
        return ((Literal(form, False, origin),),)


def _values(node: Node) -> tuple[Affine, Affine]:
    """Returns the two values of which a minimum or maximum selects one; for an absolute value, x and -x."""
    first = affine(node.args[0])
    return (first, -first) if isinstance(node, ops.Abs) else (first, affine(node.args[1]))


_SPLIT = (ops.Abs, ops.Minimum, ops.Maximum, ops.Where)
_OPPOSITE = {
    ops.Equal: ops.NotEqual, ops.NotEqual: ops.Equal, ops.Less: ops.GreaterEqual, ops.GreaterEqual: ops.Less,
    ops.Greater: ops.LessEqual, ops.LessEqual: ops.Greater,
}  # fmt: skip
_COMPARISONS = frozenset(_OPPOSITE)
