"""Proxies for the indices and the score that record what a user's function computes.

A `Traced` holds the text of an expression (see `expression_json`), and the arrays and numbers that the text leaves
open. It does not hold a SymPy node: a function that is given at a call is traced at that call, and its text is looked
up in a cache. Python's operators build longer texts. Operations that Python does not pass to a proxy (`and`, `or`,
`not`, `if`, chained comparisons, `float(x)`) raise a SpecError that says what to write instead.

torch.compile inlines the functions of this module, so they use plain Python only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import sympy

from flashgen.errors import SpecError
from flashgen.language import operations as ops
from flashgen.language.expression_json import FLOAT, INTEGER, canonical, node_from_trace, node_to_data
from flashgen.language.operations import Capture, Kind, Operation, kind_of
from flashgen.language.well_formed import FLOAT32_MAX, MAX_DEPTH, MAX_NODES, check_kinds, literal

MAX_POWER = 16
MAX_INT = 2**31
ANSWERS: dict[str, Callable[..., Any]] = {}
"""The handlers of traced values for NumPy, torch and tensor methods, filled in by `protocols`, a higher layer."""
HANDLED: dict[Any, Callable[..., Any]] = {}
"""Handlers of particular torch functions, which `flashgen.torch` registers."""
PLACEHOLDERS: list[Any] = []
"""Not empty while torch.compile traces a function: what knows the tensors that represent traced values."""
_MAX_TEXT = 80 * MAX_NODES  # in characters: `check_expression` would refuse a larger tree
_TRUE, _FALSE, _INTEGER, _FLOAT = "true", "false", f'"{INTEGER}"', f'"{FLOAT}"'
_LITERALS = (_TRUE, _FALSE)


_KINDS: tuple[Kind, ...] = ("bool", "int", "float")


def _kinds_of_results() -> dict[tuple[str, ...], Kind]:
    """Returns the kind of each operation's result, keyed by its name and the kinds of operands that it accepts."""
    found: dict[tuple[str, ...], Kind] = {}
    for name, cls in ops.OPERATIONS.items():
        for kinds in [] if cls is ops.Load else itertools.product(_KINDS, repeat=cls.arity):
            try:
                check_kinds(cls, list(kinds))
            except SpecError:
                continue
            found[name, *kinds] = cls.kind_of_result(*kinds)
    return found


_RESULTS = _kinds_of_results()


class Columns:
    """The base of rows of traced values (`rows`). Traced values leave operators with a row to the row."""


def _operator(cls: type[Operation], reflected: bool = False) -> Callable[[Any, Any], Any]:
    """Returns the method of a binary operator. For speed it repeats the common case of `apply`."""
    prefix = f'["{cls.__name__}",'
    name = cls.__name__
    kinds = {a: {b: _RESULTS.get((name, a, b)) for b in _KINDS} for a in _KINDS}

    def operator(self: Traced, other: Any) -> Any:
        if type(other) is int and not reflected and -MAX_INT <= other < MAX_INT:
            kind, text = kinds[self.kind]["int"], f"{prefix}{self.text},{_INTEGER}]"
            arrays, numbers = self.arrays, (*self.numbers, other)
        else:
            if not isinstance(other, Traced):
                if isinstance(other, Columns):
                    return NotImplemented
                other = lift(other)
            a, b = (other, self) if reflected else (self, other)
            kind, text = kinds[a.kind][b.kind], f"{prefix}{a.text},{b.text}]"
            arrays, numbers = a.arrays + b.arrays, a.numbers + b.numbers
        if kind is None or len(text) > _MAX_TEXT or (kind == "float" and not is_grad_enabled()):
            return apply(cls, other, self) if reflected else apply(cls, self, other)
        return Traced(text, kind, arrays, numbers)

    return operator


def _logical_operator(
    boolean_operation: type[Operation], integer_operation: type[Operation], reflected: bool = False
) -> Callable[[Any, Any], Any]:
    """Returns the method of & | or ^. For speed it repeats the case of `logic` for two non-literal booleans."""
    prefix = f'["{boolean_operation.__name__}",'

    def operator(self: Traced, other: Any) -> Any:
        a, b = (other, self) if reflected else (self, other)
        if isinstance(other, Traced) and a.kind == "bool" == b.kind:
            text = f"{prefix}{a.text},{b.text}]"
            if a.text not in _LITERALS and b.text not in _LITERALS and len(text) <= _MAX_TEXT:
                return Traced(text, "bool", a.arrays + b.arrays, a.numbers + b.numbers)
        return NotImplemented if isinstance(other, Columns) else logic(boolean_operation, integer_operation, a, b)

    return operator


