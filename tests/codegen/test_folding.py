"""Folding of the scale into the constants of a score function: conditions and resulting text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import flashgen.language as fg
from flashgen.codegen.dispatch import render_forward
from flashgen.codegen.expressions.scale_folding import folded_products
from flashgen.codegen.targets import TARGETS
from flashgen.codegen.variant import variant_of


def products_of(function: Callable[..., Any], scale: float = 0.125) -> set[str]:
    score = fg.AttentionSpec(64, score=function).score
    assert score is not None
    return set(folded_products(scale, score.expression).values())


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda s, b, h, q, k: 20.0 * fg.tanh(s / 20.0), {"product * (kScale / 20.0f)"}),
        (lambda s, b, h, q, k: s * 3 + q, {"product * (kScale * 3.0f)"}),
        (lambda s, b, h, q, k: -0.5 * s, {"product * (kScale * -0.5f)"}),
        (lambda s, b, h, q, k: fg.tanh(s / 2) * (s * 4), {"product * (kScale / 2.0f)", "product * (kScale * 4.0f)"}),
        (lambda s, b, h, q, k: fg.tanh(s / 2) + s, set()),
        (lambda s, b, h, q, k: s, set()),
        (lambda s, b, h, q, k: s * q, set()),
        (lambda s, b, h, q, k: s * s, set()),
        (lambda s, b, h, q, k: 2.0 / s, set()),
        (lambda s, b, h, q, k: s * 0.0 + q, set()),
        (lambda s, b, h, q, k: s * 1e35, set()),
        (lambda s, b, h, q, k: s / fg.Scalar("cap", "float32"), set()),
        (lambda s, b, h, q, k: fg.to_float(q), set()),
    ],
)
def test_products(function: Callable[..., Any], expected: set[str]) -> None:
    assert products_of(function) == expected


def test_values_beyond_float32_are_not_folded() -> None:
    assert products_of(lambda s, b, h, q, k: s * 1e20, scale=1e5)
    assert not products_of(lambda s, b, h, q, k: s * 1e20, scale=1e15)
    assert not products_of(lambda s, b, h, q, k: s / 1e20, scale=1e-15)


def test_softcap_applies_to_the_product() -> None:
    source = render_forward(fg.AttentionSpec(64, score=fg.softcap(20)), TARGETS["sm_80"]).source
    assert "score_mod(float product, const" in source
    assert "return 20.0f * tanh_approx(product * (kScale / 20.0f));" in source
    assert "= score_mod(scores[n], arguments);" in source


def test_functions_that_read_the_score_get_the_score() -> None:
    source = render_forward(fg.AttentionSpec(64, score=fg.alibi(8)), TARGETS["sm_80"]).source
    assert "score_mod(float score, int h" in source
    assert "= score_mod(scores[n] * kScale, position.head, q, k, arguments);" in source


def test_a_repeated_product_is_stored_in_a_variable() -> None:
    spec = fg.AttentionSpec(64, score=lambda s, b, h, q, k: fg.sin(s / 3) + fg.cos(s / 3))
    score = variant_of(spec).score
    assert score is not None
    assert score.declarations == ("const float x0 = product * (kScale / 3.0f);",)
    assert score.text == "sinf(x0) + cosf(x0)"
