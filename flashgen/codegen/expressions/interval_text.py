"""Predicate -> CUDA text that evaluates it over a whole tile by interval arithmetic, without reading its elements.

The text is that of the predicate, over `Range` and `Truth` (templates/tile_lists/ranges.cuh.jinja) instead of int and
bool: `k <= q` becomes a comparison of two ranges. What cannot be bounded (floats, shifts by a variable amount, arrays
of floats) becomes `unknown()`; an expression that is entirely unknown has no text. Operations on ranges are defined as
in flashgen/analysis/intervals/evaluation.py. The ends of ranges are int if int holds every integer of the predicate,
else long long. An operation that may overflow these is also `unknown()`.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from flashgen.analysis.closed_forms.affine import contains
from flashgen.analysis.integer_bounds import Bounds
from flashgen.codegen.expressions.precedence import ATOM, CONDITIONAL
from flashgen.codegen.expressions.printer import Printer, references, worth_sharing
from flashgen.language import operations as op
from flashgen.language.operations import KEY, QUERY, Capture, Load, kind_of

_UNKNOWN = sympy.Symbol("unknown()")
_RANGE_TYPES = {"bool": "Truth", "int": "Range"}
_MAY_BE_PARTLY_UNKNOWN = (op.And, op.Or)
_NEED_BOUNDED_OPERANDS = (
    *(op.Add, op.Sub, op.Mul, op.Neg, op.Abs, op.Minimum, op.Maximum, op.FloorDiv, op.FloorMod),
    *(op.BitAnd, op.BitOr, op.BitXor, op.ToInt, op.Not, op.Xor),
    *(op.Equal, op.NotEqual, op.Less, op.LessEqual, op.Greater, op.GreaterEqual),
)
_CALLS = {op.Abs: "abs", op.Minimum: "min", op.Maximum: "max", op.FloorDiv: "floor_divide", op.FloorMod: "floor_modulo"}
_BY_CONSTANT = {op.FloorDiv: "quotient", op.FloorMod: "remainder"}
_ON_TRUTHS = (op.And, op.Or, op.Xor, op.Equal, op.NotEqual)
_WIDEST = 2**48  # limit for ends of ranges: sums and products with a few of them fit in 64 bits
_MAY_GROW = (op.Add, op.Sub, op.Mul, op.Neg, op.Abs, op.FloorDiv, op.ShiftLeft)


@dataclass(frozen=True)
class IntervalText:
    """A predicate over a tile.

    Attributes:
        operations: Names of the operations on ranges that it uses.
        scanned: Captured arrays that it reads over ranges of indices.
        wide: Whether the ends of its ranges are long long.
    """

    declarations: tuple[str, ...]
    text: str
    operations: frozenset[str]
    scanned: frozenset[Capture]
    symbols: frozenset[sympy.Symbol]
    wide: bool


def over_tile(node: sympy.Basic) -> bool:
    """Whether the node's value varies within a tile, or is unknown."""
    return contains(node, QUERY, KEY, _UNKNOWN)


def interval_text(predicate: sympy.Basic) -> IntervalText | None:
    """Returns the predicate over a tile with the ranges `q` and `k`; None if it is constant there, or unknown."""
    node = _UnboundedReplacer().replace(predicate)
    if node is None or not over_tile(node):
        return None
    printer = _IntervalPrinter()
    declarations: list[str] = []
    for shared, uses in references((node,)).items():
        if uses > 1 and worth_sharing(shared):
            name = f"x{len(declarations)}"
            of_type = _RANGE_TYPES[kind_of(shared)] if over_tile(shared) else printer.c_type(shared)
            declarations.append(f"const {of_type} {name} = {printer.text(shared)};")
            printer.names[shared] = name
    text = printer.text(node)
    operations, scanned = frozenset(printer.operations), frozenset(printer.scanned)
    wide = not all(map(printer.fits_int, (part for part in references((node,)) if kind_of(part) == "int")))
    return IntervalText(tuple(declarations), text, operations, scanned, frozenset(node.free_symbols), wide)


