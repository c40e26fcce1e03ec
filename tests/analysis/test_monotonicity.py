"""Tiles that visit a common tile are contiguous where that is claimed, as it is for the usual masks."""

from __future__ import annotations

import numpy as np
import pytest

import flashgen as fg
from flashgen.analysis.closed_forms.monotonicity import visitors_are_contiguous
from flashgen.analysis.closed_forms.tile_ranges import evaluate_range, query_range
from flashgen.language.operations import captures_of

_TILE_Q, _TILE_K = 8, 16


def _packed(b, h, q, k):
    return q // 24 == k // 24


def _to_the_right(b, h, q, k):
    return k >= q + 5


def _mirrored(b, h, q, k):
    return q + k < fg.len_k


def _mirrored_window(b, h, q, k):
    return (q + k < fg.len_k + 9) & (q + k > fg.len_k - 9)


def _early_or_causal(b, h, q, k):
    return (k < 20) | (q >= k)


def _all_of_late_keys(b, h, q, k):
    return (k >= 40) | (q >= k)


_USUAL = (
    fg.full(),
    fg.causal(),
    fg.causal(align="top_left"),
    fg.sliding_window(13),
    fg.sliding_window(13, 4),
    fg.causal() & fg.sliding_window(20),
    fg.prefix_lm(20),
    fg.dilated_window(4, 3),
    fg.padding(fg.Tensor("lengths", "int32", 1)),
    fg.causal() & fg.padding(fg.Tensor("lengths", "int32", 1)),
    _packed,
    _to_the_right,
    _mirrored,
    _mirrored_window,
    _early_or_causal,
)
_UNUSUAL = (_all_of_late_keys,)


def _range_of(mask):
    found = query_range(fg.AttentionSpec(head_dim=64, mask=mask).mask.expression)
    assert found is not None
    return found


def _visitors(found, len_q: int, len_k: int) -> np.ndarray:
    """Returns (tiles of queries, tiles of keys) that visit each other, for tile grids with partial ends."""
    first = np.arange(0, len_k, _TILE_K)
    captures = {each.name: np.array([len_k * 2 // 3]) for each in captures_of(found.begin, found.end)}
    begin, end, _, _ = evaluate_range(found, first, first + _TILE_K - 1, len_q, len_k, captures)
    tiles = np.arange(-(-len_q // _TILE_Q))[:, None]
    return (tiles >= begin // _TILE_Q) & (tiles < -(-end // _TILE_Q))


@pytest.mark.parametrize("mask", _USUAL, ids=lambda mask: getattr(mask, "name", getattr(mask, "__name__", "")))
def test_visitors_of_usual_masks_are_contiguous(mask) -> None:
    found = _range_of(mask)
    assert visitors_are_contiguous(found)
    for len_q, len_k in ((96, 96), (40, 96), (96, 40), (7, 96), (96, 7)):
        visits = _visitors(found, len_q, len_k).astype(int)
        begins = (np.diff(visits, axis=1, prepend=0) == 1).sum(axis=1)
        assert begins.max() <= 1, (len_q, len_k)


@pytest.mark.parametrize("mask", _UNUSUAL)
def test_nothing_is_claimed_for_other_masks(mask) -> None:
    found = _range_of(mask)
    visits = _visitors(found, 96, 96).astype(int)
    assert (np.diff(visits, axis=1, prepend=0) == 1).sum(axis=1).max() > 1, "this mask has a gap, as intended"
    assert not visitors_are_contiguous(found)
