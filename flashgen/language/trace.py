"""Proxies that stand for the indices and the score while a user's function runs once, and record what it does.

A `Traced` wraps a node (see `operations`). Python's operators on it build further nodes; what Python cannot hand over
(`and`, `or`, `not`, `if`, chained comparisons, `float(x)`) raises a SpecError that says what to write instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import sympy

from flashgen.errors import SpecError
from flashgen.language import operations as ops
from flashgen.language.operations import Kind, Operation, kind_of
from flashgen.language.well_formed import build, is_literal, literal

MAX_POWER = 16
ANSWERS: dict[str, Callable[..., Any]] = {}
"""What traced values answer NumPy, torch and callers of tensors' methods; `protocols`, a layer above, fills it in."""


class Traced:
    """A value inside a traced mask or score function: an index, the score, a captured number, or what was made of them.

    `node` is the expression behind it, `kind` one of "bool", "int", "float". `&`, `|`, `^` and `~` are logic on
    booleans; on integers `&`, `|`, `^` are bitwise. `//`, `%` are floored and `/` gives a float, as in Python.
    """

    __slots__ = ("node",)
    __hash__ = None  # type: ignore[assignment]  # == builds an expression, so a set or dict could not tell values apart
    __array_priority__ = 1000

    def __init__(self, node: sympy.Basic) -> None:
        self.node = node

    @property
    def kind(self) -> Kind:
        return kind_of(self.node)

    def __repr__(self) -> str:
        return f"Traced({self.node})"

    # Arithmetic -------------------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Traced:
        return apply(ops.Add, self, other)

    def __radd__(self, other: Any) -> Traced:
        return apply(ops.Add, other, self)

    def __sub__(self, other: Any) -> Traced:
        return apply(ops.Sub, self, other)

    def __rsub__(self, other: Any) -> Traced:
        return apply(ops.Sub, other, self)

    def __mul__(self, other: Any) -> Traced:
        return apply(ops.Mul, self, other)

    def __rmul__(self, other: Any) -> Traced:
        return apply(ops.Mul, other, self)

    def __truediv__(self, other: Any) -> Traced:
        return apply(ops.Divide, self, other)

    def __rtruediv__(self, other: Any) -> Traced:
        return apply(ops.Divide, other, self)

    def __floordiv__(self, other: Any) -> Traced:
        return apply(ops.FloorDiv, self, other)

    def __rfloordiv__(self, other: Any) -> Traced:
        return apply(ops.FloorDiv, other, self)

    def __mod__(self, other: Any) -> Traced:
        return apply(ops.FloorMod, self, other)

    def __rmod__(self, other: Any) -> Traced:
        return apply(ops.FloorMod, other, self)

    def __divmod__(self, other: Any) -> tuple[Traced, Traced]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Traced, Traced]:
        return other // self, other % self

    def __pow__(self, exponent: Any) -> Traced:
        return power(self, exponent)

    def __rpow__(self, base: Any) -> Traced:
        return power(base, self)

    def __neg__(self) -> Traced:
        return Traced(literal(-_number(self.node))) if _is_number(self.node) else apply(ops.Neg, self)

    def __pos__(self) -> Traced:
        return self

    def __abs__(self) -> Traced:
        return apply(ops.Abs, self)

    def __lshift__(self, other: Any) -> Traced:
        return shift(ops.ShiftLeft, self, other)

    def __rlshift__(self, other: Any) -> Traced:
        return shift(ops.ShiftLeft, other, self)

    def __rshift__(self, other: Any) -> Traced:
        return shift(ops.ShiftRight, self, other)

    def __rrshift__(self, other: Any) -> Traced:
        return shift(ops.ShiftRight, other, self)

    # Comparison and logic ---------------------------------------------------------------------------------------------

    def __eq__(self, other: Any) -> Traced:  # type: ignore[override]
        return apply(ops.Equal, self, other)

    def __ne__(self, other: Any) -> Traced:  # type: ignore[override]
        return apply(ops.NotEqual, self, other)

    def __lt__(self, other: Any) -> Traced:
        return apply(ops.Less, self, other)

    def __le__(self, other: Any) -> Traced:
        return apply(ops.LessEqual, self, other)

    def __gt__(self, other: Any) -> Traced:
        return apply(ops.Greater, self, other)

    def __ge__(self, other: Any) -> Traced:
        return apply(ops.GreaterEqual, self, other)

    def __and__(self, other: Any) -> Traced:
        return logic(ops.And, ops.BitAnd, self, other)

    def __rand__(self, other: Any) -> Traced:
        return logic(ops.And, ops.BitAnd, other, self)

    def __or__(self, other: Any) -> Traced:
        return logic(ops.Or, ops.BitOr, self, other)

    def __ror__(self, other: Any) -> Traced:
        return logic(ops.Or, ops.BitOr, other, self)

    def __xor__(self, other: Any) -> Traced:
        return logic(ops.Xor, ops.BitXor, self, other)

    def __rxor__(self, other: Any) -> Traced:
        return logic(ops.Xor, ops.BitXor, other, self)

    def __invert__(self) -> Traced:
        return negate(self)

    # What a traced value cannot do ------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        raise SpecError(
            "a traced value is neither true nor false yet, so `and`, `or`, `not`, `if`, `in`, min(), max() and chained "
            "comparisons cannot be recorded. Write & | ~ for and, or, not; where(condition, a, b) for if; "
            "(a <= q) & (q < b) for a <= q < b; minimum(a, b) for min"
        )

    def __iter__(self) -> NoReturn:
        raise SpecError("a traced value is one number and cannot be iterated, unpacked or searched with `in`")

    def __len__(self) -> int:
        raise SpecError("a traced value is one number and has no length; len_q and len_k are the sequence lengths")

    def __getitem__(self, _index: Any) -> NoReturn:
        raise SpecError("a traced value is one number and cannot be indexed; a flashgen.Tensor can, by traced indices")

    def __index__(self) -> int:
        raise SpecError(
            "a traced index cannot index a Python list or an array that is made inside of the function, nor drive "
            "range(): make an array outside of the function and index that, or a flashgen.Tensor(name, dtype, ndim), "
            "and give the array at the call"
        )

    def __float__(self) -> float:
        raise SpecError("float() and the math module need a number now: use flashgen.to_float(x), flashgen.exp(x), ...")

    def __int__(self) -> int:
        raise SpecError("int() needs a number now: use flashgen.to_int(x), which rounds towards zero")

    def __complex__(self) -> complex:
        raise SpecError("complex numbers are not part of the language")

    def __round__(self, _digits: int | None = None) -> NoReturn:
        raise SpecError("round() is not part of the language: use to_int(floor(x + 0.5))")

    # math.floor and friends ask the value itself, so these run unchanged.
    def __floor__(self) -> Traced:
        return self if self.kind == "int" else apply(ops.ToInt, apply(ops.Floor, self))

    def __ceil__(self) -> Traced:
        return self if self.kind == "int" else apply(ops.ToInt, -apply(ops.Floor, -self))

    def __trunc__(self) -> Traced:
        return self if self.kind == "int" else apply(ops.ToInt, self)

    # What tensors can do, so that FlexAttention's functions run unchanged ---------------------------------------------

    def __getattr__(self, name: str) -> Any:
        return ANSWERS["method"](self, name)

    def __array_ufunc__(self, ufunc: Any, how: str, *inputs: Any, **keywords: Any) -> Any:
        return ANSWERS["numpy"](ufunc, how, inputs, keywords)

    def __array_function__(self, function: Any, _types: Any, arguments: Any, keywords: Any) -> Any:
        return ANSWERS["numpy"](function, "__call__", arguments, keywords)

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return ANSWERS["torch"](function, arguments, keywords or {})


