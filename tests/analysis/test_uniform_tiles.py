"""Tiles classified as uniform read the same elements; the usual clipped biases have such tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.analysis.closed_forms.inequalities import K_FIRST, K_LAST, Q_FIRST, Q_LAST
from flashgen.analysis.closed_forms.uniform_tiles import uniform_condition
from flashgen.language import functions as f
from flashgen.language.evaluate import evaluate
from flashgen.language.operations import BATCH, HEAD, KEY, LEN_K, LEN_Q, QUERY, Load

_LENGTHS = {LEN_Q: 96, LEN_K: 144}
_CAPTURES = {"far": 9, "offsets": np.array([3, 40])}
_TABLE, _OFFSETS = fg.Tensor("table", "float32", 1), fg.Tensor("offsets", "int32", 1)
_FAR = fg.Scalar("far", "int32")


def biased(index: Callable[..., Any]) -> fg.Score:
    return fg.trace_score(lambda score, b, h, q, k: score + _TABLE[index(b, h, q, k)], "biased")


ALIKE = {
    "relative": fg.relative_bias(_TABLE, 12),
    "relative by head": fg.relative_bias(fg.Tensor("by_head", "float32", 2), 7),
    "relative, told at the call": fg.relative_bias(_TABLE, _FAR),
    "softcap of relative": fg.softcap(20)(fg.relative_bias(_TABLE, 12)),
    "the other way": biased(lambda b, h, q, k: f.clamp(q - k, -5, 20) + 5),
    "before alone": biased(lambda b, h, q, k: f.maximum(k - 3 * q, -31) + 31),
    "by blocks": biased(lambda b, h, q, k: (q // 32) * 4 + k // 32),
    "by sequence": biased(lambda b, h, q, k: f.clamp(k - q + _OFFSETS[b], 0, 30)),
    "of keys": biased(lambda b, h, q, k: f.minimum(k, 20)),
    "a step": biased(lambda b, h, q, k: f.where(k > q, 40, f.clamp(k - q, -30, 0) + 30)),
}
UNLIKE = {
    "a distance without an end": biased(lambda b, h, q, k: k - q + 95),
    "the distance itself, too": fg.alibi(4)(fg.relative_bias(_TABLE, 12)),
    "up and down": biased(lambda b, h, q, k: f.minimum(abs(k - q), 12)),
    "falling where it may not": biased(lambda b, h, q, k: f.where(k > q, 0, f.maximum(k - q, -30) + 30)),
    "read from an array": biased(lambda b, h, q, k: f.clamp(_OFFSETS[k] - q, -5, 5) + 5),
    "by the remainder": biased(lambda b, h, q, k: f.minimum(k % 32, 8)),
    "of the score": fg.trace_score(lambda score, b, h, q, k: score + _TABLE[f.clamp(f.to_int(score) + k - q, 0, 5)]),
    "no array": fg.softcap(20),
}


def indices_of(score: fg.Score, b: int) -> list[np.ndarray[Any, Any]]:
    """Returns the (queries, keys) arrays of each index at which a score function reads an array."""
    q, k = np.arange(_LENGTHS[LEN_Q])[:, None], np.arange(_LENGTHS[LEN_K])[None]
    values = {BATCH: b, HEAD: 1, QUERY: q, KEY: k, **_LENGTHS}
    loads = [load for load in score.expression.atoms(Load) if load.has(QUERY, KEY)]
    return [
        np.broadcast_to(evaluate(index, values, _CAPTURES), (q.size, k.size))
        for load in loads
        for index in load.indices
    ]


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("tile", [(16, 16), (8, 24), (1, 1)], ids=str)
def test_uniform_tiles_are_uniform(name: str, tile: tuple[int, int]) -> None:
    score, (tile_q, tile_k) = ALIKE[name], tile
    condition = uniform_condition(score.expression)
    assert condition is not None
    q, k = np.arange(0, _LENGTHS[LEN_Q], tile_q)[:, None], np.arange(0, _LENGTHS[LEN_K], tile_k)[None]
    ends = {Q_FIRST: q, Q_LAST: q + tile_q - 1, K_FIRST: k, K_LAST: k + tile_k - 1}
    for b in (0, 1):
        said = np.broadcast_to(
            evaluate(condition, {BATCH: b, HEAD: 1, **_LENGTHS, **ends}, _CAPTURES), (q.size, k.size)
        )
        are = np.ones_like(said)
        for index in indices_of(score, b):
            tiles = index.reshape(q.size, tile_q, k.size, tile_k)
            are &= tiles.min(axis=(1, 3)) == tiles.max(axis=(1, 3))
        assert np.array_equal(said, are)
        assert said.any(), "some tiles are uniform"


@pytest.mark.parametrize("name", UNLIKE)
def test_nothing_is_claimed_for_others(name: str) -> None:
    assert uniform_condition(UNLIKE[name].expression) is None
