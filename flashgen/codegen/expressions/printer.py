"""Expression -> CUDA text, with parentheses by operator precedence, as a person would write it.

Integers are int if int provably holds them in every call, else long long. If long long may overflow, they wrap as in
NumPy. Decisive floats (language/decisive.py) are multiplied and divided by intrinsics, which no compiler option
contracts or approximates. For floats that are compared with a tolerance, a division by a constant is a multiplication
by its reciprocal.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Container, Mapping

import sympy

from flashgen.analysis.integer_bounds import INT32_MIN, Bounds
from flashgen.codegen.arguments import member_name
from flashgen.codegen.expressions.operation_text import SPECIAL, integer_operands, shift_amount
from flashgen.codegen.expressions.precedence import (
    ATOM,
    BIT_AND,
    BIT_OR,
    CLARIFIED,
    CONDITIONAL,
    INFIX,
    PRODUCT,
    SUM,
    UNARY,
)
from flashgen.language import operations as op
from flashgen.language.decisive import decisive, tolerant
from flashgen.language.operations import Capture, Load, kind_of

C_TYPES = {"bool": "bool", "int": "int", "float": "float"}

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
# Intrinsics for decisive floats (divisions are in operation_text.py); functions for integers that may overflow int64.
_EXACT = {op.Mul: "__fmul_rn", op.Sqrt: "__fsqrt_rn"}
_WRAPPING: dict[type, str] = {
    op.Add: "wrapping_sum",
    op.Sub: "wrapping_difference",
    op.Neg: "wrapping_difference",
    op.Mul: "wrapping_product",
    op.ShiftLeft: "wrapping_product",
    op.Abs: "wrapping_magnitude",
    op.FloorDiv: "floor_divide_long",
}


def float_literal(value: float) -> str:
    """Returns a C++ float literal whose value is `value` rounded to float32."""
    rounded = struct.unpack("f", struct.pack("f", value))[0] if abs(value) < 3.5e38 else math.copysign(math.inf, value)
    if rounded in (float("inf"), float("-inf")):
        return "infinity()" if rounded > 0 else "minus_infinity()"
    text = f"{rounded:.9g}"
    return f"{text}f" if any(mark in text for mark in ".e") else f"{text}.0f"


def _is_distance(left: sympy.Basic, right: sympy.Basic) -> bool:
    """Whether `left <= right` (or <) bounds the magnitude of an integer by a constant."""
    limited = isinstance(right, sympy.Integer) and 1 <= int(right) < 2**30
    return limited and isinstance(left, op.Abs) and kind_of(left) == "int"


class Printer:
    """Prints nodes as CUDA expressions.

    Attributes:
        names: Node -> name of the variable that holds it.
        products: Node -> text of the product that replaces it.
        exact: Operations on decisive floats.
        loose: Operations on floats that are compared with a tolerance.
    """

    def __init__(
        self,
        names: Mapping[sympy.Basic, str] | None = None,
        products: Mapping[sympy.Basic, str] | None = None,
        exact: Container[sympy.Basic] = (),
        loose: Container[sympy.Basic] = (),
    ) -> None:
        self.names, self.products = dict(names or {}), dict(products or {})
        self.exact, self.loose = exact, loose
        self.bounds = Bounds()

    def text(self, node: sympy.Basic, around: int = CONDITIONAL) -> str:
        """Returns the expression, in parentheses if its operator has a lower precedence than `around`."""
        text, strength = self.printed(node)
        return f"({text})" if strength < around else text

    def as_float(self, node: sympy.Basic, around: int = CONDITIONAL) -> str:
        """Returns the expression as a float: integers and booleans are cast."""
        if isinstance(node, sympy.Integer):
            return self.text(sympy.Float(int(node)), around)
        return self.text(node, around) if kind_of(node) == "float" else f"static_cast<float>({self.text(node)})"

    def as_long(self, node: sympy.Basic, around: int = CONDITIONAL) -> str:
        """Returns the integer as a long long."""
        if self._is_narrowed(node):
            text, strength = self._operation(node)
            return f"({text})" if strength < around else text
        if isinstance(node, sympy.Integer):
            return f"({int(node)}ll)" if int(node) < 0 and around > UNARY else f"{int(node)}ll"
        return f"static_cast<long long>({self.text(node)})" if self.fits_int(node) else self.text(node, around)

    def fits_int(self, node: sympy.Basic) -> bool:
        """Whether the integer (or boolean) is an int in C++; otherwise it is a long long."""
        return self.bounds.fit_int32(node)

    def c_type(self, node: sympy.Basic) -> str:
        """Returns the C++ type of a variable that holds the value."""
        kind = kind_of(node)
        return C_TYPES[kind] if kind != "int" or self.fits_int(node) else "long long"

    def in_cpp(self, _node: sympy.Basic) -> bool:
        """Whether an operation is printed over C++ numbers; subclasses may print some over other types."""
        return True

    def printed(self, node: sympy.Basic) -> tuple[str, int]:
        """Returns the expression, and the precedence of its outermost operator."""
        if node in self.names:
            return self.names[node], ATOM
        if node in self.products:
            return self.products[node], PRODUCT
        if isinstance(node, op.Operation) and node.kind == "int" and self.in_cpp(node):
            if self.bounds.wraps(node):
                return self._wrapping(node), ATOM
            if self._is_narrowed(node):
                return f"static_cast<int>({self._operation(node)[0]})", ATOM
        return self._operation(node)

    def _is_narrowed(self, node: sympy.Basic) -> bool:
        """Whether the value fits int, but C++ computes a long long because an operand is one."""
        if node in self.names or not isinstance(node, (op.Arithmetic, op.Bitwise, op.Where)) or node.kind != "int":
            return False
        return self.fits_int(node) and not all(map(self.fits_int, integer_operands(node)))

    def _operation(self, node: sympy.Basic) -> tuple[str, int]:
        if self._is_short_distance(node):
            limit = int(node.args[1]) - isinstance(node, op.Less)
            return f"magnitude_within({self.text(node.args[0].args[0])}, {limit})", ATOM
        if node in self.exact and type(node) in _EXACT:
            return self.exactly(_EXACT[type(node)], *node.args), ATOM
        if isinstance(node, tuple(INFIX)):
            return self._infix(node, *INFIX[type(node)])
        if isinstance(node, tuple(_CALLS)):
            return self._call(node), ATOM
        handler = SPECIAL.get(type(node))
        if handler:
            return handler(self, node)
        leaf = self._leaf(node)
        return leaf, UNARY if leaf.startswith("-") else ATOM

    def _is_short_distance(self, node: sympy.Basic) -> bool:
        found = isinstance(node, (op.LessEqual, op.Less)) and self.in_cpp(node) and _is_distance(*node.args)
        return found and self.fits_int(node.args[0].args[0])

    def exactly(self, intrinsic: str, *operands: sympy.Basic) -> str:
        """Returns a call of an intrinsic on floats."""
        return f"{intrinsic}({', '.join(map(self.as_float, operands))})"

    def _wrapping(self, node: op.Operation) -> str:
        """Returns an operation that may overflow int64, and then wraps as in NumPy."""
        operands = [self.as_long(operand) for operand in node.args]
        if isinstance(node, op.ShiftLeft):
            operands[1] = f"1ll << {self.text(shift_amount(node.args[1]), SUM)}"
        if isinstance(node, op.Neg):
            operands.insert(0, "0ll")
        return f"{_WRAPPING[type(node)]}({', '.join(operands)})"

    def _infix(self, node: sympy.Basic, symbol: str, strength: int) -> tuple[str, int]:
        clarified = CLARIFIED.get(strength, set())
        widened = self._widened(node)
        parts = []
        for operand, minimum in zip(node.args, (strength, strength + 1), strict=True):
            text, own = self.printed(operand)
            regrouped = own == strength and strength in (BIT_AND, BIT_OR)  # associative: no parentheses needed
            needs = (own < minimum and not regrouped) or own in clarified
            if kind_of(operand) == "bool" and kind_of(node) != "bool":
                text, needs = f"static_cast<int>({text})", False
            if operand is widened:
                text, needs = self._widening(operand, text, strength, minimum), False
                widened = None
            parts.append(f"({text})" if needs else text)
        return f"{parts[0]} {symbol} {parts[1]}", strength

    def _widened(self, node: sympy.Basic) -> sympy.Basic | None:
        """Returns the operand of a sum or product to widen to long long so that the result is one; None if none."""
        if kind_of(node) != "int" or not self.in_cpp(node) or self.fits_int(node):
            return None
        left, right = node.args
        if not (self.fits_int(left) and self.fits_int(right)):
            return None
        return right if isinstance(right, sympy.Integer) else left

    def _widening(self, operand: sympy.Basic, text: str, strength: int, around: int) -> str:
        """Returns the operand of a sum or product as a long long: a literal, or preceded by a neutral element."""
        if isinstance(operand, sympy.Integer) or self._is_narrowed(operand):
            return self.as_long(operand, around)
        own = self.printed(operand)[1]
        return f"{'1ll *' if strength == PRODUCT else '0ll +'} {f'({text})' if own < around else text}"

    def _call(self, node: sympy.Basic) -> str:
        kind = kind_of(node)
        operand = self.as_float if kind == "float" else self.text
        if kind == "int" and self.in_cpp(node) and not all(map(self.fits_int, (node, *node.args))):
            operand = self.as_long
        return f"{_CALLS[type(node)][kind]}({', '.join(operand(argument) for argument in node.args)})"

    def _leaf(self, node: sympy.Basic) -> str:
        if isinstance(node, Capture):
            return f"arguments.{member_name(node)}"
        if isinstance(node, (sympy.Float, sympy.core.numbers.Infinity, sympy.core.numbers.NegativeInfinity)):
            return float_literal(float(node))
        if node in (sympy.true, sympy.false):
            return "true" if node == sympy.true else "false"
        if node == INT32_MIN:  # C++ parses -2147483648 as the negation of a long
            return "(-2147483647 - 1)"
        if node in (op.LEN_Q, op.LEN_K):
            return f"arguments.{node}"
        return f"{node}ll" if isinstance(node, sympy.Integer) and not self.fits_int(node) else str(node)


PRINTED: frozenset[type] = frozenset(INFIX) | frozenset(_CALLS) | frozenset(SPECIAL)


def references(results: tuple[sympy.Basic, ...]) -> Counter[sympy.Basic]:
    """Counts the uses of each operation by distinct operations or results, with operands before their users."""
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
    """Whether a repeated node is worth a variable: a load, a division, or at least two operations."""
    return isinstance(node, (Load, op.FloorDiv, op.FloorMod, op.Divide)) or any(
        isinstance(operand, op.Operation) for operand in node.args
    )


def statements(
    *results: sympy.Basic,
    products: Mapping[sympy.Basic, str] | None = None,
    names: Mapping[sympy.Basic, str] | None = None,
) -> tuple[list[str], list[str]]:
    """Returns declarations of common subexpressions, and the text of each result in terms of these.

    Args:
        products: Node -> text of the product that replaces it (see `folded_products`).
        names: Leaf -> name of the variable that holds it.
    """
    printer = Printer(names, products, exact=decisive(*results), loose=tolerant(*results))
    declarations: list[str] = []
    for node, uses in references(results).items():
        if uses > 1 and worth_sharing(node):
            name = f"x{len(declarations)}"
            declarations.append(f"const {printer.c_type(node)} {name} = {printer.text(node)};")
            printer.names[node] = name
    return declarations, [printer.text(result) for result in results]
