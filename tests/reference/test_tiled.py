"""FlashAttention 1 and 2: equal to standard attention for every variant; traffic equals the closed forms."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen.language as fl
from flashgen.reference import (
    HbmTraffic,
    attention,
    flash1,
    flash2,
    standard,
    traffic_flash1,
    traffic_flash2,
    traffic_standard,
)

pytestmark = pytest.mark.filterwarnings("error")  # warnings about NaN would hide mistakes of the reference

HEADS, LEN_Q, LEN_K, DIM, VALUE_DIM = 4, 45, 61, 8, 16
RANDOM = np.random.default_rng(5)
IDS = np.sort(RANDOM.integers(0, 5, 70)).astype(np.int32)
LAYOUT = RANDOM.random((6, 6)) < 0.5
SLOPES = (2.0 ** -np.arange(1, HEADS + 1)).astype(np.float32)
TABLE = RANDOM.standard_normal((HEADS, 17)).astype(np.float32)

MASKS = {
    "full": (fl.full(), {}),
    "causal": (fl.causal(), {}),
    "causal top left": (fl.causal(align="top_left"), {}),
    "sliding window": (fl.sliding_window(7, 3), {}),
    "causal window": (fl.sliding_window(9), {}),
    "dilated window": (fl.dilated_window(20, 3), {}),
    "prefix lm": (fl.prefix_lm(12), {}),
    "document": (fl.document(fl.Tensor("ids", "int32", 1)), {"ids": IDS}),
    "block sparse": (fl.block_sparse(fl.Tensor("blocks", "bool", 2), 9, 13), {"blocks": LAYOUT}),
    "composed": (fl.causal() & fl.document(fl.Tensor("ids", "int32", 1)) | ~fl.sliding_window(30, 30), {"ids": IDS}),
    "rows with nothing": (lambda b, h, q, k: (q % 4 != h) & (k > 20), {}),
    "nothing": (lambda b, h, q, k: k < b - 5, {}),
}
SCORES = {
    "alibi": (fl.alibi(fl.Tensor("slopes", "float32", 1)), {"slopes": SLOPES}),
    "softcap": (fl.softcap(2.0), {}),
    "relative bias": (fl.relative_bias(fl.Tensor("table", "float32", 2), 8), {"table": TABLE}),
    "softcapped alibi": (fl.softcap(5.0)(fl.alibi(HEADS)), {}),
    "minus infinity": (lambda s, b, h, q, k: fl.where((q + k) % 3 == 0, s, -float("inf")), {}),
    "not of the score": (lambda s, b, h, q, k: fl.to_float(k) / 4, {}),
    "constant": (lambda s, b, h, q, k: 2.0, {}),
    "large": (lambda s, b, h, q, k: 400.0 * s, {}),
}


def inputs(batch=2, heads_q=HEADS, heads_kv=2, len_q=LEN_Q, len_k=LEN_K, head_dim=DIM, value_dim=VALUE_DIM):
    rng = np.random.default_rng(len_q * 1000 + len_k)
    shapes = [
        (batch, heads_q, len_q, head_dim),
        (batch, heads_kv, len_k, head_dim),
        (batch, heads_kv, len_k, value_dim),
    ]
    return tuple(rng.standard_normal(shape) for shape in shapes)


def assert_all_agree(spec, q, k, v, on_chip, **arguments):
    expected, expected_lse = attention(spec, q, k, v, return_lse=True, **arguments)
    for out, lse, _ in (
        standard(spec, q, k, v, **arguments),
        flash1(spec, q, k, v, on_chip=on_chip, **arguments),
        flash2(spec, q, k, v, on_chip=on_chip, **arguments),
    ):
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-10)
        np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-10)  # equal infinities are equal
        assert out.shape == expected.shape


@pytest.mark.rotated(9)
@pytest.mark.parametrize("on_chip", [192, 480, 4000])  # 4 rows and keys per block; unequal blocks; larger than the keys
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask, on_chip):
    function, captures = MASKS[mask]
    spec = fl.AttentionSpec(head_dim=DIM, value_dim=VALUE_DIM, mask=function)
    assert_all_agree(spec, *inputs(batch=1), on_chip, **captures)


@pytest.mark.rotated(36)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", ["full", "causal", "rows with nothing"])
def test_every_score_with_dropout_in_the_other_layout(score, mask):
    (modifier, score_captures), (function, mask_captures) = SCORES[score], MASKS[mask]
    spec = fl.AttentionSpec(
        head_dim=DIM, value_dim=VALUE_DIM, layout="bshd", dropout=0.17, score=modifier, mask=function
    )
    q, k, v = (array.swapaxes(1, 2) for array in inputs())
    assert_all_agree(spec, q, k, v, 480, seed=2**40 + 1, offset=3, **score_captures, **mask_captures)


lengths = st.integers(0, 30)
dims = st.sampled_from([8, 16, 24])


@settings(max_examples=50, deadline=None)
@given(len_q=lengths, len_k=lengths, d=dims, dv=dims, heads=st.integers(0, 3), on_chip=st.integers(24, 1500))
def test_counters_equal_the_closed_forms(len_q, len_k, d, dv, heads, on_chip):
    spec = fl.AttentionSpec(head_dim=d, value_dim=dv, mask=fl.causal())
    q, k, v = inputs(2, heads, 1, len_q, len_k, d, dv)
    runs = [
        standard(spec, q, k, v),
        flash1(spec, q, k, v, on_chip=on_chip),
        flash2(spec, q, k, v, on_chip=on_chip),
    ]
    sizes = (len_q, len_k, d, dv)
    closed = [
        traffic_standard(*sizes),
        traffic_flash1(*sizes, on_chip=on_chip),
        traffic_flash2(*sizes, on_chip=on_chip),
    ]
    assert [traffic for *_, traffic in runs] == [2 * heads * one for one in closed]
    for out, lse, _ in runs[1:]:
        np.testing.assert_allclose(out, runs[0][0], rtol=0, atol=1e-10)
        np.testing.assert_allclose(lse, runs[0][1], rtol=0, atol=1e-10)


def test_counts_by_hand():
    """len 4 x 6, d = dv = 8, M = 64: blocks of 2 rows and 2 keys, so 3 passes over Q in FA-1, 2 over K, V in FA-2."""
    spec = fl.AttentionSpec(head_dim=8)
    q, k, v = inputs(1, 1, 1, 4, 6, 8, 8)
    *_, plain = standard(spec, q, k, v)
    *_, first = flash1(spec, q, k, v, on_chip=64)
    *_, second = flash2(spec, q, k, v, on_chip=64)
    assert plain == HbmTraffic(reads=32 + 48 + 24 + 24 + 48, writes=24 + 24 + 32)
    assert first == HbmTraffic(reads=48 + 48 + 3 * (32 + 32 + 4 + 4), writes=4 * (32 + 4 + 4))
    assert second == HbmTraffic(reads=32 + 2 * (48 + 48), writes=32 + 4)


def test_traffic_does_not_depend_on_the_variant():
    q, k, v = inputs()
    plain = fl.AttentionSpec(head_dim=DIM, value_dim=VALUE_DIM)
    other = fl.AttentionSpec(
        head_dim=DIM, value_dim=VALUE_DIM, mask=fl.causal(), score=fl.softcap(3.0), dropout=0.5, dtype="bfloat16"
    )
    for function, more in ((standard, {}), (flash1, {"on_chip": 480}), (flash2, {"on_chip": 480})):
        assert function(plain, q, k, v, **more)[2] == function(other, q, k, v, seed=1, **more)[2]
