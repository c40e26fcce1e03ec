"""Derivatives of expressions: text, conventions, and comparison with SymPy and finite differences."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import flashgen.language as fg
from flashgen.analysis.derivatives import RULES, derivative, gathers
from flashgen.language import operations as op
from flashgen.language.evaluate import evaluate
from flashgen.language.operations import HEAD, KEY, QUERY, SCORE, Capture, Load
from flashgen.reference.tangents import Duals

Int, Real = sympy.Integer, sympy.Float
BIAS = Load(Capture("bias", "float32", 1, True), QUERY)
NUMBER = Capture("number", "float32", 0)
LOG_2 = Real(float(np.log(2)))


def graph(*roots: sympy.Basic) -> set[sympy.Basic]:
    """Returns the distinct nodes."""
    seen: set[sympy.Basic] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.args if isinstance(node, op.Operation) else ())
    return seen


def at(node: sympy.Basic, score: Any, **captures: Any) -> np.ndarray[Any, Any]:
    return evaluate(node, {SCORE: score, QUERY: 3, KEY: 5, HEAD: 1}, captures).astype(np.float64)


def test_every_operation_has_a_derivative() -> None:
    assert list(RULES) == list(op.OPERATIONS.values())


ONE, TANH, EXP, ROOT = sympy.S.One, op.FastTanh(op.Divide(SCORE, Real(30.0))), op.Exp(SCORE), op.Sqrt(SCORE)
SIGMOID = op.Sigmoid(SCORE)
DISTANCE = op.Sub(KEY, QUERY)


@pytest.mark.parametrize(
    ("expression", "wrt", "expected"),
    [
        (SCORE, SCORE, ONE),
        (op.Add(SCORE, BIAS), SCORE, ONE),
        (op.Add(SCORE, BIAS), BIAS, ONE),
        (op.Sub(op.Mul(SCORE, Real(1.0)), Int(4)), SCORE, ONE),
        (op.Neg(op.Neg(SCORE)), SCORE, ONE),
        (op.ToFloat(SCORE), SCORE, ONE),
        (op.ToFloat(QUERY), SCORE, sympy.S.Zero),
        (op.Floor(SCORE), SCORE, sympy.S.Zero),
        (op.ToFloat(op.ToInt(SCORE)), SCORE, sympy.S.Zero),
        (op.Where(op.Less(SCORE, BIAS), QUERY, Real(2.0)), SCORE, sympy.S.Zero),
        (op.Add(SCORE, op.Mul(BIAS, DISTANCE)), BIAS, op.ToFloat(DISTANCE)),
        (op.Mul(SCORE, BIAS), SCORE, BIAS),
        (op.Mul(SCORE, Int(3)), SCORE, Real(3.0)),
        (op.Neg(SCORE), SCORE, Real(-1.0)),
        (op.Mul(SCORE, SCORE), SCORE, op.Mul(Real(2.0), SCORE)),
        (op.Divide(BIAS, SCORE), SCORE, op.Neg(op.Divide(op.Divide(BIAS, SCORE), SCORE))),
        (op.Mul(Real(30.0), TANH), SCORE, op.Sub(Real(1.0), op.Mul(TANH, TANH))),
        (EXP, SCORE, EXP),
        (op.Exp2(SCORE), SCORE, op.Mul(op.Exp2(SCORE), LOG_2)),
        (op.Log(SCORE), SCORE, op.Divide(Real(1.0), SCORE)),
        (ROOT, SCORE, op.Divide(Real(0.5), ROOT)),
        (SIGMOID, SCORE, op.Mul(SIGMOID, op.Sub(Real(1.0), SIGMOID))),
        (op.Where(op.Less(QUERY, KEY), SCORE, -sympy.oo), SCORE, op.Where(op.Less(QUERY, KEY), Real(1.0), Real(0.0))),
        (op.Where(op.Less(QUERY, KEY), SCORE, op.Add(SCORE, BIAS)), SCORE, ONE),
        (
            op.Minimum(SCORE, Int(5)),
            SCORE,
            op.Where(op.Less(SCORE, Int(5)), Real(1.0), op.Where(op.Equal(SCORE, Int(5)), Real(0.5), Real(0.0))),
        ),
        (op.Maximum(op.Add(SCORE, BIAS), SCORE), SCORE, ONE),
        (op.FloorMod(SCORE, BIAS), SCORE, ONE),
        (op.FloorMod(SCORE, BIAS), BIAS, op.Neg(op.FloorDiv(SCORE, BIAS))),
    ],
)
def test_derivatives_read_as_written_by_hand(expression: sympy.Basic, wrt: sympy.Basic, expected: sympy.Basic) -> None:
    found = derivative(expression, wrt)
    # Constants are on the left of products, whatever their original side.
    assert found == expected or (isinstance(expected, op.Mul) and found == op.Mul(*reversed(expected.args)))


def test_nodes_of_the_function_are_reused() -> None:
    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return 30 * fg.tanh(s / 30) + fg.sigmoid(s) + fg.exp(s / 7) + fg.sqrt(s * s + 1) + s / (s + 9.5)

    expression = fg.AttentionSpec(64, score=score).score.expression  # type: ignore[union-attr]
    costly = (op.Tanh, op.Sigmoid, op.Exp, op.Sqrt)
    own = {node for node in graph(expression) if isinstance(node, costly)}
    assert {node for node in graph(expression, derivative(expression, SCORE)) if isinstance(node, costly)} == own


def test_a_cap_cancels_exactly() -> None:
    for cap in (30, 49, 0.1, fg.Scalar("cap", "float32")):
        spec = fg.AttentionSpec(64, score=fg.softcap(cap))
        (tanh,) = spec.score.expression.atoms(op.FastTanh)  # type: ignore[union-attr]
        expected = op.Sub(Real(1.0), op.Mul(tanh, tanh))
        assert derivative(spec.score.expression, SCORE) == expected  # type: ignore[union-attr]


def test_constants_beyond_float32_are_not_merged() -> None:
    slope = derivative(op.Mul(op.Mul(SCORE, Real(1e30)), Real(1e30)), SCORE)
    assert slope == op.Mul(Real(1e30), Real(1e30))


# ---- Deep and shared ------------------------------------------------------------------------------------------------


def repeated(step: Callable[[sympy.Basic], sympy.Basic], times: int) -> sympy.Basic:
    node: sympy.Basic = SCORE
    for _ in range(times):
        node = step(node)
    return node


@pytest.mark.parametrize(
    ("step", "times"),
    [
        (op.Abs, 120),  # each doubles the derivative when written as a tree
        (lambda node: op.Maximum(node, op.Neg(node)), 60),  # and these the function, too
        (lambda node: op.Mul(node, node), 60),
        (lambda node: op.Divide(node, op.Add(node, BIAS)), 60),
        *((step, 120) for step in (op.Tanh, op.Log, op.Sin, op.Sqrt, op.Exp, op.Neg)),
        (lambda node: op.Mul(op.Tanh(op.Divide(node, Real(3.0))), Real(3.0)), 40),
    ],
)
def test_size_grows_with_the_number_of_distinct_nodes(step: Callable[[sympy.Basic], sympy.Basic], times: int) -> None:
    expression = repeated(step, times)
    slope = derivative(expression, SCORE)
    assert len(graph(slope)) <= 6 * len(graph(expression))
    at(slope, np.array([0.5]), bias=np.ones(5))


# ---- Against SymPy and finite differences ---------------------------------------------------------------------------


class Step(sympy.Function):
    """floor with derivative 0, which SymPy's own lacks."""

    def fdiff(self, argindex: int = 1) -> Any:
        return sympy.S.Zero


