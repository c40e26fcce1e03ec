"""Block-sparse layouts in the forms that users have, and attention with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import flashgen as fg
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.errors import ArgumentError
from flashgen.reference import numerics

_random = np.random.default_rng(11)
DENSE = _random.random((5, 7)) < 0.4
INDPTR = np.concatenate([[0], np.cumsum(DENSE.sum(axis=1))])
INDICES = np.nonzero(DENSE)[1]


def _padded(dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lists like FlexAttention's: kept blocks first, then the others."""
    return dense.sum(axis=-1), np.argsort(~dense, axis=-1, kind="stable")


@pytest.mark.parametrize(
    "make",
    [
        lambda: fg.BlockLayout.from_dense(DENSE),
        lambda: fg.BlockLayout.from_dense(DENSE.astype(np.int8)),
        lambda: fg.BlockLayout.from_bsr(INDPTR, INDICES, (5, 7)),
        lambda: fg.BlockLayout.from_bsr(scipy.sparse.csr_matrix(DENSE)),
        lambda: fg.BlockLayout.from_bsr(
            scipy.sparse.bsr_matrix(np.kron(DENSE, np.ones((16, 8), np.float32)), blocksize=(16, 8))
        ),
        lambda: fg.BlockLayout.from_lists(*_padded(DENSE), 7),
    ],
)
def test_every_form_is_equivalent(make: Callable[[], fg.BlockLayout]) -> None:
    layout = make()
    np.testing.assert_array_equal(layout.to_dense(), DENSE)
    np.testing.assert_array_equal(np.asarray(layout), DENSE)
    assert layout.shape == (5, 7) and layout.density == DENSE.mean()
    assert not layout.to_dense().flags.writeable


def test_per_head_and_per_batch_lists() -> None:
    dense = _random.random((2, 3, 4, 6)) < 0.5
    np.testing.assert_array_equal(fg.BlockLayout.from_lists(*_padded(dense), 6).to_dense(), dense)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fg.BlockLayout.from_dense(np.ones(3, bool)), "2 to 4 dimensions"),
        (lambda: fg.BlockLayout.from_dense(np.full((2, 2), 3)), "0 or 1"),
        (lambda: fg.BlockLayout.from_dense(np.ones((2, 2), np.float32)), "float32"),
        (lambda: fg.BlockLayout.from_bsr([0, 1], [0]), "shape="),
        (lambda: fg.BlockLayout.from_bsr([0, 1], [0], (2, 2)), "2 rows of blocks need 3"),
        (lambda: fg.BlockLayout.from_bsr([0, 2, 1], [0], (2, 2)), "must rise"),
        (lambda: fg.BlockLayout.from_bsr([0, 1, 2], [0, 2], (2, 2)), "holds 2; there are blocks 0 to 1"),
        (lambda: fg.BlockLayout.from_bsr([0, 2, 2], [1, 1], (2, 2)), "twice"),
        (lambda: fg.BlockLayout.from_bsr([0, 1, 1], [0.5], (2, 2)), "give integers"),
        (lambda: fg.BlockLayout.from_bsr([0], [], (0, 2)), "positive"),
        (lambda: fg.BlockLayout.from_lists([1, 3], [[0, 1], [0, 1]], 4), "room for 2"),
        (lambda: fg.BlockLayout.from_lists([1, 1], [[0], [9]], 4), "holds 9"),
        (lambda: fg.BlockLayout.from_lists([[1]], [0], 4), "blocks_q, capacity"),
    ],
)
def test_invalid_layouts_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.parametrize("block", [(16, 16), (32, 64), (64, 32), (128, 64)])
@pytest.mark.parametrize("mixed", [False, True])
def test_attention_with_a_layout(block: tuple[int, int], mixed: bool) -> None:
    """Blocks that divide the kernel's tile of 64 x 32, that are multiples of it, and both; with a mask and a score."""
    mask = fg.block_sparse("layout", *block)
    spec = fg.AttentionSpec(
        head_dim=32, mask=mask & fg.causal() if mixed else mask, score=fg.softcap(15) if mixed else None
    )
    attention = fg.compile(spec, emulate=True, plan=ForwardPlan(64, 32, 4))
    length = 150
    q, k, v = (_random.standard_normal((1, 2, length, 32)).astype(np.float16) for _ in range(3))
    dense = _random.random([-(-length // size) for size in block]) < 0.5
    layout = fg.BlockLayout.from_dense(dense)
    out = attention(q, k, v, layout=layout)
    np.testing.assert_array_equal(out, attention(q, k, v, layout=dense))
    np.testing.assert_array_equal(
        out, attention(q, k, v, layout=dense, tile_lists=attention.tile_lists(150, layout=layout))
    )
    verdict = numerics.judge(
        out,
        fg.reference.attention(spec, q, k, v, layout=layout),
        fg.reference.low_precision(spec, q, k, v, layout=layout),
    )
    assert verdict.ok, verdict


def test_a_layout_must_match_the_lengths() -> None:
    attention = fg.compile(fg.AttentionSpec(head_dim=32, mask=fg.block_sparse("layout", 64, 64)), emulate=True)
    q = np.zeros((1, 1, 200, 32), np.float16)
    with pytest.raises(ArgumentError, match=r"3 blocks along axis 0; len_q=200 in blocks of 64 has 4"):
        attention(q, q, q, layout=fg.BlockLayout.from_dense(np.ones((3, 4), bool)))
    with pytest.raises(ArgumentError, match=r"5 blocks along axis 1; len_k=200 in blocks of 64 has 4"):
        attention.tile_lists(200, layout=fg.BlockLayout.from_dense(np.ones((4, 5), bool)))
