"""Loss curves: comparison, and detection of a wrong attention among rounding differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.loss_curves import FLOOR, SMOOTHED, apart, compared, smoothed


def test_curves_are_smoothed_by_trailing_means() -> None:
    assert smoothed([4.0, 2.0, 3.0, 7.0], 2) == [4.0, 3.0, 2.5, 5.0]
    assert smoothed([5.0] * 100) == [5.0] * 100


def test_curves_are_compared_smoothed_and_at_the_start_as_they_are() -> None:
    """An outlier counts a thirtieth, except among the first steps; a trend counts in full."""
    flat = [2.0] * 90
    leap = [*flat[:60], 2.6, *flat[61:]]
    early = [2.0, 2.02, *flat[2:]]
    curves = {"standard": flat, "leap": leap, "trend": [2.06] * 90, FLOOR: early}
    said, *lines = compared(curves)
    assert "90 steps" in said and lines == [
        f"the floor, {FLOOR}: 0.50%; 1.000%",
        "leap: 1.00%; 0.000%",
        "trend: 3.00%; 3.000%",
    ]
    assert apart(leap, flat) == pytest.approx(0.3) and SMOOTHED == 30


def test_without_standard_attention_nothing_is_compared() -> None:
    assert compared({"flashgen": [1.0]}) == [] == compared({"standard": [1.0]})


def test_the_learning_rate_rises_and_falls() -> None:
    pytest.importorskip("torch")
    from benchmarks.gpt2 import rate_of

    rates = [rate_of(step, 300, 2**19) for step in range(300)]
    assert max(rates) == rates[99] == pytest.approx(6e-4) and rates[0] == pytest.approx(6e-6)
    assert rates[:100] == sorted(rates[:100]) and rates[100:] == sorted(rates[100:], reverse=True)
    assert rates[-1] == pytest.approx(6e-5, rel=1e-2)
    assert rate_of(99, 300, 32 * 1024) == pytest.approx(1.5e-4) and rate_of(99, 300, 2**20) == pytest.approx(6e-4)
    assert rate_of(0, 1, 2**19) == pytest.approx(6e-4)


def test_a_wrong_attention_exceeds_the_floor() -> None:
    """A mask that lets each token see the next one, in a model that is small enough for a CPU."""
    torch = pytest.importorskip("torch")
    from benchmarks import gpt2, train

    def peeking(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(2)
        return torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1).to(v.dtype) @ v

    def losses(attend: Callable[..., Any], steps: int = 60) -> list[float]:
        torch.manual_seed(0)
        model = gpt2.GPT2(gpt2.Config(64, 256, 2, 2, 64), attend)
        step, of_step = gpt2.Trainer(model, model, 2**19, steps), gpt2.batches(4, 64, 0, "cpu")
        return [float(step(*of_step(number), number)) for number in range(steps)]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is slower with several threads
    try:
        standard, exact, wrong = (losses(attend) for attend in (train._standard, train._standard_in_float32, peeking))
    finally:
        torch.set_num_threads(threads)
    assert standard[-1] < 0.98 * standard[0]
    for first in (30, 60):
        floor = apart(smoothed(exact)[:first], smoothed(standard)[:first])
        assert 0 < floor < apart(smoothed(wrong)[:first], smoothed(standard)[:first]) / 5
