"""Expression -> CUDA text: ordered tables, precedence-aware, so that the text is what a person would write."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import sympy

from flashgen.analysis.intervals import interval_of
from flashgen.codegen.arguments import member_name
from flashgen.language import operations as op
from flashgen.language.operations import Capture, Load, kind_of

C_TYPES = {"bool": "bool", "int": "int", "float": "float"}

# Binding strength of C++ operators, weakest first.
_CONDITIONAL, _OR, _AND, _BIT_OR, _BIT_XOR, _BIT_AND, _EQUALITY, _RELATION, _SHIFT, _SUM, _PRODUCT, _UNARY, _ATOM = (
    range(13)
)

_INFIX: dict[type, tuple[str, int]] = {
    op.Add: ("+", _SUM),
    op.Sub: ("-", _SUM),
    op.Mul: ("*", _PRODUCT),
    op.BitAnd: ("&", _BIT_AND),
    op.BitOr: ("|", _BIT_OR),
    op.BitXor: ("^", _BIT_XOR),
    op.Equal: ("==", _EQUALITY),
    op.NotEqual: ("!=", _EQUALITY),
    op.Xor: ("!=", _EQUALITY),
    op.Less: ("<", _RELATION),
    op.LessEqual: ("<=", _RELATION),
    op.Greater: (">", _RELATION),
    op.GreaterEqual: (">=", _RELATION),
    # Not && and ||: a mask is evaluated for every score of a tile, and their branches cost more than they save.
    op.And: ("&", _BIT_AND),
    op.Or: ("|", _BIT_OR),
}

# Operators whose operands read better in parentheses though precedence does not ask for them; gcc warns likewise.
_COMPARED = {_EQUALITY, _RELATION, _SHIFT, _SUM}
_CLARIFIED = {_BIT_OR: {_BIT_AND, *_COMPARED}, _BIT_AND: _COMPARED, _SHIFT: {_SUM}}

_CALLS: dict[type, dict[str, str]] = {
    op.Abs: {"int": "abs", "float": "fabsf"},
    op.Minimum: {"int": "min", "float": "fminf"},
    op.Maximum: {"int": "max", "float": "fmaxf"},
    op.Floor: {"float": "floorf"},
    op.Exp2: {"float": "exp2_approx"},
    op.Log2: {"float": "log2_approx"},
    op.Tanh: {"float": "tanh_by_exp2"},
    op.FastTanh: {"float": "tanh_approx"},
    op.Sigmoid: {"float": "sigmoid_by_exp2"},
    op.Sqrt: {"float": "sqrtf"},
    op.Sin: {"float": "sinf"},
    op.Cos: {"float": "cosf"},
}


def float_literal(value: float) -> str:
    """A C++ float literal that reads back as `value` rounded to float32."""
    rounded = struct.unpack("f", struct.pack("f", value))[0] if abs(value) < 3.5e38 else math.copysign(math.inf, value)
    if rounded in (float("inf"), float("-inf")):
        return "infinity()" if rounded > 0 else "minus_infinity()"
    text = f"{rounded:.9g}"
    return f"{text}f" if any(mark in text for mark in ".e") else f"{text}.0f"


def _divides_plainly(left: sympy.Basic, right: sympy.Basic) -> bool:
    """Whether C's own / and % are the floored ones, and never divide by zero."""
    return is_nonnegative(left) and isinstance(right, sympy.Integer) and int(right) > 0


def _is_distance(left: sympy.Basic, right: sympy.Basic) -> bool:
    """Whether `left <= right` (or <) says that an integer is at most so far from 0."""
    limited = isinstance(right, sympy.Integer) and 1 <= int(right) < 2**30
    return limited and isinstance(left, op.Abs) and kind_of(left) == "int"


def _is_power_of_two(divisor: sympy.Integer) -> bool:
    """Whether dividing by it is a shift: C's signed / would correct for dividends below 0, which there are none of."""
    return int(divisor).bit_count() == 1


def is_shift_or_mask(division: sympy.Basic) -> bool:
    """Whether a floored division or modulo is one instruction."""
    left, right = division.args
    return _divides_plainly(left, right) and _is_power_of_two(right)


def is_nonnegative(node: sympy.Basic) -> bool:
    """Whether an integer node is known to be >= 0 (indices and lengths are), so that C's division is a floored one."""
    if isinstance(node, sympy.Integer):
        return int(node) >= 0
    if isinstance(node, sympy.Symbol):
        return True
    if isinstance(node, (op.Add, op.Mul, op.FloorDiv, op.Minimum, op.ShiftRight)):
        return all(is_nonnegative(operand) for operand in node.args)
    if isinstance(node, (op.Maximum, op.BitAnd)):
        return any(is_nonnegative(operand) for operand in node.args)
    if isinstance(node, op.FloorMod):
        return isinstance(node.args[1], sympy.Integer) and int(node.args[1]) > 0
    return isinstance(node, op.Abs)