class Traced:
    """A value inside a traced mask or score function: an index, the score, a captured number, or a computed value."""

    __slots__ = ("arrays", "kind", "numbers", "text")
    __hash__ = None  # type: ignore[assignment]  # == builds an expression, so a set or dict could not tell values apart
    __array_priority__ = 1000

    def __init__(self, text: str, kind: Kind, arrays: tuple[Any, ...] = (), numbers: tuple[Any, ...] = ()) -> None:
        self.text = text  # faster than assigning a tuple, and every operator creates a Traced
        self.kind: Kind = kind
        self.arrays = arrays
        self.numbers = numbers

    @property
    def node(self) -> sympy.Basic:
        """The expression as a SymPy tree. Undeclared arrays appear as captures array__0, array__1, ..."""
        numbered = (Capture(f"array__{number}", "float32", 1) for number in itertools.count())
        return node_from_trace(self.text, map(literal, self.numbers), numbered)

    def __repr__(self) -> str:
        return f"Traced({self.text})"

    # Arithmetic -------------------------------------------------------------------------------------------------------

    __add__ = _operator(ops.Add)
    __radd__ = _operator(ops.Add, reflected=True)
    __sub__ = _operator(ops.Sub)
    __rsub__ = _operator(ops.Sub, reflected=True)
    __mul__ = _operator(ops.Mul)
    __rmul__ = _operator(ops.Mul, reflected=True)
    __truediv__ = _operator(ops.Divide)
    __rtruediv__ = _operator(ops.Divide, reflected=True)
    __floordiv__ = _operator(ops.FloorDiv)
    __rfloordiv__ = _operator(ops.FloorDiv, reflected=True)
    __mod__ = _operator(ops.FloorMod)
    __rmod__ = _operator(ops.FloorMod, reflected=True)

    def __divmod__(self, other: Any) -> tuple[Traced, Traced]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Traced, Traced]:
        return other // self, other % self

    def __pow__(self, exponent: Any) -> Traced:
        return power(self, exponent)

    def __rpow__(self, base: Any) -> Traced:
        return power(base, self)

    def __neg__(self) -> Traced:
        return lift(-self.numbers[0]) if _is_number(self) else apply(ops.Neg, self)

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

    __eq__ = _operator(ops.Equal)
    __ne__ = _operator(ops.NotEqual)
    __lt__ = _operator(ops.Less)
    __le__ = _operator(ops.LessEqual)
    __gt__ = _operator(ops.Greater)
    __ge__ = _operator(ops.GreaterEqual)

    __and__ = _logical_operator(ops.And, ops.BitAnd)
    __rand__ = _logical_operator(ops.And, ops.BitAnd, reflected=True)
    __or__ = _logical_operator(ops.Or, ops.BitOr)
    __ror__ = _logical_operator(ops.Or, ops.BitOr, reflected=True)
    __xor__ = _logical_operator(ops.Xor, ops.BitXor)
    __rxor__ = _logical_operator(ops.Xor, ops.BitXor, reflected=True)

    def __invert__(self) -> Traced:
        return negate(self)

    # Operations that a traced value refuses ---------------------------------------------------------------------------

    def __bool__(self) -> bool:
        raise SpecError(
            "a traced value is neither true nor false yet, so `and`, `or`, `not`, `if`, `in`, min(), max() and chained "
            "comparisons cannot be recorded. Write & | ~ for and, or, not; where(condition, a, b) for if; "
            "(a <= q) & (q < b) for a <= q < b; minimum(a, b) for min"
        )

    def __iter__(self) -> NoReturn:
        raise SpecError("a traced value is one number and cannot be iterated, unpacked or searched with `in`")

    def __index__(self) -> int:
        raise SpecError(
            "a traced index cannot index a Python list or an array that is created inside of the function, nor drive "
            "range(): create an array outside of the function and index that, or a flashgen.Tensor(name, dtype, ndim), "
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

    # math.floor, math.ceil and math.trunc call these methods, so they can be traced.
    def __floor__(self) -> Traced:
        return self if self.kind == "int" else apply(ops.ToInt, apply(ops.Floor, self))

    def __ceil__(self) -> Traced:
        return self if self.kind == "int" else apply(ops.ToInt, -apply(ops.Floor, -self))

    def __trunc__(self) -> Traced:
        return self if self.kind == "int" else apply(ops.ToInt, self)

    # Attributes and functions of tensors, so that FlexAttention's functions run unchanged -----------------------------

    def tensor_attribute(self, name: str) -> Any:
        """Returns an attribute or a method of tensors.

        `protocols` adds a property for each name. With `__getattr__` instead, Python 3.11 would take three times as
        long to read `text` and the other slots, of which a call reads about a hundred.
        """
        return ANSWERS["method"](self, name)

    def __array_ufunc__(self, ufunc: Any, how: str, *inputs: Any, **keywords: Any) -> Any:
        return ANSWERS["numpy"](ufunc, how, inputs, keywords)

    def __array_function__(self, function: Any, _types: Any, arguments: Any, keywords: Any) -> Any:
        return ANSWERS["numpy"](function, "__call__", arguments, keywords)

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return ANSWERS["torch"](function, arguments, keywords or {})


def traced_node(node: sympy.Basic) -> Traced:
    """Returns the traced value of an expression that reads declared captures only."""
    return Traced(canonical(node_to_data(node)), kind_of(node))


_INFINITY, _MINUS_INFINITY, _MINUS_ZERO = (traced_node(literal(value)) for value in (math.inf, -math.inf, -0.0))


def lift(value: Any) -> Traced:
    """Returns the traced value of a number, a boolean, or a zero-dimensional array. Raises SpecError for others."""
    if isinstance(value, Traced):
        return value
    if isinstance(value, (bool, np.bool_)):
        return Traced(_TRUE if value else _FALSE, "bool")
    if isinstance(value, (int, np.integer)):
        return _integer(value)
    if isinstance(value, (float, np.floating)):
        return _float(value)
    if isinstance(value, np.generic):
        return lift(value.item())
    if PLACEHOLDERS:
        stood_for = PLACEHOLDERS[-1].traced(value)
        if isinstance(stood_for, Traced):
            return stood_for
    if getattr(value, "ndim", None) == 0 and hasattr(value, "dtype"):
        return ANSWERS["array"](value)
    raise SpecError(_lift_error(value))


def _integer(value: Any) -> Traced:
    if isinstance(value, np.integer):
        value = int(value)
    if not -MAX_INT <= value < MAX_INT:
        raise SpecError(f"the integer {value} does not fit in 32 bits: use a float, or smaller numbers")
    return Traced(_INTEGER, "int", (), (value,))


def _float(value: Any) -> Traced:
    """Returns a traced float. Infinities and -0.0, which captured numbers may not be, are part of the text itself."""
    value = float(value)
    if abs(value) <= FLOAT32_MAX:
        is_minus_zero = value == 0 and math.copysign(1, value) < 0
        return _MINUS_ZERO if is_minus_zero else Traced(_FLOAT, "float", (), (value,))
    if math.isinf(value):
        return _INFINITY if value > 0 else _MINUS_INFINITY
    if value != value:
        raise SpecError("a literal is NaN: a mask or score function must not produce NaN")
    raise SpecError(f"the literal {value!r} is beyond float32 (about 3.4e38): use float('inf') or a smaller number")


def _lift_error(value: Any) -> str:
    """Returns the message that says why a value cannot be part of a traced function, and what to do."""
    if hasattr(value, "capture"):
        return f"{value!r} is not a number yet: give it one index per dimension"
    if hasattr(value, "shape") or isinstance(value, (list, tuple)):
        return (
            f"an array ({type(value).__name__}) is not a number of a traced function: create it outside of the "
            "function and index it there, one index per dimension, or declare flashgen.Tensor(name, dtype, ndim), "
            "index that, and give the array at the call"
        )
    if callable(value):
        named = getattr(value, "__name__", None) or getattr(value, "name", None) or type(value).__name__
        return f"{named} is a function: call it with the indices, e.g. causal()(b, h, q, k)"
    if value is None:
        return "None cannot stand in a traced function: did a helper forget to return its result?"
    return f"{value!r} ({type(value).__name__}) cannot stand in a traced function: use numbers and booleans"


is_grad_enabled: Callable[[], bool] = lambda: True
"""torch.is_grad_enabled if torch is loaded (`watch_gradient_mode`)."""


def watch_gradient_mode(ask: Callable[[], bool]) -> None:
    """Makes values that are computed while `ask` returns False, as under torch.no_grad(), have no gradient."""
    global is_grad_enabled
    is_grad_enabled = ask


def apply(cls: type[Operation], *operands: Any) -> Traced:
    """Returns the operation applied to traced values or literals."""
    name = cls.__name__
    key: tuple[str, ...] = (name,)
    text, arrays, numbers = f'["{name}"', (), ()
    for operand in operands:
        value = operand if isinstance(operand, Traced) else lift(operand)
        key += (value.kind,)
        text = f"{text},{value.text}"
        arrays += value.arrays
        numbers += value.numbers
    text += "]"
    kind = _RESULTS.get(key)
    if kind is None:
        check_kinds(cls, list(key[1:]))  # type: ignore[arg-type]
        raise AssertionError(key)
    if len(text) > _MAX_TEXT:
        raise SpecError(
            f"the expression is too large: more than {MAX_DEPTH} levels or {MAX_NODES} operations, each shared part "
            "counted wherever it occurs; unroll less, or read a table from a Tensor"
        )
    if kind == "float" and cls is not ops.Detach and not is_grad_enabled():
        text = f'["Detach",{text}]'
    return Traced(text, kind, arrays, numbers)


def detach(value: Any) -> Traced:
    """Returns the value, with a derivative of 0."""
    value = lift(value)
    return apply(ops.Detach, value) if value.kind == "float" and (value.arrays or not is_literal(value)) else value


def is_literal(value: Traced) -> bool:
    """Returns whether a traced value is a Python number or boolean."""
    return _is_number(value) or value.text in _LITERALS


def number_of(value: Any) -> int | float | None:
    """Returns the Python number that a traced value is, or None."""
    value = lift(value)
    return value.numbers[0] if _is_number(value) else None


def logic(boolean_operation: type[Operation], integer_operation: type[Operation], left: Any, right: Any) -> Traced:
    """Returns & | ^ of two booleans or two integers. A literal True or False is folded."""
    a, b = lift(left), lift(right)
    if a.kind == b.kind == "int":
        return apply(integer_operation, a, b)
    if a.kind == b.kind == "bool":
        for constant, other in ((a, b), (b, a)):
            if constant.text in _LITERALS:
                return _fold(boolean_operation, constant.text == _TRUE, other)
    return apply(boolean_operation, a, b)


def _fold(cls: type[Operation], constant: bool, other: Traced) -> Traced:
    if cls is ops.Xor:
        return negate(other) if constant else other
    is_neutral = constant == (cls is ops.And)  # True & x and False | x equal x
    return other if is_neutral else lift(constant)


def negate(value: Any) -> Traced:
    """Returns the logical not of a boolean."""
    value = lift(value)
    if value.text in _LITERALS:
        return lift(value.text == _FALSE)
    if value.kind != "bool":
        raise SpecError(f"~ needs a boolean, got {value.kind}: compare first, e.g. ~(q == k); bitwise not is x ^ -1")
    return apply(ops.Not, value)


def shift(cls: type[Operation], value: Any, amount: Any) -> Traced:
    """Returns value << amount or value >> amount. A literal amount must be 0 to 31; others are clamped to that."""
    amount = lift(amount)
    if amount.text == _INTEGER and not 0 <= amount.numbers[0] <= 31:
        raise SpecError(f"shift by {amount.numbers[0]}: integers have 32 bits, give 0 to 31")
    return apply(cls, value, amount)


def power(base: Any, exponent: Any) -> Traced:
    """Returns base ** exponent where one is a literal: an integer exponent up to 16 or ±0.5, or a positive base.

    A literal base needs a float exponent.
    """
    below, above = lift(base), lift(exponent)
    if isinstance(exponent, float) and math.isinf(exponent):
        return _literal_power(below, exponent)
    if _is_number(above):
        return _literal_power(below, above.numbers[0])
    if _is_number(below) and 0 < below.numbers[0] < math.inf:
        if above.kind == "float":
            logarithm = math.log2(below.numbers[0])
            return apply(ops.Exp2, above if logarithm == 1 else above * literal_float(logarithm))
        raise SpecError(f"{below.numbers[0]} ** an integer: write 1 << x for a power of two, or exp2(x * log2(base))")
    raise SpecError("x ** y: one of them must be a literal number; otherwise write exp2(y * log2(x))")


def _literal_power(base: Traced, exponent: float) -> Traced:
    if exponent in (0.5, -0.5):
        root = apply(ops.Sqrt, base)
        return root if exponent > 0 else 1.0 / root
    if abs(exponent) > MAX_POWER or exponent % 1:
        raise SpecError(
            f"x ** {exponent}: give ±0.5, an integer from -{MAX_POWER} to {MAX_POWER}, or write exp2(y * log2(x))"
        )
    if base.kind != "float" and (exponent < 0 or isinstance(exponent, float)):
        base = apply(ops.ToFloat, base)  # before the multiplication: floats represent powers at which integers wrap
    if exponent < 0:
        return 1.0 / _literal_power(base, -exponent)
    if exponent == 0:
        return lift(1.0 if base.kind == "float" else 1)
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
    """Returns a traced float constant."""
    return lift(float(value))


def _is_number(value: Traced) -> bool:
    return value.text in (_INTEGER, _FLOAT)
