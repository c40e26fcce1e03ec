"""Bounds of integers proven for every call: fitting int32, not wrapping, or neither."""

from __future__ import annotations

import numpy as np
import pytest
import sympy

from flashgen.analysis.closed_forms.inequalities import Q_LAST, at_most
from flashgen.analysis.integer_bounds import Bounds
from flashgen.language import operations as ops
from flashgen.language.evaluate import evaluate
from flashgen.language.operations import HEAD, KEY, LEN_K, LEN_Q, LONGEST, QUERY, Capture, Load

WINDOW = Capture("window", "int32", 0)
IDS, WIDE, BYTES = (
    Capture(name, dtype, 1) for name, dtype in (("ids", "int32"), ("wide", "int64"), ("bytes", "uint8"))
)
Int = sympy.Integer
POSITION = ops.Add(QUERY, ops.Sub(LEN_K, LEN_Q))


def product(*factors: sympy.Basic) -> sympy.Basic:
    result, *rest = factors
    for factor in rest:
        result = ops.Mul(result, factor)
    return result


@pytest.mark.parametrize(
    "node",
    [
        ops.Add(QUERY, KEY),
        ops.Sub(ops.Add(QUERY, LEN_K), LEN_Q),
        POSITION,
        ops.Sub(POSITION, KEY),
        ops.Sub(POSITION, Int(10**9)),
        ops.Add(POSITION, Int(10**9)),
        ops.Mul(ops.FloorDiv(QUERY, Int(3)), Int(3)),
        ops.Mul(HEAD, Int(32768)),
        ops.FloorMod(product(QUERY, KEY, QUERY), Int(7)),
        ops.Load(IDS, QUERY),
        ops.Maximum(ops.Minimum(Load(WIDE, QUERY), Int(5)), Int(0)),
        ops.Sub(ops.Mul(Load(BYTES, QUERY), Int(1000)), Load(BYTES, KEY)),
        ops.ToInt(ops.Mul(ops.ToFloat(QUERY), sympy.Float(1e30))),
        ops.BitXor(WINDOW, QUERY),
    ],
    ids=str,
)
def test_values_that_fit_int32(node: sympy.Basic) -> None:
    assert Bounds().fit_int32(node)


@pytest.mark.parametrize(
    "node",
    [
        ops.Add(QUERY, WINDOW),
        ops.Neg(WINDOW),
        ops.Abs(WINDOW),
        ops.FloorDiv(WINDOW, WINDOW),
        ops.Mul(QUERY, Int(3)),
        ops.Add(POSITION, Int(2**31 - 1)),
        ops.Sub(Load(IDS, QUERY), Load(IDS, KEY)),
        Load(WIDE, QUERY),
        product(QUERY, LEN_K),
        ops.ShiftLeft(QUERY, Int(2)),
    ],
    ids=str,
)
def test_values_that_need_64_bits(node: sympy.Basic) -> None:
    assert not Bounds().fit_int32(node) and not Bounds().wraps_within(node)


@pytest.mark.parametrize(
    "node",
    [
        product(QUERY, KEY, QUERY),
        ops.Add(Load(WIDE, QUERY), Int(1)),
        ops.Neg(Load(WIDE, QUERY)),
        ops.Abs(Load(WIDE, QUERY)),
        ops.ShiftLeft(product(QUERY, KEY), Int(4)),
        ops.FloorDiv(Load(WIDE, QUERY), WINDOW),
    ],
    ids=str,
)
def test_values_that_may_wrap(node: sympy.Basic) -> None:
    bounds = Bounds()
    assert bounds.wraps(node) and bounds.limits(node) == (-(2**63), 2**63 - 1)
    within = ops.FloorMod(node, Int(9))
    assert bounds.wraps_within(within) and not bounds.wraps(within) and bounds.limits(within) == (0, 8)


def test_bounds_from_operands_only() -> None:
    """Code that evaluates intervals does not know that a query is smaller than len_q."""
    assert Bounds().limits(POSITION)[1] < LONGEST + 4096
    assert Bounds(related=False).limits(POSITION)[1] == 2 * LONGEST + 4095


def test_bounds_hold_at_their_ends() -> None:
    q, k = np.array([0, 4095, LONGEST - 1]), np.array([0, 77, LONGEST - 1])
    nodes = [POSITION, ops.Sub(POSITION, KEY), ops.Mul(QUERY, WINDOW), ops.FloorDiv(QUERY, WINDOW)]
    for lengths in ((1, LONGEST), (LONGEST, 1), (LONGEST, LONGEST)):
        for window in (-(2**31), -1, 0, 1, 2**31 - 1):
            values = {QUERY: np.minimum(q, lengths[0] - 1), KEY: np.minimum(k, lengths[1] - 1)}
            values |= {LEN_Q: lengths[0], LEN_K: lengths[1]}
            for node in nodes:
                low, high = Bounds().limits(node)
                found = evaluate(node, values, {"window": window})
                assert low <= found.min() and found.max() <= high, (node, lengths, window)


def test_a_scalar_may_be_negative() -> None:
    assert not at_most(Int(0), WINDOW)
    assert not at_most(QUERY, ops.Add(QUERY, WINDOW))
    assert not at_most(ops.Sub(QUERY, WINDOW), QUERY)


def test_lengths_do_not_exceed_the_maximum() -> None:
    assert at_most(LEN_K, Int(LONGEST)) and not at_most(LEN_K, Int(LONGEST - 1))
    assert at_most(LEN_K, ops.Add(ops.Sub(Q_LAST, LEN_Q), Int(2 * LONGEST)))
