"""Mathematical functions for traced masks and scores. Each takes traced values or literals and gives a traced value."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from flashgen.errors import SpecError
from flashgen.language import operations as ops
from flashgen.language.trace import PLACEHOLDERS, Traced, apply, lift, of_node

__all__ = ["abs", "clamp", "cos", "exp", "exp2", "floor", "len_k", "len_q", "log", "log2", "maximum", "minimum"]
__all__ += ["sigmoid", "sin", "sqrt", "tanh", "to_float", "to_int", "where"]


def _public(function: Callable[..., Traced]) -> Any:
    """The function as users call it: its results are placeholders where torch.compile traces them."""

    @wraps(function)
    def call(*operands: Any, **options: Any) -> Any:
        if PLACEHOLDERS:
            return PLACEHOLDERS[-1].call(function.__name__, operands, options)
        return function(*operands, **options)

    return call


len_q = of_node(ops.LEN_Q)
"""How many queries the sequence has: a number of the call, which compiles nothing anew."""
len_k = of_node(ops.LEN_K)
"""How many keys the sequence has: a number of the call, which compiles nothing anew."""


@_public
def where(condition: Any, a: Any, b: Any) -> Traced:
    """a where the condition holds, else b. Both are computed."""
    return apply(ops.Where, condition, a, b)


@_public
def minimum(a: Any, b: Any) -> Traced:
    """The smaller of a and b."""
    return apply(ops.Minimum, a, b)


@_public
def maximum(a: Any, b: Any) -> Traced:
    """The larger of a and b."""
    return apply(ops.Maximum, a, b)


@_public
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


@_public
def abs(x: Any) -> Traced:
    """|x|, of x's kind."""
    return apply(ops.Abs, x)


@_public
def exp(x: Any) -> Traced:
    """e**x."""
    return apply(ops.Exp, x)


@_public
def exp2(x: Any) -> Traced:
    """2**x."""
    return apply(ops.Exp2, x)


@_public
def log(x: Any) -> Traced:
    """Natural logarithm; log(0) = -inf."""
    return apply(ops.Log, x)


@_public
def log2(x: Any) -> Traced:
    """Logarithm to base 2; log2(0) = -inf."""
    return apply(ops.Log2, x)


@_public
def tanh(x: Any, precision: str = "accurate") -> Traced:
    """Hyperbolic tangent, to an absolute error of 1e-6; with precision="fast" one instruction, to a relative 2**-11."""
    operations = {"accurate": ops.Tanh, "fast": ops.FastTanh}
    if precision not in operations:
        raise SpecError(f"tanh: precision={precision!r} must be 'accurate' or 'fast'")
    return apply(operations[precision], x)


@_public
def sigmoid(x: Any) -> Traced:
    """1 / (1 + exp(-x))."""
    return apply(ops.Sigmoid, x)


@_public
def sqrt(x: Any) -> Traced:
    """Square root."""
    return apply(ops.Sqrt, x)


@_public
def sin(x: Any) -> Traced:
    """Sine of x radians."""
    return apply(ops.Sin, x)


@_public
def cos(x: Any) -> Traced:
    """Cosine of x radians."""
    return apply(ops.Cos, x)


@_public
def floor(x: Any) -> Traced:
    """The largest whole number not above x, as a float; to_int(floor(x)) for an index."""
    return apply(ops.Floor, x)


@_public
def to_int(x: Any) -> Traced:
    """int32 of x, rounded towards zero; True is 1. Beyond int32 it saturates, and NaN gives 0."""
    return apply(ops.ToInt, x)


@_public
def to_float(x: Any) -> Traced:
    """float32 of x; True is 1.0."""
    return apply(ops.ToFloat, x)
