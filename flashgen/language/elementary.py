"""The mathematical functions of the language, as its own modules call them; `functions` has them for users."""

from __future__ import annotations

from typing import Any

from flashgen.errors import SpecError
from flashgen.language import operations as ops
from flashgen.language.trace import Traced, apply, lift, of_node

len_q = of_node(ops.LEN_Q)
"""How many queries the sequence has: a number of the call, which compiles nothing anew."""
len_k = of_node(ops.LEN_K)
"""How many keys the sequence has: a number of the call, which compiles nothing anew."""


def where(condition: Any, a: Any, b: Any) -> Traced:
    """a where the condition holds, else b. Both are computed."""
    return apply(ops.Where, condition, a, b)


def minimum(a: Any, b: Any) -> Traced:
    """The smaller of a and b."""
    return apply(ops.Minimum, a, b)


def maximum(a: Any, b: Any) -> Traced:
    """The larger of a and b."""
    return apply(ops.Maximum, a, b)


def clamp(x: Any, low: Any = None, high: Any = None) -> Traced:
    """x brought into [low, high]; a bound of None is no bound. Where low > high, the result is high.

    Where x is at a bound, the gradient is x's, as torch.clamp's is; a NaN stays one.
    """
    if low is not None:
        x = _bounded(x, low, ops.Maximum, ops.Less)
    if high is not None:
        x = _bounded(x, high, ops.Minimum, ops.Greater)
    return lift(x)


def _bounded(x: Any, bound: Any, extreme: type[ops.Operation], beyond: type[ops.Operation]) -> Traced:
    """Integers by an operation whose ranges are known; of floats, where the two are equal, the slope is x's."""
    extremum = apply(extreme, x, bound)
    return extremum if extremum.kind == "int" else where(apply(beyond, x, bound), bound, x)


def abs(x: Any) -> Traced:
    """|x|, of x's kind."""
    return apply(ops.Abs, x)


def exp(x: Any) -> Traced:
    """e**x."""
    return apply(ops.Exp, x)


def exp2(x: Any) -> Traced:
    """2**x."""
    return apply(ops.Exp2, x)


def log(x: Any) -> Traced:
    """Natural logarithm; log(0) = -inf."""
    return apply(ops.Log, x)


def log2(x: Any) -> Traced:
    """Logarithm to base 2; log2(0) = -inf."""
    return apply(ops.Log2, x)


def tanh(x: Any, precision: str = "accurate") -> Traced:
    """Hyperbolic tangent, to an absolute error of 1e-6; with precision="fast" one instruction, to a relative 2**-11."""
    operations = {"accurate": ops.Tanh, "fast": ops.FastTanh}
    if precision not in operations:
        raise SpecError(f"tanh: precision={precision!r} must be 'accurate' or 'fast'")
    return apply(operations[precision], x)


def sigmoid(x: Any) -> Traced:
    """1 / (1 + exp(-x))."""
    return apply(ops.Sigmoid, x)


def sqrt(x: Any) -> Traced:
    """Square root."""
    return apply(ops.Sqrt, x)


def sin(x: Any) -> Traced:
    """Sine of x radians."""
    return apply(ops.Sin, x)


def cos(x: Any) -> Traced:
    """Cosine of x radians."""
    return apply(ops.Cos, x)


def floor(x: Any) -> Traced:
    """The largest whole number not above x, as a float; to_int(floor(x)) for an index."""
    return apply(ops.Floor, x)


def to_int(x: Any) -> Traced:
    """int32 of x, rounded towards zero; True is 1. Beyond int32 it saturates, and NaN gives 0."""
    return apply(ops.ToInt, x)


def to_float(x: Any) -> Traced:
    """float32 of x; True is 1.0."""
    return apply(ops.ToFloat, x)
