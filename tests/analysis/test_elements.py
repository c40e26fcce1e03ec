"""The elements of a tile, and drawings of them."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

import flashgen as fg
from flashgen.analysis.drawing.tile_maps import summary, to_svg, to_text
from flashgen.analysis.tile_classes import PARTIAL, tile_map
from flashgen.analysis.tile_elements import tile_elements
from flashgen.errors import ArgumentError

CAUSAL = fg.causal().expression
MAP = tile_map(CAUSAL, (4, 4), 10, 10)


def test_elements_equal_the_mask() -> None:
    found = tile_elements(CAUSAL, MAP, 1, 1)
    assert np.array_equal(found.kept, np.tri(4, dtype=bool))
    assert (found.first_q, found.first_k, found.kind, found.share) == (4, 4, PARTIAL, 0.625)


def test_a_tile_ends_at_the_lengths() -> None:
    assert np.array_equal(tile_elements(CAUSAL, MAP, 2, 2).kept, np.tri(2, dtype=bool))


def test_elements_of_a_batch_and_head() -> None:
    per_head = fg.trace_mask(lambda b, h, q, k: k == 2 * b + h).expression
    tiles = tile_map(per_head, (4, 4), 4, 4, batch=2, heads=2)
    found = tile_elements(per_head, tiles, 0, 0, batch=1, head=1)
    assert found.kept.tolist() == [[False, False, False, True]] * 4


@pytest.mark.parametrize("place", [(3, 0), (0, 3), (-1, 0)])
def test_a_tile_outside_the_map_is_refused(place: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match="below 3"):
        tile_elements(CAUSAL, MAP, *place)


def test_a_missing_capture() -> None:
    ids = np.zeros(8, np.int32)
    mask = fg.document("ids").expression
    tiles = tile_map(mask, (4, 4), 8, 8, captures={"ids": ids})
    assert tile_elements(mask, tiles, 0, 0, captures={"ids": ids}).kept.all()
    with pytest.raises(ArgumentError, match="'ids' is missing"):
        tile_elements(mask, tiles, 0, 0)


def test_text_has_two_elements_per_character() -> None:
    assert to_text(tile_elements(CAUSAL, MAP, 1, 1)).splitlines() == [
        "┌────┐",
        "│█▄  │",
        "│███▄│",
        "└────┘",
        "█ kept 62.5%",
        "tile 1,1, partial: queries 4 to 7 (down) × keys 4 to 7 (right)",
    ]


def test_wide_text_has_four_elements_per_character() -> None:
    assert to_text(tile_elements(CAUSAL, MAP, 1, 1), width=3).splitlines()[1:3] == ["│▙ │", "│█▙│"]
    odd = tile_map(CAUSAL, (3, 3), 3, 3)
    assert to_text(tile_elements(CAUSAL, odd, 0, 0), width=2).splitlines()[1:3] == ["│▙ │", "│▀▘│"]


def test_images() -> None:
    found = tile_elements(CAUSAL, MAP, 1, 1)
    words = "".join(ElementTree.fromstring(to_svg(found, title="causal()")).itertext())
    assert "causal()" in words and "kept 62.5%" in words and summary(found) in words
