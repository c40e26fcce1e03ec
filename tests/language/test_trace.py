"""Tracing: operators, kinds, literals, captures, and refusals."""

import math

import ml_dtypes
import numpy as np
import pytest
import sympy

import flashgen as fg
from flashgen.errors import SpecError
from flashgen.language import operations as ops
from flashgen.language.declarations import CPLUSPLUS_KEYWORDS, RESERVED
from flashgen.language.evaluate import evaluate
from flashgen.language.operations import BATCH, HEAD, KEY, LEN_K, LEN_Q, QUERY, SCORE
from flashgen.language.trace import traced_node
from flashgen.language.well_formed import MAX_DEPTH

Q, K = traced_node(QUERY), traced_node(KEY)
S = traced_node(SCORE)


def value_of(traced, q=7, k=3, score=0.5, **captures):
    values = {QUERY: q, KEY: k, SCORE: score, BATCH: 1, HEAD: 2, LEN_Q: 16, LEN_K: 16}
    captures |= {f"array__{number}": array.reshape(1) for number, array in enumerate(traced.arrays)}
    return evaluate(traced.node, values, captures).item()


@pytest.mark.parametrize("function", [
    lambda q, k: q + k, lambda q, k: 10 - q, lambda q, k: q * -3, lambda q, k: q / k, lambda q, k: -7 // k,
    lambda q, k: -q % k, lambda q, k: 100 // q, lambda q, k: 100 % q, lambda q, k: q << k, lambda q, k: 1 << k,
    lambda q, k: -q >> 1, lambda q, k: 1000 >> k, lambda q, k: q & 5, lambda q, k: 5 | k, lambda q, k: q ^ k,
    lambda q, k: q**3, lambda q, k: q**0, lambda q, k: k**5, lambda q, k: q**2.0, lambda q, k: q**-1,
    lambda q, k: q**0.5,
    lambda q, k: 4.0**-0.5 * q, lambda q, k: 2 ** (q / k), lambda q, k: 3 ** (-q / 4), lambda q, k: abs(k - q),
    lambda q, k: +q, lambda q, k: divmod(-q, k)[1], lambda q, k: divmod(100, k)[0], lambda q, k: math.floor(-q / k),
    lambda q, k: math.ceil(-q / k), lambda q, k: math.trunc(-q / k), lambda q, k: 8 / q, lambda q, k: True + k,
    lambda q, k: (q > k) * 2.5,
])  # fmt: skip
def test_operators_have_pythons_semantics(function):
    for q, k in [(7, 3), (3, 7), (1, 1), (12, 5)]:
        expected = function(q, k)
        traced = function(Q, K)
        assert value_of(traced, q, k) == pytest.approx(expected, rel=1e-12)
        assert traced.kind == ("float" if isinstance(expected, float) else "int")


@pytest.mark.parametrize("function", [
    lambda q, k: q == k, lambda q, k: q != 7, lambda q, k: q < 8, lambda q, k: k <= 3, lambda q, k: q > k,
    lambda q, k: q >= k, lambda q, k: (q > k) & (k == 3), lambda q, k: (q < k) | (k == 3),
    lambda q, k: (q < k) ^ (k == 3),
    lambda q, k: np.int64(7) <= q, lambda q, k: np.float32(2.5) > k, lambda q, k: (q > k) == (k > q),
])  # fmt: skip
def test_comparisons_and_logic(function):
    for q, k in [(7, 3), (3, 7), (3, 3)]:
        traced = function(Q, K)
        assert traced.kind == "bool"
        assert value_of(traced, q, k) is bool(function(q, k))
    assert value_of(~(Q > K)) is False