class _UnboundedReplacer:
    """Replaces the parts of a node that have no bounds by `unknown()`."""

    def __init__(self) -> None:
        self._bounds = Bounds(related=False)

    def replace(self, node: sympy.Basic) -> sympy.Basic | None:
        """Returns the node with unbounded parts replaced; None if it is entirely unknown."""
        if not over_tile(node) or node in (QUERY, KEY):
            return node
        if kind_of(node) == "float" or any(kind_of(operand) == "float" for operand in node.args):
            return None
        if isinstance(node, _MAY_GROW) and max(map(abs, self._bounds.limits(node))) > _WIDEST:
            return None
        operands = [operand if isinstance(operand, Capture) else self.replace(operand) for operand in node.args]
        if isinstance(node, _MAY_BE_PARTLY_UNKNOWN):
            if all(operand is None for operand in operands):
                return None
            return type(node)(*(_UNKNOWN if operand is None else operand for operand in operands))
        if isinstance(node, op.Where):
            condition, then, otherwise = operands
            if then is None or otherwise is None:
                return None
            return op.Where(_UNKNOWN if condition is None else condition, then, otherwise)
        if isinstance(node, (op.ShiftLeft, op.ShiftRight)):
            amount = node.args[1]
            constant = isinstance(amount, sympy.Integer) and 0 <= int(amount) <= 31
            return None if operands[0] is None or not constant else type(node)(*operands)
        if any(operand is None for operand in operands) or not isinstance(node, (*_NEED_BOUNDED_OPERANDS, Load)):
            return None
        return type(node)(*operands)


class _IntervalPrinter(Printer):
    """Prints values that vary within a tile as ranges, and all others as numbers; records operations and arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()
        self.scanned: set[Capture] = set()

    def in_cpp(self, node: sympy.Basic) -> bool:
        return not over_tile(node)

    def printed(self, node: sympy.Basic) -> tuple[str, int]:
        if node == _UNKNOWN:
            self.operations.add("Unknown")
        if node in self.names or not isinstance(node, op.Operation) or not over_tile(node):
            return super().printed(node)
        name, operands = _name(node), node.args
        self.operations.add(name)
        if isinstance(node, Load):
            self.scanned.add(node.capture)
            return f"load_{node.capture.name}(arguments, {', '.join(map(self.text, node.indices))})", ATOM
        if isinstance(node, op.Where):
            branches = (self._branch(kind_of(node), operand) for operand in operands[1:])
            return f"choose({self.text(operands[0])}, {', '.join(branches)})", ATOM
        if name in ("Quotient", "Remainder"):
            return f"{_BY_CONSTANT[type(node)]}({self._as('int', operands[0])}, {operands[1]})", ATOM
        if isinstance(node, tuple(_CALLS)):
            return f"{_CALLS[type(node)]}({', '.join(self._as('int', operand) for operand in operands)})", ATOM
        if isinstance(node, op.ToInt):
            return self._as("int", operands[0]), CONDITIONAL
        if isinstance(node, op.Neg):
            return f"-({self._as('int', operands[0])})", ATOM
        if isinstance(node, (op.ShiftLeft, op.ShiftRight)):
            symbol = "<<" if isinstance(node, op.ShiftLeft) else ">>"
            return f"({self._as('int', operands[0])}) {symbol} {operands[1]}", CONDITIONAL
        return super().printed(node)

    def _infix(self, node: sympy.Basic, symbol: str, strength: int) -> tuple[str, int]:
        kinds = {kind_of(operand) for operand in node.args}
        counts = not isinstance(node, (op.And, op.Or)) and "bool" in kinds
        if not over_tile(node) or not counts or (kinds == {"bool"} and isinstance(node, _ON_TRUTHS)):
            return super()._infix(node, symbol, strength)
        left, right = (f"({self._as('int', operand)})" for operand in node.args)
        return f"{left} {symbol} {right}", strength

    def _branch(self, kind: str, node: sympy.Basic) -> str:
        """Returns a branch of a choice. Numbers get an explicit type, because both branches may be numbers."""
        text = self._as(kind, node)
        return text if over_tile(node) else f"{_RANGE_TYPES[kind]}({text})"

    def _as(self, kind: str, node: sympy.Basic) -> str:
        """Returns the operand's text; a truth used as an integer becomes a range within 0 and 1."""
        text = self.text(node)
        if kind != "int" or kind_of(node) != "bool":
            return text
        if not over_tile(node):
            return f"static_cast<int>({text})"
        self.operations.add("Counted")
        return f"counted({text})"


def _name(node: op.Operation) -> str:
    """Returns the template's name of the node's operation."""
    name = type(node).__name__
    if type(node) in _BY_CONSTANT and isinstance(node.args[1], sympy.Integer) and int(node.args[1]) > 0:
        return _BY_CONSTANT[type(node)].capitalize()
    if isinstance(node, (op.Equal, op.NotEqual)) and all(kind_of(operand) == "bool" for operand in node.args):
        return {"Equal": "EqualTruths", "NotEqual": "Xor"}[name]
    return f"{name}Truth" if isinstance(node, op.Where) and kind_of(node) == "bool" else name
