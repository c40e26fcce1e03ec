"""Arrays with few elements are judged together with those of further problems, by the same rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention, reference
from flashgen.verify import Case, Shape, learned, named_cases, verify
from flashgen.verify.gradients import same_bits
from flashgen.verify.problems import ENOUGH
from flashgen.verify.samples import samples, together

SLOPES = fg.AttentionSpec(8, mask=fg.causal(), score=learned(fg.alibi("slopes")), dropout=0.1)
TABLE = fg.AttentionSpec(8, score=learned(fg.relative_bias(fg.Tensor("table", ndim=2, dtype="float32"), 12)))
PLAIN = fg.AttentionSpec(8)


@pytest.mark.parametrize(
    ("spec", "shape", "count"),
    [
        (PLAIN, Shape(40, 60), 1),
        (PLAIN, Shape(40, 1), 4),  # two problems of two heads: four rows of dk
        (PLAIN, Shape(1, 40, 2, 4, 1), 2),  # eight of dq
        (PLAIN, Shape(0, 40), 1),
        (SLOPES, Shape(40, 60), 8),
        (SLOPES, Shape(40, 60, 1, 16, 2), 1),
        (SLOPES, Shape(40, 60, 1, 12, 2), 2),
        (TABLE, Shape(40, 60, 1, 16, 2), 1),
        (TABLE, Shape(1, 1, 8, 4, 2), 4),  # one element of each of four heads' rows is read
    ],
)
def test_the_number_of_problems_gives_enough_elements(spec: fg.AttentionSpec, shape: Shape, count: int) -> None:
    assert len(samples(Case(spec, shape), 3, backward=True)) == count
    assert len(samples(Case(spec, shape), 3, backward=False)) == 1


def test_problems_have_separate_inputs_gradients_and_dropout() -> None:
    case = Case(SLOPES, Shape(40, 60), lse_gradient=True)
    first, second, *_ = samples(case, 3, backward=True)
    for one, other in zip(
        (*first.qkv, first.d_out, first.d_lse), (*second.qkv, second.d_out, second.d_lse), strict=True
    ):
        assert one is not None and other is not None and not same_bits(one, other)
    assert (first.options["seed"], second.options["seed"]) == (3, 4) and "slopes" in first.options
    again = samples(case, 4, backward=True)[0]
    assert all(same_bits(one, other) for one, other in zip(second.qkv, again.qkv, strict=True))


def test_arrays_of_one_problem_are_unchanged() -> None:
    one = {"dq": np.ones((2, 3))}
    assert together([one])["dq"] is one["dq"]
    assert together([one, {"dq": np.zeros(4)}])["dq"].tolist() == [1] * 6 + [0] * 4


def test_every_problems_gradients_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in one slope of two in one problem, with all others right, fails."""
    calls = 0

    def backward(d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, into: Any, **given: Any) -> Any:
        nonlocal calls
        calls += 1
        found = reference.backward(SLOPES, q, k, v, d_out, **given)
        if calls == wrong:
            found.captures["slopes"][1] += 1000
        return found

    monkeypatch.setattr(attention, "compile", lambda *_, **__: SimpleNamespace(backward=backward, edited=()))
    for wrong in (0, 1, 8):
        calls = 0
        (result,) = verify([Case(SLOPES, Shape(9, 17))], passes=("backward",), emulate=True)
        assert calls == 8 and result.ok == (wrong == 0) and (wrong == 0 or result.worst == "d_slopes")


def test_the_sweeps_tiny_shapes_have_enough_rows_in_one_call() -> None:
    for case in named_cases():
        shape = case.shape
        assert shape.batch * shape.heads_q * shape.len_q >= ENOUGH <= shape.batch * shape.heads_kv * shape.len_k
