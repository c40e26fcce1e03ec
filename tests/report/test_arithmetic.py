"""Formulas in texts: values and refusals."""

from __future__ import annotations

import pytest

from flashgen.errors import ArgumentError
from flashgen.report.arithmetic import evaluate


@pytest.mark.parametrize(
    ("formula", "value"),
    [("2 * (a + 3) - b", 7), ("a / 2 * 2", 2), ("-a % 4", 1), ("1 << a", 8), ("a * 0.5", 1.5)],
)
def test_values(formula: str, value: float) -> None:
    assert evaluate(formula, {"a": 3, "b": 5}) == value


@pytest.mark.parametrize("formula", ["c + 1", "a ** 2", "a.real", "f(a)", "[a]", "a if b else a", "'a'", "a +"])
def test_anything_else_is_refused_by_its_text(formula: str) -> None:
    with pytest.raises(ArgumentError, match="the formula"):
        evaluate(formula, {"a": 3, "b": 5})
