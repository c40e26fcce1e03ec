"""The float64 gradients against finite differences of the forward; low precision and edge cases."""

import math

import ml_dtypes
import numpy as np
import pytest

import flashgen.language as fl
import flashgen.reference.oracle as oracle
from flashgen.reference import (
    Gradients,
    attention,
    backward,
    backward_of_rounded_output,
    dropout_keep,
    judge,
    low_precision_backward,
    threshold,
)

pytestmark = pytest.mark.filterwarnings("error")  # warnings about NaN would hide mistakes of the reference

LEN_Q, LEN_K = 7, 10
RANDOM = np.random.default_rng(8)


def on_a_grid(*shape):
    """Returns numbers that float32 represents exactly, also after a small binary step."""
    return (RANDOM.integers(-64, 64, shape) / 64).astype(np.float32)


SLOPES, TABLE = fl.Tensor("slopes", "float32", 1, grad=True), fl.Tensor("table", "float32", 2, grad=True)
U, W = fl.Tensor("u", "float32", 2, grad=True), fl.Tensor("w", "float32", 2, grad=True)
IDS, ROWS = fl.Tensor("ids", "int32", 1), fl.Tensor("rows", "float32", 1, grad=True)
GIVEN = {
    "slopes": np.abs(on_a_grid(4)),
    "table": on_a_grid(4, 7),
    "u": on_a_grid(LEN_Q, 3),
    "w": on_a_grid(LEN_K, 3),
    "ids": np.array([0, 0, 1, 1, 1, 2, 2, 2, 3, 3], np.int32),
    "rows": on_a_grid(5),
}
MASKS = {
    "full": None,
    "causal": fl.causal(),
    "top left": fl.causal("top_left"),
    "window": fl.sliding_window(3, 2),
    "dilated": fl.dilated_window(8, 2),
    "prefix": fl.prefix_lm(4),
    "documents": fl.document(IDS),
    "composed": fl.causal() & fl.document(IDS) | ~fl.sliding_window(4, 4),
    "some rows have nothing": lambda b, h, q, k: q % 3 != h % 3,
}
SCORES = {
    "none": None,
    "alibi": fl.alibi(4),
    "learned alibi": fl.alibi(SLOPES),
    "softcap": fl.softcap(1.5),
    "accurate softcap": fl.softcap(1.5, precision="accurate"),
    "relative bias": fl.relative_bias(TABLE, 3),
    "softcapped learned alibi": fl.softcap(2.0)(fl.alibi(SLOPES)),
    "low rank": lambda s, b, h, q, k: s + sum(U[q, r] * W[k, r] for r in range(3)),
    "gathers of one capture": lambda s, b, h, q, k: s * ROWS[q] + ROWS[k] * ROWS[IDS[k]] - 0.25 * ROWS[k - 2],
    "gather within an index": lambda s, b, h, q, k: s + ROWS[fl.to_int(4 * TABLE[h, q])],
    "where": lambda s, b, h, q, k: fl.where((q + k) % 2 == 0, s * s, fl.sin(s) * SLOPES[h]),
    "kinks": lambda s, b, h, q, k: fl.maximum(s, 0.01) - fl.minimum(fl.abs(s * 2), 1 + 0.1 * s) * ROWS[h],
    "quotient": lambda s, b, h, q, k: s / (1 + fl.abs(s)) + fl.log(1 + s * s) * fl.sigmoid(s),
    "modulo": lambda s, b, h, q, k: 0.5 * (s % 1.3) + fl.exp(0.1 * s) // 5,
    "not of the score": lambda s, b, h, q, k: ROWS[k] * ROWS[q],
    "constant": lambda s, b, h, q, k: 2.0,
    "minus infinity": lambda s, b, h, q, k: fl.where(k != q, s * ROWS[q], -math.inf),
}


def inputs(batch=2, heads_q=4, heads_kv=4, len_q=LEN_Q, len_k=LEN_K, head_dim=8, value_dim=8, seed=0):
    """Returns q, k, v, d_out and d_lse in float64."""
    rng = np.random.default_rng(seed)
    shapes = [
        (batch, heads_q, len_q, head_dim),
        (batch, heads_kv, len_k, head_dim),
        (batch, heads_kv, len_k, value_dim),
        (batch, heads_q, len_q, value_dim),
        (batch, heads_q, len_q),
    ]
    return tuple(rng.standard_normal(shape) for shape in shapes)


def spec_of(mask=None, score=None, **more):
    return fl.AttentionSpec(8, mask=mask, score=score, **more)


def captures_of(spec):
    return {capture.name: GIVEN[capture.name] for capture in spec.captures}


