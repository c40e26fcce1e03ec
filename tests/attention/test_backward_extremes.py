"""Gradients of numbers with extreme magnitudes, and beside invalid values that the mask excludes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import attention, reference
from flashgen.verify import Shape, gradients_by_name, judged_gradients, random_gradients, random_inputs
from flashgen.verify.gradients import expected_gradients, gradients_of_rounded_output, poisoned_gradients
from flashgen.verify.problems import Inputs

MODES = pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
SHAPE = Shape(70, 300, 1, 2, 1)  # several tiles in both directions, and a group of two query heads
MASKS = {"full": fg.full(), "causal": fg.causal()}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"mask": fg.full()},
    "causal with alibi": {"mask": fg.causal(), "score": fg.alibi(8)},
}


def changed_inputs(spec: fg.AttentionSpec, change: Any = None) -> Inputs:
    """Returns random inputs, modified in float32."""
    random = random_inputs(spec, SHAPE)
    if change is None:
        return random
    with np.errstate(over="ignore"):
        arrays = change(*(x.astype(np.float32) for x in (random.q, random.k, random.v)))
    return Inputs(*(x.astype(random.q.dtype) for x in arrays), random.captures)


def gradients_of(
    spec: fg.AttentionSpec, inputs: Inputs, deterministic: bool, of_oracle: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Returns a random d_out, and the gradients from the kernel's forward output or from the reference's."""
    compiled = attention.compile(spec, target="sm_80", emulate=True, deterministic=deterministic)
    forward = reference.attention if of_oracle else compiled
    given = (spec, inputs.q, inputs.k, inputs.v) if of_oracle else (inputs.q, inputs.k, inputs.v)
    out, lse = forward(*given, return_lse=True, **inputs.captures)
    out, lse = out.astype(inputs.q.dtype), lse.astype(np.float32)
    d_out, _ = random_gradients(spec, SHAPE)
    into = poisoned_gradients(spec, inputs)
    gradients = compiled.backward(d_out, inputs.q, inputs.k, inputs.v, out, lse, into=into, **inputs.captures)
    return d_out, gradients_by_name(gradients)


def assert_right(spec: fg.AttentionSpec, inputs: Inputs, d_out: Any, found: dict[str, Any]) -> None:
    verdicts = judged_gradients(spec, inputs.q, inputs.k, inputs.v, d_out, found, **inputs.captures)
    assert all(verdict.ok for verdict in verdicts.values()), f"{spec.name}: {verdicts}"


@MODES
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [1e2, 1e4, 1e15])
@pytest.mark.covering(6)
def test_lse_rounding_does_not_change_probabilities(size: float, variant: str, deterministic: bool) -> None:
    """Forward and backward add scores in different orders, which differ by 1e23 at 1e30.

    One key has all the probability of such a row and receives dO.
    """
    spec = fg.AttentionSpec(64, "bfloat16", **VARIANTS[variant])
    inputs = changed_inputs(spec, lambda q, k, v: (q * size, k * size, v))
    d_out, found = gradients_of(spec, inputs, deterministic, of_oracle=True)
    assert_right(spec, inputs, d_out, found)
    exact = reference.backward(spec, inputs.q, inputs.k, inputs.v, d_out, **inputs.captures).dv
    np.testing.assert_allclose(found["dv"].astype(np.float64), exact, rtol=2.0**-7, atol=2.0**-7)


@MODES
def test_a_scale_whose_lse_exceeds_the_resolution_of_float32(deterministic: bool) -> None:
    spec = fg.AttentionSpec(64, "bfloat16", scale=1e30)
    inputs = changed_inputs(spec)
    assert_right(spec, inputs, *gradients_of(spec, inputs, deterministic))


