"""Functions classified as depending only on q - k do so, and the usual relative biases are classified so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.analysis.closed_forms.distances import depends_on_difference
from flashgen.language import functions as f
from flashgen.language.evaluate import evaluate
from flashgen.language.operations import BATCH, HEAD, KEY, LEN_K, LEN_Q, QUERY, Load

_LENGTHS = {LEN_Q: 48, LEN_K: 80}
_CAPTURES = {"offsets": np.array([3, 40])}
_TABLE, _OFFSETS = fg.Tensor("table", "float32", 1), fg.Tensor("offsets", "int32", 1)

OF_DISTANCE: dict[str, Callable[..., Any]] = {
    "clipped": lambda b, h, q, k: f.clamp(k - q, -5, 20) + 5,
    "both ways": lambda b, h, q, k: abs(q - k),
    "in another order": lambda b, h, q, k: k + 100 - q,
    "twice": lambda b, h, q, k: 2 * (k - q) + (3 * k - 3 * q) // 4 + 400,
    "by the remainder": lambda b, h, q, k: (k - q) % 7,
    "by sequence": lambda b, h, q, k: f.maximum(k - q + _OFFSETS[b], 0),
    "buckets": lambda b, h, q, k: f.to_int(f.log2(f.maximum(q - k, 1) / 4) * 3) + 9,
    "chosen": lambda b, h, q, k: f.where(k < q, q - k, 100),
    "of the head": lambda b, h, q, k: h,
}
OF_MORE: dict[str, Callable[..., Any]] = {
    "of keys": lambda b, h, q, k: k,
    "weighed": lambda b, h, q, k: 2 * k - q + 48,
    "the sum": lambda b, h, q, k: q + k,
    "of blocks": lambda b, h, q, k: q // 8 - k // 8 + 80,
    "remainders": lambda b, h, q, k: k % 8 - q % 8 + 8,
    "chosen by keys": lambda b, h, q, k: f.where(k < 9, abs(q - k), 100),
    "read from an array": lambda b, h, q, k: abs(q - k) + _OFFSETS[k % 2],
    "clipped by queries": lambda b, h, q, k: f.minimum(abs(q - k), q),
}


def index_of(function: Callable[..., Any]) -> Any:
    score = fg.trace_score(lambda s, b, h, q, k: s + _TABLE[function(b, h, q, k)], "biased")
    return next(load for load in score.expression.atoms(Load) if load.capture.name == "table").indices[0]


def same_along_diagonals(index: Any) -> bool:
    q, k = np.arange(_LENGTHS[LEN_Q])[:, None], np.arange(_LENGTHS[LEN_K])[None]
    values = {BATCH: 1, HEAD: 1, QUERY: q, KEY: k, **_LENGTHS}
    found = np.broadcast_to(evaluate(index, values, _CAPTURES), (q.size, k.size))
    return bool((found[1:, 1:] == found[:-1, :-1]).all())


@pytest.mark.parametrize("name", OF_DISTANCE)
def test_the_classification_is_sound(name: str) -> None:
    index = index_of(OF_DISTANCE[name])
    assert depends_on_difference(index) and same_along_diagonals(index)


@pytest.mark.parametrize("name", OF_MORE)
def test_other_functions_are_not_classified_so(name: str) -> None:
    index = index_of(OF_MORE[name])
    assert not depends_on_difference(index) and not same_along_diagonals(index)
