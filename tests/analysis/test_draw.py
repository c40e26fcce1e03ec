"""Pictures of tile maps."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

import flashgen as fg
from flashgen.analysis.draw import to_svg, to_text
from flashgen.analysis.tiles import tile_map
from flashgen.errors import ArgumentError

CAUSAL = tile_map(fg.causal().expression, (64, 64), 256, 256)
SVG = "{http://www.w3.org/2000/svg}"


def test_text() -> None:
    assert to_text(CAUSAL).splitlines() == [
        "▒▒······",
        "██▒▒····",
        "████▒▒··",
        "██████▒▒",
        "· empty 37.5%   ▒ partial 25.0%   █ full 37.5%",
        "62.5% of the work: 256 queries (down) × 256 keys (right), tiles of 64 × 64",
    ]


def test_narrow_keys_keep_the_shape() -> None:
    narrow = tile_map(fg.causal().expression, (128, 64), 256, 256)
    assert to_text(narrow).splitlines()[:2] == ["▒▒··", "██▒▒"]


def test_a_large_map_is_scaled_to_the_width() -> None:
    large = tile_map(fg.causal().expression, (64, 64), 64 * 100, 64 * 100)
    lines = to_text(large, width=50).splitlines()
    assert max(map(len, lines[:-3])) <= 50
    assert lines[0].startswith("▒▒·")
    assert lines[-1] == "a cell stands for 4 × 4 tiles"


def test_an_empty_map() -> None:
    nothing = tile_map(fg.causal().expression, (64, 64), 0, 0)
    assert "0.0% of the work" in to_text(nothing)
    ElementTree.fromstring(to_svg(nothing))


def test_svg_is_an_image_with_every_visited_tile() -> None:
    root = ElementTree.fromstring(to_svg(CAUSAL, title="causal() & <more>"))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "causal() & <more>"
    assert "full 37.5%" in texts
    areas: dict[str, float] = {}
    for rectangle in root.find(f"{SVG}g") or ():
        colour = rectangle.attrib["fill"]
        areas[colour] = areas.get(colour, 0) + float(rectangle.attrib["width"]) * float(rectangle.attrib["height"])
    assert sorted(area / 480**2 for area in areas.values()) == pytest.approx([0.25, 0.375])


def test_which_batch_and_head() -> None:
    ids = np.stack([np.arange(128) // 64, np.zeros(128)]).astype(np.int32)
    by_batch = tile_map(
        fg.document(fg.Tensor("ids", "int32", ndim=2)).expression, (64, 64), 128, 128, batch=2, captures={"ids": ids}
    )
    assert to_text(by_batch, batch=0).splitlines()[:2] == ["██··", "··██"]
    assert to_text(by_batch, batch=1, head=7).splitlines()[:2] == ["████", "████"]
    with pytest.raises(ArgumentError, match="batch=2"):
        to_text(by_batch, batch=2)
