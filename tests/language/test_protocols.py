"""Functions written for FlexAttention, torch and NumPy are traced unchanged."""

import math

import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import SpecError
from flashgen.language import operations as ops
from flashgen.language.evaluate import evaluate
from flashgen.language.operations import BATCH, HEAD, KEY, LEN_K, LEN_Q, QUERY, SCORE
from flashgen.language.protocols import FUNCTIONS, call_torch
from flashgen.language.trace import Traced, traced_node

Q, K, S = traced_node(QUERY), traced_node(KEY), traced_node(SCORE)


def value_of(traced, q=7, k=3, score=0.5):
    values = {QUERY: q, KEY: k, SCORE: score, BATCH: 1, HEAD: 2, LEN_Q: 16, LEN_K: 16}
    arrays = {f"array__{number}": array.reshape(1) for number, array in enumerate(traced.arrays)}
    return evaluate(traced.node, values, arrays).item()


@pytest.mark.parametrize("function", [
    lambda s, q, k: np.exp(s), lambda s, q, k: np.tanh(s / 30) * 30, lambda s, q, k: np.where(q > k, s, -np.inf),
    lambda s, q, k: np.abs(q - k), lambda s, q, k: np.minimum(q, 5), lambda s, q, k: np.clip(q, 0, 5),
    lambda s, q, k: np.maximum(s, q), lambda s, q, k: np.sqrt(q) + np.log2(q) - np.log(k), lambda s, q, k: np.exp2(s),
    lambda s, q, k: np.logical_and(q, k > 5), lambda s, q, k: np.logical_not(q),
    lambda s, q, k: np.floor(s) + np.ceil(s),
    lambda s, q, k: np.floor_divide(q, k), lambda s, q, k: np.remainder(-q, k), lambda s, q, k: np.square(q),
    lambda s, q, k: np.float32(2.0) * s, lambda s, q, k: np.int64(3) - q, lambda s, q, k: np.less(q, k),
    lambda s, q, k: np.array(2) * q, lambda s, q, k: np.power(s, 2), lambda s, q, k: np.bitwise_xor(q, k),
    lambda s, q, k: np.left_shift(1, k), lambda s, q, k: np.log10(q), lambda s, q, k: np.invert(q),
    lambda s, q, k: np.trunc(s),
    lambda s, q, k: np.negative(q), lambda s, q, k: np.sin(s) * np.cos(s), lambda s, q, k: np.reciprocal(s),
    lambda s, q, k: np.logical_xor(q > k, k > q) | np.logical_or(q, k), lambda s, q, k: np.fabs(-s), lambda s, q, k: +s,
])  # fmt: skip
def test_numpy_functions(function):
    for s, q, k in [(0.5, 7, 3), (-2.5, 3, 7), (1.0, 4, 4)]:
        expected = function(np.float64(s), np.int64(q), np.int64(k))
        assert value_of(function(S, Q, K), q, k, s) == pytest.approx(float(expected), rel=1e-12, nan_ok=True)


def test_floats_are_not_converted_through_integers():
    """Integers would saturate beyond int32, or wrap beyond int64."""
    for value in (1e10, -1e10, 3e38, -0.75, 2.5, -7.0):
        assert value_of(np.trunc(S), 7, 3, value) == math.trunc(value)
    assert value_of(Q**4.0, 10**6) == pytest.approx(1e24)
    assert value_of(Q**-4, 10**6) == pytest.approx(1e-24)


def test_numpy_functions_that_need_arrays_are_refused():
    for function, message in [
        (lambda: np.add.reduce(Q), "reduce"), (lambda: np.cumsum(Q), "numpy.cumsum cannot be traced; known"),
        (lambda: np.arange(3) + Q, "flashgen.Tensor"), (lambda: np.where(Q > K), "one argument"),
        (lambda: np.add(Q, K, out=np.zeros(1)), "cannot be traced"),
        (lambda: np.add(Q, K, where=True), "cannot be traced"),
        (lambda: np.arctan2(Q, K), "arctan2 cannot be traced"),
    ]:  # fmt: skip
        with pytest.raises(SpecError, match=message):
            function()


def torch_function(name):
    """Mimics how torch calls __torch_function__ of the first argument that has one."""
    return type(name, (), {})