class Below(sympy.Function):
    """1 where a < b, else 0. SymPy would try to solve the conditions of a Piecewise, which takes too long."""

    def fdiff(self, argindex: int = 1) -> Any:
        return sympy.S.Zero


def chosen(condition: Any, a: Any, b: Any) -> Any:
    return condition * a + (1 - condition) * b


ORDINARY: dict[type[op.Operation], Callable[..., Any]] = {
    op.Add: lambda a, b: a + b, op.Sub: lambda a, b: a - b, op.Mul: lambda a, b: a * b, op.Neg: lambda a: -a,
    op.Abs: lambda a: chosen(Below(0, a), a, -a), op.Divide: lambda a, b: a / b,
    op.Minimum: lambda a, b: chosen(Below(a, b), a, b), op.Maximum: lambda a, b: chosen(Below(b, a), a, b),
    op.FloorDiv: lambda a, b: Step(a / b), op.FloorMod: lambda a, b: a - b * Step(a / b), op.Floor: Step,
    op.ToFloat: lambda a: a, op.Exp: sympy.exp, op.Exp2: lambda a: sympy.exp(a * sympy.log(2)), op.Log: sympy.log,
    op.Log2: lambda a: sympy.log(a) / sympy.log(2), op.Tanh: sympy.tanh, op.FastTanh: sympy.tanh,
    op.Sigmoid: lambda a: 1 / (1 + sympy.exp(-a)), op.Sqrt: sympy.sqrt, op.Sin: sympy.sin, op.Cos: sympy.cos,
    op.Less: Below, op.Where: chosen,
}  # fmt: skip
IN_PYTHON = {"Step": math.floor, "Below": lambda a, b: float(a < b)}
UNARY = (op.Neg, op.Abs, op.Floor, op.ToFloat, op.Exp, op.Exp2, op.Tanh, op.FastTanh, op.Sigmoid, op.Sin, op.Cos)
POSITIVE = (op.Log, op.Log2, op.Sqrt)
BINARY = (op.Add, op.Sub, op.Mul, op.Minimum, op.Maximum, op.FloorMod, op.FloorDiv, op.Divide)