class Printer:
    """Prints nodes as CUDA expressions.

    `names` maps nodes that already stand in a variable to its name; `products` maps nodes to the text of a product
    that stands for them.
    """

    on_numbers = True  # operands are C++'s own numbers, for which there are shorter forms

    def __init__(
        self, names: Mapping[sympy.Basic, str] | None = None, products: Mapping[sympy.Basic, str] | None = None
    ) -> None:
        self.names, self.products = dict(names or {}), dict(products or {})

    def text(self, node: sympy.Basic, around: int = _CONDITIONAL) -> str:
        """The expression, in parentheses where an operator of strength `around` binds tighter than its own."""
        text, strength = self._print(node)
        return f"({text})" if strength < around else text

    def as_float(self, node: sympy.Basic, around: int = _CONDITIONAL) -> str:
        """The expression as a float: integers and booleans are cast."""
        if isinstance(node, sympy.Integer):
            return self.text(sympy.Float(int(node)), around)
        return self.text(node, around) if kind_of(node) == "float" else f"static_cast<float>({self.text(node)})"

    def _print(self, node: sympy.Basic) -> tuple[str, int]:
        if node in self.names:
            return self.names[node], _ATOM
        if node in self.products:
            return self.products[node], _PRODUCT
        if self.on_numbers and isinstance(node, (op.LessEqual, op.Less)) and _is_distance(*node.args):
            limit = int(node.args[1]) - isinstance(node, op.Less)
            return f"magnitude_within({self.text(node.args[0].args[0])}, {limit})", _ATOM
        if isinstance(node, tuple(_INFIX)):
            return self._infix(node, *_INFIX[type(node)])
        if isinstance(node, tuple(_CALLS)):
            return self._call(node), _ATOM
        handler = _SPECIAL.get(type(node))
        if handler:
            return handler(self, node)
        leaf = self._leaf(node)
        return leaf, _UNARY if leaf.startswith("-") else _ATOM

    def _infix(self, node: sympy.Basic, symbol: str, strength: int) -> tuple[str, int]:
        left, right = node.args
        clarified = _CLARIFIED.get(strength, set())
        parts = []
        for operand, minimum in ((left, strength), (right, strength + 1)):
            text, own = self._print(operand)
            regrouped = own == strength and strength in (_BIT_AND, _BIT_OR)  # they associate: no parentheses needed
            needs = (own < minimum and not regrouped) or own in clarified
            if kind_of(operand) == "bool" and kind_of(node) != "bool":
                text, needs = f"static_cast<int>({text})", False
            parts.append(f"({text})" if needs else text)
        return f"{parts[0]} {symbol} {parts[1]}", strength

    def _call(self, node: sympy.Basic) -> str:
        kind = kind_of(node)
        operand = self.as_float if kind == "float" else self.text
        return f"{_CALLS[type(node)][kind]}({', '.join(operand(argument) for argument in node.args)})"

    def _leaf(self, node: sympy.Basic) -> str:
        if isinstance(node, Capture):
            return f"arguments.{member_name(node)}"
        if isinstance(node, (sympy.Float, sympy.core.numbers.Infinity, sympy.core.numbers.NegativeInfinity)):
            return float_literal(float(node))
        if node in (sympy.true, sympy.false):
            return "true" if node == sympy.true else "false"
        if node == -(2**31):  # C++ reads -2147483648 as minus a long
            return "(-2147483647 - 1)"
        if node in (op.LEN_Q, op.LEN_K):
            return f"arguments.{node}"
        return str(node)


def _floor_divide(printer: Printer, node: sympy.Basic) -> tuple[str, int]:
    left, right = node.args
    if kind_of(node) == "float":
        return f"floorf({printer.as_float(left, _PRODUCT)} / {printer.as_float(right, _UNARY)})", _ATOM
    if _divides_plainly(left, right):
        if _is_power_of_two(right):
            return f"{printer.text(left, _SHIFT)} >> {int(right).bit_length() - 1}", _SHIFT
        return f"{printer.text(left, _PRODUCT)} / {printer.text(right, _UNARY)}", _PRODUCT
    return f"floor_divide({printer.text(left)}, {printer.text(right)})", _ATOM


def _floor_modulo(printer: Printer, node: sympy.Basic) -> tuple[str, int]:
    left, right = node.args
    if kind_of(node) == "float":
        quotient = printer._print(op.FloorDiv(left, right))[0]
        return f"{printer.as_float(left, _PRODUCT)} - {printer.as_float(right, _PRODUCT)} * {quotient}", _SUM
    if _divides_plainly(left, right):
        if _is_power_of_two(right):
            return f"{printer.text(left, _SHIFT)} & {int(right) - 1}", _BIT_AND
        return f"{printer.text(left, _PRODUCT)} % {printer.text(right, _UNARY)}", _PRODUCT
    return f"floor_modulo({printer.text(left)}, {printer.text(right)})", _ATOM


