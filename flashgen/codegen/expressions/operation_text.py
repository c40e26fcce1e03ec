"""Text of operations that are not a single operator or call: divisions, shifts, choices, conversions, loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from typing import Protocol

import sympy

from flashgen.analysis.integer_bounds import INT32_MAX, Bounds
from flashgen.codegen.expressions.precedence import (
    ATOM,
    BIT_AND,
    CLARIFIED,
    CONDITIONAL,
    OR,
    PRODUCT,
    SHIFT,
    SUM,
    UNARY,
)
from flashgen.language import operations as op
from flashgen.language.operations import Load, kind_of


class Printer(Protocol):
    """The interface by which operations print their operands: `printer.Printer` and its subclasses."""

    bounds: Bounds
    exact: Container[sympy.Basic]
    loose: Container[sympy.Basic]

    def text(self, node: sympy.Basic, around: int = CONDITIONAL) -> str: ...
    def as_float(self, node: sympy.Basic, around: int = CONDITIONAL) -> str: ...
    def as_long(self, node: sympy.Basic, around: int = CONDITIONAL) -> str: ...
    def printed(self, node: sympy.Basic) -> tuple[str, int]: ...
    def exactly(self, intrinsic: str, *operands: sympy.Basic) -> str: ...
    def fits_int(self, node: sympy.Basic) -> bool: ...
    def in_cpp(self, _node: sympy.Basic) -> bool: ...


def _divides_plainly(left: sympy.Basic, right: sympy.Basic, bounds: Bounds) -> bool:
    """Whether C++'s / and % equal floored division and modulo here, without division by zero."""
    return isinstance(right, sympy.Integer) and int(right) > 0 and bounds.limits(left)[0] >= 0


def is_64_bit(division: sympy.Basic) -> bool:
    """Whether a floored division or modulo has 64-bit integers: about 100 instructions, unless it is a shift."""
    bounds = Bounds()
    integers = all(kind_of(node) == "int" for node in division.args)
    return integers and not all(map(bounds.fit_int32, (division, *division.args)))


def _is_power_of_two(divisor: sympy.Integer) -> bool:
    """Whether a division by it is a shift. Signed / would add a correction for negative dividends; there are none."""
    return int(divisor).bit_count() == 1


def is_shift_or_mask(division: sympy.Basic) -> bool:
    """Whether a floored division or modulo is a single shift or bitwise and."""
    left, right = division.args
    return _divides_plainly(left, right, Bounds()) and _is_power_of_two(right)


def integer_operands(node: op.Operation) -> tuple[sympy.Basic, ...]:
    """Returns the operands that determine the C++ type of an integer operation."""
    if isinstance(node, op.Where):
        return node.args[1:]
    if isinstance(node, (op.ShiftLeft, op.ShiftRight)):
        return node.args[:1]
    return () if isinstance(node, op.ToInt) and kind_of(node.args[0]) != "int" else node.args


def _negate(printer: Printer, node: sympy.Basic) -> tuple[str, int]:
    (value,) = node.args
    widened = printer.in_cpp(node) and kind_of(node) == "int" and not printer.fits_int(node)
    return f"-{(printer.as_long if widened else printer.text)(value, ATOM)}", UNARY


def _floored(printer: Printer, node: sympy.Basic, primitive: str) -> str:
    """Returns a call of floor_divide or floor_modulo for int, or for long long."""
    wide = not all(map(printer.fits_int, (node, *node.args)))
    return f"{primitive}{'_long' if wide else ''}({', '.join(map(printer.text, node.args))})"


def _floor_divide(printer: Printer, node: sympy.Basic) -> tuple[str, int]:
    left, right = node.args
    if kind_of(node) == "float":
        return f"floorf({_quotient(printer, node)[0]})", ATOM
    if _divides_plainly(left, right, printer.bounds):
        if _is_power_of_two(right):
            return f"{printer.text(left, SHIFT)} >> {int(right).bit_length() - 1}", SHIFT
        return f"{printer.text(left, PRODUCT)} / {printer.text(right, UNARY)}", PRODUCT
    return _floored(printer, node, "floor_divide"), ATOM


def _floor_modulo(printer: Printer, node: sympy.Basic) -> tuple[str, int]:
    left, right = node.args
    if kind_of(node) == "float":
        floored = f"floorf({_quotient(printer, node)[0]})"
        if node in printer.exact:
            return f"{printer.as_float(left, SUM)} - __fmul_rn({printer.as_float(right)}, {floored})", SUM
        return f"{printer.as_float(left, PRODUCT)} - {printer.as_float(right, PRODUCT)} * {floored}", SUM
    if _divides_plainly(left, right, printer.bounds):
        if _is_power_of_two(right):
            return f"{printer.text(left, SHIFT)} & {int(right) - 1}", BIT_AND
        return f"{printer.text(left, PRODUCT)} % {printer.text(right, UNARY)}", PRODUCT
    return _floored(printer, node, "floor_modulo"), ATOM


