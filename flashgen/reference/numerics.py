"""The rule that judges a kernel: one rule for outputs, gradients and LSE.

An output X passes iff max|X - ref| <= 2 max|low - ref| + 1e-5, where `ref` is standard attention in float64 and `low`
the same attention rounded to the input dtype at every step: a fused kernel may be at most twice as wrong as the plain
implementation that it replaces. Source: the tests of flash-attention (Dao et al.), with a float64 reference.

A gradient passes too if max|X - ref| <= 2 max|given - ref| + 1e-5, where `given` is float64's backward of an output
rounded to the input dtype. A backward gets no better output, so its D = rowsum(dO * O) has O's rounding; only another
pass over the scores would give a better D. Standard attention happens to cancel that rounding where P is all but
one-hot, as it rounds P alike before it takes O.

LSE is float32 and has no low-precision twin: it must be within 1e-3 of the reference or, where float32 holds less of a
sum, within 2^-20 of its magnitude, and infinite exactly where the reference is.
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
    """error = max|X - ref|, and its bound; lse_error = |LSE - ref LSE| where it comes nearest to its bound, and that
    bound (both None where no LSE was given).

    NaN or infinity in an error says that the output holds NaN, or infinity where the reference is finite.
    `worst` is the index of the error in the output, `lse_worst` of that in LSE; None for empty arrays.
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
    """Judge an output `out` against `ref` (float64) and `low` (rounded at each step), and `lse` against `ref_lse`.

    given: for a gradient, the float64 gradient of a rounded output; it or `low` gives the bound, whichever is larger.
    All have one shape, in any layout; lse and ref_lse, natural logarithms, have one shape. NaN in out or lse fails, and
    so does a bound that is not finite, since anything would pass.
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
    lse_error, lse_bound, lse_worst = _judged_lse(lse, ref_lse)
    return Verdict(error, bound, lse_error, ok and lse_error <= lse_bound, worst, lse_worst, lse_bound)


def _judged_lse(lse: ArrayLike, reference: ArrayLike) -> tuple[float, float, tuple[int, ...] | None]:
    """The difference that is largest relative to its bound, that bound, and its index."""
    difference = _differences("lse", lse, reference)
    if difference.size == 0:
        return 0.0, LSE_BOUND, None
    magnitude = np.abs(np.where(np.isfinite(reference), reference, 0.0))
    bounds = np.maximum(LSE_BOUND, LSE_FACTOR * magnitude)
    index = np.unravel_index(int(np.argmax(difference / bounds)), difference.shape)
    return float(difference[index]), float(bounds[index]), tuple(int(i) for i in index)


def _largest_difference(name: str, given: ArrayLike, reference: ArrayLike) -> tuple[float, tuple[int, ...] | None]:
    """max|given - reference| and its index; NaN if given holds one; equal infinities differ by 0."""
    difference = _differences(name, given, reference)
    if difference.size == 0:
        return 0.0, None
    index = np.unravel_index(int(np.argmax(difference)), difference.shape)  # argmax finds a NaN before any number
    return float(difference[index]), tuple(int(i) for i in index)


def _differences(name: str, given: ArrayLike, reference: ArrayLike) -> NDArray[np.float64]:
    """|given - reference|; NaN where given is; equal infinities differ by 0."""
    ours, theirs = _as_float64(given), _as_float64(reference)
    if ours.shape != theirs.shape:
        raise ArgumentError(f"{name} has shape {ours.shape}, its reference {theirs.shape}; give arrays of one shape")
    if np.isnan(theirs).any():
        raise ArgumentError(f"the reference of {name} holds NaN, which nothing can be judged by; give finite inputs")
    with np.errstate(invalid="ignore"):
        return np.where(ours == theirs, 0.0, np.abs(ours - theirs))


def _as_float64(array: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(array).astype(np.float64)


def _comparison(name: str, error: float, bound: float, where: tuple[int, ...] | None) -> str:
    relation = "<=" if error <= bound else "is not <="
    at = "" if where is None or error <= bound else f" at {list(where)}"
    return f"{name} {error:.2e}{at} {relation} {bound:.2e}"