def _divide(printer: Printer, node: sympy.Basic) -> tuple[str, int]:
    left, right = node.args
    numbers = (sympy.Integer, sympy.Float)
    if (
        isinstance(right, numbers) and right != 0 and not isinstance(left, numbers)
    ):  # a product with a constant is much cheaper
        return f"{printer.as_float(left, _PRODUCT)} * (1.0f / {printer.as_float(right)})", _PRODUCT
    return f"{printer.as_float(left, _PRODUCT)} / {printer.as_float(right, _UNARY)}", _PRODUCT


def _shift(printer: Printer, node: sympy.Basic) -> tuple[str, int]:
    value, amount = node.args
    symbol = "<<" if isinstance(node, op.ShiftLeft) else ">>"
    text, own = printer._print(value)
    shifted = f"({text})" if own < _SHIFT or own in _CLARIFIED[_SHIFT] else text
    if isinstance(amount, sympy.Integer):
        return f"{shifted} {symbol} {min(max(int(amount), 0), 31)}", _SHIFT
    return f"{shifted} {symbol} min(max({printer.text(amount)}, 0), 31)", _SHIFT


def _where(printer: Printer, node: sympy.Basic) -> tuple[str, int]:
    condition, then, otherwise = node.args
    branch = printer.as_float if kind_of(node) == "float" else printer.text
    return f"{printer.text(condition, _OR)} ? {branch(then, _OR)} : {branch(otherwise, _CONDITIONAL)}", _CONDITIONAL


def from_zero(index: sympy.Basic) -> sympy.Basic:
    """An index that is not below 0; what reads by it clamps it from above, to the size that only the call knows."""
    known = is_nonnegative(index) or _never_below_zero(index)
    return index if known else op.Maximum(index, sympy.Integer(0))


def _never_below_zero(index: sympy.Basic) -> bool:
    """Whether the bounds of the index, over all positions, prove it >= 0."""
    if index.atoms(Capture):
        return False
    everywhere = (np.int64(0), np.int64(2**31 - 1))
    return bool(interval_of(index, dict.fromkeys(index.free_symbols, everywhere)).low >= 0)


def _load(printer: Printer, node: sympy.Basic) -> tuple[str, int]:
    indices = ", ".join(printer.text(from_zero(index)) for index in node.indices)
    return f"load_{node.capture.name}(arguments, {indices})", _ATOM


_SPECIAL: dict[type, Callable[[Printer, sympy.Basic], tuple[str, int]]] = {
    op.Neg: lambda p, n: (f"-{p.text(n.args[0], _ATOM)}", _UNARY),
    op.Not: lambda p, n: (f"!{p.text(n.args[0], _UNARY)}", _UNARY),
    op.FloorDiv: _floor_divide,
    op.FloorMod: _floor_modulo,
    op.Divide: _divide,
    op.ToFloat: lambda p, n: (p.as_float(n.args[0], _UNARY), _UNARY),
    op.ToInt: lambda p, n: (
        f"to_int({p.as_float(n.args[0])})"
        if kind_of(n.args[0]) == "float"
        else f"static_cast<int>({p.text(n.args[0])})",
        _ATOM,
    ),
    op.ShiftLeft: _shift,
    op.ShiftRight: _shift,
    op.Exp: lambda p, n: (f"exp2_approx({p.as_float(n.args[0], _PRODUCT)} * 1.44269504f)", _ATOM),
    op.Log: lambda p, n: (f"log2_approx({p.as_float(n.args[0])}) * 0.693147181f", _PRODUCT),
    op.Where: _where,
    Load: _load,
}

PRINTED: frozenset[type] = frozenset(_INFIX) | frozenset(_CALLS) | frozenset(_SPECIAL)


def references(results: tuple[sympy.Basic, ...]) -> Counter[sympy.Basic]:
    """How often each operation is used by distinct operations (or results); operands come before their users."""
    uses: Counter[sympy.Basic] = Counter()
    order: dict[sympy.Basic, None] = {}

    def visit(node: sympy.Basic) -> None:
        if not isinstance(node, op.Operation):
            return
        uses[node] += 1
        if uses[node] == 1:
            for operand in node.args:
                visit(operand)
            order[node] = None

    for result in results:
        visit(result)
    return Counter({node: uses[node] for node in order})


def worth_sharing(node: sympy.Basic) -> bool:
    """Whether a repeated node costs enough to stand in a variable: a load, a division, or two operations or more."""
    return isinstance(node, (Load, op.FloorDiv, op.FloorMod, op.Divide)) or any(
        isinstance(operand, op.Operation) for operand in node.args
    )


def statements(*results: sympy.Basic, products: Mapping[sympy.Basic, str] | None = None) -> tuple[list[str], list[str]]:
    """Declarations of the subexpressions that are used more than once, and the text of each result in their terms.

    products: the text of a product for each node that shall be printed as that (see `folding`).
    """
    printer = Printer(products=products)
    declarations: list[str] = []
    for node, uses in references(results).items():
        if uses > 1 and worth_sharing(node):
            name = f"x{len(declarations)}"
            declarations.append(f"const {C_TYPES[kind_of(node)]} {name} = {printer.text(node)};")
            printer.names[node] = name
    return declarations, [printer.text(result) for result in results]
