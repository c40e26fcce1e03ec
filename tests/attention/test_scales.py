"""Scales of 0 and below in every family and pass: the largest score is then not that of the largest product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.verify import Case, Shape, verify

SHAPES = (Shape(70, 70, 2, 4, 2), Shape(5, 130, 1, 2, 1))
SINK = fg.Tensor("sinks", "float32", 1, grad=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {"mask": fg.causal()},
    "lists": {"mask": fg.document("ids")},
    "softcap": {"mask": fg.causal(), "score": fg.softcap(2)},
    "a multiple": {"score": lambda s, b, h, q, k: s * 3 - (q - k)},
    "sink": {"mask": fg.causal(), "sink": SINK},
    "dropout": {"mask": fg.causal(), "dropout": 0.25},
    "ragged": {"mask": fg.causal(), "layout": "thd"},
}


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.covering(12)
def test_both_passes(name: str, scale: float, target: str) -> None:
    spec = fg.AttentionSpec(64, scale=scale, **VARIANTS[name])
    if spec.is_varlen and target == "sm_75":
        pytest.skip("has no ragged batches")
    for shape in SHAPES if name != "lists" else SHAPES[:1]:
        for result in verify([Case(spec, shape)], passes=("forward", "backward"), target=target, emulate=True):
            assert result.ok, str(result)


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_few_queries_over_split_keys(scale: float) -> None:
    compiled = fg.compile(fg.AttentionSpec(64, scale=scale), emulate=True)
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 2, length, 64)).astype(np.float16) for length in (1, 300, 300))
    whole, parts = compiled(q, k, v), compiled(q, k, v, num_splits=3)
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ v.astype(np.float64)
    for out in (whole, parts):
        np.testing.assert_allclose(out.astype(np.float64), expected, atol=2e-3)


def test_specs_with_such_scales() -> None:
    spec = fg.AttentionSpec(64, scale=-0.5)
    assert spec.scale == -0.5 and spec.score is not None and spec.score.name == "unchanged"
    assert fg.AttentionSpec.from_json(spec.to_json()) == spec
    assert fg.AttentionSpec(64, scale=-0.0) == fg.AttentionSpec(64, scale=0)
    assert fg.AttentionSpec(64, scale=0.5).score is None