@MODES
def test_rows_with_a_large_lse_beside_others(deterministic: bool) -> None:
    spec = fg.AttentionSpec(64, "bfloat16")
    inputs = changed_inputs(spec, lambda q, k, v: (q * np.where(np.arange(70) % 3 == 0, 1e4, 1.0)[:, None], k, v))
    d_out, found = gradients_of(spec, inputs, deterministic)
    assert_right(spec, inputs, d_out, found)
    inputs.q[:, :, ::3] = 0  # other rows equal those of a call without them
    d_out[:, :, ::3] = 0
    _, alone = gradients_of(spec, inputs, deterministic)
    np.testing.assert_allclose(found["dq"][:, :, 1::3].astype(float), alone["dq"][:, :, 1::3].astype(float), atol=1e-2)


def hides_first(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return fg.where(k < 150, -float("inf"), s)


def hides_rows(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return fg.where(q % 3 == 0, -float("inf"), s)


@MODES
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", [hides_first, hides_rows])
@pytest.mark.covering(6)
def test_scores_of_minus_infinity(score: Any, mask: str, deterministic: bool) -> None:
    spec = fg.AttentionSpec(64, mask=MASKS[mask], score=fg.trace_score(score, score.__name__))
    inputs = changed_inputs(spec)
    d_out, found = gradients_of(spec, inputs, deterministic)
    assert_right(spec, inputs, d_out, found)
    if score is hides_rows:
        assert not found["dq"][:, :, ::3].any()


@MODES
def test_keys_with_products_beyond_float32(deterministic: bool) -> None:
    def change(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        k[:, :, :150] = -1e38
        return (np.abs(q) + 1) * 10, k, v

    spec = fg.AttentionSpec(64, "bfloat16")
    inputs = changed_inputs(spec, change)
    assert_right(spec, inputs, *gradients_of(spec, inputs, deterministic))


def padded(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q % 3 != 0) & (k < 140)


@MODES
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_invalid_values_in_masked_keys(garbage: float, deterministic: bool) -> None:
    """Rows without keys to attend to have zero gradients, whatever K holds."""

    def change(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        k[:, :, 140:] = garbage
        return q, k, v

    spec = fg.AttentionSpec(64, mask=fg.trace_mask(padded, "padded"))
    _, found = gradients_of(spec, changed_inputs(spec, change), deterministic)
    assert not found["dq"][:, :, ::3].any()
    assert not found["dk"][:, :, 140:].any() and not found["dv"][:, :, 140:].any()


@MODES
def test_memory_behind_the_last_key_and_query_has_no_effect(deterministic: bool) -> None:
    spec = fg.AttentionSpec(64, mask=fg.causal())
    random = random_inputs(spec, SHAPE)
    rows = ((0, 0), (0, 0), (0, 80), (0, 0))
    q, k, v = (np.pad(x, rows, constant_values=np.nan) for x in (random.q, random.k, random.v))
    inputs = Inputs(q[:, :, :70], k[:, :, :300], v[:, :, :300], {})
    assert_right(spec, inputs, *gradients_of(spec, inputs, deterministic))


def test_nearly_one_hot_probabilities() -> None:
    """The rounding of O dominates the gradients' error: 5 times that of standard attention in float16."""
    spec, shape = fg.AttentionSpec(128), Shape(3, 3, 1, 1, 1)
    random = random_inputs(spec, shape, seed=89)
    inputs = Inputs((random.q.astype(np.float32) * 3).astype(np.float16), random.k, random.v, {})
    d_out, _ = random_gradients(spec, shape, 89)
    compiled = attention.compile(spec, target="sm_80", emulate=True)
    _, pullback = compiled.vjp(inputs.q, inputs.k, inputs.v)
    found = gradients_by_name(pullback(d_out))
    qkv = (inputs.q, inputs.k, inputs.v)
    expected, low = expected_gradients(spec, *qkv, d_out)
    given = gradients_of_rounded_output(spec, *qkv, d_out)
    for name in ("dq", "dk"):
        assert not reference.judge(found[name], expected[name], low[name]).ok  # the previous rule
        assert reference.judge(found[name], expected[name], low[name], given=given[name]).ok
        of_exact_output = found[name].astype(np.float64) - (given[name] - expected[name])
        assert reference.judge(of_exact_output, expected[name], low[name]).ok  # no other error contributes
    assert_right(spec, inputs, d_out, found)
