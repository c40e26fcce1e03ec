"""The float64 reference against loops over plain Python numbers; low precision and edge cases."""

import math

import ml_dtypes
import numpy as np
import pytest
import scipy.special

import flashgen.reference.oracle as oracle
from flashgen.language import AttentionSpec, Tensor, tanh, where
from flashgen.reference import attention, dropout_keep, judge, low_precision, threshold

pytestmark = pytest.mark.filterwarnings("error")  # warnings about NaN would hide mistakes of the reference


def inputs(batch=2, heads_q=2, heads_kv=2, len_q=8, len_k=9, head_dim=8, value_dim=8, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [
        (batch, heads_q, len_q, head_dim),
        (batch, heads_kv, len_k, head_dim),
        (batch, heads_kv, len_k, value_dim),
    ]
    return tuple(rng.standard_normal(shape).astype(np.float16) for shape in shapes)


def by_loops(q, k, v, scale, allowed=None, modified=None, keep=None, keep_scale=1.0):
    """Attention element by element. `allowed` and `modified` are the user's functions, called with Python numbers."""
    q, k, v = (array.astype(np.float64) for array in (q, k, v))
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full(q.shape[:3], -np.inf)
    for b, h, i in np.ndindex(q.shape[:3]):
        kv = h // (q.shape[1] // k.shape[1])
        scores = {}
        for j in range(k.shape[2]):
            score = scale * math.fsum(q[b, h, i] * k[b, kv, j])
            score = modified(score, b, h, i, j) if modified else score
            if allowed is None or allowed(b, h, i, j):
                scores[j] = score
        if scores:
            total = math.fsum(math.exp(score) for score in scores.values())
            lse[b, h, i] = math.log(total)
            for j, score in scores.items():
                if keep is None or keep[b, h, i, j]:
                    out[b, h, i] += math.exp(score) / total * keep_scale * v[b, kv, j]
    return out, lse


MASKS = {
    "none": None,
    "causal": lambda b, h, q, k: k <= q,
    "near or global": lambda b, h, q, k: (abs(q - k) <= 2) | (k < 1),
    "floored division": lambda b, h, q, k: (q - 4) // 3 == (k - 4) // 3,
    "modulo": lambda b, h, q, k: (q - k) % 3 == 1,
    "by head and batch": lambda b, h, q, k: (k >= h) & ((q + b) % 2 == 0),
    "some rows have nothing": lambda b, h, q, k: q % 3 != 0,
    "nothing": lambda b, h, q, k: k < 0,
}
SCORES = {
    "none": None,
    "distance": lambda s, b, h, q, k: s - 0.25 * (h + 1) * abs(q - k),
    "squared": lambda s, b, h, q, k: s * s / (1 + k),
    "not of the score": lambda s, b, h, q, k: k / 4,
    "constant": lambda s, b, h, q, k: 2.0,
    "scaled by row": lambda s, b, h, q, k: s * (q - 3) + b,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_every_mask_and_score_agrees_with_loops(mask, score):
    q, k, v = inputs()
    functions = {"mask": MASKS[mask], "score": SCORES[score]}
    spec = AttentionSpec(head_dim=8, **{name: function for name, function in functions.items() if function})
    out, lse = attention(spec, q, k, v, return_lse=True)
    expected, expected_lse = by_loops(q, k, v, 8**-0.5, MASKS[mask], SCORES[score])
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(2, 2), (6, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("value_dim", [8, 24])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_heads_value_dim_and_layout(heads_q, heads_kv, value_dim, layout):
    q, k, v = inputs(heads_q=heads_q, heads_kv=heads_kv, value_dim=value_dim)
    expected, expected_lse = by_loops(q, k, v, 0.3, MASKS["causal"], SCORES["distance"])
    spec = AttentionSpec(
        head_dim=8, value_dim=value_dim, scale=0.3, layout=layout, mask=MASKS["causal"], score=SCORES["distance"]
    )
    if layout == "bshd":
        q, k, v, expected = (array.swapaxes(1, 2) for array in (q, k, v, expected))
    out, lse = attention(spec, q, k, v, return_lse=True)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12)


def test_captures():
    slopes, ids = Tensor("slopes", "float32", 1), Tensor("ids", "int32", 2)
    spec = AttentionSpec(
        head_dim=8,
        mask=lambda b, h, q, k: ids[b, q] == ids[b, k],
        score=lambda s, b, h, q, k: s + slopes[h] * (k - q),
    )
    given_slopes = np.array([0.5, 0.125], dtype=np.float32)
    given_ids = np.array([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 3, 3]], dtype=np.int32)
    q, k, v = inputs()
    out, lse = attention(spec, q, k, v, slopes=given_slopes, ids=given_ids, return_lse=True)
    expected, expected_lse = by_loops(
        *(q, k, v, 8**-0.5),
        lambda b, h, i, j: given_ids[b, i] == given_ids[b, j],
        lambda s, b, h, i, j: s + float(given_slopes[h]) * (j - i),
    )
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12)


