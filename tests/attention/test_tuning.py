"""Tuning: which plans are timed and kept, and which kernels calls then run. Timings are mocked except on a GPU."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import attention
from flashgen.attention import trials, tuned_plans, tuning
from flashgen.attention.callable import Attention
from flashgen.attention.tuned_plans import LengthClass, TunedPlan, TunedPlans, nearest_power
from flashgen.build.cache import KernelCache
from flashgen.codegen.dispatch import render_forward
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.plan import Plan
from flashgen.codegen.targets import target_named
from flashgen.codegen.workload import Workload
from flashgen.errors import ArgumentError, BuildError, FlashgenWarning, LaunchError
from flashgen.launch.engines import Emulator
from flashgen.runtime.gpu import Card
from flashgen.runtime.timing import Run
from flashgen.verify import Shape, random_inputs

SM_80 = target_named("sm_80")
SPEC = fg.AttentionSpec(16, mask=fg.causal())
LISTED = fg.AttentionSpec(16, mask=fg.document("ids"))
SMALL, OTHER = ForwardPlan(32, 32, 2), ForwardPlan(64, 32, 4)
CARD, LENGTHS = Card("a GPU", 132), LengthClass(1024, 1024, 16)


def compiled(folder: Path, spec: fg.AttentionSpec = SPEC, jit: bool = True) -> Attention:
    return Attention(spec, SM_80, Emulator(), tuned=KernelCache(folder, jit=jit))


def inputs(length: int = 90, heads: int = 2, dim: int = 16) -> tuple[np.ndarray[Any, Any], ...]:
    random = np.random.default_rng(length)
    return tuple(random.standard_normal((1, heads, length, dim)).astype(np.float16) for _ in range(3))


class MadeUpTimes:
    """A timer that runs nothing and returns milliseconds by plan name, 5 for the others."""

    def __init__(self, *fast: Plan, milliseconds: float = 2.0) -> None:
        self.times = {str(plan): milliseconds for plan in fast}
        self.rounds: list[list[str]] = []

    def __call__(self, runs: Mapping[str, Run]) -> dict[str, float]:
        self.rounds.append(list(runs))
        return {name: self.times.get(name, 5.0) for name in runs}


def tuned(
    it: Attention, *arrays: Any, timer: Any = None, plans: Any = (SMALL, OTHER), **captures: Any
) -> trials.Tuning:
    given = arrays or inputs()
    return tuning.tune(it.forward, given, captures, plans=plans, timer=timer or MadeUpTimes(SMALL))  # type: ignore[arg-type]


# ---- winners on disk


@pytest.mark.parametrize(("number", "power"), [(1, 1), (2, 2), (3, 4), (5, 4), (6, 8), (11585, 8192), (11586, 16384),
                                               (16384, 16384), (23170, 16384), (23171, 32768)])  # fmt: skip
def test_lengths_are_classified_by_the_nearest_power_of_2(number: int, power: int) -> None:
    assert nearest_power(number) == power


def test_heads_are_classified_until_they_fill_the_gpu_and_not_with_lists() -> None:
    def of(heads: int, length: int = 16384, lists: bool = False) -> LengthClass:
        return LengthClass.of(Workload(length, length, heads, 132), lists)

    assert of(1) != of(4) and of(16) == of(64) == of(1000)
    assert of(16, 1024) != of(64, 1024) and of(256, 1024) == of(4096, 1024)
    assert of(1, lists=True) == of(64, lists=True) != of(1, 1024, lists=True)
    assert str(of(2)) == "q16384-k16384-h2" and str(of(2, lists=True)) == "q16384-k16384"
    assert of(3, 1).heads == 4


@pytest.mark.parametrize(("target", "plan"), [("sm_80", SMALL), ("sm_90a", HopperPlan(2, 64, 2, takes_turns=True))])
def test_a_winner_is_found_only_for_the_same_kernel_gpu_and_lengths(
    target: str, plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default, kernel = (render_forward(SPEC, target_named(target), given) for given in (None, plan))
    kept = TunedPlans(default, KernelCache(tmp_path))
    assert kept.find(CARD, LENGTHS) is None
    folder = kept.store(CARD, LENGTHS, TunedPlan.of(kernel), {"milliseconds": 1.5})
    found = TunedPlans(default, KernelCache(tmp_path)).find(CARD, LENGTHS)
    assert found == TunedPlan.of(kernel) and found.plan == plan and found.describes(kernel)
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["gpu"]["name"] == "a GPU" and meta["measured"] == {"milliseconds": 1.5}
    assert [entry.name for entry in KernelCache(tmp_path).list()] == [f"tuned-{default.name}-q1024-k1024-h16"]
    for card in (Card("another", 132), Card("a GPU", 114)):
        assert kept.find(card, LENGTHS) is None
    assert kept.find(CARD, LengthClass(1024, 2048, 16)) is None
    other_text = replace(default, source=default.source + "// as another version would have it\n")
    assert TunedPlans(other_text, KernelCache(tmp_path)).find(CARD, LENGTHS) is None
    other_target = render_forward(SPEC, target_named("sm_86"))
    assert TunedPlans(other_target, KernelCache(tmp_path)).find(CARD, LENGTHS) is None
    monkeypatch.setattr(tuned_plans, "_nvrtc_version", lambda: "99.0")
    assert kept.find(CARD, LENGTHS) is None


def test_a_later_winner_replaces_an_earlier_one(tmp_path: Path) -> None:
    default = render_forward(SPEC, SM_80)
    kept = TunedPlans(default, KernelCache(tmp_path))
    for plan in (SMALL, OTHER):
        kept.store(CARD, LENGTHS, TunedPlan.of(render_forward(SPEC, SM_80, plan)), {})
    found = kept.find(CARD, LENGTHS)
    assert found is not None and found.plan == OTHER and len(KernelCache(tmp_path).list()) == 1
    assert KernelCache(tmp_path).clear() == 1 and kept.find(CARD, LENGTHS) is None


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"plan": {"tile_q": 1}}', b"\xff"])
def test_a_damaged_winner_warns_and_is_ignored(damage: bytes, tmp_path: Path) -> None:
    kept = TunedPlans(render_forward(SPEC, SM_80), KernelCache(tmp_path))
    folder = kept.store(CARD, LENGTHS, TunedPlan.of(render_forward(SPEC, SM_80, SMALL)), {})
    (folder / "plan.json").write_bytes(damage)
    with pytest.warns(FlashgenWarning, match="damaged: .* it is not used"):
        assert kept.find(CARD, LENGTHS) is None


def test_a_winner_with_unknown_fields_is_ignored() -> None:
    for data in (b"{}", b"[]", b'{"plan": {"tile_q": 64, "colour": 3}, "source": ""}', b"nonsense"):
        assert tuned_plans._parse(data, ForwardPlan) is None


# ---- kernels of calls


def test_tuned_lengths_run_the_winner_also_in_later_processes(tmp_path: Path) -> None:
    first, beside = compiled(tmp_path), compiled(tmp_path)
    before, beside_before = first(*inputs()), beside(*inputs())
    result = tuned(first)
    assert (result.winner, result.default, result.gain) == (SMALL, first.plan, 2.5)
    for it in (first, beside, compiled(tmp_path)):  # the last call acts as in a later process
        assert it.plan_for(90, heads=2) == SMALL != it.plan == it.plan_for(90, heads=64)
        assert it.plan_for(2000, heads=2) == it.plan_for(0) == it.plan
        out = it(*inputs())
        assert np.abs(out.astype(np.float32) - before.astype(np.float32)).max() < 2e-3
        assert it.forward._prepared.values()[0].built.kernel.plan == SMALL
        assert it(*inputs(400)).shape == (1, 2, 400, 16)
    np.testing.assert_array_equal(before, beside_before)


def test_winners_are_ignored_on_the_emulator_and_with_a_plan(tmp_path: Path) -> None:
    tuned(compiled(tmp_path))
    assert attention.compile(SPEC, emulate=True).forward.dispatch.tuned is None
    given = Attention(SPEC, SM_80, Emulator(), plan=OTHER, tuned=KernelCache(tmp_path))
    assert given.plan_for(90, heads=2) == given.plan == OTHER
    with pytest.raises(ArgumentError, match="compiled with plan="):
        tuned(given)


def test_the_disk_is_read_once_per_class_of_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    find = TunedPlans.find
    monkeypatch.setattr(TunedPlans, "find", lambda *given: asked.append(given[2]) or find(*given))
    it = compiled(tmp_path)
    for length in (90, 91, 90, 100, 33, 30):
        it(*inputs(length))
    assert [str(lengths) for lengths in asked] == ["q64-k64-h2", "q128-k128-h2", "q32-k32-h2"]


def test_a_default_plan_can_win(tmp_path: Path) -> None:
    it = compiled(tmp_path)
    result = tuned(it, timer=MadeUpTimes(SMALL, milliseconds=4.96))  # within the noise
    assert result.winner == result.default == it.plan == it.plan_for(90, heads=2) and result.gain == 1
    assert "the default plan stays" in str(result)


def test_a_winner_of_another_source_is_not_used(tmp_path: Path) -> None:
    it = compiled(tmp_path)
    lengths = LengthClass.of(Workload(90, 90, 2, 3), lists=False)
    card = it.engine.card(0)
    kept = TunedPlans(it._kernel, KernelCache(tmp_path))
    kept.store(card, lengths, TunedPlan(SMALL, "the hash of an older template's text"), {})
    assert it.plan_for(90, heads=2) == it.plan
    kept.store(card, lengths, TunedPlan(ForwardPlan(33, 32, 2), "that plans no longer allow"), {})
    assert compiled(tmp_path).plan_for(90, heads=2) == it.plan


def test_an_unavailable_winner_warns_and_the_default_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(compiled(tmp_path / "tuned"))
    it = compiled(tmp_path / "tuned")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("FLASHGEN_JIT", "0")
    with pytest.warns(FlashgenWarning, match=r"the tuned plan ForwardPlan.* is not used.*FLASHGEN_JIT=0"):
        assert it(*inputs()).shape == (1, 2, 90, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        it(*inputs(100))  # one warning


def test_lists_fit_the_plan_of_the_call(tmp_path: Path) -> None:
    it, ids = compiled(tmp_path, LISTED), np.sort(np.random.default_rng(0).integers(0, 3, 90)).astype(np.int32)
    stale = it.tile_lists(90, ids=ids)
    expected = it(*inputs(), ids=ids, tile_lists=stale)
    result = tuned(it, ids=ids)
    assert result.winner == SMALL and result.lengths == LengthClass(64, 64, 0)
    for heads in (1, 2, 64):  # lists do not depend on it, and neither does the winner
        lists = it.tile_lists(90, heads=heads, ids=ids)
        assert lists.tile == (32, 32) != stale.tile
    out = it(*inputs(), ids=ids, tile_lists=lists)
    np.testing.assert_array_equal(out, it(*inputs(), ids=ids))
    assert np.abs(out.astype(np.float32) - expected.astype(np.float32)).max() < 2e-3
    with pytest.raises(ArgumentError, match=r"tile_lists were made for tile .*make them by this attention's"):
        it(*inputs(), ids=ids, tile_lists=stale)
    with pytest.raises(ArgumentError, match="len_q=-1"):
        it.tile_lists(-1, ids=ids)
    with pytest.raises(ArgumentError, match="heads='x'"):
        it.plan_for(90, heads="x")  # type: ignore[arg-type]


# ---- timing


def test_all_are_timed_and_the_best_are_compared_with_the_default(tmp_path: Path) -> None:
    timer, told = MadeUpTimes(SMALL), []
    it = compiled(tmp_path)
    result = tuning.tune(
        it.forward, inputs(), {}, plans=(SMALL, OTHER, it.plan), timer=timer,
        progress=lambda what, done, total: told.append((what, done, total)),
    )  # fmt: skip
    default, small, other = map(str, (it.plan, SMALL, OTHER))
    assert timer.rounds[0] == [default, small, other] and timer.rounds[1][:2] == [default, small]
    assert told[0] == ("comparing outputs", 1, 2) and told[-1] == ("timing the best", 2, 2)
    assert [row.plan for row in result.timings] == [it.plan, SMALL, OTHER]
    assert list(result.milliseconds.values()) == [2.0, 5.0, 5.0] and next(iter(result.milliseconds)) == SMALL
    assert "2.50 times as fast: 2 ms with ForwardPlan" in str(result) and "3 of 3 plans timed" in str(result)
    facts = json.loads(json.dumps(result.to_dict()))
    assert facts["winner"]["tile_q"] == 32 and facts["gain"] == 2.5 and len(facts["timings"]) == 3


def test_default_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(tuning, "candidates", lambda *given: asked.append(given) or (SMALL,))
    it = compiled(tmp_path)
    tuned(it, plans=None)
    assert asked == [(SPEC, SM_80, Workload(90, 90, 2, 3))]


def test_a_plan_with_a_wrong_output_cannot_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tuning._Trials._results

    def wrong(self: Any, forward: Any) -> Any:
        found = results(self, forward)
        return {"output": found["output"] * np.nan} if forward.kernel.plan == SMALL else found

    monkeypatch.setattr(tuning._Trials, "_results", wrong)
    result = tuned(compiled(tmp_path))
    assert result.winner == result.default and SMALL not in result.milliseconds
    assert "its output is nan from the default plan's" in result.timings[1].left_out


def test_outputs_may_differ_only_by_rounding() -> None:
    one = np.array([1.0, np.inf, np.nan, -2.0], np.float32)

    def told(expected: Any, found: Any) -> str:
        return trials.differences({"output": expected}, {"output": found}, "float16")

    assert not told(one, one + np.float32(1e-3))
    assert "its output is 0.1 from" in told(one, one + np.float32(0.1))
    assert "nan from" in told(np.zeros(2, np.float32), np.array([0, np.nan], np.float32))


def test_dropout_and_wrong_arguments(tmp_path: Path) -> None:
    spec = fg.AttentionSpec(16, mask=fg.causal(), dropout=0.25)
    it = compiled(tmp_path, spec)
    assert tuning.tune(it.forward, inputs(), {}, 3, plans=[SMALL], timer=MadeUpTimes(SMALL)).winner == SMALL
    with pytest.raises(ArgumentError, match="seed is missing"):
        tuned(it)
    with pytest.raises(ArgumentError, match="unknown argument 'ids'"):
        tuned(compiled(tmp_path), ids=3)
    with pytest.raises(ArgumentError, match="nothing to time"):
        tuned(compiled(tmp_path), *inputs(0))


def test_the_emulator_refuses_to_tune(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="emulator's times say nothing"):
        compiled(tmp_path).tune(*inputs())
    with pytest.raises(LaunchError, match="emulator's times say nothing"):  # the error names no plan that was not given
        fg.compile(SPEC, emulate=True).tune(*inputs())


def test_plans_that_ptxas_warns_about_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen.build.resources import Resources

    class Entry:
        resources, meta = Resources(168), {"log": "ptxas info : (C7510) Potential Performance Loss: wgmma"}

    kernel = render_forward(SPEC, SM_80)
    monkeypatch.setattr(trials, "build", lambda kernel, prebuild: Entry)
    assert trials.compile_candidate(kernel) == (168, "the assembler warns: (C7510) Potential Performance Loss: wgmma")
    Entry.resources = Resources(255, spill_stores=8, spill_loads=4)
    assert trials.compile_candidate(kernel) == (255, "it spills 12 bytes of registers")
    Entry.resources, Entry.meta = Resources(255), {}
    assert trials.compile_candidate(kernel) == (255, "")
    assert "too many" in trials.compile_candidate(replace(kernel, threads=512))[1]

    def fails(*_: Any) -> Any:
        raise BuildError("it does not compile\nfor this reason")

    monkeypatch.setattr(trials, "build", fails)
    assert trials.compile_candidate(kernel) == (None, "it does not compile")


# ---- on a GPU


OWN = {"scale": 0.11}  # keeps winners away from other tests


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [fg.causal(), fg.document("ids")], ids=["ranges", "lists"])
def test_tuning_on_a_gpu(mask: fg.Mask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: Any) -> None:
    import cupy

    spec = fg.AttentionSpec(64, mask=mask, **OWN)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    shape = Shape(1000, 1000, 2, 4, 2)
    given = random_inputs(spec, shape)
    q, k, v = (cupy.asarray(array) for array in (given.q, given.k, given.v))
    captures = {name: cupy.asarray(array) for name, array in given.captures.items()}
    it = attention.compile(spec)
    result = it.tune(q, k, v, **captures)
    print(result)
    assert len(result.milliseconds) >= 2 and result.gain >= 1 and result.kept.is_dir()
    assert all(0 < milliseconds < 1000 for milliseconds in result.milliseconds.values())
    assert it.plan_for(1000, batch=2, heads=4) == result.winner
    out, lse = it(q, k, v, return_lse=True, **captures)
    right(spec, given, cupy.asnumpy(out), cupy.asnumpy(lse))
    home, lse = it(given.q, given.k, given.v, return_lse=True, **given.captures)
    right(spec, given, home, lse)


@pytest.mark.gpu
def test_every_candidate_is_right_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASHGEN_JIT", "1")
    plain = fg.AttentionSpec(64, "bfloat16", **OWN)
    for spec in (plain, fg.AttentionSpec(128, "bfloat16", mask=fg.causal(), dropout=0.1, **OWN)):
        given = random_inputs(spec, Shape(700, 900, 1, 4, 4))
        seed = {"seed": 3} if spec.dropout else {}
        result = attention.compile(spec).tune(given.q, given.k, given.v, **seed)
        wrong = [row for row in result.timings if "output" in row.left_out]
        assert not wrong, wrong


@pytest.mark.gpu
def test_tuning_is_refused_without_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    it = attention.compile(fg.AttentionSpec(64))
    monkeypatch.setenv("FLASHGEN_JIT", "0")
    with pytest.raises(BuildError, match="FLASHGEN_JIT=0 forbids"):
        it.tune(*(np.zeros((1, 1, 64, 64), np.float16) for _ in range(3)))
