"""Precomputed lists: `attention.tile_lists`, their use in calls, and refusals."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.errors import ArgumentError

PLAN = ForwardPlan(32, 32, 2)
NEAR = fg.trace_mask(lambda b, h, q, k: (abs(q - k) < 20) | (k < 4) | (q < 4))
_random = np.random.default_rng(3)


def _compiled(mask: fg.Mask, score: fg.Score | None = None) -> Any:
    return fg.compile(fg.AttentionSpec(head_dim=32, mask=mask, score=score), emulate=True, plan=PLAN)


def _inputs(length: int, heads: int = 2) -> tuple[np.ndarray, ...]:
    return tuple(_random.standard_normal((1, heads, length, 32)).astype(np.float16) for _ in range(3))


def _ids(length: int) -> np.ndarray:
    return np.sort(_random.integers(0, 3, length)).astype(np.int32)


def test_precomputed_lists_give_the_same_output() -> None:
    attention, ids, inputs = _compiled(fg.document("ids") & fg.causal()), _ids(150), _inputs(150)
    lists = attention.tile_lists(150, ids=ids)
    np.testing.assert_array_equal(attention(*inputs, ids=ids, tile_lists=lists), attention(*inputs, ids=ids))
    np.testing.assert_array_equal(lists.tile_map().classes, attention.tiles(150, ids=ids).classes)
    assert lists.bytes == lists.counts.size * 12 + lists.entries.size * 4
    assert (lists.tile, lists.len_q, lists.len_k) == ((32, 32), 150, 150)


def test_lists_fit_another_attention_with_the_same_mask() -> None:
    plain, capped = _compiled(fg.document("ids")), _compiled(fg.document("ids"), fg.softcap(20))
    ids, inputs = _ids(100), _inputs(100)
    lists = plain.tile_lists(100, ids=ids)
    np.testing.assert_array_equal(capped(*inputs, ids=ids, tile_lists=lists), capped(*inputs, ids=ids))


def test_lists_of_a_mask_without_captures_are_cached() -> None:
    attention = _compiled(NEAR)
    assert attention.tile_lists(90) is attention.tile_lists(90)
    assert attention.tile_lists(90) is not attention.tile_lists(91)
    inputs = _inputs(90)
    np.testing.assert_array_equal(attention(*inputs), attention(*inputs))
    for length in range(200, 220):
        attention.tile_lists(length)
    assert len(attention._lister._cache) <= 8


def test_small_lists_are_equally_spaced() -> None:
    lists = _compiled(fg.document("ids")).tile_lists(150, 100, ids=np.zeros(150, np.int32))
    np.testing.assert_array_equal(lists.offsets.ravel(), np.arange(5) * 4)
    assert (lists.counts == 4).all() and lists.entries.size == 20


def test_larger_lists_of_sparse_masks_use_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.attention.tile_lists._FEW_ENTRIES", 0)
    attention = fg.compile(fg.AttentionSpec(head_dim=32, mask=fg.document("ids")), emulate=True)
    tile_q, tile_k = attention.plan.tile_q, attention.plan.tile_k
    document = math.lcm(tile_q, tile_k)  # so that documents end at tile borders in every plan
    lists = attention.tile_lists(8 * document, ids=(np.arange(8 * document) // document).astype(np.int32))
    assert lists.entries.size * tile_q * tile_k == 8 * document**2


def test_empty_lengths() -> None:
    attention = _compiled(fg.document("ids"))
    assert attention.tile_lists(0, 40, ids=_ids(40)).tile_map().classes.shape == (1, 1, 0, 2)
    assert attention.tile_lists(40, 0, ids=_ids(40)).tile_map().classes.shape == (1, 1, 2, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"len_q": 99}, "len_q, len_k"),
        ({"tile": (64, 64)}, "tile"),
        ({"mask": fg.causal().expression}, "mask"),
        ({"direction": "queries"}, "direction"),
        ({"counts": np.zeros((2, 1, 4), np.int32)}, "batch, heads"),
    ],
)
def test_mismatched_lists_are_refused(change: dict[str, Any], message: str) -> None:
    attention, ids = _compiled(fg.document("ids")), _ids(100)
    lists = replace(attention.tile_lists(100, ids=ids), **change)
    with pytest.raises(ArgumentError, match=message):
        attention(*_inputs(100), ids=ids, tile_lists=lists)


def test_lists_are_checked_once_per_shape_and_not_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that fitted once are refused where they do not fit, and other lists are checked again."""
    attention, checked = _compiled(fg.document("ids")), []
    check = attention._lister._check
    monkeypatch.setattr(
        attention._lister, "_check", lambda lists, *given: checked.append(lists) or check(lists, *given)
    )
    first, second = (attention.tile_lists(100, ids=_ids(100)) for _ in range(2))
    for lists in (first, second, first):
        attention(*_inputs(100), ids=_ids(100), tile_lists=lists)
    assert checked == [first, second]
    for _ in range(2):
        with pytest.raises(ArgumentError, match="len_q, len_k"):
            attention(*_inputs(90), ids=_ids(90), tile_lists=first)
    gone = weakref.ref(second)
    checked.clear()
    del second, lists
    assert gone() is None


def test_other_misuse() -> None:
    with pytest.raises(ArgumentError, match="needs no lists"):
        _compiled(fg.causal()).tile_lists(100)
    with pytest.raises(ArgumentError, match="read none"):
        _compiled(fg.causal())(*_inputs(64), tile_lists=_compiled(NEAR).tile_lists(64))
    attention = _compiled(fg.document("ids"))
    with pytest.raises(ArgumentError, match="'ids' is missing"):
        attention.tile_lists(100)
    with pytest.raises(ArgumentError, match="unknown argument 'windows'"):
        attention.tile_lists(100, ids=_ids(100), windows=3)
    with pytest.raises(ArgumentError, match="len_q=-1"):
        attention.tile_lists(-1, ids=_ids(100))
    with pytest.raises(ArgumentError, match="give 100 elements"):
        attention.tile_lists(100, ids=_ids(90))
    with pytest.raises(ArgumentError, match="tile_lists of type ndarray"):
        attention(*_inputs(100), ids=_ids(100), tile_lists=np.zeros(3))