def test_torch_functions_by_their_names():
    def call(name, *arguments, **keywords):
        return Traced.__torch_function__(torch_function(name), (Traced,), arguments, keywords).node

    assert call("where", Q > K, S, -math.inf) == fg.where(Q > K, S, -math.inf).node
    assert call("clamp", Q, 0, max=5) == fg.clamp(Q, 0, 5).node
    assert call("div", Q, K, rounding_mode="floor") == (Q // K).node
    assert call("div", Q, K) == (Q / K).node
    assert call("add", S, Q, alpha=2) == (S + Q * 2).node
    assert call("sub", S, Q) == (S - Q).node
    assert call("__rsub__", Q, 3) == (3 - Q).node
    assert call("__rpow__", S, 2.0) == fg.exp2(S).node
    assert call("__and__", Q > K, K > 3) == ((Q > K) & (K > 3)).node
    assert call("__iadd__", S, 1) == (S + 1).node
    assert call("logical_and", Q > K, K > 3) == ((Q > K) & (K > 3)).node
    assert call("rsqrt", S) == (1.0 / fg.sqrt(S)).node
    assert call("zeros_like", S) == ops.ToFloat(0) or call("zeros_like", S).is_Float
    for name, message in [("softmax", "torch.softmax cannot be traced; known: abs"), ("div", "cannot be traced")]:
        with pytest.raises(SpecError, match=message):
            call_torch(torch_function(name), (Q,), {})
    with pytest.raises(SpecError, match=r"flashgen\.Tensor"):
        call("__getitem__", [1, 2, 3], Q)
    with pytest.raises(SpecError, match="rounding_mode"):
        call("div", Q, K, rounding_mode="trunc")
    assert {"abs", "exp", "minimum", "maximum", "tanh", "sigmoid", "where", "clamp", "clamp_min"} <= set(FUNCTIONS)


def test_methods_of_tensors():
    assert (Q - K).abs().node == abs(Q - K).node
    assert Q.clamp(0, 5).node == Q.clamp(min=0, max=5).node == Q.clip(0, 5).node == fg.clamp(Q, 0, 5).node
    assert Q.clamp(max=5).node == fg.minimum(Q, 5).node
    assert Q.float().node == Q.to("torch.float32").node == Q.to(dtype=np.float32).node == fg.to_float(Q).node
    assert S.int().node == S.to("int64").node == S.long().node == fg.to_int(S).node
    assert S.to(S.dtype).node == S.to("cuda").node == S.node
    assert Q.to(S).node == Q.type_as(S).node == fg.to_float(Q).node
    assert Q.bool().node == (Q != 0).node
    assert (Q > K).logical_not().node == (~(Q > K)).node
    assert S.masked is None if hasattr(S, "masked") else True
    assert (Q.ndim, Q.shape) == (0, ())
    dtypes = [str(x.dtype).removeprefix("torch.") for x in (Q, S, Q > K)]  # torch's where flashgen.torch is loaded
    assert dtypes == ["int32", "float32", "bool"]
    for narrow in ("float16", "torch.bfloat16", "int8"):
        with pytest.raises(SpecError, match="not part of the language"):
            S.to(narrow)
    assert Q.sum().node == Q.sum(-1).node == QUERY
    with pytest.raises(AttributeError, match="no attribute 'cumsum'"):
        Q.cumsum()


def test_constants_created_from_an_index():
    """torch's own and_masks and noop_mask begin that way."""
    assert Q.new_ones((), dtype="torch.bool").node == Q.new_ones(size=(), dtype=bool, device=Q.device).node
    assert value_of(Q.new_ones((), dtype="bool")) is True
    assert value_of(Q.new_zeros((), dtype="torch.bool")) is False
    assert value_of(S.new_full((), 2.5)) == 2.5
    with pytest.raises(SpecError, match="shape"):
        Q.new_ones((3,))


def test_flexattention_functions_run_unchanged():
    """As in the documentation of torch and attention-gym, with NumPy in place of torch."""

    def and_masks(*mask_mods):
        def and_mask(b, h, q_idx, kv_idx):
            result = b.new_ones((), dtype=bool)
            for mask in mask_mods:
                result = result & mask(b, h, q_idx, kv_idx)
            return result

        return and_mask

    def causal_mask(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def natten(width, kernel):
        def natten_mask(b, h, q_idx, kv_idx):
            q_x, q_y = q_idx // width, q_idx % width
            kv_x, kv_y = kv_idx // width, kv_idx % width
            center_x = q_x.clamp(kernel // 2, (width - 1) - kernel // 2)
            center_y = q_y.clamp(kernel // 2, (width - 1) - kernel // 2)
            return ((center_x - kv_x).abs() <= kernel // 2) & ((center_y - kv_y).abs() <= kernel // 2)

        return natten_mask

    def alibi(heads):
        def alibi_mod(score, b, h, q_idx, kv_idx):
            scale = np.exp2(-((h + 1) * 8.0 / heads))
            return score + (q_idx - kv_idx) * scale

        return alibi_mod

    mask = fg.trace_mask(and_masks(causal_mask, natten(8, 3)))
    assert mask.name == "and_mask"
    assert value_of(traced_node(mask.expression), q=9, k=8) is True
    assert value_of(traced_node(mask.expression), q=9, k=3) is False
    score = fg.trace_score(alibi(8))
    assert value_of(traced_node(score.expression)) == 0.5 + 4 * 2.0**-3
