"""The numerics rule where it applies, and the remaining bounds where scores are too large for it."""

from __future__ import annotations

import numpy as np
import pytest

from random_variants.judging import Judged, complaint

RIGHT = np.linspace(-1, 1, 64)
LOW = RIGHT + 1e-3


def drawn(found: np.ndarray, name: str = "out", largest: float = 3.0, **changed: object) -> Judged:
    low = changed.pop("low", LOW)
    return Judged({name: found}, {name: RIGHT}, {name: low}, largest, 1.0, **changed)


def changed(value: float) -> np.ndarray:
    found = RIGHT.copy()
    found[7] = value
    return found


@pytest.mark.parametrize("name", ["out", "dq", "lse"])
@pytest.mark.parametrize("largest", [3.0, 1e6, 1e30])
def test_right_results_pass(name: str, largest: float) -> None:
    assert complaint([drawn(RIGHT, name, largest)], "float16") is None


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (drawn(RIGHT + 3e-3), "is not <="),
        (drawn(changed(np.nan)), "1 of 64 are NaN"),
        (drawn(changed(np.nan), largest=1e30), "1 of 64 are NaN"),
        (drawn(RIGHT + 2e-3, "lse"), "beyond 1.00e-03"),
        (drawn(RIGHT + 1.0, "lse", 1e5), "beyond"),
        (drawn(changed(30.0), largest=1e30), "beyond"),
        (drawn(RIGHT + 0.1, largest=1e4), "beyond"),
        (drawn(changed(np.inf), "dq", 1e5), "1 of 64 are infinite"),
        (drawn(changed(np.nan), "dq", 1e5), "1 of 64 are NaN"),
        (drawn(RIGHT + 3e-3, "dq"), "is not <="),
    ],
)
def test_wrong_results_fail(draw: Judged, words: str) -> None:
    assert words in str(complaint([draw], "float16"))


def test_draws_are_judged_together() -> None:
    """A draw that fails alone, because the low-precision error is small by chance, need not fail with others."""
    lucky = drawn(RIGHT + 1.5e-3, low=RIGHT + 1e-4)
    assert complaint([lucky], "float16") and complaint([lucky, drawn(RIGHT + 1.5e-3)], "float16") is None


def test_the_fast_tanh_has_its_documented_error() -> None:
    far = RIGHT + 5e-3
    assert complaint([drawn(far, "lse", 20.0)], "float16")
    assert complaint([drawn(far, "lse", 20.0, fast_tanh=True)], "float16") is None
