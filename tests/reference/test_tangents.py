"""Dual numbers: each operation's tangent against finite differences, and conventions at kinks."""

import numpy as np
import pytest

import flashgen.language as fl
from flashgen.analysis.derivatives import derivative
from flashgen.language import operations as ops
from flashgen.language.evaluate import evaluate
from flashgen.language.operations import BATCH, HEAD, KEY, OPERATIONS, QUERY, SCORE
from flashgen.reference.tangents import TANGENTS, Duals, gathers

pytestmark = pytest.mark.filterwarnings("error")

U, W, TABLE = (fl.Tensor("u", "float32", 1, grad=True), fl.Tensor("w", "float32", 1, grad=True),
               fl.Tensor("table", "float32", 2, grad=True))  # fmt: skip
IDS, POINTS, FACTOR = fl.Tensor("ids", "int32", 1), fl.Tensor("points", "float32", 1), fl.Scalar("factor", "float32")
CAPTURES = {
    "u": np.array([0.5, -1.25, 2.0], np.float32),
    "w": np.array([1.5, 0.25, -0.75], np.float32),
    "table": np.arange(12, dtype=np.float32).reshape(3, 4) / 8,
    "ids": np.array([2, 0, 1], np.int32),
    "points": np.array([0.3, 0.6, 0.9], np.float32),
    "factor": 1.5,
}


def duals(score, rounding=None):
    score = np.asarray(score, np.float64)
    indices = {BATCH: 0, HEAD: 1, QUERY: np.arange(3)[:, None], KEY: np.arange(4)[None, :]}
    return Duals({**indices, SCORE: score}, CAPTURES, rounding)


def traced(function):
    return fl.trace_score(function).expression


def of_score(function, score):
    """Returns the derivative by the score at `score`, with the score's shape."""
    tangent = duals(score).tangent(traced(function), SCORE)
    return None if tangent is None else np.broadcast_to(tangent, np.shape(score))


def test_every_operation_has_a_tangent():
    assert set(TANGENTS) == set(OPERATIONS.values())