def swapped(array):
    return np.ascontiguousarray(array.swapaxes(1, 2))


def loss(spec, q, k, v, d_out, d_lse, **arguments):
    out, lse = attention(spec, q, k, v, return_lse=True, **arguments)
    lse = np.where(np.isfinite(lse), lse, 0.0)
    return float((out * d_out).sum() + (lse * d_lse).sum())


def slope_along(function, at, direction):
    """Returns the derivative of function(at + t direction) at t = 0, to fourth order; `at` keeps its dtype exactly."""
    values = [function((at + step * direction).astype(at.dtype)) for step in (-2, -1, 1, 2)]
    return (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / 12


def assert_gradients(spec, q, k, v, d_out, d_lse, **arguments):
    """Compares gradients with finite differences along random directions, for each array that has one."""
    captures = captures_of(spec)
    got = backward(spec, q, k, v, d_out, d_lse=d_lse, **arguments, **captures)
    arrays = {"q": q, "k": k, "v": v, **captures}
    gradients = {"q": got.dq, "k": got.dk, "v": got.dv, **got.captures}
    assert set(got.captures) == {capture.name for capture in spec.captures if capture.grad}
    rng = np.random.default_rng(1)
    for name, gradient in gradients.items():
        at = arrays[name]
        assert gradient.shape == at.shape and gradient.dtype == np.float64

        def moved(array, name=name):
            return loss(spec, d_out=d_out, d_lse=d_lse, **arguments, **{**arrays, name: array})

        for _ in range(3):
            direction = rng.integers(-3, 4, at.shape) * 2.0**-16  # small, so that no score crosses a kink
            expected = slope_along(moved, at, direction)
            np.testing.assert_allclose((gradient * direction).sum(), expected, rtol=1e-7, atol=1e-11)


@pytest.mark.rotated(3)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", ["full", "causal", "some rows have nothing"])
def test_every_score(mask, score):
    assert_gradients(spec_of(MASKS[mask], SCORES[score]), *inputs())


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask):
    assert_gradients(spec_of(MASKS[mask]), *inputs())


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_heads_value_dim_layout_and_dropout(heads_q, heads_kv, layout):
    q, k, v, d_out, d_lse = inputs(heads_q=heads_q, heads_kv=heads_kv, value_dim=24)
    if layout == "bshd":
        q, k, v, d_out = (swapped(array) for array in (q, k, v, d_out))
    spec = spec_of(
        MASKS["window"], SCORES["learned alibi"], value_dim=24, layout=layout, dropout=0.17, scale=0.4, dtype="bfloat16"
    )
    assert_gradients(spec, q, k, v, d_out, d_lse, seed=2**33 + 5, offset=7)


def test_no_d_lse_equals_zeros():
    q, k, v, d_out, d_lse = inputs()
    one = backward(spec_of(), q, k, v, d_out)
    for got, expected in zip(one[:3], backward(spec_of(), q, k, v, d_out, d_lse=0 * d_lse)[:3], strict=True):
        np.testing.assert_array_equal(got, expected)
    assert not np.allclose(one.dq, backward(spec_of(), q, k, v, d_out, d_lse=d_lse).dq)
    assert isinstance(one, Gradients) and one.captures == {}


def test_formulas_of_the_paper():
    """dS = P ∘ (dP - rowsum(dO ∘ O)), written out for full attention, as kernels compute it."""
    q, k, v, d_out, _ = inputs()
    p = np.exp(q @ k.swapaxes(2, 3) / 8**0.5)
    p /= p.sum(axis=-1, keepdims=True)
    d_s = p * (d_out @ v.swapaxes(2, 3) - (d_out * (p @ v)).sum(axis=-1, keepdims=True))
    dq, dk, dv, _ = backward(spec_of(), q, k, v, d_out)
    np.testing.assert_allclose(dq, d_s @ k / 8**0.5, atol=1e-13)
    np.testing.assert_allclose(dk, d_s.swapaxes(2, 3) @ q / 8**0.5, atol=1e-13)
    np.testing.assert_allclose(dv, p.swapaxes(2, 3) @ d_out, atol=1e-13)