def grown(rng: random.Random, depth: int, known: list[sympy.Basic]) -> sympy.Basic:
    """Returns a random expression of the score and NUMBER; some of its subexpressions are shared."""
    if depth == 0:
        return rng.choice((SCORE, SCORE, SCORE, NUMBER, Real(1.75), Real(-0.5), Int(2)))
    if len(known) > 2 and rng.random() < 0.15:
        return rng.choice(known)
    pick = rng.random()
    if pick < 0.35:
        node = rng.choice(UNARY)(grown(rng, depth - 1, known))
    elif pick < 0.45:
        operand = grown(rng, depth - 1, known)
        node = rng.choice(POSITIVE)(op.Add(op.Mul(operand, operand), Real(0.3)))
    elif pick < 0.9:
        node = rng.choice(BINARY)(grown(rng, depth - 1, known), grown(rng, depth - 1, known))
    else:
        condition = op.Less(grown(rng, 1, known), grown(rng, 1, known))
        node = op.Where(condition, grown(rng, depth - 1, known), grown(rng, depth - 1, known))
    known.append(node)
    return node


def ordinary(node: sympy.Basic) -> Any:
    """Translates the function to SymPy."""
    if isinstance(node, op.Operation):
        return ORDINARY[type(node)](*map(ordinary, node.args))
    return sympy.Symbol("number", real=True) if node == NUMBER else node


POINTS = np.array([-2.31, -1.1, -0.437, 0.213, 0.619, 1.39, 2.77])
seeds = st.integers(0, 2**32)


