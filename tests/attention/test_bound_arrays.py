"""Calls of attentions whose functions close over arrays: the arrays are not passed, and each call reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import ArgumentError

LENGTH = 70
IDS = np.repeat([0, 1], LENGTH // 2)


@pytest.fixture(scope="module")
def qkv() -> tuple[Any, ...]:
    random = np.random.default_rng(1)
    return tuple(random.standard_normal((2, 2, LENGTH, 64)).astype(np.float16) for _ in range(3))


def spec_of(ids: Any, slopes: Any) -> fg.AttentionSpec:
    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + slopes[h] * (q - k)

    return fg.AttentionSpec(64, mask=lambda b, h, q, k: ids[q] == ids[k], score=score)


def test_closed_over_arrays_need_not_be_passed(qkv: Any) -> None:
    slopes = np.array([0.5, 0.25], np.float32)
    spec = spec_of(IDS, slopes)
    declared = fg.AttentionSpec.from_json(spec.to_json())
    attention, plain = fg.compile(spec, emulate=True), fg.compile(declared, emulate=True)
    given = {"ids": IDS.astype(np.int32), "slopes": slopes}
    out, lse = attention(*qkv, return_lse=True)
    assert np.array_equal(out, plain(*qkv, **given))
    expected = fg.reference.attention(spec, *qkv)
    assert np.array_equal(expected, fg.reference.attention(declared, *qkv, **given))
    assert np.abs(out - expected).max() < 5e-3
    gradients = attention.backward(out, *qkv, out, lse)
    for ours, theirs in zip(gradients, plain.backward(out, *qkv, out, lse, **given), strict=True):
        assert np.abs(ours.astype(np.float32) - theirs).max() <= 1e-2  # the order of additions to dq varies
    assert np.array_equal(attention.vjp(*qkv)[0], out)
    assert attention.tiles(LENGTH).classes.tolist() == plain.tiles(LENGTH, ids=given["ids"]).classes.tolist()
    lists = attention.tile_lists(LENGTH)
    assert np.array_equal(attention(*qkv, tile_lists=lists), out)
    backward_lists = attention.backward_tile_lists(LENGTH)
    assert attention.backward(out, *qkv, out, lse, tile_lists=backward_lists).dv.any()


def test_attentions_with_shared_kernels_have_separate_arrays(qkv: Any) -> None:
    one, other = (fg.compile(spec_of(ids, np.zeros(2, np.float32)), emulate=True) for ids in (IDS, IDS * 0))
    assert one.kernels is not None and one.source == other.source
    assert not np.array_equal(one(*qkv), other(*qkv))
    assert one.backward_kernels is other.backward_kernels, "one rendering serves both"


def test_later_changes_of_an_array_are_read(qkv: Any) -> None:
    slopes = np.zeros(2, np.float32)
    attention = fg.compile(spec_of(IDS, slopes), emulate=True)
    before = attention(*qkv)
    slopes[:] = 1
    assert not np.array_equal(attention(*qkv), before)


def test_a_capture_passed_at_the_call_wins(qkv: Any) -> None:
    attention = fg.compile(spec_of(IDS, np.zeros(2, np.float32)), emulate=True)
    assert np.array_equal(
        attention(*qkv, ids=np.zeros(LENGTH, np.int32)),
        fg.compile(spec_of(IDS * 0, np.zeros(2, np.float32)), emulate=True)(*qkv),
    )


def test_a_short_array_is_refused(qkv: Any) -> None:
    attention = fg.compile(spec_of(IDS[:9], np.zeros(2, np.float32)), emulate=True)
    with pytest.raises(ArgumentError, match="capture 'ids' has shape"):
        attention(*qkv)


def test_documents_and_padding_accept_common_array_types(qkv: Any) -> None:
    ids, lengths = np.stack([IDS, IDS // 2]), np.array([70, 33])
    mask = fg.document(ids) & fg.padding(lengths)
    spec = fg.AttentionSpec(64, mask=mask)
    assert np.abs(fg.compile(spec, emulate=True)(*qkv) - fg.reference.attention(spec, *qkv)).max() < 5e-3


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_padding_by_closed_forms(side: str, target: str) -> None:
    """There are no lists; padded keys that hold NaN are never read, however many tiles they fill."""
    random, lengths = np.random.default_rng(2), np.array([40, 300, 0])
    q, k, v = (random.standard_normal((3, 2, length, 64)).astype(np.float16) for length in (70, 300, 300))
    spec = fg.AttentionSpec(64, mask=fg.padding(lengths, side=side))
    attention = fg.compile(spec, target, emulate=True)
    assert [kernel.role for kernel in attention.kernels] == ["forward"]
    expected = fg.reference.attention(spec, q, k, v)
    hidden = k.copy()
    hidden[0, :, 192:] = np.nan if side == "right" else hidden[0, :, 192:]
    hidden[0, :, :128] = np.nan if side == "left" else hidden[0, :, :128]
    hidden[2] = np.nan
    out, lse = attention(q, hidden, v, return_lse=True)
    assert np.abs(out - expected).max() < 5e-3 and not out[2].any()
    d_out = random.standard_normal(out.shape).astype(np.float16)
    ours = attention.backward(d_out, q, k, v, out, lse)
    theirs = fg.reference.backward(spec, q, k, v, d_out)
    for got, wanted in zip(ours[:3], theirs[:3], strict=True):
        assert np.abs(got - wanted).max() <= 2e-2 * np.abs(wanted).max()


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["host", "cupy", "torch"])
def test_on_a_gpu(qkv: Any, where: str) -> None:
    """Host arrays are copied to the GPU once; GPU arrays are read in place."""
    cupy = pytest.importorskip("cupy")
    slopes = np.array([0.5, 0.25], np.float32)
    if where == "host":
        arrays: Any = (IDS, slopes)
    elif where == "cupy":
        arrays = (cupy.asarray(IDS), cupy.asarray(slopes))
    else:
        torch = pytest.importorskip("torch")
        arrays = tuple(torch.from_numpy(array).cuda() for array in (IDS, slopes))
    attention = fg.compile(spec_of(*arrays))
    expected = fg.reference.attention(spec_of(IDS, slopes), *qkv)
    on_gpu = [cupy.asarray(array) for array in qkv]
    assert np.abs(cupy.asnumpy(attention(*on_gpu)) - expected).max() < 5e-3
    assert np.abs(attention(*qkv) - expected).max() < 5e-3
    out, pullback = attention.vjp(*on_gpu)
    assert cupy.isfinite(pullback(out).dq).all()
    assert attention.tile_lists(LENGTH).bytes > 0