# Dropout --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probability", [0.17, 0.5])
def test_dropout_bits_equal_those_of_the_forward(probability):
    """Read from the results: O and dV where V and dO are unit vectors, dS as the gradient of a bias."""
    length, heads = 64, 2
    spec = fl.AttentionSpec(8, value_dim=length, dropout=probability, score=lambda s, b, h, q, k: s + BIAS[b, h, q, k])
    rng, unit = np.random.default_rng(4), np.eye(length)
    q, k = rng.standard_normal((2, 1, heads, length, 8))
    given = {"seed": 2**50 + 3, "offset": 9, "bias": np.zeros((1, heads, length, length), np.float32)}
    units = np.broadcast_to(unit, (1, heads, length, length))
    forward = attention(spec, q, k, units, **given) != 0  # O[i, j] = Z P
    of_values = backward(spec, q, k, units, units, **given).dv.swapaxes(2, 3) != 0  # dV[j, i] = Z P
    ones = np.ones_like(units) / length  # so that dO V^T is 1 everywhere and dS = P (Z - row's mean)
    d_scores = backward(spec, q, k, np.ones_like(units), ones, **given).captures["bias"]
    p = attention(fl.AttentionSpec(8, value_dim=length), q, k, units)
    of_scores = np.diff(np.sort(d_scores / p, axis=-1), axis=-1).argmax(axis=-1)
    order = np.argsort(np.argsort(d_scores / p, axis=-1), axis=-1)
    expected = dropout_keep(2**50 + 3, 9, 1, heads, length, length, probability)
    np.testing.assert_array_equal(forward, expected)
    np.testing.assert_array_equal(of_values, expected)
    np.testing.assert_array_equal(order > of_scores[..., None], expected)
    z = expected * (256 / threshold(probability))
    np.testing.assert_allclose(d_scores, p * (z - (p * z).sum(axis=-1, keepdims=True)), atol=1e-14)


BIAS = fl.Tensor("bias", "float32", 4, grad=True)

# Edges ----------------------------------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("function", [backward, low_precision_backward])


@BOTH
def test_rows_without_keys(function):
    q, k, v, d_out, d_lse = inputs()
    spec = spec_of(lambda b, h, q, k: (q % 3 != 0) & (k < 8), SCORES["learned alibi"])
    d_lse[:, :, ::3] = np.nan  # a loss may give any gradient for -inf
    got = function(spec, q, k, v, d_out, d_lse=d_lse, slopes=GIVEN["slopes"])
    assert (got.dq[:, :, ::3] == 0).all() and (got.dk[:, :, 8:] == 0).all() and (got.dv[:, :, 8:] == 0).all()
    assert np.isfinite(got.captures["slopes"]).all()
    assert all(np.isfinite(array).all() and (array != 0).any() for array in got[:3])
    nothing = function(spec_of(lambda b, h, q, k: k < 0, SCORES["learned alibi"]), q, k, v, d_out, **captures_of(spec))
    assert all((array == 0).all() for array in (*nothing[:3], *nothing.captures.values()))


@BOTH
def test_masked_elements_contribute_nothing(function):
    """On the diagonal 1 / 0, log(0) and their derivatives are infinite or NaN, and masked."""
    q, k, v, d_out, d_lse = inputs()
    rows = {"rows": GIVEN["rows"]}

    def unsafe(s, b, h, q, k):
        return (s * (q - k) + fl.log(fl.abs(q - k)) * ROWS[q]) / (q - k) + fl.sqrt(-fl.abs(1.0 * (q == k)))

    def safe(s, b, h, q, k):
        away = fl.where(q == k, 1, q - k)
        return (s * away + fl.log(fl.abs(away)) * ROWS[q]) / away

    def mask(b, h, q, k):
        return q != k

    got = function(spec_of(mask, unsafe), q, k, v, d_out, d_lse=d_lse, **rows)
    expected = function(spec_of(mask, safe), q, k, v, d_out, d_lse=d_lse, **rows)
    for one, other in zip((*got[:3], got.captures["rows"]), (*expected[:3], expected.captures["rows"]), strict=True):
        np.testing.assert_array_equal(one, other)


