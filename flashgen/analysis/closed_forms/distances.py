"""Finds expressions that depend on a query and a key only through their difference, as the index of a relative bias."""

from __future__ import annotations

from functools import lru_cache

from flashgen.analysis.closed_forms.affine import Node, affine, contains
from flashgen.language import operations as ops

_COMPARISONS = (ops.Less, ops.LessEqual, ops.Greater, ops.GreaterEqual, ops.Equal, ops.NotEqual)


@lru_cache(maxsize=65536)
def depends_on_difference(node: Node) -> bool:
    """Returns whether a node is proven to be the same for all q and k with the same difference."""
    if not contains(node, ops.QUERY, ops.KEY):
        return True
    if isinstance(node, _COMPARISONS) and all(ops.kind_of(operand) == "int" for operand in node.args):
        node = ops.Sub(*node.args)
    form = affine(node)
    if form.terms.get(ops.QUERY, 0) + form.terms.get(ops.KEY, 0):
        return False
    rest = form.without(ops.QUERY).without(ops.KEY).atoms_with(ops.QUERY, ops.KEY)
    return all(depends_on_difference(operand) for atom in rest for operand in atom.args)
