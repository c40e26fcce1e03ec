"""Backward kernels of every kind of plan on the emulator: correct in every thread order, clean under every sanitizer.

The tiles are small, so that a small call has many of them, and the spec uses every feature. Default plans are tested
with every variant in tests/verify/test_sweep.py.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention, reference
from flashgen.codegen.mma_sync.backward_plans import BackwardPlan
from flashgen.runtime.schedule import Schedule, schedules
from flashgen.verify import Shape, gradients_by_name, judged_gradients, learned, random_gradients, random_inputs
from flashgen.verify.gradients import poisoned_gradients, same_bits

SHAPE = Shape(70, 100, 1, 2, 1)
SEED = 5
PLANS = (
    BackwardPlan(32, 32, 2, 1, 1),
    BackwardPlan(16, 48, 3, 1, 2),
    BackwardPlan(32, 32, 4, 2, 1),
    BackwardPlan(64, 32, 2, 2, 2),
    BackwardPlan(64, 32, 8, 4, 1),
    BackwardPlan(64, 64, 4, 4, 2),
)
every_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan).removeprefix("BackwardPlan"))


def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Gradients of captures that all scores of a head share, those of a query, those of a key, and none."""
    by_head, by_query = fg.Tensor("by_head"), fg.Tensor("by_query", "float16", 2)
    by_key, own = fg.Tensor("by_key", "bfloat16"), fg.Tensor("own", "float32", 3)
    return 4 * fg.tanh(s / 4) + by_head[h] * (k - q) + by_query[h, q] * (k % 3) + by_key[k] + own[h, q, k]


@functools.cache
def problem(split: int) -> tuple[Any, ...]:
    """Returns a spec whose columns `split` warps can divide, and a call of it with its expected results."""
    dims: dict[str, int] = {"head_dim": 24, "value_dim": 40} if split == 1 else {"head_dim": 16 * split}
    mask = fg.sliding_window(60, 20)
    spec = fg.AttentionSpec(**dims, dropout=0.17, score=learned(fg.trace_score(score)), mask=mask)
    inputs, (d_out, d_lse) = random_inputs(spec, SHAPE), random_gradients(spec, SHAPE, of_lse=True)
    given = {"seed": SEED, **inputs.captures}
    out, lse = reference.attention(spec, inputs.q, inputs.k, inputs.v, return_lse=True, **given)
    return spec, inputs, d_out, (out.astype(np.float16), lse.astype(np.float32)), {"d_lse": d_lse, **given}


def gradients(plan: BackwardPlan, deterministic: bool, schedule: Schedule, sanitize: Any = None) -> dict[str, Any]:
    spec, inputs, d_out, outputs, given = problem(plan.split)
    options: dict[str, Any] = {"deterministic": deterministic, "backward_plan": plan, "schedule": schedule}
    compiled = attention.compile(spec, emulate=True, sanitize=sanitize, **options)
    into = poisoned_gradients(spec, inputs)
    return gradients_by_name(compiled.backward(d_out, inputs.q, inputs.k, inputs.v, *outputs, into=into, **given))


def check(plan: BackwardPlan, found: dict[str, Any]) -> None:
    spec, inputs, d_out, _, given = problem(plan.split)
    verdicts = judged_gradients(spec, inputs.q, inputs.k, inputs.v, d_out, found, **given)
    assert list(verdicts) == ["dq", "dk", "dv", "d_by_head", "d_by_key", "d_by_query", "d_own"]
    assert all(verdict.ok for verdict in verdicts.values()), {name: str(each) for name, each in verdicts.items()}


@every_plan
@pytest.mark.rotated(9)
def test_gradients_are_right_in_every_thread_order(plan: BackwardPlan) -> None:
    for schedule in schedules(12):
        check(plan, gradients(plan, False, schedule))


@every_plan
@pytest.mark.rotated(9)
def test_deterministic_gradients_have_the_same_bits_in_every_thread_order(plan: BackwardPlan) -> None:
    first = gradients(plan, True, Schedule())
    check(plan, first)
    for schedule in [*schedules(12), Schedule("random", "random", 77), Schedule("random", "random", 78, workers=3)]:
        found = gradients(plan, True, schedule)
        differing = [name for name in found if not same_bits(found[name], first[name])]
        assert not differing, f"{differing} under {schedule}"


@every_plan
def test_workers_divide_the_blocks(plan: BackwardPlan) -> None:
    check(plan, gradients(plan, False, Schedule("random", "random", workers=4)))


@pytest.mark.slow
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize(("plan", "deterministic"), [(PLANS[0], False), (PLANS[3], True), (PLANS[4], False)], ids=str)
@pytest.mark.covering(9)
def test_sanitizers_find_nothing(plan: BackwardPlan, deterministic: bool, sanitize: str) -> None:
    for schedule in (Schedule("greedy_warp", "late"), Schedule("reverse", "early")):
        check(plan, gradients(plan, deterministic, schedule, sanitize))
