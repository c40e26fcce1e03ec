"""Random expressions: the printed text, compiled by the host's compiler, has NumPy's values."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from flashgen.errors import SpecError
from flashgen.language import operations as op
from flashgen.language.evaluate import evaluate
from flashgen.language.operations import Capture, Load, kind_of
from flashgen.language.well_formed import build

BATCH_OF = 40
CAPTURES = {
    name: Capture(name, dtype, ndim)
    for name, dtype, ndim in (
        ("ids", "int32", 1), ("wide", "int64", 2), ("bytes", "uint8", 1), ("table", "float32", 2),
        ("half", "float16", 1), ("brain", "bfloat16", 1), ("flags", "bool", 2), ("window", "int32", 0),
        ("zero", "int32", 0), ("cap", "float32", 0),
    )
}  # fmt: skip
OF_KIND = {kind: [c for c in CAPTURES.values() if c.kind == kind] for kind in ("bool", "int", "float")}
INTEGERS = (0, 1, -1, 2, 3, 5, -7, 16, 100, -128, 2**31 - 1, -(2**31), 65536)
FLOATS = (0.0, 0.5, -1.0, 2.0, 3.25, -0.125, 10.0)
ARITHMETIC = (op.Add, op.Sub, op.Mul, op.Minimum, op.Maximum, op.FloorDiv, op.FloorMod)
BITWISE = (op.ShiftLeft, op.ShiftRight, op.BitAnd, op.BitOr, op.BitXor)
UNARY_FLOAT = (op.ToFloat, op.Floor, op.Exp, op.Exp2, op.Log, op.Log2, op.Tanh, op.Sigmoid, op.Sqrt, op.Sin, op.Cos)
COMPARISONS = (op.Equal, op.NotEqual, op.Less, op.LessEqual, op.Greater, op.GreaterEqual)
LOGIC = (op.And, op.Or, op.Xor)


class Grower:
    """Builds random expressions of a kind; some subexpressions are reused, so that they are shared."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.grown: dict[str, list[sympy.Basic]] = {"bool": [], "int": [], "float": []}

    def grow(self, kind: str, depth: int) -> sympy.Basic:
        if self.grown[kind] and self.rng.random() < 0.1:
            return self.rng.choice(self.grown[kind])
        if depth == 0 or self.rng.random() < 0.1:
            return self._leaf(kind)
        while True:
            try:
                node = getattr(self, f"_{kind}")(depth - 1)
            except SpecError:  # not available for these kinds: draw another
                continue
            self.grown[kind].append(node)
            return node

    def _leaf(self, kind: str) -> sympy.Basic:
        pick = self.rng.random()
        if pick < 0.3:
            capture = self.rng.choice(OF_KIND[kind])
            return Load(capture, *(self.grow("int", 0) for _ in range(capture.ndim))) if capture.ndim else capture
        if kind == "int":
            return self.rng.choice((*op.INDICES, op.LEN_Q, op.LEN_K, *map(sympy.Integer, INTEGERS)))
        if kind == "float":
            return op.SCORE if pick < 0.7 else sympy.Float(self.rng.choice(FLOATS))
        return self.rng.choice((sympy.true, sympy.false))

    def _any(self, depth: int) -> sympy.Basic:
        return self.grow(self.rng.choice(("bool", "int", "float")), depth)

    def _two(self, cls: Any, depth: int, kinds: tuple[str, ...]) -> sympy.Basic:
        return build(cls, self.grow(self.rng.choice(kinds), depth), self.grow(self.rng.choice(kinds), depth))

    def _int(self, depth: int) -> sympy.Basic:
        pick = self.rng.random()
        if pick < 0.5:
            return self._two(self.rng.choice(ARITHMETIC), depth, ("int",))
        if pick < 0.55:
            return self._two(self.rng.choice((op.Add, op.Sub, op.Mul)), depth, ("int", "bool"))
        if pick < 0.75:
            return self._two(self.rng.choice(BITWISE), depth, ("int",))
        if pick < 0.85:
            return build(self.rng.choice((op.Neg, op.Abs)), self.grow("int", depth))
        if pick < 0.92:
            return build(op.ToInt, self._any(depth))
        return self._where("int", depth)

    def _float(self, depth: int) -> sympy.Basic:
        pick = self.rng.random()
        if pick < 0.5:
            return self._two(self.rng.choice(ARITHMETIC), depth, ("float", "float", "int"))
        if pick < 0.6:
            return self._two(op.Divide, depth, ("float", "int"))
        if pick < 0.7:
            return build(self.rng.choice((op.Neg, op.Abs)), self.grow("float", depth))
        if pick < 0.9:
            return build(self.rng.choice(UNARY_FLOAT), self.grow(self.rng.choice(("float", "int")), depth))
        return self._where("float", depth)

    def _bool(self, depth: int) -> sympy.Basic:
        pick = self.rng.random()
        if pick < 0.5:
            return self._two(self.rng.choice(COMPARISONS), depth, ("int", "int", "float", "bool"))
        if pick < 0.8:
            return self._two(self.rng.choice(LOGIC), depth, ("bool",))
        return build(op.Not, self.grow("bool", depth)) if pick < 0.9 else self._where("bool", depth)

    def _where(self, kind: str, depth: int) -> sympy.Basic:
        branches = {"bool": ("bool",), "int": ("int", "int", "bool"), "float": ("float", "float", "int", "bool")}[kind]
        then, otherwise = (self.grow(self.rng.choice(branches), depth) for _ in range(2))
        return build(op.Where, self.grow("bool", depth), then, otherwise)