def test_dropout():
    q, k, v = inputs(heads_q=4, len_q=20, len_k=40)
    spec = AttentionSpec(head_dim=8, dropout=0.3, mask=MASKS["causal"])
    keep = dropout_keep(11, 5, 2, 4, 20, 40, 0.3)
    out, lse = attention(spec, q, k, v, seed=11, offset=5, return_lse=True)
    expected, expected_lse = by_loops(q, k, v, 8**-0.5, MASKS["causal"], keep=keep, keep_scale=256 / threshold(0.3))
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12)  # before dropout
    assert not np.array_equal(out, attention(spec, q, k, v, seed=11, offset=6))
    assert not np.array_equal(out, attention(spec, q, k, v, seed=12, offset=5))


def test_dropout_is_unbiased():
    q, k, v = inputs(batch=1, heads_q=1, heads_kv=1)
    spec = AttentionSpec(head_dim=8, dropout=0.17)
    mean = np.mean([attention(spec, q, k, v, seed=seed) for seed in range(3000)], axis=0)
    assert np.abs(mean - attention(AttentionSpec(head_dim=8), q, k, v)).max() < 0.04


def test_full_attention_agrees_with_scipy():
    q, k, v = inputs(heads_q=3, heads_kv=3, len_q=130, len_k=70, head_dim=64, value_dim=32)
    out, lse = attention(AttentionSpec(head_dim=64, value_dim=32), q, k, v, return_lse=True)
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3) / 8
    np.testing.assert_allclose(
        out, scipy.special.softmax(scores, axis=-1) @ v.astype(np.float64), rtol=1e-12, atol=1e-13
    )
    np.testing.assert_allclose(lse, scipy.special.logsumexp(scores, axis=-1), rtol=1e-12)


@pytest.mark.parametrize("function", [attention, low_precision])
def test_rows_without_keys(function):
    q, k, v = inputs()
    out, lse = function(AttentionSpec(head_dim=8, mask=MASKS["some rows have nothing"]), q, k, v, return_lse=True)
    assert (out[:, :, ::3] == 0).all() and (lse[:, :, ::3] == -np.inf).all()
    assert np.isfinite(out).all() and np.isfinite(lse[:, :, 1::3]).all()


@pytest.mark.parametrize("function", [attention, low_precision])
def test_a_score_of_minus_infinity_masks(function):
    q, k, v = inputs()
    masked = AttentionSpec(head_dim=8, mask=lambda b, h, q, k: k > q + 1)
    scored = AttentionSpec(head_dim=8, score=lambda s, b, h, q, k: where(k > q + 1, s, -math.inf))
    got = function(scored, q, k, v, return_lse=True)
    expected = function(masked, q, k, v, return_lse=True)
    assert (expected[1][:, :, -1] == -np.inf).all()  # the last rows have no keys
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("function", [attention, low_precision])
@pytest.mark.parametrize(
    "shape", [{"batch": 0}, {"heads_q": 0}, {"heads_q": 0, "heads_kv": 0}, {"len_q": 0}, {"len_k": 0}]
)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_lengths_of_zero(function, shape, layout):
    q, k, v = inputs(**shape, value_dim=16)
    expected_shape, lse_shape = (*q.shape[:3], 16), q.shape[:3]
    spec = AttentionSpec(
        head_dim=8, value_dim=16, layout=layout, mask=MASKS["causal"], score=SCORES["distance"], dropout=0.5
    )
    if layout == "bshd":
        q, k, v = (array.swapaxes(1, 2) for array in (q, k, v))
        expected_shape = tuple(expected_shape[axis] for axis in (0, 2, 1, 3))
    out, lse = function(spec, q, k, v, seed=1, return_lse=True)
    assert out.shape == expected_shape and lse.shape == lse_shape
    assert (out == 0).all() and (lse == -np.inf).all()  # of the remaining values where len_k is 0


@pytest.mark.parametrize("function", [attention, low_precision])
def test_blocks_of_rows_give_the_same(function, monkeypatch):
    q, k, v = inputs(len_q=50, len_k=33)
    spec = AttentionSpec(head_dim=8, mask=MASKS["near or global"], score=SCORES["distance"], dropout=0.2)
    whole = function(spec, q, k, v, seed=3, return_lse=True)
    monkeypatch.setattr(oracle, "_TILE_ELEMENTS", 33 * 7)
    for got, expected in zip(function(spec, q, k, v, seed=3, return_lse=True), whole, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)