def smooth_slopes(node: sympy.Basic) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns central differences at POINTS, and where they are valid: no kink, jump or infinity is near."""
    step, short = 1e-5, 1e-6
    here, below, above, near_below, near_above = (
        np.broadcast_to(at(node, POINTS + d, number=0.83), POINTS.shape) for d in (0, -step, step, -short, short)
    )
    with np.errstate(all="ignore"):
        left, right = (here - below) / step, (above - here) / step
        slopes = (above - below) / (2 * step)
        smooth = np.isfinite(here) & (np.abs(here) < 1e3) & (np.abs(left - right) < 1e-2 * (1 + np.abs(slopes)))
        # Slopes on both sides of an oscillation within a step may agree by chance, but not those of a shorter step.
        smooth &= np.isclose((near_above - near_below) / (2 * short), slopes, rtol=5e-4, atol=5e-5)
    for part in graph(node):  # functions that saturate, or beyond the precision of the step, look smooth
        smooth &= np.abs(at(part, POINTS, number=0.83)) < 1e6 if op.kind_of(part) == "float" else True
    return slopes, smooth & (np.abs(slopes) < 1e4)


@settings(max_examples=150, deadline=None)
@given(seeds, st.integers(1, 6))
@example(787, 6)  # oscillates within a step
def test_finite_differences(seed: int, depth: int) -> None:
    node = grown(random.Random(seed), depth, [])
    slopes, smooth = smooth_slopes(node)
    assume(smooth.any())
    found = np.broadcast_to(at(derivative(node, SCORE), POINTS, number=0.83), POINTS.shape)
    np.testing.assert_allclose(found[smooth], slopes[smooth], rtol=1e-3, atol=1e-4, err_msg=str(node))


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 4))
@example(604, 4)  # a remainder whose quotient is an integer up to rounding
def test_sympy(seed: int, depth: int) -> None:
    node = grown(random.Random(seed), depth, [])
    _, smooth = smooth_slopes(node)
    for part in graph(node):  # rounding changes comparisons for equality, and the floor of integer quotients
        values = [at(operand, POINTS, number=0.83) for operand in part.args]
        if isinstance(part, op.Less):
            smooth &= ~np.isclose(*values)
        elif isinstance(part, (op.FloorDiv, op.FloorMod, op.Floor)):
            with np.errstate(all="ignore"):
                quotient = values[0] / values[1] if len(values) == 2 else values[0]
            smooth &= ~np.isclose(quotient, np.round(quotient))
    assume(smooth.any())
    symbols = (SCORE, sympy.Symbol("number", real=True))
    theirs = sympy.lambdify(symbols, sympy.diff(ordinary(node), SCORE), [IN_PYTHON, "math"])
    ours = np.broadcast_to(at(derivative(node, SCORE), POINTS, number=0.83), POINTS.shape)
    number = float(np.float32(0.83))
    expected = [theirs(float(point), number) for point in POINTS[smooth]]
    np.testing.assert_allclose(ours[smooth], expected, rtol=1e-9, atol=1e-9, err_msg=str(node))


@settings(max_examples=150, deadline=None)
@given(seeds, st.integers(1, 6))
def test_dual_numbers_agree_also_at_kinks(seed: int, depth: int) -> None:
    """The reference's own derivative, an independent implementation, at points with many ties and zeros."""
    node, points = grown(random.Random(seed), depth, []), np.array([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0])
    tangent = Duals({SCORE: points, QUERY: 3, KEY: 5, HEAD: 1}, {"number": 1.0}).tangent(node, SCORE)
    ours, theirs = np.zeros(7) + at(derivative(node, SCORE), points, number=1.0), np.zeros(7)
    theirs += 0.0 if tangent is None else tangent
    known = np.isfinite(theirs) & np.isfinite(ours) & (np.abs(theirs) < 1e30)
    for part in graph(node):  # no promise for NaN
        known &= ~np.isnan(at(part, points, number=1.0))
    np.testing.assert_allclose(ours[known], theirs[known], rtol=1e-7, atol=1e-9, err_msg=str(node))


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_the_derivative_by_a_gather_is_that_by_a_symbol(seed: int) -> None:
    """The derivative by an element equals the derivative by the score of the function with both exchanged."""
    node = op.Mul(op.Tanh(BIAS), grown(random.Random(seed), 4, []).xreplace({NUMBER: BIAS}))
    exchanged = node.xreplace({SCORE: BIAS, BIAS: SCORE})
    bias = np.full(8, 0.61)
    bias = bias.astype(np.float32).astype(np.float64)
    ours = at(derivative(node, BIAS), bias[0], bias=POINTS[[1] * 8])
    theirs = at(derivative(exchanged, SCORE), np.float64(np.float32(POINTS[1])), bias=bias)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


# ---- Kinks ----------------------------------------------------------------------------------------------------------

whole = st.integers(-8, 8)
slopes_of_lines = st.tuples(whole, whole)


def line(slope: int, place: int, height: int) -> sympy.Basic:
    """Returns a line of this slope through (x, height)."""
    return op.Add(op.Mul(Real(slope), op.Sub(SCORE, Real(place))), Real(height))