def comparable(node: sympy.Basic, values: Any, captures: Any) -> np.ndarray[Any, Any]:
    """Returns the rows at which float32 represents all intermediate floats. Integers are always compared."""
    rows = np.ones(len(values[op.QUERY]), bool)
    for part in sympy.preorder_traversal(node):
        if not isinstance(part, op.Operation):
            continue
        of_part = evaluate(part, values, captures)
        if "float" in map(kind_of, part.args):
            for operand in part.args:
                if kind_of(operand) == "int":
                    rows &= np.abs(np.float64(evaluate(operand, values, captures))) < 2**24
        if part.kind == "float":
            rows &= np.abs(of_part) < 1e30  # infinities and NaN are excluded, too
            if part != node:
                rows &= of_part.astype(np.float32) == of_part
                rows &= not isinstance(part, op.Divide) or part.args[1] in (1, -1, 2, 16, -128, 0.5, -0.125)
            if isinstance(part, (op.FloorDiv, op.FloorMod)):
                a, b = (evaluate(operand, values, captures).astype(np.float32) for operand in part.args)
                with np.errstate(all="ignore"):
                    quotient, exact = a / b, a.astype(np.float64) / b
                    rows &= (np.floor(quotient) == np.floor(exact)) & (np.abs(quotient) < 2**20)
        if isinstance(part, (op.Sin, op.Cos)):
            rows &= np.abs(evaluate(part.args[0], values, captures)) < 1e4
    return rows


@settings(
    max_examples=8,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.integers(0, 2**32 - 1))
@pytest.mark.rotated(3)
def test_printed_text_has_numpys_values(run: Any, values: Any, captures: Any, seed: int) -> None:
    grower = Grower(random.Random(seed))
    nodes = [grower.grow(kind, 5) for kind in ("bool", "int", "float", "int") * (BATCH_OF // 4)]
    compared = 0
    for node, result in zip(nodes, run(nodes, captures), strict=True):
        with np.errstate(all="ignore"):
            expected, rows = evaluate(node, values, captures), comparable(node, values, captures)
        expected = np.broadcast_to(expected, result.shape)
        compared += int(rows.sum())
        if kind_of(node) == "float":
            np.testing.assert_allclose(result[rows], expected[rows], rtol=2e-5, atol=4e-6, err_msg=str(node))
        else:
            np.testing.assert_array_equal(result[rows], expected[rows].astype(np.int64), err_msg=str(node))
    assert compared > BATCH_OF * 10, "too few values are comparable"
