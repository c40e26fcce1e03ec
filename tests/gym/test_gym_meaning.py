"""The trace of each variant of the suite equals its second definition, element by element."""

from __future__ import annotations

import numpy as np
import pytest

from families import entries
from families.entry import Entry
from flashgen.language import operations as ops
from flashgen.language.evaluate import evaluate
from flashgen.verify import Shape
from gym_shapes import LENGTH, SHAPES, named

MASKED = [entry for entry in entries(LENGTH) if entry.mask is not None and "+" not in entry.name]
SCORED = [entry for entry in entries(LENGTH) if entry.score is not None and "+" not in entry.name]


def values_of(shape: Shape) -> dict[object, object]:
    batch, head = np.arange(shape.batch).reshape(-1, 1, 1, 1), np.arange(shape.heads_q).reshape(-1, 1, 1)
    lengths = {ops.LEN_Q: shape.len_q, ops.LEN_K: shape.len_k}
    q, k = np.arange(shape.len_q)[:, None], np.arange(shape.len_k)
    return {ops.BATCH: batch, ops.HEAD: head, ops.QUERY: q, ops.KEY: k} | lengths


def sizes(shape: Shape) -> tuple[int, ...]:
    return shape.batch, shape.heads_q, shape.len_q, shape.len_k


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("entry", MASKED, ids=named)
def test_masks_equal_their_definition(entry: Entry, shape: Shape) -> None:
    assert entry.mask is not None and entry.allowed is not None
    captures = entry.captures_for(shape)
    traced = np.broadcast_to(evaluate(entry.mask.expression, values_of(shape), captures), sizes(shape))
    meant = np.broadcast_to(entry.allowed(shape, captures), sizes(shape))
    wrong = np.argwhere(traced != meant)
    assert not len(wrong), f"{len(wrong)} differ, first at (b, h, q, k) = {wrong[0]}: traced {traced[tuple(wrong[0])]}"
    assert meant.any() and not meant.all(), "a mask that keeps all or nothing tests nothing"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("entry", SCORED, ids=named)
def test_scores_equal_their_definition(entry: Entry, shape: Shape) -> None:
    assert entry.score is not None and entry.modified is not None
    captures = entry.captures_for(shape)
    scores = np.random.default_rng(1).standard_normal(sizes(shape))
    traced = evaluate(entry.score.expression, values_of(shape) | {ops.SCORE: scores}, captures)
    meant = entry.modified(scores, shape, captures)
    np.testing.assert_allclose(np.broadcast_to(traced, sizes(shape)), meant, rtol=1e-12, atol=1e-12)
    assert not np.allclose(meant, scores)


@pytest.mark.parametrize("name", ["flamingo"])
def test_some_rows_have_no_keys(name: str) -> None:
    (entry,) = (entry for entry in MASKED if entry.name == name)
    assert entry.allowed is not None
    for shape in SHAPES:
        rows = entry.allowed(shape, entry.captures_for(shape)).any(axis=-1)
        assert rows.any() and not rows.all()


def test_names_are_unique() -> None:
    names = [entry.name for entry in entries(LENGTH)]
    assert len(names) == len(set(names))
