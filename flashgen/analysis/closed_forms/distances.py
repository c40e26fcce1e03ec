"""What depends on a query and a key only by how far they are apart: the index of a relative bias."""

from __future__ import annotations

from functools import lru_cache

from flashgen.analysis.closed_forms.affine import Node, affine, contains
from flashgen.language import operations as ops

_COMPARISONS = (ops.Less, ops.LessEqual, ops.Greater, ops.GreaterEqual, ops.Equal, ops.NotEqual)


@lru_cache(maxsize=65536)
def is_of_distance(node: Node) -> bool:
    """Whether a node is proven to be the same for all q and k whose difference is the same."""
    if not contains(node, ops.QUERY, ops.KEY):
        return True
    if isinstance(node, _COMPARISONS) and all(ops.kind_of(operand) == "int" for operand in node.args):
        node = ops.Sub(*node.args)
    form = affine(node)
    if form.terms.get(ops.QUERY, 0) + form.terms.get(ops.KEY, 0):
        return False
    rest = form.without(ops.QUERY).without(ops.KEY).atoms_with(ops.QUERY, ops.KEY)
    return all(is_of_distance(operand) for atom in rest for operand in atom.args)