def _quotient(printer: Printer, node: sympy.Basic) -> tuple[str, int]:
    """Returns the text of left / right as floats, for true and floored divisions."""
    left, right = node.args
    exact = node in printer.exact
    if not _is_constant(left) and (_has_exact_reciprocal(right) or (node in printer.loose and _is_constant(right))):
        if exact:
            return f"__fmul_rn({printer.as_float(left)}, 1.0f / {printer.as_float(right)})", ATOM
        return f"{printer.as_float(left, PRODUCT)} * (1.0f / {printer.as_float(right)})", PRODUCT
    if exact:
        return printer.exactly("__fdiv_rn", left, right), ATOM
    return f"{printer.as_float(left, PRODUCT)} / {printer.as_float(right, UNARY)}", PRODUCT


def _is_constant(node: sympy.Basic) -> bool:
    return isinstance(node, (sympy.Integer, sympy.Float)) and float(node) != 0


def _has_exact_reciprocal(divisor: sympy.Basic) -> bool:
    """Whether multiplying by 1 / divisor gives exactly the quotient, which holds only for powers of two."""
    if not _is_constant(divisor):
        return False
    mantissa, exponent = math.frexp(abs(float(divisor)))
    return mantissa == 0.5 and -125 <= exponent <= 126


def _shift(printer: Printer, node: sympy.Basic) -> tuple[str, int]:
    value, amount = node.args
    symbol = "<<" if isinstance(node, op.ShiftLeft) else ">>"
    text, own = printer.printed(value)
    if printer.in_cpp(node) and printer.fits_int(value) and not printer.fits_int(node):
        text, own = printer.as_long(value, PRODUCT), ATOM
    shifted = f"({text})" if own < SHIFT or own in CLARIFIED[SHIFT] else text
    return f"{shifted} {symbol} {printer.text(shift_amount(amount), SUM)}", SHIFT


def shift_amount(amount: sympy.Basic) -> sympy.Basic:
    """Returns the amount, clamped to 0 ... 31."""
    if isinstance(amount, sympy.Integer):
        return sympy.Integer(min(max(int(amount), 0), 31))
    return op.Minimum(op.Maximum(amount, sympy.Integer(0)), sympy.Integer(31))


def _where(printer: Printer, node: sympy.Basic) -> tuple[str, int]:
    condition, then, otherwise = node.args
    branch = printer.as_float if kind_of(node) == "float" else printer.text
    return f"{printer.text(condition, OR)} ? {branch(then, OR)} : {branch(otherwise, CONDITIONAL)}", CONDITIONAL


def _to_int(printer: Printer, node: sympy.Basic) -> tuple[str, int]:
    (value,) = node.args
    if kind_of(value) == "int":
        return printer.printed(value)
    return f"{'to_int' if kind_of(value) == 'float' else 'static_cast<int>'}({printer.text(value)})", ATOM


def _log(printer: Printer, node: sympy.Basic) -> tuple[str, int]:
    logarithm = f"log2_approx({printer.as_float(node.args[0])})"
    if node in printer.exact:
        return f"__fmul_rn({logarithm}, 0.693147181f)", ATOM
    return f"{logarithm} * 0.693147181f", PRODUCT


def clamped_index(index: sympy.Basic) -> sympy.Basic:
    """Returns an array index as a non-negative int. The load function clamps it to the array's size."""
    low, high = Bounds().limits(index)
    if low < 0:
        index = op.Maximum(index, sympy.Integer(0))
    return index if high <= INT32_MAX else op.Minimum(index, sympy.Integer(INT32_MAX))


def _load(printer: Printer, node: sympy.Basic) -> tuple[str, int]:
    indices = ", ".join(printer.text(clamped_index(index)) for index in node.indices)
    return f"load_{node.capture.name}(arguments, {indices})", ATOM


SPECIAL: dict[type, Callable[[Printer, sympy.Basic], tuple[str, int]]] = {
    op.Neg: _negate,
    op.Not: lambda p, n: (f"!{p.text(n.args[0], UNARY)}", UNARY),
    op.FloorDiv: _floor_divide,
    op.FloorMod: _floor_modulo,
    op.Divide: _quotient,
    op.ToFloat: lambda p, n: (p.as_float(n.args[0], UNARY), UNARY),
    op.Detach: lambda p, n: (p.as_float(n.args[0], UNARY), UNARY),
    op.Surrogate: lambda p, n: (p.as_float(n.args[0], UNARY), UNARY),
    op.ToInt: _to_int,
    op.ShiftLeft: _shift,
    op.ShiftRight: _shift,
    op.Exp: lambda p, n: (f"exp2_approx({p.as_float(n.args[0], PRODUCT)} * 1.44269504f)", ATOM),
    op.Log: _log,
    op.Where: _where,
    Load: _load,
}