@BOTH
def test_a_score_of_minus_infinity_masks(function):
    q, k, v, d_out, d_lse = inputs()
    zero = np.zeros(1, np.float32)
    masked = spec_of(lambda b, h, q, k: k > q + 1, lambda s, b, h, q, k: s + 0 * ROWS[q])
    scored = spec_of(None, lambda s, b, h, q, k: s + fl.where(k > q + 1, 0.0, fl.log(ROWS[q])))  # log(0)
    expected = function(masked, q, k, v, d_out, d_lse=d_lse, rows=zero)
    got = function(scored, q, k, v, d_out, d_lse=d_lse, rows=zero)
    for one, other in zip(got[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(one, other)
    assert got.captures["rows"] == 0


@BOTH
@pytest.mark.parametrize(
    "shape", [{"batch": 0}, {"heads_q": 0}, {"heads_q": 0, "heads_kv": 0}, {"len_q": 0}, {"len_k": 0}]
)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_lengths_of_zero(function, shape, layout):
    q, k, v, d_out, d_lse = inputs(**shape, value_dim=16)
    if layout == "bshd":
        q, k, v, d_out = (swapped(array) for array in (q, k, v, d_out))
    spec = spec_of(MASKS["causal"], SCORES["learned alibi"], value_dim=16, layout=layout, dropout=0.5)
    got = function(spec, q, k, v, d_out, d_lse=d_lse, seed=1, slopes=GIVEN["slopes"])
    for gradient, array in zip((*got[:3], got.captures["slopes"]), (q, k, v, GIVEN["slopes"]), strict=True):
        assert gradient.shape == array.shape and (gradient == 0).all()


@BOTH
def test_blocks_of_rows_give_the_same(function, monkeypatch):
    q, k, v, d_out, d_lse = inputs(len_q=50, len_k=33)
    spec = spec_of(MASKS["causal"], SCORES["relative bias"], dropout=0.2)
    arguments = {"d_lse": d_lse, "seed": 3, "table": GIVEN["table"]}
    whole = function(spec, q, k, v, d_out, **arguments)
    monkeypatch.setattr(oracle, "_TILE_ELEMENTS", 33 * 7)
    blocks = function(spec, q, k, v, d_out, **arguments)
    tolerance = 1e-12 if function is backward else 2e-3  # sums in another order may round to the next float16
    for got, expected in zip(blocks[:3], whole[:3], strict=True):
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(blocks.captures["table"], whole.captures["table"], rtol=tolerance, atol=tolerance)


def test_captures_of_the_mask_and_unused_ones_have_zero_gradients():
    q, k, v, d_out, _ = inputs()
    spec = spec_of(lambda b, h, q, k: ROWS[k] > ROWS[q], lambda s, b, h, q, k: s + fl.floor(SLOPES[h]))
    got = backward(spec, q, k, v, d_out, **captures_of(spec))
    assert set(got.captures) == {"rows", "slopes"} and not any(array.any() for array in got.captures.values())


def test_gradients_of_clamped_indices():
    """Gradients of indices beyond the end go to the last element, those before the first to the first."""
    q, k, v, d_out, _ = inputs()
    wide, far = fl.Tensor("wide", "float32", 1, grad=True), np.arange(-3, LEN_K - 3).clip(0, 4)
    got = backward(spec_of(None, lambda s, b, h, q, k: s + ROWS[k - 3]), q, k, v, d_out, rows=GIVEN["rows"])
    each = backward(spec_of(None, lambda s, b, h, q, k: s + wide[k]), q, k, v, d_out, wide=GIVEN["rows"][far]).captures[
        "wide"
    ]
    np.testing.assert_allclose(got.captures["rows"], np.bincount(far, each), atol=1e-13)


def test_arguments_are_not_modified():
    arrays = inputs()
    before = [array.copy() for array in arrays]
    backward(spec_of(MASKS["causal"]), *arrays[:4], d_lse=arrays[4])
    for array, copy in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, copy)


# Low precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("score", ["none", "softcap", "learned alibi", "relative bias"])
def test_low_precision_has_the_dtype_and_is_close(dtype, score):
    q, k, v, d_out, d_lse = inputs(heads_kv=2, len_q=64, len_k=64, head_dim=64, value_dim=64)
    storage = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    q, k, v, d_out = (array.astype(storage) for array in (q, k, v, d_out))
    spec = fl.AttentionSpec(64, dtype=dtype, mask=fl.causal(), score=SCORES[score], dropout=0.1)
    arguments = {"d_lse": d_lse.astype(np.float32), "seed": 4, **captures_of(spec)}
    ref = backward(spec, q, k, v, d_out, **arguments)
    low = low_precision_backward(spec, q, k, v, d_out, **arguments)
    epsilon = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
    for one, other in zip((*low[:3], *low.captures.values()), (*ref[:3], *ref.captures.values()), strict=True):
        np.testing.assert_array_equal(one, one.astype(storage).astype(np.float64))
        size = np.abs(other).max()
        assert epsilon / 8 * size < np.abs(one - other).max() < 16 * epsilon * size
        assert judge(other.astype(storage), other, one).ok
        assert not judge(np.roll(other, 1, axis=-1), other, one).ok


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_rounds_each_step(dtype):
    """One query, two keys: the steps written out by hand, each in the dtype."""
    storage = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).type

    def rounded(array):
        return np.asarray(array).astype(storage).astype(np.float32)

    q, k, v, d_out, d_lse = (rounded(array) for array in inputs(1, 1, 1, 1, 2))
    cap, slope = 3.1, np.array([0.3], np.float32)
    spec = fl.AttentionSpec(
        8, dtype=dtype, scale=0.3, score=lambda s, b, h, q, k: cap * fl.tanh(s / cap) + SLOPES[h] * (k - 7)
    )
    scaled = rounded(q[0, 0].astype(np.float64) * 0.3)
    tanh = rounded(np.tanh(rounded(rounded(scaled @ k[0, 0].T).astype(np.float64) / cap).astype(np.float64)))
    scores = rounded(rounded(cap * tanh.astype(np.float64)) + float(slope[0]) * (np.arange(2) - 7.0))
    weights = np.exp(scores - scores.max())
    p = rounded(weights / weights.sum())
    d_p = rounded(d_out[0, 0] @ v[0, 0].T)
    out = rounded(p @ v[0, 0])
    d_s = rounded(p * rounded(d_p - rounded(rounded(d_out[0, 0] * out).sum() - d_lse[0, 0, 0])))
    by_score = rounded(cap * rounded((1 - tanh.astype(np.float64) ** 2) * rounded(np.float64(1 / cap)).astype(float)))
    d_x = rounded(d_s.astype(np.float64) * by_score)
    got = low_precision_backward(spec, q, k, v, d_out, d_lse=d_lse, slopes=slope)
    np.testing.assert_array_equal(got.dq[0, 0], rounded(rounded(d_x @ k[0, 0]).astype(np.float64) * 0.3))
    np.testing.assert_array_equal(got.dk[0, 0], rounded(d_x.T @ scaled))
    np.testing.assert_array_equal(got.dv[0, 0], rounded(p.T @ d_out[0, 0]))
    np.testing.assert_array_equal(
        got.captures["slopes"], rounded(rounded(d_s.astype(np.float64) * (np.arange(2) - 7.0)).sum())[None]
    )