def lift(value: Any) -> sympy.Basic:
    """The node of a traced value, a number, a boolean, or a zero-dimensional array. SpecError for anything else."""
    if isinstance(value, Traced):
        return value.node
    if isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        return literal(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return lift(value.item())
    if hasattr(value, "capture"):
        raise SpecError(f"{value!r} is not a number yet: give it one index a dimension")
    if hasattr(value, "shape") or isinstance(value, (list, tuple)):
        raise SpecError(
            f"an array ({type(value).__name__}) is no number of a traced function: make it outside of the function and "
            "index it there, one index a dimension, or a flashgen.Tensor(name, dtype, ndim), and give it at the call"
        )
    if callable(value):
        raise SpecError(f"{_readable(value)} is a function: call it with the indices, e.g. causal()(b, h, q, k)")
    if value is None:
        raise SpecError("None cannot stand in a traced function: did a helper forget to return its result?")
    raise SpecError(f"{value!r} ({type(value).__name__}) cannot stand in a traced function: use numbers and booleans")


def _readable(value: Any) -> str:
    return getattr(value, "__name__", None) or getattr(value, "name", None) or type(value).__name__


def apply(cls: type[Operation], *operands: Any) -> Traced:
    """The operation on traced values or literals."""
    return Traced(build(cls, *(lift(operand) for operand in operands)))


def logic(of_booleans: type[Operation], of_integers: type[Operation], left: Any, right: Any) -> Traced:
    """& | ^ of two booleans or two integers. A literal True or False is folded away."""
    a, b = lift(left), lift(right)
    kinds = {kind_of(a), kind_of(b)}
    if kinds == {"int"}:
        return Traced(build(of_integers, a, b))
    if kinds == {"bool"}:
        for known, other in ((a, b), (b, a)):
            if known in (sympy.true, sympy.false):
                return _fold(of_booleans, known == sympy.true, other)
    return Traced(build(of_booleans, a, b))


def _fold(cls: type[Operation], known: bool, other: sympy.Basic) -> Traced:
    if cls is ops.Xor:
        return negate(Traced(other)) if known else Traced(other)
    absorbed = known == (cls is ops.And)  # True & x and False | x are x
    return Traced(other) if absorbed else Traced(sympy.true if known else sympy.false)


def negate(value: Any) -> Traced:
    """Logical not of a boolean."""
    node = lift(value)
    if node in (sympy.true, sympy.false):
        return Traced(sympy.false if node == sympy.true else sympy.true)
    if kind_of(node) != "bool":
        raise SpecError(f"~ needs a boolean, got {kind_of(node)}: compare first, e.g. ~(q == k); bitwise not is x ^ -1")
    return apply(ops.Not, value)


def shift(cls: type[Operation], value: Any, amount: Any) -> Traced:
    """value << amount or value >> amount. A literal amount must be 0 to 31; others are clamped to that."""
    node = lift(amount)
    if isinstance(node, sympy.Integer) and not 0 <= node <= 31:
        raise SpecError(f"shift by {node}: integers have 32 bits, give 0 to 31")
    return apply(cls, value, amount)


def power(base: Any, exponent: Any) -> Traced:
    """base ** exponent where one of them is a literal: integers up to 16, ±0.5, and positive bases of a float."""
    below, above = lift(base), lift(exponent)
    if _is_number(above):
        return _literal_power(Traced(below), _number(above))
    if _is_number(below) and 0 < _number(below) < math.inf:
        if kind_of(above) == "float":
            logarithm = math.log2(_number(below))
            return apply(ops.Exp2, exponent if logarithm == 1 else exponent * literal_float(logarithm))
        raise SpecError(f"{_number(below)} ** an integer: write 1 << x for a power of two, or exp2(x * log2(base))")
    raise SpecError("x ** y: one of them must be a literal number; otherwise write exp2(y * log2(x))")


def _literal_power(base: Traced, exponent: float) -> Traced:
    if exponent in (0.5, -0.5):
        root = apply(ops.Sqrt, base)
        return root if exponent > 0 else 1.0 / root
    if abs(exponent) > MAX_POWER or exponent != int(exponent):
        raise SpecError(
            f"x ** {exponent}: give ±0.5, an integer from -{MAX_POWER} to {MAX_POWER}, or write exp2(y * log2(x))"
        )
    if base.kind != "float" and (exponent < 0 or isinstance(exponent, float)):
        base = apply(ops.ToFloat, base)  # before it is multiplied: floats hold powers that integers wrap at
    if exponent < 0:
        return 1.0 / _literal_power(base, -exponent)
    if exponent == 0:
        return Traced(literal(1.0 if base.kind == "float" else 1))
    result, square, remaining = None, base, int(exponent)
    while True:
        if remaining & 1:
            result = square if result is None else result * square
        remaining >>= 1
        if not remaining:
            assert result is not None
            return result
        square = square * square


def literal_float(value: float) -> Traced:
    """A traced float constant."""
    return Traced(literal(float(value)))


def _is_number(node: sympy.Basic) -> bool:
    return is_literal(node) and kind_of(node) != "bool"


def _number(node: sympy.Basic) -> int | float:
    return int(node) if isinstance(node, sympy.Integer) else float(node)
