"""Numbers of extreme magnitude and invalid values outside the mask, in both families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen as fg
from flashgen import attention
from flashgen.verify import Shape, judged, random_inputs
from flashgen.verify.problems import Inputs, poisoned_outputs

FAMILIES = pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
SHAPE = Shape(70, 300, 1, 2, 1)  # several tiles of keys in both families
MASKS = {"full": fg.full(), "causal": fg.causal(), "window": fg.sliding_window(200, 250)}
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"mask": mask} for name, mask in MASKS.items()},
    "alibi": {"score": fg.alibi(8)},
}
Change = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


def called(spec: fg.AttentionSpec, target: str, change: Change, shape: Shape = SHAPE) -> tuple[Inputs, Any, Any]:
    """Returns the inputs, modified in float32, and the kernel's output, written into arrays full of NaN."""
    random = random_inputs(spec, shape)
    q, k, v = (x.astype(np.float32) for x in (random.q, random.k, random.v))
    with np.errstate(over="ignore"):
        q, k, v = (x.astype(random.q.dtype) for x in change(q, k, v))
    inputs = Inputs(q, k, v, random.captures)
    out, lse = poisoned_outputs(spec, q)
    attention.compile(spec, target=target, emulate=True)(q, k, v, return_lse=True, out=(out, lse), **inputs.captures)
    return inputs, out, lse


def assert_right(spec: fg.AttentionSpec, inputs: Inputs, out: Any, lse: Any) -> None:
    verdict = judged(spec, inputs.q, inputs.k, inputs.v, out, lse, inputs.captures)
    assert verdict.ok, f"{spec.name}: {verdict}"


@FAMILIES
@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_beyond_the_precision_of_the_offset(variant: str, target: str) -> None:
    """At 1e30 a maximum and its product with a constant differ by more than 2^127: rows were NaN on sm_90a."""
    spec = fg.AttentionSpec(64, "bfloat16", **VARIANTS[variant])
    inputs, out, lse = called(spec, target, lambda q, k, v: (q * 1e15, k * 1e15, v))
    assert_right(spec, inputs, out, lse)
    exact = fg.reference.attention(spec, inputs.q, inputs.k, inputs.v, **inputs.captures)
    np.testing.assert_array_equal(out, exact.astype(ml_dtypes.bfloat16))  # each row attends to one key


@FAMILIES
@pytest.mark.parametrize("variant", MASKS)
@pytest.mark.parametrize("scale", [1e9, 1e30])
@pytest.mark.covering(6)
def test_scales_beyond_the_precision_of_the_offset(scale: float, variant: str, target: str) -> None:
    spec = fg.AttentionSpec(64, "bfloat16", scale=scale, mask=MASKS[variant])
    inputs, out, lse = called(spec, target, lambda q, k, v: (q, k, v))
    assert_right(spec, inputs, out, lse)


@FAMILIES
def test_row_maxima_beyond_the_range_of_offsets_beside_others(target: str) -> None:
    """Some rows of a warp exceed the offset range in the middle of their keys; the rows beside them are unchanged."""

    def change(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        q[:, :, ::3, 0], k[..., 0] = 1e6, np.where(np.arange(300) < 130, 0.0, 1e6 * np.arange(300))
        q[:, :, 1::3, 0] = q[:, :, 2::3, 0] = 0
        return q, k, v

    spec = fg.AttentionSpec(64, "bfloat16")
    assert_right(spec, *called(spec, target, change))


def hides_first(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return fg.where(k < 150, -float("inf"), s)


@FAMILIES
@pytest.mark.parametrize("mask", MASKS)
def test_first_tiles_with_scores_of_minus_infinity(mask: str, target: str) -> None:
    """By a score function, and by products beyond float32: in both cases a row has a tile without a maximum."""
    by_score = fg.AttentionSpec(64, mask=MASKS[mask], score=fg.trace_score(hides_first, "hides_first"))
    assert_right(by_score, *called(by_score, target, lambda q, k, v: (q, k, v)))

    def change(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        k[:, :, :150] = -1e38
        return (np.abs(q) + 1) * 10, k, v

    by_product = fg.AttentionSpec(64, "bfloat16", mask=MASKS[mask])
    assert_right(by_product, *called(by_product, target, change))


GARBAGE = pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])


def padded(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q % 3 != 0) & (k < 140)


@FAMILIES
@GARBAGE
def test_rows_without_keys_are_0_whatever_v_holds(garbage: float, target: str) -> None:
    def change(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        v[:, :, 140:] = garbage
        return q, k, v

    spec = fg.AttentionSpec(64, mask=fg.trace_mask(padded, "padded"))
    _, out, lse = called(spec, target, change)
    assert not out[:, :, ::3].any() and (lse[:, :, ::3] == -np.inf).all()
    hidden = fg.trace_score(lambda s, b, h, q, k: fg.where(q % 3 == 0, -float("inf"), s), "hidden")
    spec = fg.AttentionSpec(64, score=hidden)  # no tile is partial, and every row reads V
    _, out, lse = called(spec, target, change)
    assert not out[:, :, ::3].any() and (lse[:, :, ::3] == -np.inf).all()


@FAMILIES
@GARBAGE
def test_masked_keys_may_hold_anything(garbage: float, target: str) -> None:
    """This holds for K; masked rows of V are multiplied by 0 and must be finite."""

    def change(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        k[:, :, 140:] = garbage
        return q, k, v

    spec = fg.AttentionSpec(64, mask=fg.trace_mask(padded, "padded"))
    inputs, out, lse = called(spec, target, change)
    inputs.k[:, :, 140:] = 0
    assert_right(spec, inputs, out, lse)


@FAMILIES
def test_memory_behind_the_last_key_and_query_has_no_effect(target: str) -> None:
    spec = fg.AttentionSpec(64, mask=fg.causal())
    random = random_inputs(spec, SHAPE)
    q, k, v = (
        np.pad(x, ((0, 0), (0, 0), (0, 80), (0, 0)), constant_values=np.nan) for x in (random.q, random.k, random.v)
    )
    inputs = Inputs(q[:, :, :70], k[:, :, :300], v[:, :, :300], {})
    out, lse = attention.compile(spec, target=target, emulate=True)(inputs.q, inputs.k, inputs.v, return_lse=True)
    assert_right(spec, inputs, out, lse)