def test_arguments_are_not_modified_and_strides_do_not_matter():
    q, k, v = inputs()
    before = [array.copy() for array in (q, k, v)]
    out = attention(AttentionSpec(head_dim=8), q[:, :, ::-1], np.asfortranarray(k), v)
    np.testing.assert_allclose(out[:, :, ::-1], attention(AttentionSpec(head_dim=8), q, k, v), rtol=1e-12)
    for array, copy in zip((q, k, v), before, strict=True):
        np.testing.assert_array_equal(array, copy)


# Low precision --------------------------------------------------------------------------------------------------------

SOFTCAP = AttentionSpec(head_dim=64, score=lambda s, b, h, q, k: 3 * tanh(s / 3), mask=MASKS["causal"], dropout=0.1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_has_the_dtype_and_is_close(dtype):
    q, k, v = inputs(len_q=64, len_k=64, head_dim=64, value_dim=64)
    if dtype == "bfloat16":
        q, k, v = (array.astype(ml_dtypes.bfloat16) for array in (q, k, v))
    storage = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    epsilon = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
    for spec in (
        AttentionSpec(head_dim=64, dtype=dtype),
        AttentionSpec.from_json(SOFTCAP.to_json().replace("float16", dtype)),
    ):
        ref, ref_lse = attention(spec, q, k, v, seed=4, return_lse=True)
        low, low_lse = low_precision(spec, q, k, v, seed=4, return_lse=True)
        np.testing.assert_array_equal(low, low.astype(storage).astype(np.float64))
        error = np.abs(low - ref).max()
        assert epsilon / 4 < error < 16 * epsilon
        assert np.abs(low_lse - ref_lse).max() < 16 * epsilon
        assert judge(ref.astype(storage), ref, low, ref_lse.astype(np.float32), ref_lse).ok
        assert not judge(attention(spec, q, k, np.roll(v, 1, axis=2), seed=4), ref, low).ok


def test_low_precision_of_one_key_is_exact():
    q, k, v = inputs(len_k=1)
    np.testing.assert_array_equal(
        low_precision(AttentionSpec(head_dim=8), q, k, v), attention(AttentionSpec(head_dim=8), q, k, v)
    )


def test_low_precision_rounds_its_inputs():
    q, k, v = (array.astype(np.float64) + 1e-6 for array in inputs())
    rounded = [array.astype(np.float16) for array in (q, k, v)]
    spec = AttentionSpec(head_dim=8)
    np.testing.assert_array_equal(low_precision(spec, q, k, v), low_precision(spec, *rounded))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_rounds_each_operation_on_the_score(dtype):
    """One query, two keys: the steps written out by hand, each in the dtype."""
    storage = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).type
    q, k, v = (array.astype(storage) for array in inputs(1, 1, 1, 1, 2))
    cap, slope = 3.1, 0.3
    spec = AttentionSpec(
        head_dim=8, dtype=dtype, scale=0.3, score=lambda s, b, h, q, k: cap * tanh(s / cap) + slope * (k - 7)
    )
    scaled = (q.astype(np.float64) * 0.3).astype(storage).astype(np.float32)
    scores = (scaled @ k.astype(np.float32).swapaxes(2, 3)).astype(storage)[0, 0, 0]
    steps = [storage(np.float64(s) / cap) for s in scores]
    steps = [storage(np.tanh(np.float64(s))) for s in steps]
    steps = [storage(cap * np.float64(s)) for s in steps]
    steps = [storage(np.float64(s) + slope * (j - 7)) for j, s in enumerate(steps)]  # the bias itself is not rounded
    weights = np.exp(np.array(steps, np.float32))
    probabilities = (weights / weights.sum()).astype(storage).astype(np.float32)
    expected = (probabilities @ v.astype(np.float32)[0, 0]).astype(storage)
    np.testing.assert_array_equal(low_precision(spec, q, k, v)[0, 0, 0], expected.astype(np.float64))


def test_a_float16_overflow_is_no_bound():
    q, k, v = inputs(head_dim=64)
    spec = AttentionSpec(head_dim=64, value_dim=8, scale=1.0)
    low = low_precision(spec, q * 200, k * 200, v)
    ref = attention(spec, q * 200, k * 200, v)
    assert np.isfinite(ref).all() and not judge(ref, ref, low).ok
