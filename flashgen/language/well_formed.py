"""Checks expressions: literals, the kinds of operands that each operation accepts, and the size of a tree.

Tracing, deserialization and the construction of a `Mask` or `Score` by hand all use these checks. Every expression that
exists can therefore be handled by all other parts (NumPy evaluation, intervals, the CUDA printer).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import sympy

from flashgen.errors import SpecError
from flashgen.language import operations as ops
from flashgen.language.operations import Capture, Load, Operation, kind_of

# Printers, hashing and SymPy itself recurse into a tree, and Python allows about 1000 frames.
MAX_DEPTH = 128
# Counted as a tree, with shared parts counted each time they occur, since traversals visit them each time.
MAX_NODES = 10_000

FLOAT32_MAX = float(np.finfo(np.float32).max)
SYMBOLS = (*ops.INDICES, ops.LEN_Q, ops.LEN_K, ops.SCORE)

# fmt: off
_SPELLING = {
    ops.Add: "+", ops.Sub: "-", ops.Mul: "*", ops.Neg: "unary -", ops.FloorDiv: "//", ops.FloorMod: "%",
    ops.ShiftLeft: "<<", ops.ShiftRight: ">>", ops.BitAnd: "&", ops.BitOr: "|", ops.BitXor: "^", ops.Divide: "/",
    ops.Equal: "==", ops.NotEqual: "!=", ops.Less: "<", ops.LessEqual: "<=", ops.Greater: ">",
    ops.GreaterEqual: ">=", ops.And: "&", ops.Or: "|", ops.Xor: "^", ops.Not: "~",
}
# fmt: on

_ANY_KIND = (ops.ToFloat, ops.ToInt, ops.Equal, ops.NotEqual)
_MIXED_KINDS = (ops.Add, ops.Sub, ops.Mul, ops.Less, ops.LessEqual, ops.Greater, ops.GreaterEqual)
_LOGIC = (ops.And, ops.Or, ops.Xor, ops.Not)


def spelling(cls: type[Operation]) -> str:
    """Returns the operation as a user writes it: "+", "//", "tanh"."""
    return _SPELLING.get(cls, cls.__name__.lower())


def build(cls: type[Operation], *operands: sympy.Basic) -> Operation:
    """Returns the operation on these operands. Raises SpecError, naming the accepted kinds, for other operands."""
    if cls is Load:
        _check_load(operands)
        return Load(*operands)
    if len(operands) != cls.arity:
        raise SpecError(f"{spelling(cls)} takes {cls.arity} operands, got {len(operands)}")
    for operand in operands:
        if isinstance(operand, Capture) and operand.ndim:
            raise SpecError(f"{spelling(cls)} got the array {operand.name!r}: index it, {_index_example(operand)}")
    check_kinds(cls, [kind_of(operand) for operand in operands])
    return cls(*operands)


def check_kinds(cls: type[Operation], kinds: list[ops.Kind]) -> None:
    """Raises SpecError if an operation does not accept operands of these kinds."""
    given = " and ".join(kinds)
    if cls in _ANY_KIND:
        return
    if cls in _LOGIC:
        if set(kinds) != {"bool"}:
            raise SpecError(f"{spelling(cls)} of {given}: both sides must be booleans, or integers; {_LOGIC_HINT}")
    elif cls is ops.Where:
        if kinds[0] != "bool":
            raise SpecError(f"where() needs a boolean condition, got {kinds[0]}: compare it, e.g. where(x != 0, a, b)")
    elif issubclass(cls, ops.Bitwise):
        if set(kinds) != {"int"}:
            raise SpecError(f"{spelling(cls)} needs integers, got {given}: use to_int(x), // and %, or compare first")
    elif cls in _MIXED_KINDS:
        if set(kinds) == {"bool"}:
            raise SpecError(f"{spelling(cls)} of two booleans: use & | ^ ~ for logic, or to_int(x) to count them")
    elif "bool" in kinds:
        raise SpecError(f"{spelling(cls)} needs numbers, got {given}: use to_int(x), or & | ^ ~ for logic")


_LOGIC_HINT = "a comparison makes a boolean, and binds weaker than & and |, so write (q >= k) & (k < 4)"


def _check_load(operands: tuple[sympy.Basic, ...]) -> None:
    if not operands or not isinstance(operands[0], Capture) or operands[0].ndim == 0:
        raise SpecError("a load needs a captured array (flashgen.Tensor) as its first operand")
    capture, indices = operands[0], operands[1:]
    if len(indices) != capture.ndim:
        raise SpecError(f"capture {capture.name!r} has ndim={capture.ndim}, indexed with {len(indices)} indices")
    for position, index in enumerate(indices):
        if isinstance(index, sympy.Integer) and index < 0:
            raise SpecError(
                f"capture {capture.name!r}: index {position} is {index}; an index is clamped to its dimension, and "
                "does not count from the end: use an index >= 0"
            )
        if kind_of(index) != "int":
            raise SpecError(
                f"capture {capture.name!r}: index {position} must be an integer, got {kind_of(index)}: use // instead "
                "of /, or to_int(x)"
            )


def _index_example(capture: Capture) -> str:
    return f"{capture.name}[{', '.join('bhqk'[i % 4] for i in range(capture.ndim))}]"


def literal(value: Any) -> sympy.Basic:
    """Returns the node of a Python or NumPy number or boolean. Raises SpecError if it exceeds int32 or float32."""
    if isinstance(value, (bool, np.bool_)):
        return sympy.true if value else sympy.false
    if isinstance(value, (int, np.integer)):
        if not -(2**31) <= int(value) < 2**31:
            raise SpecError(f"the integer {value} does not fit in 32 bits: use a float, or smaller numbers")
        return sympy.Integer(int(value))
    number = float(value)
    if math.isnan(number):
        raise SpecError("a literal is NaN: a mask or score function must not produce NaN")
    if math.isinf(number):
        return sympy.oo if number > 0 else -sympy.oo
    if abs(number) > FLOAT32_MAX:
        raise SpecError(
            f"the literal {number!r} is beyond float32 (about 3.4e38): use float('inf') or a smaller number"
        )
    if number == 0 and math.copysign(1, number) < 0:
        return ops.Neg(sympy.Float(0.0))  # SymPy's zero has no sign
    return sympy.Float(number)


def is_literal(node: sympy.Basic) -> bool:
    """Returns whether a node is a number or a boolean."""
    return isinstance(node, (sympy.Integer, sympy.Float)) or node in (sympy.true, sympy.false, sympy.oo, -sympy.oo)


def check_expression(node: sympy.Basic) -> None:
    """Raises SpecError for a tree with foreign nodes or contradictory captures, and one too deep or too large."""
    depth: dict[int, int] = {}
    size: dict[int, int] = {}
    captures: dict[str, Capture] = {}
    stack = [node]
    while stack:  # a loop, because an unchecked tree may be deeper than Python's stack
        current = stack[-1]
        if id(current) in depth:
            stack.pop()
            continue
        children = current.args if isinstance(current, Operation) else ()
        waiting = [child for child in children if id(child) not in depth]
        if waiting:
            stack.extend(waiting)
            continue
        stack.pop()
        _check_node(current, captures)
        depth[id(current)] = 1 + max((depth[id(child)] for child in children), default=0)
        size[id(current)] = 1 + sum(size[id(child)] for child in children)
        if depth[id(current)] > MAX_DEPTH or size[id(current)] > MAX_NODES:
            raise SpecError(
                f"the expression is too large: more than {MAX_DEPTH} levels or {MAX_NODES} operations, each shared "
                "part counted wherever it occurs; unroll less, or read a table from a Tensor"
            )
    if isinstance(node, Capture) and node.ndim:
        raise SpecError(f"the result is the array {node.name!r}: index it, {_index_example(node)}")


def _check_node(node: sympy.Basic, captures: dict[str, Capture]) -> None:
    if isinstance(node, Operation):
        build(type(node), *node.args)
    elif isinstance(node, Capture):
        check_same_capture(captures.setdefault(node.name, node), node)
    elif node not in SYMBOLS and not is_literal(node):
        raise SpecError(f"not an expression of the language: {node!r}")


def check_same_capture(first: Capture, second: Capture) -> None:
    """Raises SpecError if two captures of the same name are declared differently."""
    if first != second:
        raise SpecError(
            f"capture {first.name!r} is declared twice and differently: {declaration_text(first)} "
            f"and {declaration_text(second)}; declare it once and use that object"
        )


def declaration_text(capture: Capture) -> str:
    """Returns the declaration of a capture, as a user writes it."""
    if capture.ndim == 0:
        return f"Scalar({capture.name!r}, {capture.dtype!r})"
    grad = ", grad=True" if capture.grad else ""
    return f"Tensor({capture.name!r}, {capture.dtype!r}, ndim={capture.ndim}{grad})"
