"""The gallery: every variant runs and agrees with NumPy, and its page and pictures are current."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashgen.verify import Case, Shape, verify
from flashgen.verify.problems import random_captures

ROOT = Path(__file__).parents[2]
GALLERY: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "gallery.py"))
VARIANTS = GALLERY["variants"]()
LENGTHS = {"window": 1100, "selected": 320, "pair_bias": 320}
"""The keys of a variant in the test; 640 for all others."""


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_variant_agrees_with_numpy(variant: Any) -> None:
    len_q, len_k = GALLERY["lengths_of"](variant.name, LENGTHS.get(variant.name, 640))

    def captures(shape: Shape, random: np.random.Generator) -> dict[str, Any]:
        return random_captures(variant.spec, shape, random) | GALLERY["captures_of"](variant.name, len_k)

    (result,) = verify([Case(variant.spec, Shape(len_q, len_k, 1, 1, 1), captures)], emulate=True)
    assert result.ok, result.problem or result.verdict


def test_there_are_twenty_and_most_skip_tiles() -> None:
    shares = {variant.name: GALLERY["tiles_of"](variant).share for variant in VARIANTS}
    assert len(shares) == 20
    assert {name for name, share in shares.items() if share == 1} == {"tree", "relative", "pair_bias"}


def test_pictures_are_current_and_there_are_no_others() -> None:
    files = dict(GALLERY["files"]())
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, "run: python docs/refresh.py"
    assert set((ROOT / "docs" / "gallery").iterdir()) == set(files)


def test_measured_rows_exist() -> None:
    assert set(GALLERY["MEASURED"].values()) <= set(GALLERY["measured"]())
    assert set(GALLERY["MEASURED"]) <= {variant.name for variant in VARIANTS}
