"""Converts integer nodes to canonical affine forms: a constant plus integer multiples of atoms.

Atoms are symbols, scalar captures and everything that is not affine (a floor division, a product of unknowns, a
minimum, a load), with canonical operands. Equal values therefore mostly have equal forms, and differences cancel. The
arithmetic is that of unbounded integers: overflow of int32 in a kernel is not modelled. `x % c` becomes `x - c * (x //
c)` for a constant c, so that `q % B >= k % B` can be combined with `q // B == k // B`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import sympy

from flashgen.language import operations as ops

Node: TypeAlias = sympy.Basic


class Affine:
    """constant + sum of coefficient * atom. Immutable. `terms` maps each atom to its nonzero coefficient."""

    __slots__ = ("constant", "terms")

    def __init__(self, terms: Mapping[Node, int], constant: int = 0) -> None:
        self.terms: dict[Node, int] = {atom: factor for atom, factor in terms.items() if factor}
        self.constant = constant

    def __add__(self, other: Affine | int) -> Affine:
        if isinstance(other, int):
            return Affine(self.terms, self.constant + other)
        terms = dict(self.terms)
        for atom, factor in other.terms.items():
            terms[atom] = terms.get(atom, 0) + factor
        return Affine(terms, self.constant + other.constant)

    def __sub__(self, other: Affine | int) -> Affine:
        return self + (-other if isinstance(other, int) else other * -1)

    def __mul__(self, factor: int) -> Affine:
        return Affine({atom: own * factor for atom, own in self.terms.items()}, self.constant * factor)

    def __neg__(self) -> Affine:
        return self * -1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Affine) and self.terms == other.terms and self.constant == other.constant

    def __hash__(self) -> int:
        return hash((frozenset(self.terms.items()), self.constant))

    def __repr__(self) -> str:
        return f"Affine({self.node()})"

    @property
    def is_constant(self) -> bool:
        return not self.terms

    def without(self, atom: Node) -> Affine:
        """Returns the form without its multiple of `atom`."""
        return Affine({own: factor for own, factor in self.terms.items() if own != atom}, self.constant)

    def replace(self, atom: Node, form: Affine) -> Affine:
        """Returns the form with `form` in place of a top-level `atom`."""
        return self.without(atom) + form * self.terms.get(atom, 0)

    def mentions(self, *symbols: Node) -> bool:
        return any(contains(atom, *symbols) for atom in self.terms)

    def atoms_with(self, *symbols: Node) -> list[Node]:
        return [atom for atom in self.terms if contains(atom, *symbols)]

    def floor_divide(self, divisor: int) -> Affine:
        """Returns floor(self / divisor). Multiples leave the division, and nested divisions by constants are merged."""
        if divisor < 0:
            return (-self).floor_divide(-divisor)
        quotient = Affine(
            {atom: factor // divisor for atom, factor in self.terms.items() if factor % divisor == 0},
            self.constant // divisor,
        )
        rest = self - quotient * divisor
        if rest.is_constant:  # 0 <= constant < divisor
            return quotient
        return quotient + Affine({_quotient(rest, divisor): 1})

    def node(self) -> Node:
        """Returns the form as a node of the language, with terms in the order in which a person writes them."""
        ordered = sorted(self.terms.items(), key=lambda item: (item[1] < 0, *_reading_order(item[0])))
        if not ordered:
            return sympy.Integer(self.constant)
        constant = self.constant
        if ordered[0][1] < 0 and constant > 0:  # 5 - x rather than -x + 5
            result, constant = sympy.Integer(constant), 0
        else:
            atom, factor = ordered.pop(0)
            result = ops.Neg(_times(atom, -factor)) if factor < 0 else _times(atom, factor)
        for atom, factor in ordered:
            result = (ops.Sub if factor < 0 else ops.Add)(result, _times(atom, abs(factor)))
        if constant:
            result = (ops.Sub if constant < 0 else ops.Add)(result, sympy.Integer(abs(constant)))
        return result


def contains(node: Node, *symbols: Node) -> bool:
    """Returns whether any of the symbols occurs in the node."""
    free = node.free_symbols
    return any(symbol in free for symbol in symbols)


def constant(value: int) -> Affine:
    return Affine({}, int(value))


def atom(node: Node) -> Affine:
    return Affine({node: 1})


@lru_cache(maxsize=65536)
def affine(node: Node) -> Affine:
    """Returns the canonical form of an integer node, or of a boolean one counted as 0 or 1. Floats become atoms."""
    if isinstance(node, sympy.Integer):
        return constant(int(node))
    rule = _RULES.get(type(node)) if _is_integer(node) else None
    return rule(*node.args) if rule else atom(node)


def canonical(node: Node) -> Node:
    """Returns the node rewritten through its affine form."""
    return affine(node).node()


def _is_integer(node: Node) -> bool:
    return ops.kind_of(node) == "int"


def _quotient(rest: Affine, divisor: int) -> Node:
    if rest.constant == 0 and len(rest.terms) == 1:
        ((inner, factor),) = rest.terms.items()
        if factor == 1 and isinstance(inner, ops.FloorDiv) and _positive_constant(inner.args[1]):
            return ops.FloorDiv(inner.args[0], sympy.Integer(int(inner.args[1]) * divisor))
    return ops.FloorDiv(rest.node(), sympy.Integer(divisor))


def _positive_constant(node: Node) -> bool:
    return isinstance(node, sympy.Integer) and int(node) > 0


def _times(node: Node, factor: int) -> Node:
    return node if factor == 1 else ops.Mul(sympy.Integer(factor), node)


def _reading_order(node: Node) -> tuple[int, str]:
    """Orders positions first, then lengths, captures by name, and the rest by text: the same on every machine."""
    if isinstance(node, sympy.Symbol):
        if node in (ops.LEN_K, ops.LEN_Q):
            return 1, "0" if node == ops.LEN_K else "1"
        return 0, str(node.name)
    return (2, node.name) if isinstance(node, ops.Capture) else (3, str(node))


def _multiply(left: Node, right: Node) -> Affine:
    a, b = affine(left), affine(right)
    if a.is_constant:
        return b * a.constant
    if b.is_constant:
        return a * b.constant
    first, second = sorted((a.node(), b.node()), key=_reading_order)
    return atom(ops.Mul(first, second))


def _floor_divide(left: Node, right: Node) -> Affine:
    a, b = affine(left), affine(right)
    if b.is_constant and b.constant:
        return a.floor_divide(b.constant)
    return atom(ops.FloorDiv(a.node(), b.node()))


def _floor_modulo(left: Node, right: Node) -> Affine:
    a, b = affine(left), affine(right)
    if b.is_constant and b.constant:
        return a - a.floor_divide(b.constant) * b.constant
    return atom(ops.FloorMod(a.node(), b.node()))


def _extreme(kind: type[ops.Operation], pick: Callable[[int, int], int]) -> Callable[[Node, Node], Affine]:
    def rule(left: Node, right: Node) -> Affine:
        a, b = affine(left), affine(right)
        difference = a - b
        if difference.is_constant:
            return b + pick(difference.constant, 0)
        first, second = sorted((a.node(), b.node()), key=_extreme_order)
        return atom(kind(first, second))

    return rule


def _extreme_order(node: Node) -> tuple[int, int, str]:
    """Orders constants first, then lengths, then the rest: max(0, x), min(len_k, x)."""
    if isinstance(node, sympy.Integer):
        return 0, 0, ""
    return 1, 0 if node in (ops.LEN_K, ops.LEN_Q) else 1, str(node)


def _absolute(node: Node) -> Affine:
    form = affine(node)
    if form.is_constant:
        return constant(abs(form.constant))
    flipped = -form
    return atom(ops.Abs(min(form.node(), flipped.node(), key=str)))


def _shift_left(left: Node, right: Node) -> Affine:
    a, b = affine(left), affine(right)
    if b.is_constant and 0 <= b.constant < 31:
        return a * (1 << b.constant)
    return atom(ops.ShiftLeft(a.node(), b.node()))


def _shift_right(left: Node, right: Node) -> Affine:
    a, b = affine(left), affine(right)
    if b.is_constant and 0 <= b.constant < 31:
        return a.floor_divide(1 << b.constant)
    return atom(ops.ShiftRight(a.node(), b.node()))


def _bit_and(left: Node, right: Node) -> Affine:
    """Converts x & (2**n - 1) to x % 2**n, which also holds in two's complement."""
    a, b = affine(left), affine(right)
    if a.is_constant and b.is_constant:
        return constant(a.constant & b.constant)
    if a.is_constant:
        a, b = b, a
    if b.is_constant and b.constant >= 0 and b.constant & (b.constant + 1) == 0:
        modulus = b.constant + 1
        return a - a.floor_divide(modulus) * modulus
    return atom(ops.BitAnd(a.node(), b.node()))


_RULES: dict[type[Any], Callable[..., Affine]] = {
    ops.Add: lambda left, right: affine(left) + affine(right),
    ops.Sub: lambda left, right: affine(left) - affine(right),
    ops.Neg: lambda operand: -affine(operand),
    ops.Mul: _multiply,
    ops.FloorDiv: _floor_divide,
    ops.FloorMod: _floor_modulo,
    ops.Abs: _absolute,
    ops.Minimum: _extreme(ops.Minimum, min),
    ops.Maximum: _extreme(ops.Maximum, max),
    ops.ShiftLeft: _shift_left,
    ops.ShiftRight: _shift_right,
    ops.BitAnd: _bit_and,
    ops.ToInt: lambda operand: affine(operand) if ops.kind_of(operand) != "float" else atom(ops.ToInt(operand)),
}
