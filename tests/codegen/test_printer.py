"""The text that the printer emits: readable, with no more parentheses than C++ or a reader needs."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from flashgen.codegen.expressions.printer import PRINTED, Printer, float_literal, statements
from flashgen.language import operations as op
from flashgen.language.evaluate import evaluate
from flashgen.language.operations import BATCH, HEAD, KEY, LEN_K, LEN_Q, QUERY, SCORE, Capture, Load

WINDOW = Capture("window", "int32", 0)
CAP = Capture("cap", "float32", 0)
IDS, WIDE = Capture("ids", "int32", 1), Capture("wide", "int64", 1)
TABLE = Capture("table", "float32", 2)
Int, Real = sympy.Integer, sympy.Float
LESS = op.Less(QUERY, KEY)


def text(node: sympy.Basic) -> str:
    return Printer().text(node)


def test_every_operation_is_printed() -> None:
    assert set(op.OPERATIONS.values()) == PRINTED


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (op.Add(op.Mul(HEAD, Int(2)), KEY), "h * 2 + k"),
        (op.Mul(op.Add(HEAD, Int(2)), Int(3)), "(h + 2) * 3"),
        (op.Sub(QUERY, op.Sub(KEY, Int(1))), "q - (k - 1)"),
        (op.Sub(op.Sub(QUERY, KEY), Int(1)), "q - k - 1"),
        (op.Sub(QUERY, op.Add(KEY, Int(1))), "q - (k + 1)"),
        (op.Neg(op.Add(QUERY, KEY)), "-(q + k)"),
        (op.Neg(Int(-3)), "-(-3)"),
        (op.Sub(QUERY, op.Neg(KEY)), "q - -k"),
        (op.Sub(QUERY, Int(-1)), "q - -1"),
        (op.Neg(op.Neg(QUERY)), "-(-q)"),
        (op.Not(op.Not(LESS)), "!!(q < k)"),
        (op.And(op.Or(LESS, sympy.true), LESS), "((q < k) | true) & (q < k)"),
        (op.Or(op.And(LESS, LESS), LESS), "((q < k) & (q < k)) | (q < k)"),
        (op.And(op.And(LESS, LESS), op.And(LESS, LESS)), "(q < k) & (q < k) & (q < k) & (q < k)"),
        (op.Equal(LESS, op.Not(LESS)), "q < k == !(q < k)"),
        (op.BitAnd(op.Add(QUERY, Int(1)), Int(7)), "(q + 1) & 7"),
        (op.BitOr(op.BitAnd(QUERY, Int(1)), KEY), "(q & 1) | k"),
        (op.Equal(op.BitAnd(QUERY, Int(1)), Int(0)), "(q & 1) == 0"),
        (op.ShiftLeft(op.Add(HEAD, Int(1)), Int(2)), "(h + 1) << 2"),
        (op.ShiftRight(QUERY, KEY), "q >> min(max(k, 0), 31)"),
        (op.ShiftRight(QUERY, Int(40)), "q >> 31"),
        (op.ShiftLeft(QUERY, Int(-1)), "q << 0"),
        (op.Add(LESS, QUERY), "static_cast<int>(q < k) + q"),
        (op.Where(LESS, QUERY, op.Where(LESS, Int(1), Int(2))), "q < k ? q : q < k ? 1 : 2"),
        (op.Add(op.Where(LESS, Int(1), Int(2)), Int(3)), "(q < k ? 1 : 2) + 3"),
        (op.Where(LESS, QUERY, Real(0.5)), "q < k ? static_cast<float>(q) : 0.5f"),
        (op.Minimum(QUERY, Real(0.5)), "fminf(static_cast<float>(q), 0.5f)"),
        (op.Maximum(op.Abs(op.Sub(QUERY, KEY)), Int(3)), "max(abs(q - k), 3)"),
        (op.Abs(SCORE), "fabsf(score)"),
        (op.ToFloat(op.Sub(QUERY, KEY)), "static_cast<float>(q - k)"),
        (op.ToFloat(Int(-3)), "-3.0f"),
        (op.ToFloat(SCORE), "score"),
        (op.ToInt(SCORE), "to_int(score)"),
        (op.ToInt(LESS), "static_cast<int>(q < k)"),
        (op.Divide(SCORE, Int(4)), "score * (1.0f / 4.0f)"),
        (op.Divide(QUERY, KEY), "static_cast<float>(q) / static_cast<float>(k)"),
        (op.Divide(SCORE, op.Mul(CAP, Real(2.0))), "score / (arguments.cap * 2.0f)"),
        (op.Tanh(op.Divide(SCORE, CAP)), "tanh_by_exp2(score / arguments.cap)"),
        (op.Add(SCORE, op.Exp(op.Neg(SCORE))), "score + exp2_approx(-score * 1.44269504f)"),
        (op.Mul(Real(2.0), op.Log(SCORE)), "2.0f * (log2_approx(score) * 0.693147181f)"),
        (LEN_Q, "arguments.len_q"),
        (WINDOW, "arguments.window"),
        (sympy.oo, "infinity()"),
        (-sympy.oo, "minus_infinity()"),
        (op.Neg(Real(0.0)), "-0.0f"),
        (Int(-(2**31)), "(-2147483647 - 1)"),
        (Int(2**31 - 1), "2147483647"),
        (op.Less(QUERY, Int(-(2**31))), "q < (-2147483647 - 1)"),
    ],
)  # fmt: skip
def test_text(node: sympy.Basic, expected: str) -> None:
    assert text(node) == expected


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (op.FloorDiv(QUERY, Int(64)), "q >> 6"),
        (op.FloorMod(op.Add(QUERY, KEY), Int(7)), "(q + k) % 7"),
        (op.Mul(op.FloorDiv(QUERY, Int(3)), Int(3)), "q / 3 * 3"),
        (op.Mul(Int(3), op.FloorDiv(QUERY, Int(3))), "3 * (q / 3)"),
        (op.FloorDiv(op.Sub(QUERY, KEY), Int(4)), "floor_divide(q - k, 4)"),
        (op.FloorMod(op.Sub(QUERY, KEY), Int(4)), "floor_modulo(q - k, 4)"),
        (op.FloorDiv(QUERY, Int(-4)), "floor_divide(q, -4)"),
        (op.FloorDiv(QUERY, Int(0)), "floor_divide(q, 0)"),
        (op.FloorDiv(QUERY, WINDOW), "floor_divide(q, arguments.window)"),
        (op.FloorDiv(WINDOW, Int(4)), "floor_divide(arguments.window, 4)"),
        (op.FloorMod(LEN_K, Int(4)), "arguments.len_k & 3"),
        (op.FloorDiv(SCORE, Int(2)), "floorf(score * (1.0f / 2.0f))"),
        (op.FloorMod(SCORE, Real(1.5)), "score - 1.5f * floorf(score / 1.5f)"),
        (op.Sub(SCORE, op.FloorMod(SCORE, Real(1.5))), "score - (score - 1.5f * floorf(score / 1.5f))"),
    ],
)
def test_floored_division(node: sympy.Basic, expected: str) -> None:
    assert text(node) == expected


def test_nonnegative_operands_use_c_division() -> None:
    for node in (op.Add(QUERY, LEN_Q), op.Maximum(op.Sub(QUERY, KEY), Int(0)), op.FloorMod(op.Sub(QUERY, KEY), Int(5))):
        assert text(op.FloorMod(node, Int(3))).endswith(" % 3"), node
    for node in (op.Sub(QUERY, KEY), WINDOW, op.Neg(QUERY), op.FloorMod(QUERY, Int(-5)), Load(IDS, QUERY)):
        assert text(op.FloorMod(node, Int(3))).startswith("floor_modulo("), node
    cube = op.Mul(op.Mul(QUERY, QUERY), QUERY)  # may wrap, and then be negative
    assert text(op.FloorMod(cube, Int(3))).startswith("static_cast<int>(floor_modulo_long(wrapping_product(")


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (op.Add(QUERY, WINDOW), "0ll + q + arguments.window"),
        (op.Add(op.Sub(QUERY, KEY), WINDOW), "0ll + q - k + arguments.window"),
        (op.Sub(WINDOW, Int(5)), "arguments.window - 5ll"),
        (op.Sub(Int(-(2**31)), QUERY), "-2147483648ll - q"),
        (op.Mul(Int(65536), QUERY), "65536ll * q"),
        (op.Mul(op.Add(QUERY, Int(2)), KEY), "1ll * (q + 2) * k"),
        (op.Neg(WINDOW), "-static_cast<long long>(arguments.window)"),
        (op.Abs(WINDOW), "abs(static_cast<long long>(arguments.window))"),
        (op.ShiftLeft(QUERY, Int(4)), "static_cast<long long>(q) << 4"),
        (op.ShiftLeft(Int(3), op.Load(WIDE, QUERY)),
         "3ll << static_cast<int>(min(max(load_wide(arguments, q), 0ll), 31ll))"),
        (op.FloorDiv(WINDOW, QUERY), "floor_divide(arguments.window, q)"),
        (op.FloorDiv(WINDOW, WINDOW), "floor_divide_long(arguments.window, arguments.window)"),
        (op.FloorMod(op.Mul(QUERY, Int(8)), Int(7)), "static_cast<int>(q * 8ll % 7)"),
        (
            op.Minimum(QUERY, op.Add(KEY, WINDOW)),
            "static_cast<int>(min(static_cast<long long>(q), 0ll + k + arguments.window))",
        ),
        (op.LessEqual(op.Abs(op.Sub(WINDOW, KEY)), Int(6)), "abs(0ll + arguments.window - k) <= 6"),
        (
            op.Where(LESS, WINDOW, op.Neg(WINDOW)),
            "q < k ? arguments.window : -static_cast<long long>(arguments.window)",
        ),
        (op.ToFloat(op.Mul(QUERY, KEY)), "static_cast<float>(1ll * q * k)"),
        (op.ToInt(op.Mul(QUERY, KEY)), "1ll * q * k"),
        (op.Load(IDS, op.Mul(QUERY, KEY)), "load_ids(arguments, static_cast<int>(min(1ll * q * k, 2147483647ll)))"),
        (op.Equal(Load(WIDE, QUERY), Load(WIDE, KEY)), "load_wide(arguments, q) == load_wide(arguments, k)"),
        (op.Sub(op.BitAnd(Load(WIDE, QUERY), Int(7)), WINDOW), "(load_wide(arguments, q) & 7) - arguments.window"),
        (op.Add(Load(WIDE, QUERY), Int(1)), "wrapping_sum(load_wide(arguments, q), 1ll)"),
        (op.Neg(Load(WIDE, QUERY)), "wrapping_difference(0ll, load_wide(arguments, q))"),
        (op.ShiftLeft(Load(WIDE, QUERY), Int(2)), "wrapping_product(load_wide(arguments, q), 1ll << 2)"),
    ],
)  # fmt: skip
def test_integers_beyond_int(node: sympy.Basic, expected: str) -> None:
    assert text(node) == expected


def test_a_variable_of_a_wide_integer_is_long_long() -> None:
    wide = op.Add(op.Mul(QUERY, KEY), WINDOW)
    declarations, (result,) = statements(op.And(op.Less(wide, KEY), op.Greater(wide, Int(2))))
    assert declarations == ["const long long x0 = 1ll * q * k + arguments.window;"]
    assert result == "(x0 < k) & (x0 > 2)"


TENTH = Real(0.1)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (
            op.GreaterEqual(op.Sub(op.Mul(QUERY, TENTH), op.Mul(KEY, TENTH)), Int(0)),
            "__fmul_rn(static_cast<float>(q), 0.100000001f) - __fmul_rn(static_cast<float>(k), 0.100000001f) >= 0",
        ),
        (op.Floor(op.Divide(QUERY, Int(41))), "floorf(__fdiv_rn(static_cast<float>(q), 41.0f))"),
        (op.Floor(op.Divide(QUERY, Int(4))), "floorf(__fmul_rn(static_cast<float>(q), 1.0f / 4.0f))"),
        (op.ToInt(op.Divide(KEY, CAP)), "to_int(__fdiv_rn(static_cast<float>(k), arguments.cap))"),
        (op.Less(op.Sqrt(QUERY), CAP), "__fsqrt_rn(static_cast<float>(q)) < arguments.cap"),
        (op.Less(op.Log(QUERY), CAP), "__fmul_rn(log2_approx(static_cast<float>(q)), 0.693147181f) < arguments.cap"),
        (op.Divide(op.Sub(KEY, QUERY), Int(41)), "static_cast<float>(k - q) / 41.0f"),
        (op.Floor(op.Divide(SCORE, Int(41))), "floorf(score / 41.0f)"),
        (op.Divide(op.Add(SCORE, CAP), Int(41)), "(score + arguments.cap) * (1.0f / 41.0f)"),
        (op.Divide(op.Add(SCORE, CAP), CAP), "(score + arguments.cap) / arguments.cap"),
        (op.Mul(op.Mul(KEY, TENTH), SCORE), "k * 0.100000001f * score"),
    ],
    ids=str,
)
def test_decisions_are_exact(node: sympy.Basic, expected: str) -> None:
    """Products that no compiler contracts and divisions that no option approximates; other values have a tolerance."""
    assert statements(node)[1] == [expected]


def test_a_where_and_a_logical_not_bind_as_in_numpy() -> None:
    assert text(op.Not(op.And(LESS, LESS))) == "!((q < k) & (q < k))"
    assert text(op.Where(op.Or(LESS, LESS), LESS, sympy.false)) == "(q < k) | (q < k) ? q < k : false"


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_float_literals_read_back(value: float) -> None:
    literal = float_literal(value)
    assert literal.endswith("f") and any(mark in literal for mark in ".e")
    read = np.float32(float(literal[:-1]))
    assert struct.pack("f", read) == struct.pack("f", value)


@given(st.floats(allow_nan=False))
def test_double_literals_are_rounded_to_float(value: float) -> None:
    literal = float_literal(value)
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    if np.isinf(rounded):
        assert literal == ("infinity()" if value > 0 else "minus_infinity()")
    else:
        assert np.float32(float(literal[:-1])) == rounded


def test_repeated_expressions_are_stored_in_a_variable() -> None:
    distance = op.Abs(op.Sub(QUERY, KEY))
    declarations, (result,) = statements(op.And(op.Less(distance, WINDOW), op.Greater(distance, Int(2))))
    assert declarations == ["const int x0 = abs(q - k);"]
    assert result == "(x0 < arguments.window) & (x0 > 2)"


def test_cheap_or_single_expressions_are_not() -> None:
    difference = op.Sub(QUERY, KEY)
    declarations, (result,) = statements(op.And(op.Less(difference, Int(4)), op.Greater(difference, Int(-4))))
    assert declarations == [] and result == "(q - k < 4) & (q - k > -4)"
    assert statements(op.Less(op.Abs(difference), Int(4)))[0] == []


def test_variables_precede_their_uses_and_are_shared() -> None:
    loaded = Load(IDS, QUERY)
    scaled = op.Mul(op.Add(loaded, Int(1)), KEY)
    declarations, results = statements(op.Less(scaled, loaded), op.Add(scaled, Int(1)))
    assert [line.split(" = ")[0] for line in declarations] == ["const int x0", "const long long x1"]
    assert "load_ids(arguments, q)" in declarations[0] and declarations[1] == "const long long x1 = (x0 + 1ll) * k;"
    assert results == ["x1 < x0", "x1 + 1"]


def test_a_variable_has_the_type_of_its_value() -> None:
    of_float, of_bool = op.Mul(op.Add(SCORE, Real(1.0)), CAP), op.Equal(op.Add(QUERY, Int(1)), KEY)
    twice = op.Where(of_bool, of_float, op.Where(op.Not(of_bool), of_float, Real(0.0)))
    declarations, _ = statements(twice)
    assert sorted(line.split()[1] for line in declarations) == ["bool", "float"]


def test_special_values(run: Any, values: Any, captures: Any) -> None:
    """Values that random expressions rarely produce."""
    smallest, largest = Int(-(2**31)), Int(2**31 - 1)
    some = op.ToInt(op.Mul(op.ToFloat(QUERY), Real(1e9)))  # beyond int32 from the third row on
    nodes = [
        smallest, largest, op.Maximum(smallest, op.Neg(QUERY)), op.Less(smallest, op.Neg(QUERY)), some,
        op.ToInt(op.Neg(op.Mul(op.ToFloat(QUERY), Real(1e9)))), op.ToInt(op.Divide(op.Mul(SCORE, Int(0)), Int(0))),
        op.FloorDiv(QUERY, Capture("zero", "int32", 0)), op.FloorMod(QUERY, Capture("zero", "int32", 0)),
        op.FloorDiv(smallest, Int(2)), op.FloorDiv(op.Neg(QUERY), Int(-3)), op.FloorMod(op.Neg(QUERY), Int(-3)),
        op.Minimum(SCORE, sympy.oo), op.Maximum(SCORE, -sympy.oo), op.Less(op.Log(Real(0.0)), SCORE),
        Load(IDS, op.Sub(QUERY, KEY)), Load(TABLE, op.Sub(HEAD, Int(2)), op.Mul(BATCH, Int(1000))),
    ]  # fmt: skip
    for node, result in zip(nodes, run(nodes, captures), strict=True):
        with np.errstate(all="ignore"):
            expected = np.broadcast_to(evaluate(node, values, captures), result.shape)
        np.testing.assert_array_equal(result, expected, err_msg=str(node))


def test_minimum_and_maximum_of_zeros(run: Any, values: Any, captures: Any) -> None:
    """Quotients show which of two zeros is greater; their signs follow from the score's."""
    zero, other = op.Mul(SCORE, Real(0.0)), op.Mul(op.Neg(SCORE), Real(0.0))
    pairs = [
        (zero, other),
        (other, zero),
        (zero, Real(0.0)),
        (Real(0.0), zero),
        (zero, zero),
        (op.Neg(Real(0.0)), zero),
    ]
    nodes = [op.Divide(Real(1.0), choose(*pair)) for choose in (op.Maximum, op.Minimum) for pair in pairs]
    for node, result in zip(nodes, run(nodes, captures), strict=True):
        with np.errstate(all="ignore"):
            expected = np.broadcast_to(evaluate(node, values, captures), result.shape)
        np.testing.assert_array_equal(result, expected, err_msg=str(node))
        assert np.isinf(result).all()


def test_the_smallest_integer_divided_by_minus_one_does_not_trap(run: Any, captures: Any) -> None:
    minus_one, nothing = op.FloorDiv(WINDOW, Int(7)), op.Mul(QUERY, Int(0))
    int32s, int64s = op.Add(nothing, Int(-(2**31))), op.Add(nothing, Int(-(2**31)))
    for amount in (31, 1):
        int64s = op.ShiftLeft(int64s, Int(amount))
    quotients = [op.FloorDiv(smallest, minus_one) for smallest in (int32s, int64s)]
    moduli = [op.FloorMod(smallest, minus_one) for smallest in (int32s, int64s)]
    found = run([*quotients, *moduli], captures)
    assert [set(values) for values in found] == [{2**31}, {-(2**63)}, {0}, {0}]


def test_a_distance_test_is_one_comparison() -> None:
    distance = op.Abs(op.Sub(QUERY, KEY))
    assert text(op.LessEqual(distance, Int(6))) == "magnitude_within(q - k, 6)"
    assert text(op.Less(distance, Int(6))) == "magnitude_within(q - k, 5)"
    assert text(op.Less(distance, Int(0))) == "abs(q - k) < 0"
