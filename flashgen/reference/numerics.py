"""The tolerances that a kernel is judged by: for outputs, gradients and the LSE.

An output X passes iff max|X - ref| <= 2 max|low - ref| + 1e-5. Here `ref` is standard attention in float64, and `low`
is the same attention rounded to the input dtype at every step. A fused kernel may thus be at most twice as wrong as the
unfused implementation that it replaces. Source: the tests of flash-attention (Dao et al.), with a float64 reference.

A gradient also passes if max|X - ref| <= 2 max|given - ref| + 1e-5, where `given` is the float64 backward of an output
rounded to the input dtype. A backward reads the rounded output, so that its D = rowsum(dO * O) contains the rounding
error of O; only another pass over the scores would give a better D. Standard attention happens to cancel this error
where P is almost one-hot, because it rounds P in the same way before it computes O.

The LSE is float32 and has no low-precision counterpart. It must be within 1e-3 of the reference or, where the magnitude
is too large for that in float32, within 2^-20 of its magnitude. It must be infinite exactly where the reference is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flashgen.errors import ArgumentError

FACTOR = 2.0
ALLOWANCE = 1e-5
LSE_BOUND = 1e-3
LSE_FACTOR = 2.0**-20  # relative to its magnitude; more than LSE_BOUND beyond 1049


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison: error = max|X - ref| with its bound, and the error of the LSE with its bound.

    lse_error is |LSE - ref LSE| of the element that comes nearest to its bound, and lse_bound is the bound of this
    element. Both are None if no LSE was given. An error of NaN or infinity means that the output holds NaN, or infinity
    where the reference is finite. `worst` and `lse_worst` are the indices of the errors; None for empty arrays.

    Attributes:
        error: max|X - ref|.
        bound: the largest error that passes.
        lse_error: the error of the LSE that comes nearest to its bound; None without an LSE.
        ok: whether all errors are within their bounds.
        worst: the index of the error.
        lse_worst: the index of lse_error.
        lse_bound: the bound of lse_error.
    """

    error: float
    bound: float
    lse_error: float | None
    ok: bool
    worst: tuple[int, ...] | None = None
    lse_worst: tuple[int, ...] | None = None
    lse_bound: float | None = None

    def __str__(self) -> str:
        parts = [_comparison("error", self.error, self.bound, self.worst)]
        if not math.isfinite(self.bound):
            parts.append("the low-precision run overflowed: give smaller inputs")
        if self.lse_error is not None and self.lse_bound is not None:
            parts.append(_comparison("LSE error", self.lse_error, self.lse_bound, self.lse_worst))
        return f"{'ok' if self.ok else 'FAILED'}: {'; '.join(parts)}"


def judge(
    out: ArrayLike,
    ref: ArrayLike,
    low: ArrayLike,
    lse: ArrayLike | None = None,
    ref_lse: ArrayLike | None = None,
    given: ArrayLike | None = None,
) -> Verdict:
    """Judges an output `out` against `ref` (float64) and `low` (rounded at each step), and `lse` against `ref_lse`.

    The first four arrays share one shape, in any layout; lse and ref_lse share another. NaN in out or lse fails. A
    bound that is not finite fails too, because any output would pass it.

    Args:
        out: the output or gradient to judge.
        ref: the same in float64, by `attention` or `backward`.
        low: the same, rounded at each step, by `low_precision` or `low_precision_backward`.
        lse: the LSE to judge, a natural logarithm; None for none.
        ref_lse: the LSE in float64.
        given: for a gradient, that of a rounded output in float64, by `backward_of_rounded_output`. The larger of the
            errors of `given` and `low` determines the bound.

    Raises ArgumentError for shapes that differ, for NaN in a reference, and for lse without ref_lse or the reverse.
    """
    if (lse is None) != (ref_lse is None):
        missing = "ref_lse" if ref_lse is None else "lse"
        raise ArgumentError(f"{missing} is missing: give both lse and ref_lse, or neither")
    error, worst = _largest_difference("out", out, ref)
    allowed = [_largest_difference(name, x, ref)[0] for name, x in (("low", low), ("given", given)) if x is not None]
    bound = FACTOR * max(allowed) + ALLOWANCE
    ok = math.isfinite(bound) and error <= bound  # comparisons with NaN are false
    if lse is None or ref_lse is None:
        return Verdict(error, bound, None, ok, worst)
    lse_error, lse_bound, lse_worst = _judge_lse(lse, ref_lse)
    return Verdict(error, bound, lse_error, ok and lse_error <= lse_bound, worst, lse_worst, lse_bound)


def _judge_lse(lse: ArrayLike, reference: ArrayLike) -> tuple[float, float, tuple[int, ...] | None]:
    """Returns the difference that is largest relative to its bound, this bound, and its index."""
    difference = _differences("lse", lse, reference)
    if difference.size == 0:
        return 0.0, LSE_BOUND, None
    magnitude = np.abs(np.where(np.isfinite(reference), reference, 0.0))
    bounds = np.maximum(LSE_BOUND, LSE_FACTOR * magnitude)
    index = np.unravel_index(int(np.argmax(difference / bounds)), difference.shape)
    return float(difference[index]), float(bounds[index]), tuple(int(i) for i in index)


def _largest_difference(name: str, given: ArrayLike, reference: ArrayLike) -> tuple[float, tuple[int, ...] | None]:
    """Returns max|given - reference| and its index. NaN in given gives NaN; equal infinities differ by 0."""
    difference = _differences(name, given, reference)
    if difference.size == 0:
        return 0.0, None
    index = np.unravel_index(int(np.argmax(difference)), difference.shape)  # argmax returns the first NaN, if any
    return float(difference[index]), tuple(int(i) for i in index)


def _differences(name: str, given: ArrayLike, reference: ArrayLike) -> NDArray[np.float64]:
    """Returns |given - reference|: NaN where given is NaN, 0 for equal infinities."""
    actual, expected = _as_float64(given), _as_float64(reference)
    if actual.shape != expected.shape:
        raise ArgumentError(f"{name} has shape {actual.shape}, its reference {expected.shape}; give equal shapes")
    if np.isnan(expected).any():
        first = tuple(map(int, np.argwhere(np.isnan(expected))[0]))
        raise ArgumentError(
            f"the reference of {name} holds NaN, first at {first}, and cannot judge anything; give finite inputs, and "
            "a score function that is finite at every key that is attended to (q - k may be negative if len_q < len_k)"
        )
    with np.errstate(invalid="ignore"):
        return np.where(actual == expected, 0.0, np.abs(actual - expected))


def _as_float64(array: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(array).astype(np.float64)


def _comparison(name: str, error: float, bound: float, where: tuple[int, ...] | None) -> str:
    relation = "<=" if error <= bound else "is not <="
    at = "" if where is None or error <= bound else f" at {list(where)}"
    return f"{name} {error:.2e}{at} {relation} {bound:.2e}"
