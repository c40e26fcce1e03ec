"""The rule for outputs: what passes and fails; NaN and infinity hide nothing."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.errors import ArgumentError
from flashgen.reference import judge
from flashgen.reference.numerics import Verdict

REF = np.array([1.0, 2.0, 3.0])
LOW = REF + np.array([0.0, 0.01, -0.02])  # so that the bound is 0.04001
LSE = np.array([0.5, -np.inf, 2.0])


@pytest.mark.parametrize(("difference", "ok"), [(0.0, True), (0.04, True), (-0.04, True), (0.0401, False), (-1, False)])
def test_twice_the_low_precision_error_plus_a_constant(difference, ok):
    verdict = judge(REF + np.array([0, 0, difference]), REF, LOW)
    assert verdict.ok is ok
    assert verdict.error == pytest.approx(abs(difference))
    assert verdict.bound == pytest.approx(0.04001)
    assert verdict.lse_error is None


def test_a_gradient_may_have_twice_the_error_of_a_rounded_output():
    given = REF + np.array([0.03, 0, 0])
    assert judge(REF + 0.06, REF, LOW, given=given).ok and not judge(REF + 0.06, REF, LOW).ok
    assert not judge(REF + 0.0601, REF, LOW, given=given).ok
    assert judge(REF + 0.04, REF, LOW, given=REF).ok  # the larger bound applies
    assert not judge(REF, REF, LOW, given=np.array([np.inf, 0, 0])).ok


def test_an_exact_low_precision_run_leaves_the_constant():
    assert judge(REF + 9e-6, REF, REF).ok
    assert not judge(REF + 1.1e-5, REF, REF).ok


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_poisoned_output_fails(poison):
    for index in range(3):
        out = REF.copy()
        out[index] = poison
        verdict = judge(out, REF, LOW)
        assert not verdict.ok and not math.isfinite(verdict.error) and verdict.worst == (index,)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_an_overflowed_low_precision_run_is_no_bound(poison):
    verdict = judge(REF, REF, [1.0, poison, 3.0])
    assert not verdict.ok and "overflowed" in str(verdict)


@pytest.mark.parametrize(
    ("lse", "ok", "error"),
    [
        ([0.5, -np.inf, 2.0], True, 0.0),
        ([0.5009, -np.inf, 2.0], True, 9e-4),
        ([0.5, -np.inf, 2.0011], False, 1.1e-3),
        ([0.5, np.inf, 2.0], False, np.inf),
        ([0.5, -1e30, 2.0], False, np.inf),
        ([-np.inf, -np.inf, 2.0], False, np.inf),
        ([0.5, -np.inf, np.nan], False, np.nan),
    ],
)
def test_lse(lse, ok, error):
    verdict = judge(REF, REF, LOW, lse, LSE)
    assert verdict.ok is ok
    assert verdict.lse_error == pytest.approx(error, nan_ok=True)


@pytest.mark.parametrize(("lse", "ok"), [([1e6 + 0.9, 3.0], True), ([1e6 + 1.1, 3.0], False), ([1e6, 3.0011], False)])
def test_a_large_lse_may_be_off_by_float32_rounding(lse, ok):
    """2^-20 of 1e6 is 0.95; small values beside it get no such allowance."""
    verdict = judge(REF, REF, LOW, lse, [1e6, 3.0])
    assert verdict.ok is ok
    assert verdict.lse_bound == pytest.approx(1e-3 if lse[1] > 3 else 1e6 / 2**20)


def test_a_wrong_output_fails_with_a_correct_lse():
    assert not judge(REF + 1, REF, LOW, LSE, LSE).ok


def test_empty_arrays_pass():
    empty = np.empty((2, 0, 8))
    assert judge(empty, empty, empty, np.empty((2, 0)), np.empty((2, 0))) == Verdict(
        0.0, 1e-5, 0.0, True, lse_bound=1e-3
    )


def test_sixteen_bit_outputs_are_compared_in_float64():
    for dtype in (np.float16, ml_dtypes.bfloat16):
        assert judge(REF.astype(dtype), REF, LOW).error == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((REF[:2], REF, LOW), "out has shape"),
        ((REF, REF, LOW[:2]), "low has shape"),
        ((REF, [1, np.nan, 3], LOW), "holds NaN"),
        ((REF, REF, LOW, LSE), "ref_lse is missing"),
        ((REF, REF, LOW, None, LSE), "lse is missing"),
        ((REF, REF, LOW, LSE[:1], LSE), "lse has shape"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        judge(*arguments)


def test_a_verdict_is_readable_and_frozen():
    assert str(judge(REF, REF, LOW)) == "ok: error 0.00e+00 <= 4.00e-02"
    failed = judge(REF + np.array([0, 0, 1]), REF, LOW, LSE, LSE)
    assert str(failed) == "FAILED: error 1.00e+00 at [2] is not <= 4.00e-02; LSE error 0.00e+00 <= 1.00e-03"
    with pytest.raises(AttributeError):
        failed.ok = True


@given(st.lists(st.floats(allow_nan=True), min_size=1, max_size=5))
def test_passing_outputs_are_close(values):
    out = np.array(values)
    ref = np.zeros_like(out)
    assert judge(out, ref, ref).ok == bool(np.all(np.abs(out) <= 1e-5))