def test_low_precision_rounds_each_head_of_a_group_and_their_sum():
    q, k, v, d_out, _ = (array.astype(np.float16) for array in inputs(heads_kv=1))
    shared = low_precision_backward(spec_of(), q, k, v, d_out)
    apart = low_precision_backward(spec_of(), q, k.repeat(4, axis=1), v.repeat(4, axis=1), d_out)
    for one, each in zip(shared[1:3], apart[1:3], strict=True):
        np.testing.assert_array_equal(one, each.sum(axis=1, keepdims=True).astype(np.float16))


def test_low_precision_gives_a_capture_its_dtype():
    q, k, v, d_out, _ = inputs()
    coarse = fl.Tensor("coarse", "bfloat16", 1, grad=True)
    spec = spec_of(None, lambda s, b, h, q, k: s + coarse[k])
    given = on_a_grid(LEN_K).astype(ml_dtypes.bfloat16)
    gradient = low_precision_backward(spec, q, k, v, d_out, coarse=given).captures["coarse"]
    np.testing.assert_array_equal(gradient, gradient.astype(ml_dtypes.bfloat16).astype(np.float64))
    assert backward(spec, q, k, v, d_out, coarse=given).captures["coarse"].dtype == np.float64


def test_a_float16_overflow_is_no_bound():
    q, k, v, d_out, _ = inputs(head_dim=64, value_dim=8)
    spec = fl.AttentionSpec(64, value_dim=8)
    ref = backward(spec, q, k, v, d_out * 1e6)
    low = low_precision_backward(spec, q, k, v, d_out * 1e6)
    assert np.isfinite(ref.dv).all() and not judge(ref.dv, ref.dv, low.dv).ok


def test_a_rounded_output_changes_only_its_rounding():
    """dS differs by P times dO . (O - O rounded), in every element of a row."""
    spec = fl.AttentionSpec(16)
    q, k, v, d_out = (np.random.default_rng(n).standard_normal((1, 2, 9, 16)) for n in range(4))
    out, lse = attention(spec, q, k, v, return_lse=True)
    p = np.exp(spec.scale * q @ k.swapaxes(-1, -2) - lse[..., None])
    shift = (d_out * (out - out.astype(np.float16))).sum(-1, keepdims=True)
    exact, given = backward(spec, q, k, v, d_out), backward_of_rounded_output(spec, q, k, v, d_out)
    np.testing.assert_allclose(given.dq - exact.dq, spec.scale * (p * shift) @ k, atol=1e-12)
    np.testing.assert_allclose(given.dk - exact.dk, spec.scale * (p * shift).swapaxes(-1, -2) @ q, atol=1e-12)
    np.testing.assert_array_equal(given.dv, exact.dv)
    assert np.abs(given.dq - exact.dq).max() > 1e-6
