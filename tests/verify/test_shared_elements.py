"""Gradients of captured elements that scores of a tile share: along diagonals, in blocks, in windows, or all."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg
from flashgen.codegen.expressions.derivative_text import score_gradient
from flashgen.verify import Case, Shape, verify

TABLE, BLOCKS = fg.Tensor("table", "float32", 2, grad=True), fg.Tensor("blocks", "float32", 3, grad=True)


def biased(index: Any) -> Any:
    return fg.trace_score(lambda s, b, h, q, k: s + TABLE[h, index(q, k)], "biased")


def of_blocks(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + BLOCKS[h, q // 32, k // 64]


def gained(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * (1 + TABLE[h, fg.clamp(k - q, -12, 12) + 12])


# Name -> the score, dropout, which scores share an element.
SHARED = {
    "distances": (biased(lambda q, k: fg.clamp(q - k, -5, 40) + 5), 0.0, "distance"),
    "distances, dropped": (biased(lambda q, k: abs(q - k) // 2), 0.17, "distance"),
    "remainders": (biased(lambda q, k: (k - q) % 7), 0.0, "distance"),
    "blocks": (of_blocks, 0.0, "some"),
    "blocks, dropped": (of_blocks, 0.17, "some"),
    "windows": (biased(lambda q, k: (q // 8 - k // 8 + 9) % 8 * 15 + q % 8 - k % 8 + 7), 0.0, "some"),
    "gains": (gained, 0.0, "some"),
}


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.rotated(15)
def test_on_the_emulator(name: str, target: str) -> None:
    score, dropout, shared = SHARED[name]
    spec = fg.AttentionSpec(64, score=score, dropout=dropout)
    gradient = score_gradient(spec)
    assert gradient is not None and [gather.shared for gather in gradient.gathers] == [shared]
    for deterministic, shape in enumerate((Shape(150, 300, 1, 2, 1), Shape(70, 200, 1, 2, 2))):
        options: dict[str, Any] = {"emulate": True, "deterministic": bool(deterministic), "target": target}
        for result in verify([Case(spec, shape)], passes=("backward",), **options):
            assert result.ok, f"{result.case} on {result.engine}: {result.problem or result.verdicts}"
