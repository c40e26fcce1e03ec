"""The NumPy implementation of every operation, compared with plain Python."""

import math
import warnings

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

import flashgen as fg
from flashgen.errors import ArgumentError, SpecError
from flashgen.language import operations as ops
from flashgen.language.decisive import decisive, tolerant
from flashgen.language.evaluate import MEANINGS, evaluate
from flashgen.language.operations import KEY, OPERATIONS, QUERY, SCORE
from flashgen.language.well_formed import MAX_DEPTH

INT32 = st.integers(-(2**31), 2**31 - 1)
FLOAT = st.floats(-1e6, 1e6)


def test_every_operation_is_implemented():
    assert set(MEANINGS) == set(OPERATIONS.values())


@given(INT32, INT32)
def test_integers_as_in_python(a, b):
    expected = {
        ops.Add: a + b, ops.Sub: a - b, ops.Mul: a * b, ops.Minimum: min(a, b), ops.Maximum: max(a, b),
        ops.FloorDiv: a // b if b else 0, ops.FloorMod: a % b if b else 0, ops.BitAnd: a & b, ops.BitOr: a | b,
        ops.BitXor: a ^ b, ops.ShiftLeft: a << min(max(b, 0), 31), ops.ShiftRight: a >> min(max(b, 0), 31),
        ops.Equal: a == b, ops.NotEqual: a != b, ops.Less: a < b, ops.LessEqual: a <= b, ops.Greater: a > b,
        ops.GreaterEqual: a >= b,
    }  # fmt: skip
    for cls, value in expected.items():
        got = evaluate(cls(QUERY, KEY), {QUERY: a, KEY: b})
        assert got.dtype == (bool if isinstance(value, bool) else np.int64)
        assert got.item() == value
    assert evaluate(ops.Neg(QUERY), {QUERY: a}).item() == -a
    assert evaluate(ops.Abs(QUERY), {QUERY: a}).item() == abs(a)


@given(FLOAT, FLOAT.filter(lambda b: abs(b) > 1e-3))
def test_floats_as_in_python(a, b):
    for cls, value in {
        ops.Add: a + b, ops.Divide: a / b, ops.FloorDiv: math.floor(a / b), ops.FloorMod: a - b * math.floor(a / b),
        ops.Minimum: min(a, b), ops.Less: a < b,
    }.items():  # fmt: skip
        got = evaluate(cls(SCORE, sympy.Float(b)), {SCORE: a})
        assert got.dtype in (np.float64, bool)
        assert got.item() == pytest.approx(value, rel=1e-12, abs=1e-9)
    for cls, value in {
        ops.Exp: math.exp(a / 1e5), ops.Tanh: math.tanh(a / 1e5), ops.Sin: math.sin(a / 1e5),
        ops.Cos: math.cos(a / 1e5),
        ops.Exp2: 2 ** (a / 1e5), ops.Sigmoid: 1 / (1 + math.exp(-a / 1e5)), ops.Floor: float(math.floor(a / 1e5)),
        ops.ToInt: math.trunc(a / 1e5),
    }.items():  # fmt: skip
        assert evaluate(cls(SCORE), {SCORE: a / 1e5}).item() == pytest.approx(value, rel=1e-12)
    for cls, value in {ops.Log: math.log(abs(b)), ops.Log2: math.log2(abs(b)), ops.Sqrt: math.sqrt(abs(b))}.items():
        assert evaluate(cls(SCORE), {SCORE: abs(b)}).item() == pytest.approx(value, rel=1e-12, abs=1e-12)


def test_no_warnings():
    q = np.arange(-2, 3)
    score = np.array([-np.inf, -1.0, 0.0, 1e308, np.nan])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cls in (ops.FloorDiv, ops.FloorMod, ops.Divide):
            evaluate(cls(QUERY, KEY), {QUERY: q, KEY: 0})
            evaluate(cls(SCORE, KEY), {SCORE: score, KEY: 0})
        for cls in (ops.Log, ops.Sqrt, ops.Exp, ops.Sigmoid, ops.ToInt, ops.Log2, ops.Sin):
            evaluate(cls(SCORE), {SCORE: score})
        safe = ops.Where(ops.Greater(SCORE, 0), ops.Log(SCORE), ops.ToFloat(0))
        assert evaluate(safe, {SCORE: np.array([-1.0, 1.0])}).tolist() == [0.0, 0.0]
    assert evaluate(ops.FloorDiv(QUERY, KEY), {QUERY: q, KEY: 0}).tolist() == [0] * 5
    assert evaluate(ops.FloorMod(QUERY, KEY), {QUERY: q, KEY: 0}).tolist() == [0] * 5
    assert evaluate(ops.Divide(QUERY, KEY), {QUERY: 1, KEY: 0}) == np.inf


