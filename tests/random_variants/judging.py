"""Judges results of kernels by the rule of `flashgen.reference.numerics`, and by bounds where the rule does not apply.

The rule compares with standard attention in the input dtype. It does not apply where scores are so large that one
float32 rounding of them changes a probability, or that float16 cannot hold them. There scores are known to within
`slack`: the LSE must be within it, outputs within the range of the values that are averaged, gradients finite.

At a kink of a score function (abs, min, max) the error of a kernel, such as the absolute error of the accurate tanh,
may move a value to the other side, where the slope differs. Gradients may be off by as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flashgen.reference import judge
from flashgen.reference.numerics import ALLOWANCE, FACTOR, LSE_BOUND, LSE_FACTOR

Array = np.ndarray[Any, Any]

_EPS32 = 2.0**-24
_ROUNDINGS = 8  # float32 roundings on the way to a score
_FAST_TANH = 2.0**-11  # the relative error that its documentation allows
_TRUSTED = LSE_BOUND / 4  # up to this slack the rule covers float32's own rounding
_EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


class Judged(NamedTuple):
    """One draw of q, k and v: by name, what came out, what should have, and what the input dtype would give."""

    found: Mapping[str, Array]
    expected: Mapping[str, Array]
    low: Mapping[str, Array]
    largest: float  # largest magnitude on the way to a score
    values: float  # the largest magnitude of v, times dropout's factor
    fast_tanh: bool = False
    given: Callable[[], Mapping[str, Array]] | None = None  # the gradients of a rounded output
    unsure: Callable[[], Mapping[str, Array]] | None = None  # how far gradients may be off because of kinks

    @property
    def slack(self) -> float:
        """How far float32's scores may be from the exact ones."""
        return self.largest * (_ROUNDINGS * _EPS32 + (_FAST_TANH if self.fast_tanh else 0))


def complaint(draws: Sequence[Judged], dtype: str) -> str | None:
    """What is wrong with the draws together, or None. They are judged as one array: see `verify.samples`."""
    slack, values = max(draw.slack for draw in draws), max(draw.values for draw in draws)
    for name in draws[0].found:
        found, expected, low = (_together(name, parts) for parts in zip(*(draw[:3] for draw in draws), strict=True))
        if not found.size or (name != "lse" and not np.isfinite(expected).all()):
            continue  # the reference overflows float64, so nothing can be judged
        if np.isnan(found).any():
            return f"{name}: {int(np.isnan(found).sum())} of {found.size} are NaN"
        if name != "lse" and slack <= _TRUSTED:
            wrong = _by_the_rule(name, found, expected, low, draws)
        else:
            wrong = _by_bounds(name, found, expected, low, slack, values, dtype)
        if wrong:
            return f"{name}: {wrong}"
    return None


def _together(name: str, parts: Sequence[Mapping[str, Array]]) -> Array:
    return np.concatenate([np.ravel(np.asarray(part[name]).astype(np.float64)) for part in parts])


def _by_the_rule(name: str, found: Array, expected: Array, low: Array, draws: Sequence[Judged]) -> str | None:
    if name != "out" and not np.isfinite(low).all():
        return None  # the gradient overflows its array's dtype, as one of a float16 capture may
    verdict = judge(found, expected, low)
    given = [draw.given() for draw in draws if draw.given is not None] if not verdict.ok else []
    rounded = _together(name, given) if given else None
    if rounded is not None:
        verdict = judge(found, expected, low, given=rounded)
    if not verdict.ok:
        unsure = [draw.unsure() for draw in draws if draw.unsure is not None]
        if unsure and all(name in each for each in unsure):
            off = _together(name, unsure)
            verdict = judge(found - np.clip(found - expected, -off, off), expected, low, given=rounded)
    return None if verdict.ok else str(verdict)


def _by_bounds(
    name: str, found: Array, expected: Array, low: Array, slack: float, values: float, dtype: str
) -> str | None:
    if name == "lse":
        magnitude = np.abs(np.where(np.isfinite(expected), expected, 0.0))
        return _beyond(found, expected, np.maximum(LSE_BOUND, LSE_FACTOR * magnitude) + (slack > _TRUSTED) * slack)
    if name == "out":
        with np.errstate(invalid="ignore"):
            own = FACTOR * float(np.abs(low - expected).max())
        if not math.isfinite(own):
            own = 4 * _EPS[dtype] * values
        return _beyond(found, expected, own + ALLOWANCE + min(2.0, math.expm1(min(2 * slack, 1.0))) * values)
    infinite = np.isinf(found) & (np.abs(expected) < 1e4) & np.isfinite(low)
    return f"{int(infinite.sum())} of {found.size} are infinite" if infinite.any() else None


def _beyond(found: Array, expected: Array, bound: float | Array) -> str | None:
    with np.errstate(invalid="ignore"):
        difference = np.where(found == expected, 0.0, np.abs(found - expected))
    bounds = np.broadcast_to(bound, found.shape)
    worst = int(np.argmax(difference / bounds))
    if difference[worst] <= bounds[worst]:
        return None
    return (
        f"{found[worst]:g} where {expected[worst]:g} is right, beyond {bounds[worst]:.2e}, at {worst} of {found.size}"
    )
