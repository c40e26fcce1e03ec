"""Drawings of tile maps."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

import flashgen as fg
from flashgen.analysis.drawing.axes import ticks
from flashgen.analysis.drawing.tile_maps import summary, to_mask_svg, to_svg, to_text
from flashgen.analysis.tile_classes import tile_map
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


def test_few_keys_keep_the_aspect_ratio() -> None:
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


def test_svg_shows_every_visited_tile() -> None:
    root = ElementTree.fromstring(to_svg(CAUSAL, title="causal() & <more>"))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "causal() & <more>"
    assert {"full 37.5%", "partial 25.0%", "empty 37.5%", summary(CAUSAL)} <= {*texts}
    grid = root.find(f"{SVG}g")
    assert grid is not None
    areas = [area(path.attrib["d"]) for path in grid if "fill" in path.attrib]
    assert sorted(part / 256**2 for part in areas) == pytest.approx([0.25, 0.375])


def area(path: str) -> int:
    """Returns the area of rectangles drawn as M x y h width v height H x z."""
    found = re.findall(r"M\d+ \d+h(\d+)v(\d+)H\d+z", path)
    return sum(int(width) * int(height) for width, height in found)


def test_which_batch_and_head() -> None:
    ids = np.stack([np.arange(128) // 64, np.zeros(128)]).astype(np.int32)
    by_batch = tile_map(
        fg.document(fg.Tensor("ids", "int32", ndim=2)).expression, (64, 64), 128, 128, batch=2, captures={"ids": ids}
    )
    assert to_text(by_batch, batch=0).splitlines()[:2] == ["██··", "··██"]
    assert to_text(by_batch, batch=1, head=7).splitlines()[:2] == ["████", "████"]
    with pytest.raises(ArgumentError, match="batch=2"):
        to_text(by_batch, batch=2)


@pytest.mark.parametrize("lengths", [(256, 256), (100, 300), (1, 4000), (4000, 1), (0, 0), (64 * 600, 64 * 600)])
def test_images_have_bounded_size_for_any_lengths(lengths: tuple[int, int]) -> None:
    drawn = tile_map(fg.causal().expression, (64, 64), *lengths)
    root = ElementTree.fromstring(to_svg(drawn))
    assert max(float(root.attrib["width"]), float(root.attrib["height"])) <= 480 + 100


def test_a_small_svg_has_a_line_instead_of_a_legend() -> None:
    texts = [text.text for text in ElementTree.fromstring(to_svg(CAUSAL, "small", 200)).iter(f"{SVG}text")]
    assert texts[0] == "small" and texts[-1] == "62.5% of the work"


def test_an_image_of_a_mask_shows_every_kept_score() -> None:
    """Also in a map with more scores than cells, where a cell is drawn as kept if the mask keeps any of its scores."""
    first_key = fg.trace_mask(lambda b, h, q, k: k == 0).expression
    for length, drawn in ((64, 64), (1000, 4 * 1000)):
        root = ElementTree.fromstring(to_mask_svg(tile_map(first_key, (1, 1), length, length), "first"))
        (path,) = [path for path in root.iter(f"{SVG}path") if "fill" in path.attrib]
        assert area(path.attrib["d"]) == drawn
        texts = [text.text for text in root.iter(f"{SVG}text")]
        assert {f"kept {1 / length:.1%}", f"{length} queries (down) × {length} keys (right)", "query ↓"} <= {*texts}
    ElementTree.fromstring(to_mask_svg(tile_map(first_key, (1, 1), 0, 0)))


def test_axes_have_ticks_at_multiples_of_powers_of_two() -> None:
    root = ElementTree.fromstring(to_svg(tile_map(fg.causal().expression, (64, 64), 300, 1000)))
    marks = root.find(f"{SVG}g[@class='axes']")
    assert marks is not None
    words = [word.text for word in marks.iter(f"{SVG}text")]
    assert words == ["0", "128", "256", "0", "128", "256", "384", "512", "640", "768", "896", "key →", "query ↓"]
    assert (
        ticks(0, 480) == [0]
        and ticks(3, 480) == [0, 1, 2, 3]
        and ticks(2**20, 200) == [0, 2**18, 2**19, 3 * 2**18, 2**20]
    )


@pytest.mark.parametrize(("length", "pixels"), [(1, 12), (37, 480), (1000, 100), (4096, 200)])
def test_tick_labels_have_room(length: int, pixels: float) -> None:
    found = ticks(length, pixels)
    assert found[0] == 0 and found[-1] <= length
    assert len(found) <= 2 or (found[1] - found[0]) * pixels / length >= 44


def boxes(root: ElementTree.Element) -> list[tuple[str, float, float, float, float]]:
    """Returns (text, left, right, top, bottom) of every text, assuming a character width of 0.6 of the font size."""
    found = []
    sizes = {text: mark.attrib.get("font-size") for mark in root.iter(f"{SVG}g") for text in mark.iter(f"{SVG}text")}
    for text in root.iter(f"{SVG}text"):
        size = float(text.attrib.get("font-size") or sizes.get(text) or root.attrib["font-size"])
        words, x, y = text.text or "", float(text.attrib["x"]), float(text.attrib["y"])
        width = 0.6 * size * len(words)
        left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[text.attrib.get("text-anchor", "start")] * width
        found.append((words, left, left + width, y - 0.7 * size, y + 0.2 * size))
    return found


@pytest.mark.parametrize("lengths", [(256, 256), (100, 300), (1000, 2**20), (2**21, 1), (1, 10**8)])
@pytest.mark.parametrize("size", [200, 480])
def test_labels_do_not_overlap_and_lie_within_the_picture(lengths: tuple[int, int], size: int) -> None:
    root = ElementTree.fromstring(to_svg(tile_map(fg.causal().expression, (256, 2**16), *lengths), "causal()", size))
    found = boxes(root)
    for number, (words, left, right, top, bottom) in enumerate(found):
        assert left >= 0 and bottom <= float(root.attrib["height"]), words
        for other, its_left, its_right, its_top, its_bottom in found[:number]:
            apart = right <= its_left or its_right <= left or bottom <= its_top or its_bottom <= top
            assert apart, f"{words!r} overlaps {other!r}"
