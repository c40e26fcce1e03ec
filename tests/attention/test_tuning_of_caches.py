"""Tuning of serving calls: decode kernels, pages, 8-bit keys. Timings are mocked except on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import attention
from flashgen.attention import trials, tuning
from flashgen.attention.callable import Attention
from flashgen.attention.problem import CACHE
from flashgen.build.cache import KernelCache
from flashgen.codegen.decode_candidates import decode_candidates
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.mma_sync.decode_plans import DecodePlan, choose_decode_plan, decode_plans
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.plan import Plan
from flashgen.codegen.targets import TARGETS, target_named
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.launch.engines import Emulator
from flashgen.runtime.timing import Run
from flashgen.verify import Inputs, Shape, random_inputs
from flashgen.verify.check import judged

SPEC = fg.AttentionSpec(16, mask=fg.causal())
PAGED = fg.AttentionSpec(32, mask=fg.causal(), page_size=16)
NARROW = fg.AttentionSpec(32, mask=fg.causal(), page_size=16, kv_dtype="float8_e4m3")
FEW = Shape(1, 600, 1, 4, 1)


def compiled(folder: Path, spec: fg.AttentionSpec, target: str = "sm_80") -> Attention:
    return Attention(spec, target_named(target), Emulator(), tuned=KernelCache(folder))


def taken_apart(inputs: Inputs) -> tuple[tuple[Any, Any, Any], dict[str, Any], dict[str, Any]]:
    """Returns arrays, captures, and page tables with lengths."""
    cache = {name: value for name, value in inputs.captures.items() if name in CACHE}
    captures = {name: value for name, value in inputs.captures.items() if name not in CACHE}
    return (inputs.q, inputs.k, inputs.v), captures, cache


def tuned(it: Attention, inputs: Inputs, *plans: Plan, fast: Plan) -> trials.Tuning:
    def times(runs: Mapping[str, Run]) -> dict[str, float]:
        for run in runs.values():
            run()
        return {name: 2.0 if name == str(fast) else 5.0 for name in runs}

    arrays, captures, cache = taken_apart(inputs)
    return tuning.tune(it.forward, arrays, captures, cache=cache, plans=plans, timer=times)


def assert_right(it: Attention, inputs: Inputs, **how: Any) -> np.ndarray[Any, Any]:
    out, lse = it(inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.captures, **how)
    verdict = judged(it.spec, inputs.q, inputs.k, inputs.v, out, lse, inputs.captures)
    assert verdict.ok, str(verdict)
    return np.asarray(out)


@pytest.mark.parametrize(
    ("spec", "shape", "other"),
    [
        pytest.param(SPEC, FEW, DecodePlan(16, 32, 2, 3, 2), id="contiguous keys"),
        pytest.param(PAGED, FEW, DecodePlan(16, 16, 2, 2, 2), id="pages of one sequence"),
        pytest.param(PAGED, Shape(2, 300, 3, 4, 1), DecodePlan(16, 16, 2, 3, 1, scheduled=True), id="a schedule"),
        pytest.param(PAGED, Shape(2, 300, 3, 4, 1), DecodePlan(16, 32, 2, 2, 1), id="parts in place of a schedule"),
        pytest.param(NARROW, Shape(2, 300, 2, 4, 1), DecodePlan(16, 64, 2, 2, 1, scheduled=True), id="keys of 8 bits"),
    ],
)
def test_decode_calls_run_the_winner(spec: fg.AttentionSpec, shape: Shape, other: DecodePlan, tmp_path: Path) -> None:
    it, inputs = compiled(tmp_path, spec), random_inputs(spec, shape)
    sizes = {"batch": shape.batch, "heads": shape.heads_q, "heads_kv": shape.heads_kv}
    own = it.plan_for(shape.len_q, shape.len_k, **sizes)
    before = assert_right(it, inputs)
    result = tuned(it, inputs, other, fast=other)
    assert isinstance(own, DecodePlan) and (result.default, result.winner) == (own, other)
    assert "decode" in result.kernel and result.lengths.group == 4
    for attending in (it, compiled(tmp_path, spec)):  # the second call acts as in a later process
        assert attending.plan_for(shape.len_q, shape.len_k, **sizes) == other
        out = assert_right(attending, inputs)
        assert attending.forward._prepared.values()[-1].built.kernel.plan == other
        assert np.abs(out.astype(np.float32) - before.astype(np.float32)).max() < 2e-3
        others = {**sizes, "heads_kv": shape.heads_q}  # each head separately
        assert attending.plan_for(shape.len_q, shape.len_k, **others) != other
        assert attending.plan_for(shape.len_q, 8 * shape.len_k, **sizes) != other


def test_num_splits_ignores_winners(tmp_path: Path) -> None:
    it, inputs = compiled(tmp_path, SPEC), random_inputs(SPEC, FEW)
    fixed = assert_right(it, inputs, num_splits=3)
    other = DecodePlan(16, 32, 2, 3, 2)
    tuned(it, inputs, other, fast=other)
    for attending in (it, compiled(tmp_path, SPEC)):
        np.testing.assert_array_equal(assert_right(attending, inputs, num_splits=3), fixed)


def test_precomputed_lists_fit_the_winner(tmp_path: Path) -> None:
    spec, other = fg.AttentionSpec(16, mask=fg.document("ids") & fg.causal()), DecodePlan(16, 32, 2, 3, 2)
    it, inputs = compiled(tmp_path, spec), random_inputs(spec, FEW)
    tuned(it, inputs, other, fast=other)
    for attending in (it, compiled(tmp_path, spec)):
        for heads_kv in (1, 2, 4):  # lists do not depend on it
            assert attending.plan_for(1, 600, 1, 4, heads_kv) == other
        lists = attending.tile_lists(1, 600, 1, 4, **inputs.captures)
        np.testing.assert_array_equal(
            assert_right(attending, inputs, tile_lists=lists), assert_right(attending, inputs)
        )


@pytest.mark.parametrize(
    ("target", "other"), [("sm_80", ForwardPlan(64, 32, 4)), ("sm_90a", HopperPlan(1, 64, 2))], ids=["sm_80", "sm_90a"]
)
def test_prompts_over_pages_run_the_winner(target: str, other: Plan, tmp_path: Path) -> None:
    it, inputs = compiled(tmp_path, PAGED, target), random_inputs(PAGED, Shape(130, 300, 2, 4, 4))
    sizes = {"batch": 2, "heads": 4, "heads_kv": 4}
    result = tuned(it, inputs, other, fast=other)
    assert (result.default, result.winner) == (it.plan, other)
    later = compiled(tmp_path, PAGED, target)
    assert later.plan_for(130, 304, **sizes) == other != later.plan_for(130, 3000, **sizes)
    assert_right(later, inputs)


def test_prompts_and_decode_steps_have_separate_winners(tmp_path: Path) -> None:
    it, other = compiled(tmp_path, PAGED), DecodePlan(16, 32, 2, 2, 1)
    tuned(it, random_inputs(PAGED, FEW), other, fast=other)
    assert it.plan_for(1, 600, 1, 4, 1) == other != it.plan_for(256, 600, 1, 4, 1) == it.plan


def test_wrong_arguments(tmp_path: Path) -> None:
    paged, (arrays, _, cache) = compiled(tmp_path, PAGED), taken_apart(random_inputs(PAGED, FEW))
    with pytest.raises(ArgumentError, match=r"page_table is missing: the spec has page_size=16; give int32 \(batch"):
        paged.tune(*arrays)
    with pytest.raises(ArgumentError, match="the spec has no 8-bit keys and values; leave it out"):
        paged.tune(*arrays, **cache, k_scale=np.ones(1, np.float32))
    ragged = attention.compile(fg.AttentionSpec(32, layout="thd", page_size=16), emulate=True)
    with pytest.raises(UnsupportedError, match="a mixed plan, of that of prompts and that of decode steps"):
        ragged.tune(*arrays, **cache)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spec", [SPEC, PAGED, NARROW, fg.AttentionSpec(128, "bfloat16", mask=fg.causal())], ids=str)
def test_candidates_fit_and_divide_work_differently(spec: fg.AttentionSpec, target: str) -> None:
    for scheduled in {False, spec.page_size is not None}:
        on = target_named(target)
        if spec.kv_dtype and on.compute_capability < 80:  # a target without these instructions
            continue
        own = choose_decode_plan(spec, on, scheduled=scheduled)
        tried = decode_candidates(spec, on, own)
        assert tried[0] == own and 6 <= len(tried) == len(set(tried)) <= 12
        assert all(plan.problem(spec, on) is None and plan.tile_q == own.tile_q for plan in tried)
        assert all(plan.scheduled == scheduled for plan in tried), "only the device knows the lengths"
        assert len({(plan.threads, plan.blocks) for plan in tried}) >= 4 and len({plan.tile_k for plan in tried}) > 1
        assert tried == decode_candidates(spec, on, own)


def test_defaults_of_other_sizes_are_candidates() -> None:
    spec, hopper = fg.AttentionSpec(128, "bfloat16", mask=fg.causal()), target_named("sm_90a")
    own, *others = decode_plans(spec, hopper)
    few = [plan for plan in others if plan.tile_q == own.tile_q]
    assert few and set(few) <= set(decode_candidates(spec, hopper, own))


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("spec", [SPEC, PAGED, NARROW], ids=["contiguous", "pages", "8 bits"])
def test_plans_are_timed_on_a_gpu(spec: fg.AttentionSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    inputs = random_inputs(spec, Shape(1, 2048, 4, 8, 2), equal_lengths=True)
    it = fg.compile(spec)
    (q, k, v), captures, cache = taken_apart(inputs)
    result = it.tune(q, k, v, **captures, **cache)
    assert isinstance(result.winner, DecodePlan) and len(result.milliseconds) > 3
    assert it.plan_for(1, 2048, 4, 8, 2) == result.winner
    assert_right(it, inputs)
