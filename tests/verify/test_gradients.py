"""Gradients: inputs, bounds, and the report about a wrong backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention, reference
from flashgen.verify import (
    Case,
    Shape,
    gradients_by_name,
    judged_gradients,
    learned,
    learned_variants,
    random_gradients,
    random_inputs,
    verify,
)
from flashgen.verify.gradients import expected_gradients, poisoned_gradients, same_bits

SMALL = Shape(9, 17, batch=1, heads_q=2, heads_kv=1)
LEARNED = fg.AttentionSpec(8, mask=fg.causal(), score=learned(fg.alibi("slopes")))


def arrays(spec: fg.AttentionSpec) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    inputs = random_inputs(spec, SMALL)
    return inputs.q, inputs.k, inputs.v, random_gradients(spec, SMALL)[0], inputs.captures


def test_the_references_gradients_pass_and_others_fail() -> None:
    *given, captures = arrays(LEARNED)
    found = gradients_by_name(reference.low_precision_backward(LEARNED, *given, **captures))
    assert list(found) == ["dq", "dk", "dv", "d_slopes"]
    assert all(each.ok for each in judged_gradients(LEARNED, *given, found, **captures).values())
    for name in found:
        wrong = found | {name: found[name] + 0.5}
        verdicts = judged_gradients(LEARNED, *given, wrong, **captures)
        assert [other for other, verdict in verdicts.items() if not verdict.ok] == [name]


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "d_slopes"])
def test_at_most_twice_the_error_of_standard_attention_passes(name: str) -> None:
    *given, captures = arrays(LEARNED)
    expected, low = expected_gradients(LEARNED, *given, **captures)

    def passes(factor: float) -> bool:
        found = expected | {name: expected[name] + factor * (low[name] - expected[name])}
        return all(each.ok for each in judged_gradients(LEARNED, *given, found, **captures).values())

    assert passes(2) and not passes(2.1)


def test_gradients_of_inputs_follow_the_spec_and_the_seed() -> None:
    spec = fg.AttentionSpec(8, "bfloat16", value_dim=16, layout="bshd")
    (one, lse), (two, _), (other, none) = (random_gradients(spec, SMALL, seed, lse) for seed, lse in
                                           ((1, True), (1, True), (2, False)))  # fmt: skip
    assert one.shape == (1, 9, 2, 16) and one.dtype == ml_dtypes.bfloat16
    assert lse is not None and lse.shape == (1, 2, 9) and lse.dtype == np.float32 and none is None
    assert same_bits(one, two) and not same_bits(one, other)


def test_poison_covers_every_gradient() -> None:
    poison = poisoned_gradients(LEARNED, random_inputs(LEARNED, SMALL))
    assert [array.shape for array in poison] == [(1, 2, 9, 8), (1, 1, 17, 8), (1, 1, 17, 8), (2,)]
    assert poison[3].dtype == np.float32 and all(np.isnan(array).all() for array in poison)


def test_learned_requests_gradients_of_all_float_arrays() -> None:
    score = learned(fg.softcap(fg.Scalar("cap", "float32"))(fg.relative_bias("table", 4)))
    assert {capture.name: capture.grad for capture in score.captures} == {"cap": False, "table": True}
    assert all(any(c.grad for c in variant.score.captures) for variant in learned_variants() if variant.score)


def test_bits_are_distinguished() -> None:
    zeros, nans = np.zeros(3, np.float16), np.full(3, np.nan, np.float16)
    assert same_bits(zeros, zeros.copy()) and same_bits(nans, nans.copy())
    assert not same_bits(zeros, -zeros) and not same_bits(zeros, zeros.astype(np.float32))


class Stub:
    """A compiled attention with the reference's gradients, slightly changed in the second run.

    A run has eight problems, with two slopes each.
    """

    edited = ()

    def __init__(self) -> None:
        self.calls = 0

    def backward(self, d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, into: Any, **given: Any) -> Any:
        self.calls += 1
        assert out.dtype == q.dtype and lse.dtype == np.float32 and np.isnan(into[0].astype(np.float32)).all()
        found = reference.low_precision_backward(LEARNED, q, k, v, d_out, **given)
        dq, dk, dv = (array.astype(np.float16) for array in (found.dq, found.dk, found.dv))
        dk.flat[0] += np.float16(2**-12) * (self.calls > 8)
        slopes = found.captures["slopes"].astype(np.float32)
        return SimpleNamespace(dq=dq, dk=dk, dv=dv, captures={"slopes": slopes})


@pytest.mark.parametrize("deterministic", [False, True])
def test_only_a_deterministic_backward_must_be_reproducible(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = Stub()
    monkeypatch.setattr(attention, "compile", lambda *_, **__: stub)
    results = list(
        verify(
            [Case(LEARNED, SMALL, lse_gradient=True)],
            passes=("backward",),
            deterministic=deterministic,
            emulate=True,
            schedule_count=2,
        )
    )
    first, second = results
    assert first.ok and first.pass_ == "backward" and list(first.verdicts) == ["dq", "dk", "dv", "d_slopes"]
    assert second.ok is not deterministic
    assert second.problem == ("not deterministic: dk differ from the first run's" if deterministic else None)


def test_both_passes_of_a_case() -> None:
    forward, backward = verify([Case(LEARNED, SMALL)], passes=("forward", "backward"), emulate=True)
    assert (forward.pass_, list(forward.verdicts)) == ("forward", ["out"])
    assert (backward.pass_, list(backward.verdicts)) == ("backward", ["dq", "dk", "dv", "d_slopes"])
    assert backward.worst in backward.verdicts and backward.verdict == backward.verdicts[backward.worst]


def test_the_worst_result_is_reported() -> None:
    *given, captures = arrays(LEARNED)
    found = gradients_by_name(reference.low_precision_backward(LEARNED, *given, **captures))
    from flashgen.verify import Result

    verdicts = judged_gradients(LEARNED, *given, found | {"dv": np.full_like(found["dv"], np.nan)}, **captures)
    result = Result(Case(LEARNED, SMALL), "here", 0.0, verdicts, pass_="backward")
    assert result.worst == "dv" and not result.ok
