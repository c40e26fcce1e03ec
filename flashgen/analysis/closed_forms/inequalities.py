"""Proves inequalities between nodes, and simplifies minima and maxima with them.

The facts used: indices, lengths and the first rows of tiles are >= 0 and at most the largest length that a call accepts
(plus the rest of a tile for an index), and the last row of a tile is not before its first. A scalar capture may have
any value, also a negative one. A proof that is found holds for all values; if none is found, nothing follows.
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from flashgen.analysis.closed_forms.affine import Affine, Node, affine, atom
from flashgen.language import operations as ops

# The first and last row of a query tile, and the first and last key of a key tile, both included.
Q_FIRST, Q_LAST, K_FIRST, K_LAST = sympy.symbols("q_first q_last k_first k_last", integer=True)

_NEVER_NEGATIVE = {*ops.INDICES, ops.LEN_Q, ops.LEN_K, Q_FIRST, K_FIRST}
_LARGEST = {
    **dict.fromkeys((ops.LEN_Q, ops.LEN_K), ops.LONGEST),
    **dict.fromkeys((ops.QUERY, ops.KEY, Q_FIRST, Q_LAST, K_FIRST, K_LAST), ops.LONGEST + ops.OVERHANG - 1),
}
_LAST_OF = {Q_LAST: Q_FIRST, K_LAST: K_FIRST}
_PROOF_DEPTH = 8


def at_most(smaller: Node | Affine, larger: Node | Affine) -> bool:
    """Returns whether smaller <= larger is proven for all values."""
    return nonnegative(_form(larger) - _form(smaller))


def nonnegative(form: Affine, depth: int = _PROOF_DEPTH) -> bool:
    """Returns whether form >= 0 is proven for all values."""
    if depth == 0:
        return False
    for node, factor in form.terms.items():
        if isinstance(node, (ops.Minimum, ops.Maximum)):
            choices = (nonnegative(form.replace(node, affine(operand)), depth - 1) for operand in node.args)
            one_is_enough = isinstance(node, ops.Maximum) == (factor > 0)
            return any(choices) if one_is_enough else all(choices)
    quotients = [node for node in form.terms if _divides_by_positive_constant(node)]
    if quotients:
        return any(nonnegative(weaker, depth - 1) for weaker in _without_quotient(form, quotients))
    return _symbols_nonnegative(form)


def _form(value: Node | Affine) -> Affine:
    return value if isinstance(value, Affine) else affine(value)


def _divides_by_positive_constant(node: Node) -> bool:
    return isinstance(node, ops.FloorDiv) and isinstance(node.args[1], sympy.Integer) and int(node.args[1]) > 0


def _without_quotient(form: Affine, quotients: list[Node]) -> Iterable[Affine]:
    """Yields forms with one floor division fewer. If any of them is nonnegative, so is `form`."""
    for up in quotients:
        for down in quotients:
            if up.args[1] == down.args[1] and form.terms[up] > 0 > form.terms[down] and at_most(*_numerators(down, up)):
                shared = min(form.terms[up], -form.terms[down])  # x // c - y // c >= 0 if y <= x
                yield form - Affine({up: shared, down: -shared})
    for node in quotients:
        numerator, divisor, factor = affine(node.args[0]), int(node.args[1]), form.terms[node]
        rest = form.without(node)
        # Multiplied by the divisor c: x - c + 1 <= c * (x // c) <= x.
        yield rest * divisor + (numerator + (1 - divisor if factor > 0 else 0)) * factor
        if factor > 0 and nonnegative(numerator, 2):
            yield rest


def _numerators(*quotients: Node) -> tuple[Node, ...]:
    return tuple(quotient.args[0] for quotient in quotients)


def _symbols_nonnegative(form: Affine) -> bool:
    for last, first in _LAST_OF.items():
        if form.terms.get(last, 0) > 0:  # last = first + (something >= 0)
            form = form.replace(last, atom(first))
    minimum = form.constant
    for node, factor in form.terms.items():
        if factor < 0 and node in _LARGEST:
            minimum += factor * _LARGEST[node]
        elif factor < 0 or not (node in _NEVER_NEGATIVE or isinstance(node, ops.Abs)):
            return False
    return minimum >= 0


def minimum_of(nodes: Iterable[Node]) -> Node:
    """Returns the minimum of the nodes, without those that are never the smallest."""
    return _extreme_of(nodes, ops.Minimum)


def maximum_of(nodes: Iterable[Node]) -> Node:
    """Returns the maximum of the nodes, without those that are never the largest."""
    return _extreme_of(nodes, ops.Maximum)


def _extreme_of(nodes: Iterable[Node], kind: type[ops.Operation]) -> Node:
    def dominates(winner: Node, loser: Node) -> bool:
        return at_most(winner, loser) if kind is ops.Minimum else at_most(loser, winner)

    kept: list[Node] = []
    for node in (leaf for root in nodes for leaf in _leaves(root, kind)):
        if not any(dominates(other, node) for other in kept):
            kept = [other for other in kept if not dominates(node, other)] + [node]
    return _factored(kept, kind) or _nested(kept, kind)


def _factored(nodes: list[Node], kind: type[ops.Operation]) -> Node | None:
    """Factors max(min(c, a), min(c, b)) into min(c, max(a, b)), and the dual."""
    dual = ops.Maximum if kind is ops.Minimum else ops.Minimum
    families = [_leaves(node, dual) for node in nodes]
    shared = [leaf for leaf in families[0] if all(leaf in family for family in families[1:])]
    rests = [[leaf for leaf in family if leaf not in shared] for family in families]
    if len(nodes) == 1 or not shared or not all(rests):
        return None
    inner = _extreme_of([_nested(rest, dual) for rest in rests], kind)
    return _extreme_of([*shared, inner], dual)


def _nested(nodes: list[Node], kind: type[ops.Operation]) -> Node:
    first, *others = sorted(nodes, key=_clamp_order)
    for node in others:
        first = kind(first, node)
    return first


def _leaves(node: Node, kind: type[ops.Operation]) -> list[Node]:
    if isinstance(node, kind):
        return [leaf for operand in node.args for leaf in _leaves(operand, kind)]
    return [affine(node).node()]


def _clamp_order(node: Node) -> tuple[int, str]:
    """Puts the constant end of a clamp first: max(0, x), min(len_k, x)."""
    return (0 if isinstance(node, sympy.Integer) else 1 if node in (ops.LEN_Q, ops.LEN_K) else 2), str(node)
