"""The backward algorithms of the FlashAttention paper: equal to the reference; traffic equals the closed forms."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen.language as fl
from flashgen.reference import (
    HbmTraffic,
    attention,
    backward,
    flash_backward,
    standard_backward,
    traffic_flash_backward,
    traffic_standard_backward,
)

pytestmark = pytest.mark.filterwarnings("error")  # warnings about NaN would hide mistakes of the reference

HEADS, LEN_Q, LEN_K, DIM, VALUE_DIM = 4, 45, 61, 8, 16
A100 = 100 * 1024 // 2  # 100 KB of float16, as in the FlashAttention paper
RANDOM = np.random.default_rng(5)
IDS = np.sort(RANDOM.integers(0, 5, 70)).astype(np.int32)
SLOPES = (2.0 ** -np.arange(1, HEADS + 1)).astype(np.float32)

VARIANTS = {
    "full": ({}, {}),
    "causal softcap": ({"mask": fl.causal(), "score": fl.softcap(2.0)}, {}),
    "documents, alibi": (
        {
            "mask": fl.document(fl.Tensor("ids", "int32", 1)),
            "score": fl.alibi(fl.Tensor("slopes", "float32", 1, grad=True)),
        },
        {"ids": IDS, "slopes": SLOPES},
    ),
    "rows with nothing": (
        {"mask": lambda b, h, q, k: (q % 4 != h) & (k > 20), "score": lambda s, b, h, q, k: s * s},
        {},
    ),
    "nothing": ({"mask": lambda b, h, q, k: k < b - 5}, {}),
    "minus infinity": ({"score": lambda s, b, h, q, k: fl.where((q + k) % 3 == 0, s, -float("inf"))}, {}),
}


def inputs(batch=2, heads_q=HEADS, heads_kv=2, len_q=LEN_Q, len_k=LEN_K, head_dim=DIM, value_dim=VALUE_DIM):
    rng = np.random.default_rng(len_q * 1000 + len_k)
    shapes = [
        (batch, heads_q, len_q, head_dim),
        (batch, heads_kv, len_k, head_dim),
        (batch, heads_kv, len_k, value_dim),
        (batch, heads_q, len_q, value_dim),
    ]
    return tuple(rng.standard_normal(shape) for shape in shapes)


def run_both(spec, q, k, v, d_out, on_chip, **arguments):
    out, lse = attention(spec, q, k, v, return_lse=True, **arguments)
    return (
        standard_backward(spec, q, k, v, d_out, **arguments),
        flash_backward(spec, q, k, v, out, d_out, lse, on_chip=on_chip, **arguments),
    )


@pytest.mark.rotated(36)
@pytest.mark.parametrize("on_chip", [192, 480, 4000])  # 4 rows and keys per block; unequal blocks; larger than the keys
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_with_dropout(variant, layout, on_chip):
    functions, captures = VARIANTS[variant]
    spec = fl.AttentionSpec(head_dim=DIM, value_dim=VALUE_DIM, layout=layout, dropout=0.17, **functions)
    arrays = inputs()
    if layout == "bshd":
        arrays = tuple(array.swapaxes(1, 2) for array in arrays)
    arguments = {"seed": 2**40 + 1, "offset": 3, **captures}
    expected = backward(spec, *arrays, **arguments)
    for run in run_both(spec, *arrays, on_chip, **arguments):
        for got, wanted in zip(run[:3], expected[:3], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-10)


lengths = st.integers(0, 30)
dims = st.sampled_from([8, 16, 24])


@settings(max_examples=50, deadline=None)
@given(len_q=lengths, len_k=lengths, d=dims, dv=dims, heads=st.integers(0, 3), on_chip=st.integers(24, 1500))
def test_counters_equal_the_closed_forms(len_q, len_k, d, dv, heads, on_chip):
    spec = fl.AttentionSpec(head_dim=d, value_dim=dv, mask=fl.causal())
    arrays, sizes = inputs(2, heads, 1, len_q, len_k, d, dv), (len_q, len_k, d, dv)
    plain, flash = run_both(spec, *arrays, on_chip)
    assert plain[3] == 2 * heads * traffic_standard_backward(*sizes)
    assert flash[3] == 2 * heads * traffic_flash_backward(*sizes, on_chip=on_chip)
    for one, other in zip(plain[:3], flash[:3], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


def test_counts_by_hand():
    """len 4 x 6, d = dv = 8, M = 64: blocks of 2 rows and 2 keys, so 3 passes over Q, O, dO, dQ and LSE."""
    plain, flash = run_both(fl.AttentionSpec(head_dim=8), *inputs(1, 1, 1, 4, 6, 8, 8), 64)
    assert plain[3] == HbmTraffic(
        reads=(24 + 32) + (32 + 48) + (24 + 24) + (24 + 48) + (24 + 32), writes=48 + 24 + 24 + 32 + 48
    )
    assert flash[3] == HbmTraffic(reads=48 + 48 + 3 * (4 * 32 + 4), writes=(32 + 48 + 48) + 3 * 32 + 48 + 48)


def test_traffic_does_not_depend_on_the_variant():
    plain = fl.AttentionSpec(head_dim=DIM, value_dim=VALUE_DIM)
    other = fl.AttentionSpec(
        head_dim=DIM, value_dim=VALUE_DIM, mask=fl.causal(), score=fl.softcap(3.0), dropout=0.5, dtype="bfloat16"
    )
    runs = [[run[3] for run in run_both(spec, *inputs(), 480, seed=1)] for spec in (plain, other)]
    assert runs[0] == runs[1]


def test_closed_forms_of_the_header():
    for n, d in [(1, 1), (128, 64), (1024, 64), (16384, 128)]:
        assert traffic_standard_backward(n, n, d).total == 7 * n * n + 8 * n * d
        for on_chip in (d, A100):
            blocks = -(-n // -(-on_chip // (4 * d)))
            assert traffic_flash_backward(n, n, d, on_chip=on_chip).total == blocks * n * (5 * d + 1) + 7 * n * d


def test_flash_is_n_squared_d_squared_over_m():
    """Theorem 5: doubling N or d quadruples the traffic, doubling M halves it; the rest are lower-order terms."""
    n, d, m = 1 << 17, 64, 1 << 15
    base = traffic_flash_backward(n, n, d, on_chip=m).total
    assert base == pytest.approx(20 * n * n * d * d / m, rel=0.03)
    assert traffic_flash_backward(2 * n, 2 * n, d, on_chip=m).total == pytest.approx(4 * base, rel=0.01)
    assert traffic_flash_backward(n, n, 2 * d, on_chip=m).total == pytest.approx(4 * base, rel=0.03)
    assert traffic_flash_backward(n, n, d, on_chip=2 * m).total == pytest.approx(base / 2, rel=0.01)


def test_flash_moves_less_at_real_sizes():
    """d = 64 and 100 KB: about four times less than standard attention's backward."""
    for n, times in [(1024, 3.24), (4096, 4.06), (16384, 4.30)]:
        flash = traffic_flash_backward(n, n, 64, on_chip=A100).total
        assert traffic_standard_backward(n, n, 64).total / flash == pytest.approx(times, abs=0.01)
