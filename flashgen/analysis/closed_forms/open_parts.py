"""Bounds of a predicate in which an array decides about few keys, as the tree of a draft does after its prefix.

A part that reads an array at a query or a key is open: a closed form knows nothing about it. With every open part
replaced by true, the predicate allows all that it may allow; with false, it allows only what it allows whatever the
array holds. Under a negation the two are exchanged. The first predicate bounds the visited tiles, and the second those
that need no mask.
"""

from __future__ import annotations

from collections.abc import Callable

import sympy

from flashgen.analysis.closed_forms.affine import Node
from flashgen.language import operations as ops


def replace_open_parts(node: Node, is_open: Callable[[ops.Load], bool], value: bool) -> Node:
    """Returns the predicate with its open parts replaced so that it is true, or false, as often as possible."""
    if not any(is_open(load) for load in node.atoms(ops.Load)):
        return node
    if isinstance(node, ops.Not):
        return ops.Not(replace_open_parts(node.args[0], is_open, not value))
    if isinstance(node, (ops.And, ops.Or)):
        return type(node)(*(replace_open_parts(operand, is_open, value) for operand in node.args))
    return sympy.true if value else sympy.false
