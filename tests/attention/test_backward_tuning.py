"""Tuning of the backward: which plans are timed and kept, and which kernels calls then run. Timings are mocked."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import attention
from flashgen.attention import backward_tuning, trials
from flashgen.attention.callable import Attention
from flashgen.attention.tuned_plans import LengthClass, TunedPlan, TunedPlans
from flashgen.build.cache import KernelCache
from flashgen.codegen.backward_candidates import backward_candidates
from flashgen.codegen.families import backward_family
from flashgen.codegen.hopper.backward_plans import HopperBackwardPlan
from flashgen.codegen.hopper.wide_plans import HopperWidePlan
from flashgen.codegen.mma_sync.backward_plans import BackwardPlan
from flashgen.codegen.stages import backward_kernels
from flashgen.codegen.targets import target_named
from flashgen.codegen.workload import Workload
from flashgen.errors import ArgumentError, BuildError, FlashgenWarning, LaunchError, UnsupportedError
from flashgen.launch.engines import Emulator
from flashgen.runtime.timing import Run
from flashgen.verify.gradients import gradients_by_name, judged_gradients, random_gradients
from flashgen.verify.problems import Shape, random_inputs

SM_80, SM_90A = target_named("sm_80"), target_named("sm_90a")
SPEC = fg.AttentionSpec(16, mask=fg.causal())
SHAPE = Shape(90, 90, 1, 4, 2)
EARLY, APART = HopperBackwardPlan(64, stages=3), HopperBackwardPlan(64, heads_apart=True)


def compiled(
    folder: Path, spec: fg.AttentionSpec = SPEC, target: str = "sm_90a", jit: bool = True, **how: Any
) -> Attention:
    return Attention(spec, target_named(target), Emulator(), tuned=KernelCache(folder, jit=jit), **how)


class MadeUpTimes:
    """A timer that runs each plan once and returns milliseconds by plan name, 5 for the others."""

    def __init__(self, *fast: Any, milliseconds: float = 2.0) -> None:
        self.times = {str(plan): milliseconds for plan in fast}
        self.rounds: list[list[str]] = []

    def __call__(self, runs: Mapping[str, Run]) -> dict[str, float]:
        self.rounds.append(list(runs))
        for run in runs.values():
            run()
        return {name: self.times.get(name, 5.0) for name in runs}


def tuned(
    it: Attention, shape: Shape = SHAPE, plans: Any = (EARLY, APART), fast: Any = EARLY, timer: Any = None, **more: Any
) -> trials.Tuning:
    inputs = random_inputs(it.spec, shape, 3)
    given, captures = (inputs.q, inputs.k, inputs.v), inputs.captures | more.pop("captures", {})
    timer = timer or MadeUpTimes(fast)
    return backward_tuning.tune_backward(
        it.backward_pass, it.forward, given, captures, plans=plans, timer=timer, **more
    )


def assert_right(it: Attention, plan: Any, shape: Shape = SHAPE) -> None:
    """Asserts that a call of these sizes runs the plan and that its gradients are right."""
    inputs, (d_out, _) = random_inputs(it.spec, shape, 3), random_gradients(it.spec, shape, 3)
    qkv = inputs.q, inputs.k, inputs.v
    out, lse = it(*qkv, return_lse=True, **inputs.captures)
    found = it.backward(d_out, *qkv, out, lse, **inputs.captures)
    prepared = it.backward_pass._prepared.values()[-1].stages
    assert {stage.role for stage in prepared.stages} >= {"dkdv"} and (
        it.backward_plan_for(shape.len_q, shape.len_k, shape.batch, shape.heads_q, shape.heads_kv) == plan
    )
    runners = it.backward_pass.dispatch.choose(it.backward_pass._prepared.values()[-1].problem, 0).runners
    assert all(stage.runner is runners[stage.role] for stage in prepared.stages)
    verdicts = judged_gradients(it.spec, *qkv, d_out, gradients_by_name(found), **inputs.captures)
    assert all(verdict.ok for verdict in verdicts.values()), verdicts


# ---- candidates


def candidates(spec: fg.AttentionSpec, target: str, group: int = 1, deterministic: bool = False) -> tuple[Any, ...]:
    default = backward_kernels(spec, target_named(target), deterministic)["dkdv"]
    found = backward_candidates(spec, default, Workload(4096, 4096, 32, 132, group), deterministic)
    assert found[0] == default.plan and len(set(found)) == len(found)
    for plan in found:
        backward_kernels(spec, default.target, deterministic, plan=plan)  # raises if a plan does not fit
    return found


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_candidates_are_of_the_default_plans_class(head_dim: int) -> None:
    spec = fg.AttentionSpec(head_dim, mask=fg.causal())
    kind = HopperBackwardPlan if head_dim <= 128 else HopperWidePlan
    assert {type(plan) for plan in candidates(spec, "sm_90a")} == {kind}
    assert {type(plan) for plan in candidates(spec, "sm_90")} == {BackwardPlan}
    assert len(candidates(spec, "sm_90a")) >= 4 and len(candidates(spec, "sm_80")) >= 6


def test_candidates_split_heads_only_with_gqa_and_without_determinism() -> None:
    spec = fg.AttentionSpec(128, mask=fg.causal())
    assert not any(plan.heads_apart for plan in candidates(spec, "sm_90a"))
    assert sum(plan.heads_apart for plan in candidates(spec, "sm_90a", 8)) == len(candidates(spec, "sm_90a"))
    assert not any(plan.heads_apart for plan in candidates(spec, "sm_90a", 8, deterministic=True))


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_candidates_with_tile_lists_share_tile_sizes(target: str) -> None:
    spec = fg.AttentionSpec(128, mask=fg.document("ids"))
    found = candidates(spec, target)
    assert len(found) > 1 and len({(plan.tile_q, plan.tile_k) for plan in found}) == 1
    assert len({plan.tile_q for plan in candidates(fg.AttentionSpec(64), target)}) > 1


def test_every_candidate_is_checked() -> None:
    every = list(backward_family(SM_90A).candidates(SPEC, SM_90A))
    assert any(plan.problem(fg.AttentionSpec(256), SM_90A) for plan in every)
    assert len(set(every)) == len(every) > 30


# ---- kernels of calls


def test_tuned_lengths_run_the_winner_also_in_later_processes(tmp_path: Path) -> None:
    first, beside = compiled(tmp_path), compiled(tmp_path)
    default = first.backward_plan_for(90, batch=1, heads=4, heads_kv=2)
    assert default.heads_apart and default != first.backward_plan  # the family's rule for few heads
    for it in (first, beside):
        assert_right(it, default)
    result = tuned(first)
    assert (result.winner, result.default, result.gain) == (EARLY, default, 2.5)
    assert str(result.lengths).endswith("-h4-g2") and result.kernel == first.backward_kernels["dkdv"].name
    for it in (first, beside, compiled(tmp_path)):  # the last call acts as in a later process
        assert_right(it, EARLY)
        assert it.backward_plan_for(90, heads=4) == it.backward_plan  # another GQA group
        assert it.backward_plan_for(300, heads=4, heads_kv=2) == default  # other lengths
        assert it.backward_plan_for(0) == it.backward_plan
    assert [entry.name for entry in KernelCache(tmp_path).list()] == [f"tuned-{result.kernel}-{result.lengths}"]


def test_a_winner_determines_whether_heads_are_split(tmp_path: Path) -> None:
    it = compiled(tmp_path)
    assert tuned(it, fast=APART).winner == APART
    assert_right(it, APART)
    own = it.backward_plan
    assert tuned(it, fast=own, plans=(own, APART)).winner == own  # the default plan instead of the rule's
    assert_right(it, own)
    assert_right(compiled(tmp_path), own)


@pytest.mark.parametrize(
    ("spec", "target", "plan"),
    [
        (fg.AttentionSpec(144, mask=fg.causal(), score=fg.softcap(20)), "sm_90a", HopperWidePlan(48, 3)),
        (fg.AttentionSpec(32, mask=fg.document("ids")), "sm_90a", HopperBackwardPlan(128, 3, early_scores=False)),
        (fg.AttentionSpec(32, mask=fg.causal()), "sm_80", BackwardPlan(64, 64, 8, 2, 1)),
    ],
    ids=["wide", "lists", "the other family"],
)
def test_every_family_and_mask(spec: fg.AttentionSpec, target: str, plan: Any, tmp_path: Path) -> None:
    it, shape = compiled(tmp_path, spec, target), Shape(90, 90, 1, 2, 2)
    assert tuned(it, shape, (plan,), plan).winner == plan
    assert_right(it, plan, shape)
    assert_right(compiled(tmp_path, spec, target), plan, shape)


def test_tile_lists_of_the_caller_fit_the_winner(tmp_path: Path) -> None:
    spec, shape = fg.AttentionSpec(32, mask=fg.document("ids")), Shape(90, 90, 1, 2, 2)
    it, inputs = compiled(tmp_path, spec), random_inputs(spec, shape, 3)
    lists = it.backward_tile_lists(90, heads=2, **inputs.captures)
    plan = HopperBackwardPlan(128, 3, early_scores=False)
    tuned(it, shape, (plan,), plan)
    qkv, (d_out, _) = (inputs.q, inputs.k, inputs.v), random_gradients(spec, shape, 3)
    out, lse = it(*qkv, return_lse=True, **inputs.captures)
    found = it.backward(d_out, *qkv, out, lse, tile_lists=lists, **inputs.captures)
    verdicts = judged_gradients(spec, *qkv, d_out, gradients_by_name(found), **inputs.captures)
    assert all(verdict.ok for verdict in verdicts.values()), verdicts
    assert it.backward_plan_for(90, heads=2) == plan != it.backward_plan


def test_the_deterministic_backward_has_separate_winners(tmp_path: Path) -> None:
    it, exact = compiled(tmp_path), compiled(tmp_path, deterministic=True)
    tuned(it)
    assert exact.backward_plan_for(90, heads=4, heads_kv=2) == exact.backward_plan
    with pytest.raises(UnsupportedError, match="the deterministic mode cannot accumulate dK and dV"):
        tuned(exact, plans=(APART,))
    assert tuned(exact, plans=(EARLY,)).winner == EARLY
    assert_right(exact, EARLY)
    assert len(KernelCache(tmp_path).list()) == 2


def test_winners_are_ignored_on_the_emulator_and_with_a_plan(tmp_path: Path) -> None:
    tuned(compiled(tmp_path))
    assert attention.compile(SPEC, target="sm_90a", emulate=True).backward_pass.dispatch.tuned is None
    given = compiled(tmp_path, backward_plan=APART)
    assert given.backward_plan_for(90, heads=4, heads_kv=2) == given.backward_plan == APART
    with pytest.raises(ArgumentError, match=r"compiled with backward_plan=\.\.\. or source"):
        tuned(given)


def test_the_disk_is_read_once_per_class_of_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    find = TunedPlans.find
    monkeypatch.setattr(TunedPlans, "find", lambda *given: asked.append(str(given[2])) or find(*given))
    it = compiled(tmp_path)
    for length, heads in ((80, 4), (90, 4), (90, 2), (100, 4), (33, 4)):
        it.backward_plan_for(length, heads=heads, heads_kv=2)
    assert asked == ["q64-k64-h4-g2", "q64-k64-h2", "q128-k128-h4-g2", "q32-k32-h4-g2"]


def test_a_winner_of_another_source_is_not_used(tmp_path: Path) -> None:
    it = compiled(tmp_path)
    default = it.backward_plan_for(90, heads=4, heads_kv=2)
    lengths = LengthClass.of(Workload(90, 90, 4, 3, 2), lists=False, grouped=True)
    kept = TunedPlans(it.backward_kernels["dkdv"], KernelCache(tmp_path))
    for winner in (
        TunedPlan(EARLY, "the hash of an older template's text"),
        TunedPlan(HopperBackwardPlan(96), "that plans no longer allow"),
    ):
        kept.store(it.engine.card(0), lengths, winner, {})
        assert compiled(tmp_path).backward_plan_for(90, heads=4, heads_kv=2) == default


def test_an_unavailable_winner_warns_and_the_default_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = compiled(tmp_path / "tuned")
    default = it.backward_plan_for(90, heads=4, heads_kv=2)
    assert_right(it, default)
    tuned(compiled(tmp_path / "tuned"))
    later = compiled(tmp_path / "tuned")
    later.build_backward()

    def fails(*_: Any) -> Any:
        raise BuildError("FLASHGEN_JIT=0 and it is not in the cache")

    with (
        monkeypatch.context() as patch,
        pytest.warns(FlashgenWarning, match="the tuned plan HopperBackwardPlan.* is not used"),
    ):
        patch.setattr("flashgen.attention.backward_dispatch.BuiltStages", fails)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*heads apart would fill")
            assert later.backward_plan_for(90, heads=4, heads_kv=2) == later.backward_plan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert later.backward_plan_for(91, heads=4, heads_kv=2) == later.backward_plan  # one warning


# ---- timing


def test_all_are_timed_and_the_best_are_compared_with_the_default(tmp_path: Path) -> None:
    timer, told = MadeUpTimes(EARLY), []
    it = compiled(tmp_path)
    own, rule = it.backward_plan, it.backward_plan_for(90, heads=4, heads_kv=2)
    result = tuned(
        it, plans=(EARLY, own, rule), timer=timer, progress=lambda what, done, total: told.append((what, done, total))
    )
    assert timer.rounds[0] == [*map(str, (rule, EARLY, own))] and timer.rounds[1][:2] == [*map(str, (rule, EARLY))]
    assert told[0] == ("comparing outputs", 1, 2) and told[-1] == ("timing the best", 2, 2)
    assert [row.plan for row in result.timings] == [rule, EARLY, own]
    assert "2.50 times as fast: 2 ms with HopperBackwardPlan" in str(result) and "3 of 3 plans timed" in str(result)
    facts = json.loads(json.dumps(result.to_dict()))
    assert facts["winner"]["stages"] == 3 and facts["lengths"]["group"] == 2 and len(facts["timings"]) == 3


def test_default_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(backward_tuning, "backward_candidates", lambda *given: asked.append(given) or (EARLY,))
    it = compiled(tmp_path)
    tuned(it, plans=None)
    assert asked == [(SPEC, it.backward_kernels["dkdv"], Workload(90, 90, 4, 3, 2), False)]


@pytest.mark.parametrize("wrong", ["dq", "dk", "dv"])
def test_a_plan_with_wrong_gradients_cannot_win(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = backward_tuning._Trials._results

    def spoilt(self: Any, backward: Any) -> Any:
        found = results(self, backward)
        spoils = backward.kernels["dkdv"].plan == EARLY
        return found | {wrong: found[wrong] + np.float32(0.5)} if spoils else found

    monkeypatch.setattr(backward_tuning._Trials, "_results", spoilt)
    result = tuned(compiled(tmp_path))
    assert result.winner == result.default and EARLY not in result.milliseconds
    assert f"its {wrong} is 0.5 from the default plan's" in result.timings[1].left_out


def test_captures_dropout_and_wrong_arguments(tmp_path: Path) -> None:
    slopes = fg.Tensor("slopes", "float32", 1, grad=True)
    spec = fg.AttentionSpec(16, mask=fg.causal(), score=fg.alibi(slopes), dropout=0.25)
    it = compiled(tmp_path, spec)
    assert tuned(it, seed=3).winner == EARLY
    with pytest.raises(ArgumentError, match="seed is missing"):
        tuned(it)
    with pytest.raises(ArgumentError, match="unknown argument 'ids'"):
        tuned(compiled(tmp_path), captures={"ids": 3})
    with pytest.raises(ArgumentError, match="nothing to time"):
        tuned(compiled(tmp_path), Shape(0, 90, 1, 2, 2))
    thd = compiled(tmp_path, fg.AttentionSpec(16, layout="thd"))
    with pytest.raises(UnsupportedError, match="tune_backward"):
        thd.tune_backward(*(np.zeros((8, 1, 16), np.float16) for _ in range(3)))
    with pytest.raises(UnsupportedError, match="backward_plan_for"):
        thd.backward_plan_for(8)


def test_the_emulator_refuses_to_tune(tmp_path: Path) -> None:
    inputs = random_inputs(SPEC, SHAPE)
    with pytest.raises(LaunchError, match="emulator's times say nothing"):
        compiled(tmp_path).tune_backward(inputs.q, inputs.k, inputs.v)


def test_closed_over_arrays_are_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = np.linspace(0, 1, 4).astype(np.float32)
    spec = fg.AttentionSpec(16, score=lambda s, b, h, q, k: s + table[h])
    it, asked = attention.compile(spec, target="sm_90a", emulate=True), []
    monkeypatch.setattr(Attention, "tune_backward", lambda self, q, k, v, **given: asked.append(given))
    inputs = random_inputs(spec, SHAPE)
    it.tune_backward(inputs.q, inputs.k, inputs.v)
    (given,) = asked
    assert [*given] == ["table"] and given["table"] is table


# ---- on a GPU


OWN = {"scale": 0.11}  # keeps winners away from other tests


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("spec", "deterministic"),
    [
        (fg.AttentionSpec(64, mask=fg.causal(), **OWN), False),
        (fg.AttentionSpec(128, "bfloat16", mask=fg.document("ids"), **OWN), False),
        (fg.AttentionSpec(192, "bfloat16", mask=fg.causal(), score=fg.softcap(20), dropout=0.1, **OWN), True),
    ],
    ids=["ranges", "lists", "wide"],
)
def test_tuning_on_a_gpu(
    spec: fg.AttentionSpec, deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    shape = Shape(1000, 1000, 2, 4, 2)
    given, (d_out, _) = random_inputs(spec, shape), random_gradients(spec, shape)
    q, k, v, d_out_there = (cupy.asarray(array) for array in (given.q, given.k, given.v, d_out))
    captures = {name: cupy.asarray(array) for name, array in given.captures.items()}
    seed = {"seed": 3} if spec.dropout else {}
    it = attention.compile(spec, deterministic=deterministic)
    result = it.tune_backward(q, k, v, **captures, **seed)
    print(result)
    assert len(result.milliseconds) >= 2 and result.gain >= 1 and result.kept.is_dir()
    assert not [row for row in result.timings if "default plan's" in row.left_out]
    assert it.backward_plan_for(1000, batch=2, heads=4, heads_kv=2) == result.winner
    out, lse = it(q, k, v, return_lse=True, **captures, **seed)
    found = it.backward(d_out_there, q, k, v, out, lse, **captures, **seed)
    gradients = {name: cupy.asnumpy(array) for name, array in gradients_by_name(found).items()}
    verdicts = judged_gradients(spec, given.q, given.k, given.v, d_out, gradients, **given.captures, **seed)
    assert all(verdict.ok for verdict in verdicts.values()), verdicts
