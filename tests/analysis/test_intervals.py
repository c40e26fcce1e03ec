"""Interval evaluation: every operation is implemented, and common masks are decided as tightly as possible."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import sympy

import flashgen as fg
from flashgen.analysis.intervals.evaluation import EMPTY, FULL, MEANINGS, PARTIAL, classify, interval_of
from flashgen.analysis.tile_classes import tile_map
from flashgen.errors import ArgumentError
from flashgen.language import operations as ops
from flashgen.language.evaluate import evaluate
from flashgen.language.modifiers import trace_mask

Q, K = ops.QUERY, ops.KEY
SMALL = np.array([(low, high) for low in range(-6, 7) for high in range(low, 7)])
AMOUNTS = np.array([(low, high) for low in range(28, 34) for high in range(low, 34)])
NAN, INF = np.nan, np.inf
A, B = (ops.Load(ops.Capture(name, "float32", 1), index) for name, index in (("a", Q), ("b", K)))


def integer(value: int) -> sympy.Integer:
    return sympy.Integer(value)


def test_every_operation_is_implemented() -> None:
    assert set(MEANINGS) == set(ops.OPERATIONS.values())


@pytest.mark.parametrize(
    ("node", "low", "high"),
    [
        (ops.Sub(Q, K), -30, 19),
        (ops.Sub(ops.Add(Q, K), Q), 0, 40),
        (ops.Mul(ops.Sub(Q, K), integer(-2)), -38, 60),
        (ops.Mul(Q, Q), 100, 361),
        (ops.Abs(ops.Sub(Q, K)), 0, 30),
        (ops.FloorDiv(Q, integer(7)), 1, 2),
        (ops.FloorDiv(Q, integer(-7)), -3, -2),
        (ops.FloorMod(Q, integer(50)), 10, 19),
        (ops.FloorMod(Q, integer(8)), 0, 7),
        (ops.FloorMod(K, integer(-8)), -7, 0),
        (ops.Minimum(Q, integer(15)), 10, 15),
        (ops.Maximum(K, integer(15)), 15, 40),
        (ops.ShiftRight(ops.Neg(Q), integer(2)), -5, -3),
        (ops.ShiftLeft(Q, integer(2)), 40, 76),
        (ops.BitAnd(K, integer(15)), 0, 15),
        (ops.BitOr(K, integer(64)), 64, 127),
        (ops.BitXor(ops.Neg(Q), integer(1)), -32, -1),
        (ops.Where(ops.Less(Q, integer(5)), integer(1), integer(2)), 2, 2),
        (ops.Where(ops.Less(Q, integer(15)), integer(1), integer(2)), 1, 2),
        (ops.ToInt(ops.Divide(Q, integer(4))), 2, 4),
    ],
    ids=str,
)
def test_bounds_of_integers(node: sympy.Basic, low: int, high: int) -> None:
    """q is 10..19 and k is 0..40."""
    found = interval_of(node, {Q: (10, 19), K: (0, 40)})
    assert (int(found.low), int(found.high)) == (low, high)


ELEMENTWISE = {
    "product": (ops.Mul(ops.ToFloat(Q), sympy.Float(0.1)), lambda q: q * np.float32(0.1)),
    "quotient": (ops.Divide(Q, integer(41)), lambda q: q / np.float32(41)),
    "sum": (ops.Add(ops.ToFloat(Q), sympy.Float(0.3)), lambda q: q + np.float32(0.3)),
    "difference": (ops.Sub(ops.ToFloat(Q), sympy.Float(20.1)), lambda q: q - np.float32(20.1)),
    "root": (ops.Sqrt(ops.ToFloat(Q)), np.sqrt),
    "exponential": (ops.Exp(ops.Neg(ops.Divide(Q, integer(7)))), lambda q: np.exp(-(q / np.float32(7)))),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_bounds_of_one_element_include_float32_rounding(name: str) -> None:
    """Float32 may round each operation in either direction, so its value may differ from that in float64."""
    (node, in_float32), q = ELEMENTWISE[name], np.arange(1, 300)
    found, exact = interval_of(node, {Q: (q, q)}), in_float32(q.astype(np.float32))
    assert exact.dtype == np.float32
    assert (found.low <= exact).all() and (exact <= found.high).all()


@pytest.mark.parametrize(("cls", "low", "high"), [(ops.BitAnd, 16, 17), (ops.BitOr, 117, 119), (ops.BitXor, 100, 103)])
def test_common_upper_bits_are_known(cls: type[ops.Operation], low: int, high: int) -> None:
    """All bits of 0b0110001 and 0b0110011 except the last two are equal."""
    found = interval_of(cls(Q, integer(0b1010101)), {Q: (0b0110001, 0b0110011)})
    assert (int(found.low), int(found.high)) == (low, high)


@pytest.mark.parametrize(
    ("cls", "others"),
    [
        *((cls, SMALL) for cls in (ops.Add, ops.Sub, ops.Mul, ops.Minimum, ops.Maximum, ops.FloorDiv, ops.FloorMod)),
        *((cls, SMALL) for cls in (ops.BitAnd, ops.BitOr, ops.BitXor, ops.ShiftLeft, ops.ShiftRight)),
        *((cls, AMOUNTS) for cls in (ops.ShiftLeft, ops.ShiftRight)),
    ],
)
def test_all_small_intervals_of_integers(cls: type[ops.Operation], others: np.ndarray) -> None:
    """Includes divisors of 0, ranges that begin or end at 0, and shifts beyond both ends."""
    found = interval_of(cls(Q, K), {Q: (SMALL[:, :1], SMALL[:, 1:]), K: (others[:, 0], others[:, 1])})
    for (i, a), (j, b) in itertools.product(enumerate(SMALL), enumerate(others)):
        values = evaluate(cls(Q, K), {Q: np.arange(a[0], a[1] + 1)[:, None], K: np.arange(b[0], b[1] + 1)})
        assert found.low[i, j] <= values.min() and values.max() <= found.high[i, j], (a, b)


def test_clamp_has_its_bounds() -> None:
    mask = trace_mask(lambda b, h, q, k: fg.clamp(q / 2, 1.5, k / 4.0) >= 1.0, "mask").expression
    clamped = mask.args[0]
    for low, high in [(-100, 100), (0, 2), (5, 50)]:
        found = interval_of(clamped, {Q: (low, high), K: (8, 80)})
        right = evaluate(clamped, {Q: np.arange(low, high + 1)[:, None], K: np.arange(8, 81)})
        assert found.low == pytest.approx(right.min(), rel=1e-5) and found.high == pytest.approx(right.max(), rel=1e-5)
        assert found.low <= right.min() and right.max() <= found.high and not found.nan


@pytest.mark.parametrize("beyond", [ops.Less, ops.LessEqual, ops.Greater, ops.GreaterEqual])
def test_where_with_a_bound_respects_it(beyond: type[ops.Operation]) -> None:
    """For example a relu, whose slope at 0 is 0."""
    x = ops.Sub(ops.ToFloat(Q), sympy.Float(4.5))
    found = interval_of(ops.Where(beyond(x, sympy.Float(0.0)), sympy.Float(0.0), x), {Q: (0, 9)})
    low, high = (0.0, 4.5) if beyond in (ops.Less, ops.LessEqual) else (-4.5, 0.0)
    assert float(found.low) == pytest.approx(low, abs=1e-5) and float(found.high) == pytest.approx(high, abs=1e-5)


@pytest.mark.parametrize(
    ("cls", "a", "b"),
    [
        (ops.Maximum, [5.0, NAN, 7.0], [1.0, 2.0]),
        (ops.Maximum, [1.0, 2.0], [5.0, NAN, 7.0]),
        (ops.Minimum, [5.0, NAN, 7.0], [8.0, 9.0]),
        (ops.Minimum, [8.0, 9.0], [5.0, NAN, 7.0]),
        (ops.Mul, [-1.0, 0.0, 1.0], [1.0, INF]),
        (ops.Mul, [-INF, 2.0], [-2.0, -0.0, 3.0]),
        (ops.Mul, [-1.0, 0.0, 1.0], [INF]),
        (ops.Add, [-INF, 1.0], [2.0, INF]),
        (ops.Add, [1.0, INF], [-INF, 2.0]),
        (ops.Sub, [1.0, INF], [2.0, INF]),
        (ops.Sub, [-INF, 1.0], [-INF, 2.0]),
        (ops.Divide, [1.0, INF], [2.0, INF]),
        (ops.Divide, [-1.0, 1.0], [0.0, 2.0]),
        (ops.Divide, [-1.0, 1.0], [-2.0, -0.0]),
        (ops.FloorDiv, [1.0, 2.0], [0.0, 3.0]),
        (ops.FloorMod, [1.0, 2.0], [0.0, 3.0]),
        (ops.FloorMod, [1.0, INF], [2.0, 3.0]),
    ],
    ids=str,
)
def test_nan_inputs_and_results(cls: type[ops.Operation], a: list[float], b: list[float]) -> None:
    """Each value, including NaN, lies within the bounds, and so does its conversion to an integer."""
    captures = {"a": np.array(a, np.float32), "b": np.array(b, np.float32)}
    boxes = {Q: (0, len(a) - 1), K: (0, len(b) - 1)}
    values = {Q: np.arange(len(a))[:, None], K: np.arange(len(b))}
    for node in (cls(A, B), ops.ToInt(cls(A, B)), ops.Maximum(cls(A, B), sympy.Float(-3.0))):
        found, right = interval_of(node, boxes, captures), evaluate(node, values, captures)
        assert found.nan or not np.isnan(right).any()
        right = right[~np.isnan(right)]
        assert (found.low <= right).all() and (right <= found.high).all(), node


def test_nan_converts_to_0() -> None:
    """The root is NaN at -1, and otherwise from 0 to 2."""
    found = interval_of(ops.ToInt(ops.Add(sympy.Float(5.0), ops.Sqrt(Q))), {Q: (-1, 4)})
    assert found.low == 0 and found.high >= 7


@pytest.mark.parametrize("cls", [ops.Sin, ops.Cos])
def test_sine_and_cosine_reach_their_extremes(cls: type[ops.Operation]) -> None:
    """Over boxes of every phase, up to more than a period."""
    low, width = np.arange(-120, 120)[:, None], np.arange(0, 60)
    found = interval_of(cls(ops.Divide(Q, integer(8))), {Q: (low, low + width)})
    steps = np.arange(0, 60)
    right = evaluate(cls(ops.Divide(Q, integer(8))), {Q: low[:, :, None] + np.minimum(steps, width[:, None])})
    assert (found.low <= right.min(-1)).all() and (right.max(-1) <= found.high).all()


def test_integers_too_large_are_unknown() -> None:
    node: sympy.Basic = Q
    for _ in range(6):
        node = ops.Mul(node, node)
    boxes = {Q: (2**15, 2**16)}
    assert classify(ops.Greater(node, integer(0)), boxes) == PARTIAL
    assert classify(ops.Greater(ops.Mul(Q, Q), integer(0)), boxes) == FULL


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (lambda b, h, q, k: q >= k, [FULL, PARTIAL, EMPTY]),
        (lambda b, h, q, k: q // 64 == k // 64, [EMPTY, FULL, EMPTY]),
        (lambda b, h, q, k: (q + 64) - k > q, [FULL, EMPTY, EMPTY]),
        (lambda b, h, q, k: abs(q - k) > 127, [EMPTY, EMPTY, EMPTY]),
        (lambda b, h, q, k: fg.exp(-0.1 * abs(q - k)) > 0.99, [EMPTY, PARTIAL, EMPTY]),
        (lambda b, h, q, k: fg.sqrt(fg.to_float(q - 1000)) > 0.0, [PARTIAL, PARTIAL, PARTIAL]),
        (lambda b, h, q, k: fg.sqrt(fg.to_float(q - 1000)) != 0.0, [PARTIAL, PARTIAL, PARTIAL]),
    ],
)
def test_classes(mask: Any, expected: list[int]) -> None:
    """Queries 64..127 by keys 0..63, 64..127, 128..191."""
    first = np.array([0, 64, 128])
    found = classify(trace_mask(mask, "mask").expression, {Q: (64, 127), K: (first, first + 63)})
    assert np.broadcast_to(found, 3).tolist() == expected


def test_floats_are_as_wide_as_the_resolution_of_float32() -> None:
    """Claims for one element hold in float32: 41 * 0.1 is 4.1000004 there, which is not below 4.1."""
    tenths = ops.Mul(Q, sympy.Float(0.1))
    for query in range(300):
        for limit in (query / 10, np.nextafter(query / 10, 1e9), np.nextafter(query / 10, -1e9)):
            node = ops.LessEqual(tenths, sympy.Float(limit))
            found, right = classify(node, {Q: (query, query)}), evaluate(node, {Q: query})
            assert found == PARTIAL or (found == FULL) == right, (query, limit)


@pytest.mark.parametrize("divisor", [-1e-45, 1e-45, 1e-39, -1e-39])
def test_a_remainder_with_an_overflowing_quotient_is_unknown(divisor: float) -> None:
    """1 / 1e-45 is infinite in float32, and so is the remainder of 1."""
    remainder = ops.FloorMod(ops.ToFloat(Q), ops.Capture("real", "float32", 0))
    for value in (1, 3):
        with np.errstate(all="ignore"):
            a, b = np.float32(value), np.float32(divisor)
            found, left = interval_of(remainder, {Q: (value, value)}, {"real": b}), a - b * np.floor(a / b)
        assert found.nan or found.low <= left <= found.high, left
        assert found.nan or not np.isnan(left)


def test_captured_arrays_are_read_by_ranges_and_clamped() -> None:
    ids = np.array([0, 0, 1, 1, 1, 2, 2, 5], np.int32)
    node = ops.Load(ops.Capture("ids", "int32", 1), Q)
    low = np.array([-3, 0, 2, 3, 6, 7, 100])
    found = interval_of(node, {Q: (low, low + 1)}, {"ids": ids})
    assert found.low.tolist() == [0, 0, 1, 1, 2, 5, 5]
    assert found.high.tolist() == [0, 0, 1, 1, 5, 5, 5]


def test_captured_arrays_of_two_dimensions() -> None:
    table = np.random.default_rng(0).integers(0, 1000, (40, 70)).astype(np.int16)
    node = ops.Load(ops.Capture("table", "int16", 2), Q, K)
    first_q, first_k = np.arange(0, 40, 8)[:, None], np.arange(0, 70, 7)
    found = interval_of(node, {Q: (first_q, first_q + 7), K: (first_k, first_k + 6)}, {"table": table})
    blocks = table.reshape(5, 8, 10, 7)
    assert (found.low == blocks.min(axis=(1, 3))).all()
    assert (found.high == blocks.max(axis=(1, 3))).all()


def test_comparisons_with_a_captured_nan_are_undecided() -> None:
    weights = np.array([1.0, np.nan, 2.0], np.float32)
    weight = ops.Load(ops.Capture("weights", "float32", 1), Q)
    assert classify(ops.Greater(weight, integer(0)), {Q: (0, 2)}, {"weights": weights}) == PARTIAL
    assert classify(ops.Less(weight, integer(0)), {Q: (0, 2)}, {"weights": weights}) == EMPTY


# 1 / x distinguishes zeros; x may be either zero or NaN.
ZEROS = np.array([0.0, -0.0, -0.0, 0.0, -1.0, 2.0, NAN, -0.0, INF, 0.0], np.float32)


@pytest.mark.parametrize(
    "number",
    [
        ops.Maximum(A, sympy.Float(0.0)),
        ops.Maximum(sympy.Float(0.0), A),
        ops.Maximum(A, ops.Neg(sympy.Float(0.0))),
        ops.Minimum(A, sympy.Float(0.0)),
        ops.Minimum(ops.Neg(sympy.Float(0.0)), A),
        ops.Maximum(A, B),
        ops.Minimum(A, B),
        ops.Mul(A, ops.Maximum(A, B)),
    ],
    ids=str,
)
@pytest.mark.parametrize("comparison", [ops.Less, ops.Greater, ops.Equal, ops.GreaterEqual])
def test_signs_of_zeros(number: sympy.Basic, comparison: type[ops.Operation]) -> None:
    """Claims about a quotient by a minimum or maximum that may be a zero hold for each element."""
    captures = {"a": ZEROS, "b": ZEROS[::-1].copy()}
    boxes = {Q: (np.arange(10)[:, None], np.arange(10)[:, None]), K: (np.arange(0, 10, 2), np.arange(1, 11, 2))}
    for limit in (sympy.Float(0.0), sympy.oo, -sympy.oo):
        node = comparison(ops.Divide(sympy.Float(1.0), number), limit)
        found = np.broadcast_to(classify(node, boxes, captures), (10, 5))
        right = evaluate(node, {Q: np.arange(10)[:, None], K: np.arange(10)}, captures)
        tiles = np.broadcast_to(right, (10, 10)).reshape(10, 5, 2)
        assert tiles[found == FULL].all() and not tiles[found == EMPTY].any()
        exact = tile_map(node, (1, 2), 10, 10, captures=captures).classes[0, 0]
        assert (exact == np.where(tiles.all(-1), FULL, np.where(tiles.any(-1), PARTIAL, EMPTY))).all()


def test_missing_and_empty_captures() -> None:
    node = ops.Load(ops.Capture("ids", "int32", 1), Q)
    with pytest.raises(ArgumentError, match="ids"):
        interval_of(node, {Q: (0, 3)})
    with pytest.raises(ArgumentError, match="nothing can be read"):
        interval_of(node, {Q: (0, 3)}, {"ids": np.zeros(0, np.int32)})