@pytest.mark.parametrize("length", [1, 5, 64])
@pytest.mark.parametrize(
    ("a", "b", "greater", "less"),
    [
        (0.0, -0.0, 0.0, -0.0),
        (-0.0, 0.0, 0.0, -0.0),
        (0.0, 0.0, 0.0, 0.0),
        (-0.0, -0.0, -0.0, -0.0),
        (np.nan, -0.0, -0.0, -0.0),
        (0.0, np.nan, 0.0, 0.0),
        (-1.0, 0.0, 0.0, -1.0),
    ],
)
def test_minimum_and_maximum_of_zeros_and_nan(length, a, b, greater, less):
    """-0.0 is less than 0.0 in either order, and NaN is ignored beside a number."""
    for cls, expected in ((ops.Maximum, greater), (ops.Minimum, less)):
        node = cls(SCORE, ops.Load(ops.Capture("b", "float32", 1), QUERY))
        found = evaluate(node, {SCORE: np.full(length, a), QUERY: np.arange(length)}, {"b": np.full(length, b)})
        assert (found == expected).all() and (np.signbit(found) == np.signbit(expected)).all()


def test_conversions():
    to_int = evaluate(ops.ToInt(SCORE), {SCORE: np.array([1.9, -1.9, 1e20, -np.inf, np.nan])})
    assert to_int.tolist() == [1, -1, 2**31 - 1, -(2**31), 0]
    assert evaluate(ops.ToInt(ops.Less(QUERY, KEY)), {QUERY: 0, KEY: 1}).item() == 1
    flags = fg.Tensor("flags", "bool", 1)
    doubled = (flags[fg.to_int(fg.len_q)] * 2).node
    assert evaluate(doubled, {ops.LEN_Q: 1}, {"flags": np.array([False, True])}).item() == 2
    assert evaluate((flags[fg.len_q] == 1).node, {ops.LEN_Q: 1}, {"flags": np.array([False, True])}).item() is True


def test_broadcasting_is_lazy():
    q, k = np.arange(4)[:, None], np.arange(5)[None, :]
    assert evaluate(fg.full().expression, {}).shape == ()
    assert evaluate(fg.causal("top_left").expression, {QUERY: q, KEY: k}).shape == (4, 5)
    assert evaluate(fg.trace_mask(lambda b, h, q, k: q > 2).expression, {QUERY: q, KEY: k}).shape == (4, 1)


def test_loads_are_clamped():
    table = fg.Tensor("table", "int32", 2)
    node = table[fg.len_q - 5, fg.len_k].node
    array = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    for len_q, len_k, expected in [(0, 0, 1), (5, 9, 3), (9, 1, 5), (99, 99, 6)]:
        assert evaluate(node, {ops.LEN_Q: len_q, ops.LEN_K: len_k}, {"table": array}).item() == expected
    empty = np.zeros((0, 3), np.int32)
    with pytest.raises(ArgumentError, match="nothing can be read"):
        evaluate(node, {ops.LEN_Q: 5, ops.LEN_K: 0}, {"table": empty})
    nothing = np.zeros((0, 1), np.int64)
    assert evaluate(node, {ops.LEN_Q: nothing, ops.LEN_K: 0}, {"table": empty}).shape == (0, 1)


def test_captures_take_their_declared_dtype():
    tenth = fg.Scalar("tenth", "float32")
    assert evaluate(tenth.node, {}, {"tenth": 0.1}).item() == float(np.float32(0.1))
    half = fg.Tensor("half", "bfloat16", 1)
    assert evaluate(half[0 * fg.len_q].node, {ops.LEN_Q: 0}, {"half": np.array([1.001])}).item() == 1.0
    with pytest.raises(ArgumentError, match="'tenth' is missing"):
        evaluate(tenth.node, {})
    with pytest.raises(ArgumentError, match="2 dimensions, declared with ndim=1"):
        evaluate(half[fg.len_q].node, {ops.LEN_Q: 0}, {"half": np.zeros((2, 2))})
    with pytest.raises(ArgumentError, match="reads score"):
        evaluate(ops.Exp(SCORE), {})


def test_shared_subexpressions_are_computed_once(monkeypatch):
    calls = []
    monkeypatch.setitem(MEANINGS, ops.Exp, lambda a: calls.append(1) or np.exp(a))
    node = ops.Exp(SCORE)
    for _ in range(12):
        node = ops.Add(node, node)
    assert evaluate(node, {SCORE: 0.0}).item() == 2.0**12
    assert len(calls) == 1