SMOOTH = {
    "add": lambda s, b, h, q, k: s + 3,
    "sub": lambda s, b, h, q, k: 3 - s,
    "mul": lambda s, b, h, q, k: s * s * (q - k),
    "neg": lambda s, b, h, q, k: -s,
    "abs": lambda s, b, h, q, k: fl.abs(s * s - 1),
    "minimum": lambda s, b, h, q, k: fl.minimum(s * s, 1 - s),
    "maximum": lambda s, b, h, q, k: fl.maximum(s * (k + 1), 0.1 * s),
    "clamp": lambda s, b, h, q, k: fl.clamp(s * s, 0.1, 1.3),
    "divide": lambda s, b, h, q, k: (s + 1) / (s + 7),
    "floored division": lambda s, b, h, q, k: s * (s // 0.3),
    "modulo": lambda s, b, h, q, k: (s * s) % 0.7,
    "modulo by": lambda s, b, h, q, k: 9.0 % (s + 5),
    "to float": lambda s, b, h, q, k: fl.to_float(s * 3),
    "to int": lambda s, b, h, q, k: s * fl.to_int(s * 2),
    "floor": lambda s, b, h, q, k: s * fl.floor(s * 2),
    "exp": lambda s, b, h, q, k: fl.exp(s / 2),
    "exp2": lambda s, b, h, q, k: fl.exp2(s / 2),
    "log": lambda s, b, h, q, k: fl.log(s + 4),
    "log2": lambda s, b, h, q, k: fl.log2(s + 4),
    "tanh": lambda s, b, h, q, k: 3 * fl.tanh(s / 3),
    "fast tanh": lambda s, b, h, q, k: 3 * fl.tanh(s / 3, precision="fast"),
    "sigmoid": lambda s, b, h, q, k: fl.sigmoid(2 * s),
    "sqrt": lambda s, b, h, q, k: fl.sqrt(s + 4),
    "sin": lambda s, b, h, q, k: fl.sin(s * 2),
    "cos": lambda s, b, h, q, k: fl.cos(s * 2),
    "where": lambda s, b, h, q, k: fl.where((s > 0) ^ (q == k), s * s, s / 2),
    "a row of many": lambda s, b, h, q, k: fl.exp(fl.sin(s) * fl.sqrt(s * s + 1)) / (fl.abs(s) + 1),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_tangents_are_finite_differences(name):
    score = np.random.default_rng(3).uniform(-2, 2, (3, 4))
    expression, step = traced(SMOOTH[name]), 1e-5
    tangent = of_score(SMOOTH[name], score)
    ahead, behind = duals(score + step).value(expression), duals(score - step).value(expression)
    np.testing.assert_allclose(tangent, (ahead - behind) / (2 * step), rtol=1e-8, atol=1e-8)


KINKS = pytest.mark.parametrize(
    ("function", "at", "expected"),
    [
        (lambda s, b, h, q, k: fl.maximum(s, 2.0), 2.0, 0.5),
        (lambda s, b, h, q, k: fl.maximum(2.0, s), 2.0, 0.5),
        (lambda s, b, h, q, k: fl.minimum(3 * s, s), 0.0, 2),
        (lambda s, b, h, q, k: fl.minimum(s, -s), 0.0, 0),
        (lambda s, b, h, q, k: fl.maximum(s, 0.0), -0.0, 0.5),
        (lambda s, b, h, q, k: fl.maximum(s, s), 1.0, 1),
        (lambda s, b, h, q, k: fl.clamp(s, -1.0, 1.0), 1.0, 1),
        (lambda s, b, h, q, k: fl.clamp(s, -1.0, 1.0), -1.0, 1),
        (lambda s, b, h, q, k: fl.clamp(s, -1.0, 1.0), 1.5, 0),
        (lambda s, b, h, q, k: fl.abs(s), 0.0, 0),
        (lambda s, b, h, q, k: fl.where(s > 0, s, 2 * s), 0.0, 2),
        (lambda s, b, h, q, k: s % 2.0, 4.0, 1),
        (lambda s, b, h, q, k: 7.0 % s, 2.0, -3),
        (lambda s, b, h, q, k: 7 % s, 2.0, -3),
        (lambda s, b, h, q, k: fl.sqrt(s), 0.0, np.inf),
        (lambda s, b, h, q, k: fl.where(s > 0, fl.log(s), -1.0), 0.0, 0),  # 1 / 0 on the branch that is not selected
        (lambda s, b, h, q, k: fl.where(s > 0, fl.sqrt(s), s), -1.0, 1),  # NaN there
    ],
)


@KINKS
def test_conventions(function, at, expected):
    assert of_score(function, at) == expected


@pytest.mark.parametrize("name", ["maximum", "minimum", "abs", "clamp"])
@pytest.mark.parametrize("at", [0.0, -0.0, 1.0, -2.0, 3.0])
def test_slopes_at_kinks_equal_torchs(name, at):
    torch = pytest.importorskip("torch")
    cases = {
        "maximum": (lambda s, b, h, q, k: fl.maximum(s, 3 - 2 * s), lambda x: torch.maximum(x, 3 - 2 * x)),
        "minimum": (lambda s, b, h, q, k: fl.minimum(s * s, s), lambda x: torch.minimum(x * x, x)),
        "abs": (lambda s, b, h, q, k: fl.abs(s), torch.abs),
        "clamp": (lambda s, b, h, q, k: fl.clamp(s, -2.0, 3.0), lambda x: torch.clamp(x, -2.0, 3.0)),
    }
    ours, theirs = cases[name]
    x = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    theirs(x).backward()
    assert of_score(ours, at) == x.grad.item()
    assert evaluate(derivative(traced(ours), SCORE), {SCORE: at}, {}) == x.grad.item()


@pytest.mark.parametrize("choose", [fl.maximum, fl.minimum])
def test_minimum_and_maximum_have_the_tangent_of_the_number_beside_nan(choose):
    """If one operand is NaN, maximum and minimum return the other."""
    assert of_score(lambda s, b, h, q, k: choose(fl.sqrt(s), s), -1.0) == 1
    assert of_score(lambda s, b, h, q, k: choose(s, fl.sqrt(s)), -1.0) == 1


@KINKS
def test_symbolic_derivatives_keep_the_conventions(function, at, expected):
    symbolic = derivative(traced(function), SCORE)
    assert evaluate(symbolic, {SCORE: at, QUERY: 0, KEY: 0}, CAPTURES) == expected


@pytest.mark.parametrize("name", SMOOTH)
def test_symbolic_derivatives_agree(name):
    """Two implementations that only share the operations."""
    score = np.random.default_rng(3).uniform(-2, 2, (3, 4))
    symbolic = derivative(traced(SMOOTH[name]), SCORE)
    values = {SCORE: score, QUERY: np.arange(3)[:, None], KEY: np.arange(4)[None, :]}
    got = evaluate(symbolic, values, CAPTURES)
    np.testing.assert_allclose(np.broadcast_to(got, (3, 4)), of_score(SMOOTH[name], score), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: fl.to_float(q - k),
        lambda s, b, h, q, k: 2.0,
        lambda s, b, h, q, k: fl.floor(s),
        lambda s, b, h, q, k: fl.to_int(s) * 2,
        lambda s, b, h, q, k: s // 2,
        lambda s, b, h, q, k: fl.where(s > 0, 1.0, 0.0) * FACTOR,
        lambda s, b, h, q, k: U[fl.to_int(s)],
    ],
)
def test_values_that_do_not_depend_on_the_score(function):
    assert of_score(function, 1.5) is None


def test_gathers_are_distinct_and_only_of_gradients():
    def score(s, b, h, q, k):
        return s + U[q] * W[k] + U[q] * 2 + U[k] * POINTS[q] + TABLE[IDS[q], k + 1]

    names = [str(node.capture.name) for node in gathers(traced(score))]
    assert sorted(names) == ["table", "u", "u", "w"]
    assert len(gathers(traced(lambda s, b, h, q, k: s + TABLE[fl.to_int(W[q]), k]))) == 2  # one is the other's index


def test_tangents_of_gathers():
    expression = traced(lambda s, b, h, q, k: s * U[q] * W[k] + U[q] * FACTOR + TABLE[fl.to_int(W[q]), k])
    score = np.random.default_rng(1).standard_normal((3, 4))
    run, nodes = duals(score), {node.capture.name: node for node in gathers(expression)}
    by_name = {}
    for node in gathers(expression):
        by_name.setdefault(node.capture.name, []).append(run.tangent(expression, node))
    clamped = np.array([1.5, 0.25, -0.75, -0.75])  # w at k, clamped
    np.testing.assert_allclose(by_name["u"][0], score * clamped + 1.5)
    assert by_name["table"] == [1] and set(nodes) == {"u", "w", "table"}
    within, outside = sorted(by_name["w"], key=lambda tangent: tangent is not None)
    assert within is None  # through an integer
    np.testing.assert_allclose(outside, score * np.array([0.5, -1.25, 2.0])[:, None])


def test_broadcasting_is_lazy():
    run = duals(np.zeros((3, 4)))
    gather = gathers(expression := traced(lambda s, b, h, q, k: s + U[h] * (q - 1)))[0]
    assert run.tangent(expression, gather).shape == (3, 1)
    assert run.tangent(expression, SCORE).shape == ()
    assert run.value(gather.indices[0]).shape == ()


def test_rounding_applies_to_values_that_depend_on_the_score():
    def coarse(array):
        return np.round(np.asarray(array) * 4) / 4

    run = duals(np.array(0.3), coarse)
    expression = traced(lambda s, b, h, q, k: fl.exp(s * 1.1) * (FACTOR * 0.77))
    assert run.value(expression) == coarse(coarse(np.exp(coarse(0.3 * 1.1))) * (1.5 * 0.77))
    inner = coarse(np.exp(coarse(0.3 * 1.1)) * 1)
    assert run.tangent(expression, SCORE) == coarse(coarse(inner * coarse(1.1)) * (1.5 * 0.77))


def test_shared_subexpressions_are_computed_once(monkeypatch):
    calls = []
    rule = TANGENTS[ops.Exp]
    monkeypatch.setitem(TANGENTS, ops.Exp, lambda *arguments: calls.append(1) or rule(*arguments))
    node = ops.Exp(SCORE)
    for _ in range(12):
        node = ops.Add(node, node)
    assert duals(0.0).tangent(node, SCORE) == 2.0**12
    assert len(calls) == 1
