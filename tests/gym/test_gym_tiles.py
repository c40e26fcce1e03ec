"""No tile of the suite is classified EMPTY or FULL wrongly, and nearly all EMPTY tiles are recognized."""

from __future__ import annotations

import pytest

import report
from families import entries
from families.entry import Entry
from flashgen.analysis.intervals.evaluation import EMPTY
from flashgen.verify import Shape
from gym_shapes import LENGTH, SHAPES, named
from tile_proofs import Tiles, by_intervals, mapped, transposed

MASKED = [entry for entry in entries(LENGTH) if entry.mask is not None and "+" not in entry.name]
TILES = [(128, 64), (16, 32)]
LEAST_WITH_LISTS = 0.99

# Variants for which a closed form is expected: needing lists would be slower, not wrong.
RANGES = {"causal", "bottom_right_causal", "sliding_window", "dilated", "prefix_lm", "batchify_causal"}


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("entry", MASKED, ids=named)
def test_classes_of_tiles_are_right(entry: Entry, shape: Shape, tile: tuple[int, int]) -> None:
    tiles = mapped(entry, shape, tile)
    assert_sound(tiles)
    assert tiles.found(EMPTY) >= (1.0 if tiles.kind == "range" else LEAST_WITH_LISTS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("entry", MASKED, ids=named)
def test_the_transposed_direction_agrees(entry: Entry, shape: Shape) -> None:
    tiles = transposed(entry, shape, (16, 32))
    if tiles is not None:
        assert_sound(tiles)
        assert tiles.found(EMPTY) == 1.0


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("entry", MASKED, ids=named)
def test_intervals_alone_are_never_wrong(entry: Entry, shape: Shape) -> None:
    assert_sound(by_intervals(entry, shape, (16, 32)))


def test_expected_closed_forms_are_used() -> None:
    shape, tile = SHAPES[0], TILES[0]
    found = {entry.name for entry in MASKED if mapped(entry, shape, tile).kind == "range"}
    assert found >= RANGES, f"lists for {RANGES - found}"
    assert {entry.name for entry in MASKED if transposed(entry, shape, tile)} >= RANGES


def test_the_report_has_a_line_for_each_variant(capsys: pytest.CaptureFixture[str]) -> None:
    table = report.proofs(LENGTH, TILES[0])
    assert [line[0] for line in table[1:]] == [entry.name for entry in MASKED]
    assert {line[-1] for line in table[1:]} == {"0"}


def assert_sound(tiles: Tiles) -> None:
    assert tiles.lies == 0, f"{tiles.lies} of {tiles.truth.size} tiles are not what they are called"
