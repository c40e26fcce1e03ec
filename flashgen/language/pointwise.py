"""Functions of torch that kernels lack, composed of functions that they have, with torch's values and derivatives.

The derivatives at ties are those of torch: relu has 0 at 0. `inplace` has no meaning for traced values and is ignored.
"""

from __future__ import annotations

from typing import Any

from flashgen.errors import SpecError
from flashgen.language import elementary as f
from flashgen.language.trace import Traced, lift


def relu(x: Any, inplace: bool = False) -> Traced:
    """Returns max(x, 0), with a derivative of 0 at 0."""
    return f.where(x <= 0, 0, x)


def silu(x: Any, inplace: bool = False) -> Traced:
    """Returns x·sigmoid(x)."""
    return x * f.sigmoid(x)


def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Traced:
    """Returns log(1 + exp(beta·x)) / beta, or x where beta·x is above the threshold, as in torch."""
    x = f.to_float(x)
    return f.where(x * beta > threshold, x, f.log(1.0 + f.exp(x * beta)) / beta)


def leaky_relu(x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Traced:
    """Returns x where x > 0, else negative_slope·x."""
    return f.where(x > 0, x, x * negative_slope)


def elu(x: Any, alpha: float = 1.0, inplace: bool = False) -> Traced:
    """Returns x where x > 0, else alpha·(exp(x) - 1)."""
    return f.where(x > 0, x, alpha * (f.exp(x) - 1.0))


def erf(x: Any) -> Traced:
    """Returns the error function, with an absolute error of 1.5e-7 (Abramowitz and Stegun, equation 7.1.26)."""
    x = f.to_float(x)
    t = 1.0 / (1.0 + 0.3275911 * f.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf_of_abs = 1.0 - series * f.exp(-(x * x))
    return f.where(x < 0, -erf_of_abs, erf_of_abs)


def gelu(x: Any, approximate: str = "none") -> Traced:
    """Returns x times the cumulative normal distribution at x, using `erf` or torch's formula with tanh."""
    if approximate == "tanh":
        return 0.5 * x * (1.0 + f.tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))
    if approximate != "none":
        raise SpecError(f"gelu: approximate={approximate!r} must be 'none' or 'tanh'")
    return 0.5 * x * (1.0 + erf(x * 0.7071067811865476))


def sign(x: Any) -> Traced:
    """Returns -1, 0 or 1; NaN for NaN."""
    x = lift(x)
    one, zero = (1.0, x) if x.kind == "float" else (1, 0)
    return f.where(x > 0, one, f.where(x < 0, -one, zero))


def round(x: Any, decimals: int = 0) -> Traced:
    """Rounds to the nearest whole number, ties to even. The result is a float."""
    if decimals:
        raise SpecError(f"round: decimals={decimals!r} is not part of the language: give 0")
    x = f.to_float(x)
    below = f.floor(x)
    rest = x - below
    odd = below - 2.0 * f.floor(below * 0.5)
    return f.where(rest < 0.5, below, f.where(rest > 0.5, below + 1.0, below + odd))


def fmod(x: Any, y: Any) -> Traced:
    """Returns the remainder of a division that rounds towards 0. It has the sign of x."""
    rest = f.abs(x) % f.abs(y)
    return f.where(lift(x) < 0, -rest, rest)
