"""Tile maps, exact or by ranges, of every shape that a call may have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.analysis.tile_classes import EMPTY, FULL, PARTIAL, depends_on, tile_map
from flashgen.errors import ArgumentError
from flashgen.language import operations as ops
from flashgen.language.modifiers import trace_mask


def test_causal_by_its_range() -> None:
    found = tile_map(fg.causal().expression, (64, 64), 256, 256, batch=2, heads=3)
    assert found.classes.shape == (1, 1, 4, 4)
    assert found.classes.dtype == np.int8
    assert (found.classes[0, 0] == np.tril(np.full((4, 4), FULL)) - np.eye(4)).all()
    assert found.tile == (64, 64)
    assert found.share == 10 / 16
    assert (found.count(FULL), found.count(PARTIAL), found.count(EMPTY)) == (6, 4, 6)
    assert found.work() == 10 * 64 * 64
    assert found.work(batch=2, heads=3) == 6 * found.work()


def test_last_keys_beyond_len_k_and_last_queries() -> None:
    for mask in (fg.full(), fg.full() & (lambda b, h, q, k: k * q > -1)):  # by a range and by elements
        classes = tile_map(mask.expression, (64, 64), 100, 100).classes[0, 0]
        assert classes.tolist() == [[FULL, PARTIAL], [FULL, PARTIAL]]
    # The window ends with the last query, 99: the other rows of the tile do not extend its range.
    assert tile_map(fg.causal("top_left").expression, (64, 32), 100, 128).classes[0, 0, 1].tolist()[3:] == [PARTIAL]
    assert tile_map(fg.causal("top_left").expression, (64, 32), 90, 128).classes[0, 0, 1].tolist()[3:] == [EMPTY]


def test_batch_and_heads_only_where_the_mask_depends_on_them() -> None:
    ids = np.repeat(np.arange(4), 64)[None, :] * np.array([[1], [0]])
    by_batch = fg.document(fg.Tensor("ids", "int32", ndim=2)).expression
    assert depends_on(by_batch, ops.BATCH)
    assert not depends_on(by_batch, ops.HEAD)
    found = tile_map(by_batch, (64, 64), 256, 256, batch=2, heads=5, captures={"ids": ids})
    assert found.classes.shape == (2, 1, 4, 4)
    assert (found.classes[0, 0] == FULL * np.eye(4)).all()
    assert (found.classes[1, 0] == FULL).all()
    by_head = trace_mask(lambda b, h, q, k: q - k == 64 * h, "by_head").expression
    assert tile_map(by_head, (64, 64), 256, 256, batch=2, heads=5).classes.shape == (1, 5, 4, 4)


@pytest.mark.parametrize("len_q", [0, 100])
@pytest.mark.parametrize("len_k", [0, 100])
@pytest.mark.parametrize("mask", [fg.causal(), fg.document("ids")])
def test_lengths_of_zero(mask: fg.Mask, len_q: int, len_k: int) -> None:
    found = tile_map(mask.expression, (64, 64), len_q, len_k, captures={"ids": np.zeros(100, np.int32)})
    assert found.classes.shape == (1, 1, -(-len_q // 64), -(-len_k // 64))
    assert (
        found.share == (1.0 if mask.name.startswith("document") else 0.75) * bool(len_q and len_k) or found.share == 1
    )


def test_many_documents_need_no_square_memory() -> None:
    """131072² elements would be 16 GiB of booleans; only the tiles at document borders are evaluated."""
    import tracemalloc

    ids = (np.arange(2**17) // 4000).astype(np.int32)
    tracemalloc.start()
    found = tile_map((fg.document("ids") & fg.causal()).expression, (128, 128), 2**17, 2**17, captures={"ids": ids})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.classes.shape == (1, 1, 1024, 1024)
    assert 0.01 < found.share < 0.03
    assert peak < 2**28


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile": (0, 64)}, "tile rows=0"),
        ({"len_q": -1}, "len_q=-1"),
        ({"heads": 0}, "heads=0"),
        ({"len_q": 64.0}, "len_q=64.0 must be an integer"),
        ({"len_q": 10**8, "len_k": 10**8}, "a map of 1562500 x 1562500 tiles has more than .*give shorter lengths"),
    ],
)
def test_wrong_sizes_are_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"tile": (64, 64), "len_q": 64, "len_k": 64} | change
    with pytest.raises(ArgumentError, match=message):
        tile_map(fg.causal().expression, **given)


def test_a_missing_capture_is_named() -> None:
    with pytest.raises(ArgumentError, match="ids"):
        tile_map(fg.document("ids").expression, (64, 64), 100, 100)
    with pytest.raises(ArgumentError, match="window"):
        tile_map(fg.sliding_window(fg.Scalar("window")).expression, (64, 64), 100, 100)
