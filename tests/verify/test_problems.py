"""Random inputs are reproducible from their seed, and captures fit the indices of a spec."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import flashgen.language as fg
from flashgen.verify import Shape, random_inputs

SHAPE = Shape(5, 7, batch=2, heads_q=4, heads_kv=2)


def captures_of(mask: fg.Mask | None = None, score: fg.Score | None = None) -> dict[str, np.ndarray]:
    return random_inputs(fg.AttentionSpec(8, mask=mask, score=score), SHAPE).captures


def test_shapes_follow_the_layout() -> None:
    for layout, shape in (("bhsd", (2, 4, 5, 8)), ("bshd", (2, 5, 4, 8))):
        inputs = random_inputs(fg.AttentionSpec(8, value_dim=16, layout=layout), SHAPE)
        assert inputs.q.shape == shape
        assert sorted(inputs.v.shape) == sorted((2, 2, 7, 16))


def test_dtypes_are_those_of_the_spec() -> None:
    assert random_inputs(fg.AttentionSpec(8, "float16"), SHAPE).q.dtype == np.float16
    assert random_inputs(fg.AttentionSpec(8, "bfloat16"), SHAPE).k.dtype == ml_dtypes.bfloat16


def test_the_seed_determines_everything() -> None:
    spec = fg.AttentionSpec(8, mask=fg.document("ids"))
    one, two, other = (random_inputs(spec, SHAPE, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.q, two.q) and np.array_equal(one.captures["ids"], two.captures["ids"])
    assert not np.array_equal(one.q, other.q)


def test_capture_sizes_follow_the_indices() -> None:
    assert captures_of(fg.document("ids"))["ids"].shape == (7,)
    assert captures_of(fg.document(fg.Tensor("ids", "int32", 2)))["ids"].shape == (2, 7)
    assert captures_of(fg.block_sparse("layout", 2, 3))["layout"].shape == (3, 3)
    assert captures_of(fg.prefix_lm(fg.Tensor("prefix", "int32", 1)))["prefix"].shape == (2,)
    assert captures_of(score=fg.alibi("slopes"))["slopes"].shape == (4,)
    assert captures_of(score=fg.relative_bias("table", 3))["table"].shape == (4, 7)


def test_a_table_of_distances_is_complete_for_short_calls() -> None:
    shape, far = Shape(1, 1, 1, 1, 1), fg.Scalar("far")
    score = fg.relative_bias(fg.Tensor("table", "float32", 1), far)
    short = random_inputs(fg.AttentionSpec(8, score=fg.relative_bias("table", 300)), shape).captures
    assert short["table"].shape == (1, 601)
    found = random_inputs(fg.AttentionSpec(8, score=score), shape).captures
    assert found["table"].shape == (2 * found["far"] + 1,)


def test_scalars_are_numbers() -> None:
    found = captures_of(fg.sliding_window(fg.Scalar("window", "int32")), fg.softcap(fg.Scalar("cap", "float32")))
    assert isinstance(found["window"], int) and isinstance(found["cap"], float) and found["cap"] > 0


def test_dtypes_are_as_declared() -> None:
    declared = fg.Tensor("bias", "bfloat16", 1)
    score = fg.trace_score(lambda score, b, h, q, k: score + declared[k])
    assert captures_of(score=score)["bias"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("circle", [False, True])
def test_captures_that_index_captures(circle: bool) -> None:
    outer, inner = fg.Tensor("outer", "int32", 1), fg.Tensor("inner", "int32", 1)

    def mask(b, h, q, k):  # type: ignore[no-untyped-def]
        kept = outer[inner[k]] >= 0
        return kept & (inner[outer[q]] >= 0) if circle else kept

    found = captures_of(fg.trace_mask(mask))
    assert found["inner"].shape == (7,)
    if not circle:
        assert found["outer"].shape == (found["inner"].max() + 1,)


def test_readable_shapes() -> None:
    assert str(SHAPE) == "2x4:2x5x7" and str(Shape(1, 2)) == "2x2x1x2"


def test_captures_of_a_maker_replace_random_ones() -> None:
    spec = fg.AttentionSpec(8, mask=fg.document("ids"))
    given = random_inputs(spec, SHAPE, captures=lambda shape, random: {"ids": np.arange(shape.len_k, dtype=np.int32)})
    assert given.captures["ids"].tolist() == list(range(7))
