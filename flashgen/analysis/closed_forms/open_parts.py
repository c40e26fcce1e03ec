"""What is certain of a predicate that an array decides for few keys, as the tree of a draft does behind its prefix.

A part that reads an array at a query or a key is open: a closed form knows nothing of it. With true in the place of
each open part a predicate allows all that it may allow, with false all that it does whatever the array holds (the other
way round under a negation). The first bounds what is visited, the second what needs no mask.
"""

from __future__ import annotations

from collections.abc import Callable

import sympy

from flashgen.analysis.closed_forms.affine import Node
from flashgen.language import operations as ops


def settled(node: Node, is_open: Callable[[ops.Load], bool], value: bool) -> Node:
    """The predicate with its open parts chosen so that it is as true, or as false, as it may be."""
    if not any(is_open(load) for load in node.atoms(ops.Load)):
        return node
    if isinstance(node, ops.Not):
        return ops.Not(settled(node.args[0], is_open, not value))
    if isinstance(node, (ops.And, ops.Or)):
        return type(node)(*(settled(operand, is_open, value) for operand in node.args))
    return sympy.true if value else sympy.false