def test_the_deepest_allowed_tree_is_processed_everywhere():
    def deep(score, b, h, q, k):
        for i in range(MAX_DEPTH - 1):
            score = fg.where(q > i, score, 0.5) if i % 2 else score + 1
        return score

    spec = fg.AttentionSpec(64, score=deep)
    assert fg.AttentionSpec.from_json(spec.to_json()) == spec
    assert evaluate(spec.score.expression, {SCORE: 0.0, QUERY: 1000}).item() == MAX_DEPTH // 2
    with pytest.raises(SpecError, match="too large"):
        fg.softcap(30)(spec.score)


def tenths(index):
    return ops.Mul(index, sympy.Float(0.1))


SINGLE = np.float32
INDICES = np.arange(500)
AT = {QUERY: INDICES, KEY: INDICES[::-1], SCORE: 0.0}


def test_decisions_use_float32_in_each_operation():
    q, k = (SINGLE(AT[symbol]) for symbol in (QUERY, KEY))
    tenth, third = SINGLE(0.1), SINGLE(1 / 3)
    by_operation = {
        ops.Less(tenths(QUERY), ops.Add(tenths(KEY), sympy.Float(1 / 3))): q * tenth < k * tenth + third,
        ops.Equal(ops.Floor(ops.Divide(QUERY, 41)), ops.Divide(KEY, 41)): np.floor(q / SINGLE(41)) == k / SINGLE(41),
        ops.ToInt(ops.Divide(tenths(QUERY), sympy.Float(0.3))): (q * tenth / SINGLE(0.3)).astype(int),
        ops.Less(ops.FloorMod(tenths(QUERY), sympy.Float(0.7)), tenths(KEY)): (
            q * tenth - SINGLE(0.7) * np.floor(q * tenth / SINGLE(0.7)) < k * tenth
        ),
        ops.Greater(ops.Sqrt(QUERY), ops.Where(ops.Less(QUERY, KEY), tenths(KEY), 3)): (
            np.sqrt(q) > np.where(AT[QUERY] < AT[KEY], k * tenth, SINGLE(3))
        ),
        ops.Less(ops.Exp(tenths(QUERY)), 3e20): SINGLE(np.exp(np.float64(q * tenth))) < SINGLE(3e20),
        ops.LessEqual(ops.Mul(QUERY, 123_456_789), sympy.Float(1e10)): SINGLE(INDICES * 123_456_789) <= SINGLE(1e10),
    }
    for node, expected in by_operation.items():
        assert (evaluate(node, AT) == expected).all(), node


def test_a_product_and_a_sum_of_tenths_decide_as_the_product_does():
    """On the diagonal q / 10 - k / 10 is 0; with a fused operation it would not be."""
    assert evaluate(ops.GreaterEqual(ops.Sub(tenths(QUERY), tenths(KEY)), 0), {QUERY: INDICES, KEY: INDICES}).all()


def test_a_score_without_a_condition_is_float64():
    condition = ops.Less(tenths(QUERY), sympy.Float(4.1))  # in float32 41 * 0.1 is 4.1000004
    node = ops.Where(condition, ops.Add(SCORE, tenths(QUERY)), tenths(QUERY))
    found = evaluate(node, AT)
    np.testing.assert_array_equal(found, INDICES * 0.1)
    assert found.dtype == np.float64
    of_score = ops.Less(tenths(QUERY), ops.Add(SCORE, sympy.Float(4.1)))
    assert evaluate(of_score, AT).sum() == (INDICES * 0.1 < 4.1).sum()
    assert decisive(of_score, node) == {condition, condition.args[0]}


def test_which_values_have_a_tolerance():
    capped = ops.Divide(ops.Add(SCORE, tenths(QUERY)), 20)
    stepping = ops.Floor(ops.Divide(SCORE, 41))
    assert tolerant(ops.Add(capped, stepping)) == {capped, capped.args[0], ops.Add(capped, stepping)}


def test_a_remainder_is_float64_except_its_floor():
    """The floor is float32's and determines the side of a jump; the rest is as exact as the surrounding arithmetic."""
    remainder = ops.FloorMod(tenths(QUERY), sympy.Float(0.7))
    floors = np.floor(SINGLE(INDICES) * SINGLE(0.1) / SINGLE(0.7))
    np.testing.assert_array_equal(evaluate(remainder, AT), INDICES * 0.1 - 0.7 * np.float64(floors))


def test_integers_wrap_as_int64():
    high = ops.Mul(ops.Mul(QUERY, 2**31 - 1), 2**31 - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluate(ops.Mul(high, 4), {QUERY: 1}).item() == (4 * (2**31 - 1) ** 2 + 2**63) % 2**64 - 2**63
        assert evaluate(ops.Add(ops.Mul(high, 2), ops.Mul(high, 2)), {QUERY: 1}).item() < 0