@given(slopes_of_lines, whole, whole)
def test_ties_share_the_gradient_equally(slopes: tuple[int, int], place: int, height: int) -> None:
    first, second = (line(slope, place, height) for slope in slopes)
    for choose in (op.Minimum, op.Maximum):
        slope = derivative(choose(first, second), SCORE)
        assert at(slope, place) == sum(slopes) / 2
        steeper = {op.Minimum: min, op.Maximum: max}[choose](slopes)
        flatter = {op.Minimum: max, op.Maximum: min}[choose](slopes)
        assert at(slope, place + 1.0) == steeper and at(slope, place - 1.0) == flatter


@given(whole, whole)
def test_abs_has_slope_0_at_0(slope: int, place: int) -> None:
    found = derivative(op.Abs(line(slope, place, 0)), SCORE)
    assert at(found, place) == 0 and at(found, place + 1.0) == abs(slope) and at(found, place - 1.0) == -abs(slope)


@given(slopes_of_lines, whole, whole)
def test_where_has_the_slope_of_the_selected_branch(slopes: tuple[int, int], place: int, height: int) -> None:
    first, second = (line(slope, place, height) for slope in slopes)
    for condition, index in ((op.Less(SCORE, Real(place)), 1), (op.LessEqual(SCORE, Real(place)), 0)):
        assert at(derivative(op.Where(condition, first, second), SCORE), place) == slopes[index]


@given(whole, st.integers(1, 8))
def test_steps_have_slope_0_and_remainders_slope_1(multiple: int, divisor: int) -> None:
    score, by = multiple * divisor, Real(divisor)
    for step in (op.Floor(SCORE), op.FloorDiv(SCORE, by), op.ToFloat(op.ToInt(SCORE)), op.ToFloat(op.Less(SCORE, by))):
        assert at(derivative(step, SCORE), score) == 0
    assert at(derivative(op.FloorMod(SCORE, by), SCORE), score) == 1
    by_divisor = derivative(op.FloorMod(BIAS, SCORE), SCORE)
    assert at(by_divisor, divisor, bias=np.full(8, score)) == -multiple


@given(whole, st.integers(0, 8))
def test_clamp_passes_the_gradient_at_its_bounds(low: int, width: int) -> None:
    high = low + width
    spec = fg.AttentionSpec(64, score=lambda s, b, h, q, k: fg.clamp(s, float(low), float(high)))
    slope = derivative(spec.score.expression, SCORE)  # type: ignore[union-attr]
    found = [float(at(slope, score)) for score in (low - 1, low, high, high + 1)]
    assert found == [0, 1, 1, 0]


def test_sqrt_has_an_infinite_slope_at_0() -> None:
    assert at(derivative(op.Sqrt(SCORE), SCORE), 0.0) == np.inf


def test_the_branch_not_selected_has_no_effect() -> None:
    """Zero, not zero times infinity."""
    node = op.Where(op.Greater(SCORE, Real(0.0)), op.Log(SCORE), op.Mul(BIAS, SCORE))
    found = at(derivative(node, SCORE), np.array([0.0, -1.0, 2.0]), bias=np.full(8, 4.0))
    np.testing.assert_array_equal(found, [4.0, 4.0, 0.5])


# ---- Gathers --------------------------------------------------------------------------------------------------------


def test_gathers() -> None:
    table, slopes = fg.Tensor("table", "float16", 2, grad=True), fg.Tensor("slopes", "float32", 1, grad=True)
    fixed, ids = fg.Tensor("fixed", "float32", 1), fg.Tensor("ids", "int32", 1)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * slopes[h] + table[h, q - k] + fixed[q] + slopes[h] * slopes[ids[q]] + table[h, q - k]

    spec = fg.AttentionSpec(64, score=score)
    names = [str(gather) for gather in gathers(spec)]
    assert names == ["Load(slopes, h)", "Load(table, h, Sub(q, k))", "Load(slopes, Load(ids, q))"]


def test_without_score_or_grad_nothing_is_gathered() -> None:
    assert gathers(fg.AttentionSpec(64)) == ()
    assert gathers(fg.AttentionSpec(64, score=fg.alibi("slopes"))) == ()
