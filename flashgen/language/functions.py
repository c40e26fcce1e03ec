"""Mathematical functions for traced masks and scores. They take traced values or literals and return a traced value."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from flashgen.errors import SpecError
from flashgen.language import operations as ops
from flashgen.language.trace import PLACEHOLDERS, Traced, apply, lift, traced_node

__all__ = ["abs", "clamp", "cos", "exp", "exp2", "floor", "len_k", "len_q", "log", "log2", "maximum", "minimum"]
__all__ += ["sigmoid", "sin", "sqrt", "tanh", "to_float", "to_int", "where"]


def _public(function: Callable[..., Traced]) -> Any:
    """Wraps a function for users: its results are placeholders while torch.compile traces them."""

    @wraps(function)
    def call(*operands: Any, **options: Any) -> Any:
        if PLACEHOLDERS:
            return PLACEHOLDERS[-1].call(function.__name__, operands, options)
        return function(*operands, **options)

    return call


len_q = traced_node(ops.LEN_Q)
"""The number of queries of the sequence. It is an argument of the call, so a change does not recompile."""
len_k = traced_node(ops.LEN_K)
"""The number of keys of the sequence. It is an argument of the call, so a change does not recompile."""


@_public
def where(condition: Any, a: Any, b: Any) -> Traced:
    """Returns a where the condition holds, else b. Both are computed."""
    return apply(ops.Where, condition, a, b)


@_public
def minimum(a: Any, b: Any) -> Traced:
    """Returns the smaller of a and b."""
    return apply(ops.Minimum, a, b)


@_public
def maximum(a: Any, b: Any) -> Traced:
    """Returns the larger of a and b."""
    return apply(ops.Maximum, a, b)


@_public
def clamp(x: Any, low: Any = None, high: Any = None) -> Traced:
    """Clamps x to [low, high]. A bound of None is no bound. Where low > high, the result is high.

    NaN stays NaN. Where x equals a bound, the gradient is that of x, as in torch.clamp.
    """
    if low is not None:
        x = _bounded(x, low, ops.Maximum, ops.Less)
    if high is not None:
        x = _bounded(x, high, ops.Minimum, ops.Greater)
    return lift(x)


def _bounded(x: Any, bound: Any, extreme: type[ops.Operation], beyond: type[ops.Operation]) -> Traced:
    """Applies one bound. Integers use Minimum or Maximum, which interval analysis can bound; floats use Where.

    Where a float equals the bound, Where passes on the gradient of x.
    """
    extremum = apply(extreme, x, bound)
    return extremum if extremum.kind == "int" else where(apply(beyond, x, bound), bound, x)


@_public
def abs(x: Any) -> Traced:
    """Returns the absolute value of x, of the same kind as x."""
    return apply(ops.Abs, x)


@_public
def exp(x: Any) -> Traced:
    """Returns e**x."""
    return apply(ops.Exp, x)


@_public
def exp2(x: Any) -> Traced:
    """Returns 2**x."""
    return apply(ops.Exp2, x)


@_public
def log(x: Any) -> Traced:
    """Returns the natural logarithm of x; log(0) = -inf."""
    return apply(ops.Log, x)


@_public
def log2(x: Any) -> Traced:
    """Returns the logarithm of x to base 2; log2(0) = -inf."""
    return apply(ops.Log2, x)


@_public
def tanh(x: Any, precision: str = "accurate") -> Traced:
    """Returns the hyperbolic tangent of x.

    Args:
        x: A number.
        precision: "accurate" has an absolute error of 1e-6. "fast" is one instruction with a relative error of 2**-11.
    """
    operations = {"accurate": ops.Tanh, "fast": ops.FastTanh}
    if precision not in operations:
        raise SpecError(f"tanh: precision={precision!r} must be 'accurate' or 'fast'")
    return apply(operations[precision], x)


@_public
def sigmoid(x: Any) -> Traced:
    """Returns 1 / (1 + exp(-x))."""
    return apply(ops.Sigmoid, x)


@_public
def sqrt(x: Any) -> Traced:
    """Returns the square root of x."""
    return apply(ops.Sqrt, x)


@_public
def sin(x: Any) -> Traced:
    """Returns the sine of x in radians."""
    return apply(ops.Sin, x)


@_public
def cos(x: Any) -> Traced:
    """Returns the cosine of x in radians."""
    return apply(ops.Cos, x)


@_public
def floor(x: Any) -> Traced:
    """Returns the largest whole number not above x, as a float. Use to_int(floor(x)) for an index."""
    return apply(ops.Floor, x)


@_public
def to_int(x: Any) -> Traced:
    """Converts x to int32, rounded towards zero. True becomes 1, NaN becomes 0, and values beyond int32 saturate."""
    return apply(ops.ToInt, x)


@_public
def to_float(x: Any) -> Traced:
    """Converts x to float32. True becomes 1.0."""
    return apply(ops.ToFloat, x)