def test_sympy_simplifies_nothing():
    assert ((Q // 4) == (K // 4)).node == ops.Equal(ops.FloorDiv(QUERY, 4), ops.FloorDiv(KEY, 4))
    assert ((S + 1e8) - 1e8).node == ops.Sub(ops.Add(SCORE, sympy.Float(1e8)), sympy.Float(1e8))
    assert (Q - Q).node == ops.Sub(QUERY, QUERY)
    assert (Q == Q).node == ops.Equal(QUERY, QUERY)


def test_literal_booleans_are_folded():
    true = traced_node(sympy.true)
    condition = Q >= K
    assert (true & condition).node == condition.node
    assert (condition | True).node == sympy.true
    assert (condition & False).node == sympy.false
    assert (condition ^ True).node == ops.Not(condition.node)
    assert (~true).node == sympy.false


def test_literals_keep_their_kind_and_value():
    assert (Q + 1).node == ops.Add(QUERY, sympy.Integer(1))
    assert (Q + 1.0).kind == "float"
    assert (Q + 1).node != (Q + 1.0).node
    assert (S + 0.1).node.args[1] == sympy.Float(0.1)
    assert float((S + 0.1).node.args[1]) == 0.1
    assert value_of(S * -0.0) == 0 and math.copysign(1, value_of(S * -0.0)) < 0
    assert value_of(fg.where(Q < K, S, -float("inf"))) == -math.inf
    for scalar in (np.int8(3), np.uint32(3), np.int64(3)):
        assert (Q + scalar).node == (Q + 3).node
        assert (scalar + Q).node == (3 + Q).node
    for scalar in (np.float16(0.5), np.float32(0.5), np.float64(0.5), ml_dtypes.bfloat16(0.5)):
        assert (S * scalar).node == (S * 0.5).node
    assert ((Q > K) & np.bool_(True)).node == (Q > K).node


@pytest.mark.parametrize(
    ("mask", "message"),
    [(lambda b, h, q, k: q < len(q), "len_q"), (lambda b, h, q, k: q[0] < k, "cannot be indexed")],
)
def test_traced_values_are_no_sequences(mask, message):
    with pytest.raises(SpecError, match=message):
        fg.AttentionSpec(64, mask=mask)


@pytest.mark.parametrize(("literal", "message"), [
    (math.nan, "NaN"), (2**31, "32 bits"), (1e39, "float32"), (1j, "cannot stand"), ("3", "cannot stand"),
    (None, "None"), ([1, 2], "array"), (np.arange(3), "array"),
])  # fmt: skip
def test_literals_that_are_refused(literal, message):
    with pytest.raises(SpecError, match=message):
        Q + literal


@pytest.mark.parametrize(("function", "message"), [
    (lambda q, k: q > k and k > 3, "Write & [|] ~"), (lambda q, k: not q, "Write & [|] ~"),
    (lambda q, k: q if q > k else k, "where"), (lambda q, k: 0 <= q < k, "chained"),
    (lambda q, k: min(q, k), "minimum"),
    (lambda q, k: q in (1, 2), "`in`"), (lambda q, k: list(q), "iterated"), (lambda q, k: float(q), "to_float"),
    (lambda q, k: int(q), "to_int"), (lambda q, k: math.exp(q), "flashgen.exp"), (lambda q, k: round(q), "floor"),
    (lambda q, k: [1, 2][q], "Tensor"), (lambda q, k: range(q), "Tensor"),
     (lambda q, k: ~q, "compare first"),
    (lambda q, k: q & (q > k), "both sides"), (lambda q, k: (q / 2) & 1, "integers|both sides"),
    (lambda q, k: (q > k) + (q > 1), "two booleans"), (lambda q, k: -(q > k), "needs numbers"),
    (lambda q, k: q << 40, "0 to 31"), (lambda q, k: q << 1.5, "needs integers"), (lambda q, k: q**k, "literal"),
    (lambda q, k: q**0.3, "±0.5"), (lambda q, k: 3**q, "exp2"), (lambda q, k: q**99, "16"),
    (lambda q, k: fg.where(q, k, 1), "boolean condition"),
    (lambda q, k: fg.causal() & (q > k), r"causal\(\)\(b, h, q, k\)"), (lambda q, k: (q > k) & fg.causal(), "call it"),
    (lambda q, k: q ** math.inf, "±0.5"),
])  # fmt: skip
def test_helpful_errors(function, message):
    with pytest.raises(SpecError, match=message):
        function(Q, K)


def test_errors_name_the_function_and_the_line():
    def chained(b, h, q, k):
        return q - 4 <= k <= q

    with pytest.raises(SpecError, match=r"mask 'chained' \(test_trace.py:\d+\): .*chained comparisons"):
        fg.trace_mask(chained)

    def broken(b, h, q, k):
        return q + undefined  # noqa: F821

    with pytest.raises(NameError) as caught:
        fg.trace_mask(broken)
    assert "mask 'broken'" in caught.value.__notes__[0]

    with pytest.raises(IndexError) as caught:
        fg.trace_mask(lambda b, h, q, k: np.arange(4)[q] > k)
    assert "flashgen.Tensor" in caught.value.__notes__[0]


@pytest.mark.parametrize(("function", "message"), [
    (lambda b, h, q: q > 1, r"mask 'mask' takes \(b, h, q\); it must take the 4 .*\(b, h, q, k\)"),
    (lambda b, h, q, k, *, extra: q > 1, "4 positional"), (lambda b, h, q, k: q - k, "boolean, got int"),
    (lambda b, h, q, k: None, "forget to return"), (lambda b, h, q, k: "yes", "cannot stand"),
    (5, "must be a function"),
])  # fmt: skip
def test_masks_that_are_refused(function, message):
    with pytest.raises(SpecError, match=message):
        fg.trace_mask(function)


def test_scores_that_are_refused():
    for function, message in [
        (lambda s, b, h, q: s, "5 positional"),
        (lambda s, b, h, q, k: q > k, "got bool"),
        (lambda s, b, h, q, k: fg.causal(), "returned a mask"),
    ]:
        with pytest.raises(SpecError, match=message):
            fg.trace_score(function)


def test_results_of_every_kind():
    assert fg.trace_mask(lambda b, h, q, k: True).expression == sympy.true
    assert fg.trace_mask(lambda b, h, q, k: np.bool_(False)).expression == sympy.false
    assert fg.trace_mask(lambda b, h, q, k: fg.causal()).expression == fg.causal().expression
    assert fg.trace_mask(lambda b, h, q, k: fg.causal()(b, h, q, k)).expression == fg.causal().expression
    assert fg.trace_score(lambda s, b, h, q, k: 0).expression == ops.ToFloat(0)
    assert fg.trace_score(lambda s, b, h, q, k: q - k).expression == ops.ToFloat(ops.Sub(QUERY, KEY))
    assert fg.trace_score(lambda s, b, h, q, k: s).expression == SCORE
    assert fg.trace_score(lambda s, b, h, q, k: fg.softcap(30)).expression == fg.softcap(30).expression
    assert fg.trace_mask(lambda b, h, q, k=None, *rest: q > k).name == "mask"


def test_tree_sizes_are_limited():
    def deep(b, h, q, k):
        for i in range(3000):
            q = q + i
        return q > k

    def wide(s, b, h, q, k):
        for _ in range(40):  # a graph of 40 nodes, a tree of 2**40
            s = s * s
        return s

    with pytest.raises(SpecError, match=f"more than {MAX_DEPTH} levels"):
        fg.trace_mask(deep)
    with pytest.raises(SpecError, match="too large"):
        fg.trace_score(wide)


def test_tensors_are_indexed():
    table = fg.Tensor("table", "float32", ndim=2)
    assert table[Q, K].node == table[Q][K].node == ops.Load(table.capture, QUERY, KEY)
    assert value_of(table[Q, K], q=1, k=50, table=np.arange(6.0).reshape(2, 3)) == 5.0
    assert value_of(fg.Tensor("ids", "int32", 1)[Q] + 1, q=-3, ids=np.array([4, 5])) == 5
    for index, message in [
        ((Q, K, Q), "ndim=2, indexed with 3"), ((slice(None), Q), "slices"), ((Q, -1), "does not count from the end"),
        ((Q, K / 2), "must be an integer, got float"), ((Q, Q > K), "must be an integer, got bool"),
    ]:  # fmt: skip
        with pytest.raises(SpecError, match=message):
            table[index]
    with pytest.raises(SpecError, match="one index per dimension"):
        Q + table
    with pytest.raises(SpecError, match="one index per dimension"):
        Q + table[Q]
    with pytest.raises(SpecError, match="one index per dimension"):
        table[Q] + Q
    with pytest.raises(SpecError, match="cannot be iterated"):
        list(table)


def test_captures_are_checked():
    for name in [
        "q",
        "seed",
        "return_lse",
        "float",
        "and_eq",
        "lambda",
        "1a",
        "a-b",
        "_x",
        "a__b",
        "é",
        "",
        3,
        "x" * 65,
    ]:
        with pytest.raises(SpecError, match="capture name"):
            fg.Tensor(name, "float32", 1)
        with pytest.raises(SpecError, match="capture name"):
            fg.Scalar(name)
    assert "template" in CPLUSPLUS_KEYWORDS and "offset" in RESERVED
    for dtype in ["float64", "complex64", "uint16", np.float64, None, 3, object()]:
        with pytest.raises(SpecError, match="dtype"):
            fg.Tensor("a", dtype, 1)
    for ndim in [0, 9, -1, 1.0, True, None]:
        with pytest.raises(SpecError, match="ndim"):
            fg.Tensor("a", "float32", ndim)
    with pytest.raises(SpecError, match="grad"):
        fg.Tensor("a", "int32", 1, grad=True)
    with pytest.raises(SpecError, match="dtype"):
        fg.Scalar("a", "float16")
    assert fg.Tensor("a", np.float16, 1).capture.dtype == "float16"
    assert fg.Tensor("a", "bf16", 1).capture.dtype == fg.Tensor("a", ml_dtypes.bfloat16, 1).capture.dtype == "bfloat16"
    assert repr(fg.Scalar("window")) == "Scalar('window', 'int32')"


def test_a_name_is_declared_once():
    one, other = fg.Tensor("a", "float32", 1), fg.Tensor("a", "float16", 1)
    with pytest.raises(SpecError, match="'a' is declared twice and differently"):
        fg.trace_score(lambda s, b, h, q, k: s + one[h] + other[h])
    mask, other_mask = fg.trace_mask(lambda b, h, q, k: one[q] > 0), fg.trace_mask(lambda b, h, q, k: other[q] > 0)
    with pytest.raises(SpecError, match="declared twice"):
        mask & other_mask
    with pytest.raises(SpecError, match="declared twice"):
        fg.AttentionSpec(64, mask=mask, score=lambda s, b, h, q, k: s * fg.Scalar("a", "float32"))


def test_traced_values_are_unhashable():
    with pytest.raises(TypeError, match="unhashable"):
        {Q}
    assert "q" in repr(Q)
    assert not hasattr(Q, "nonsense")
