"""Packed heads on Hopper: correct on the emulator, selected where intended, and run on an H200."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import attention
from flashgen.attention import forward_dispatch
from flashgen.attention.callable import Attention
from flashgen.attention.forward_dispatch import ForwardKernels
from flashgen.attention.tuned_plans import LengthClass, TunedPlan, TunedPlans
from flashgen.build.cache import KernelCache
from flashgen.codegen.dispatch import render_forward
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.targets import target_named
from flashgen.codegen.workload import Workload
from flashgen.errors import ArgumentError, BuildError, FlashgenWarning
from flashgen.launch.engines import Emulator
from flashgen.runtime.schedule import Schedule
from flashgen.verify.check import judged
from flashgen.verify.problems import Inputs, Shape, poisoned_outputs, random_inputs

SM_90A = target_named("sm_90a")
CAUSAL = fg.AttentionSpec(64, mask=fg.causal())
ALIBI = fg.AttentionSpec(64, "bfloat16", mask=fg.causal(), score=fg.alibi("slopes"))
PLAN = HopperPlan(2, 64, takes_turns=True, packed_heads=4)


def call(compiled: Attention, inputs: Inputs) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    out, lse = poisoned_outputs(compiled.spec, inputs.q)
    compiled(inputs.q, inputs.k, inputs.v, return_lse=True, out=(out, lse), **inputs.captures)
    return out, lse


def assert_right(spec: fg.AttentionSpec, shape: Shape, plan: HopperPlan | None, **how: Any) -> None:
    compiled = attention.compile(spec, target="sm_90a", emulate=True, plan=plan, **how)
    inputs = random_inputs(spec, shape)
    verdict = judged(spec, inputs.q, inputs.k, inputs.v, *call(compiled, inputs), inputs.captures)
    assert verdict.ok, verdict


def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """The mask and score depend on every index."""
    return score + fg.Tensor("bias", "float32", 4)[b, h, q, k] + 0.1 * (h % 3) - 0.01 * q


VARIANTS = (
    fg.AttentionSpec(64),
    fg.AttentionSpec(40, value_dim=72, mask=fg.causal(), layout="bshd"),
    fg.AttentionSpec(128, "bfloat16", mask=fg.sliding_window(30, 20)),
    fg.AttentionSpec(64, mask=fg.prefix_lm(fg.Tensor("prefix", "int32", 1)), score=fg.softcap(10)),
    fg.AttentionSpec(64, mask=fg.document("ids")),
    fg.AttentionSpec(32, mask=fg.causal(), score=fg.trace_score(biased)),
)


@pytest.mark.parametrize("spec", VARIANTS, ids=lambda spec: spec.name)
def test_variants(spec: fg.AttentionSpec) -> None:
    for shape in (Shape(37, 37, 2, 8, 2), Shape(70, 70, 1, 4, 1)):
        assert_right(spec, shape, PLAN, schedule=Schedule("random", "late", seed=1))


@pytest.mark.parametrize("packed", [2, 4, 8, 16, 32, 64])
def test_rows_of_every_head_of_a_pack(packed: int) -> None:
    """Lengths around tile sizes, rows without keys, and scores that differ between heads."""
    plan = replace(PLAN, packed_heads=packed)
    for number, len_q in enumerate((1, 64 // packed + 1, 200 // packed + 3)):
        heads = (2 * packed, 2 if number else 1)  # two packs, from two KV heads or one
        assert_right(ALIBI, Shape(len_q, 90 - 60 * (number % 2), 1, *heads), plan, schedule=Schedule(seed=number))


@pytest.mark.parametrize(
    "plan", [HopperPlan(1, 32, 3, packed_heads=8), HopperPlan(3, 48, 1, takes_turns=True, packed_heads=2)], ids=str
)
@pytest.mark.parametrize(("order", "copies"), [("reverse", "early"), ("greedy_warp", "late"), ("random", "random")])
def test_plans_and_thread_orders(plan: HopperPlan, order: Any, copies: Any) -> None:
    spec = fg.AttentionSpec(64, mask=fg.sliding_window(50))
    assert_right(spec, Shape(130, 90, 1, 8, 1), plan, schedule=Schedule(order, copies, seed=3))


def test_a_tile_without_separate_output_memory() -> None:
    spec, plan = fg.AttentionSpec(256, mask=fg.causal()), HopperPlan(2, 80, packed_heads=8)
    assert not plan.output_apart(spec)
    assert_right(spec, Shape(50, 90, 1, 8, 1), plan, schedule=Schedule("random", "late", seed=1))


@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_under_sanitizers(sanitize: Any) -> None:
    schedule = Schedule("random", "late", seed=5)
    assert_right(ALIBI, Shape(37, 70, 1, 8, 2), PLAN, sanitize=sanitize, schedule=schedule)
    if sanitize == "address":
        plan = replace(PLAN, packed_heads=32)
        assert_right(fg.AttentionSpec(40, value_dim=72), Shape(5, 70, 1, 32, 1), plan, sanitize=sanitize)


def test_strides() -> None:
    """Views of a larger array, and queries that heads share."""
    spec = fg.AttentionSpec(32, mask=fg.causal())
    rows = np.random.default_rng(0).standard_normal((2, 4, 60, 3, 48)).astype(np.float16)[:, :, ::2]
    q, k, v = (rows[:, :, :, i, 8:40] for i in range(3))
    q, k, v = np.broadcast_to(q[:, :1], q.shape), k[:, :1], v[:, :1]
    compiled = attention.compile(spec, target="sm_90a", emulate=True, plan=PLAN)
    np.testing.assert_array_equal(compiled(q, k, v), compiled(*map(np.ascontiguousarray, (q, k, v))))


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)], ids=str)
def test_no_keys(lengths: tuple[int, int]) -> None:
    assert_right(CAUSAL, Shape(*lengths, 2, 8, 2), PLAN)


# ---- dispatch


def test_calls_are_packed_where_that_reduces_work() -> None:
    """The emulator reports 3 multiprocessors."""
    compiled = attention.compile(CAUSAL, target="sm_90a", emulate=True)
    plan, packed = compiled.plan, replace(compiled.plan, packed_heads=4)
    assert isinstance(plan, HopperPlan) and plan.packed_heads == 1
    assert compiled.plan_for(30, 90, batch=2, heads=8, heads_kv=2) == packed
    assert compiled.plan_for(30, 90, batch=2, heads=8) == plan == compiled.plan_for(30, 0, 2, 8, 2)
    assert compiled.plan_for(30, 90, batch=2, heads=6, heads_kv=2) == plan
    assert compiled.plan_for(30, 90, heads=2, heads_kv=1) == plan
    with pytest.raises(ArgumentError, match="heads_kv=3 must divide heads=8"):
        compiled.plan_for(30, heads=8, heads_kv=3)
    inputs = random_inputs(CAUSAL, Shape(30, 90, 2, 8, 2))
    runner = compiled.forward.dispatch._kernels.by_plan.get(packed).stages.runners["forward"]  # type: ignore[union-attr]
    launches: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        launch = runner.launch
        patch.setattr(runner, "launch", lambda *how: (launches.append(how), launch(*how)))
        out, lse = call(compiled, inputs)
    assert len(launches) == 1
    assert judged(CAUSAL, inputs.q, inputs.k, inputs.v, out, lse, {}).ok


def test_a_plan_of_the_caller_is_used() -> None:
    unpacked = attention.compile(CAUSAL, target="sm_90a", emulate=True, plan=replace(PLAN, packed_heads=1))
    assert unpacked.plan_for(30, 90, 2, 8, 2) == unpacked.plan
    packed = attention.compile(CAUSAL, target="sm_90a", emulate=True, plan=PLAN)
    assert packed.plan_for(1000, heads=4) == PLAN == packed.plan_for(1000, heads=4, heads_kv=1)
    inputs = random_inputs(CAUSAL, Shape(30, 90, 1, 6, 1))
    with pytest.raises(ArgumentError, match="q has 6 heads for each head of k and v, no multiple of the 4"):
        packed(inputs.q, inputs.k, inputs.v)


def test_tile_lists_of_the_caller_fit_every_group_size() -> None:
    spec = fg.AttentionSpec(64, mask=fg.document("ids"))
    compiled = attention.compile(spec, target="sm_90a", emulate=True)
    inputs = random_inputs(spec, Shape(30, 30, 2, 8, 2))
    lists = compiled.tile_lists(30, batch=2, heads=8, **inputs.captures)
    given = compiled(inputs.q, inputs.k, inputs.v, tile_lists=lists, **inputs.captures)
    np.testing.assert_array_equal(given, compiled(inputs.q, inputs.k, inputs.v, **inputs.captures))


def test_an_unavailable_packed_kernel_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Attention(CAUSAL, SM_90A, Emulator())

    def refuse(*how: Any) -> None:
        raise BuildError(f"`{how[-1]}` would build it")

    monkeypatch.setattr(
        forward_dispatch, "ForwardKernels", type("Refused", (ForwardKernels,), {"build": staticmethod(refuse)})
    )
    said = r"packed4 would fill the card .*`flashgen show --packed-heads 4 --what resources --target sm_90a '"
    with pytest.warns(FlashgenWarning, match=said):
        assert compiled.plan_for(30, 90, 2, 8, 2) == compiled.plan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled.plan_for(20, 90, 2, 8, 2) == compiled.plan


def test_a_tuned_winner_is_packed(tmp_path: Path) -> None:
    winner = HopperPlan(2, 64, takes_turns=True)
    compiled = Attention(CAUSAL, SM_90A, Emulator(), tuned=KernelCache(tmp_path))
    tuned = TunedPlans(render_forward(CAUSAL, SM_90A), KernelCache(tmp_path))
    card = Emulator().card(0)
    lengths = LengthClass.of(Workload(30, 90, 16, card.multiprocessors), lists=False)
    tuned.store(card, lengths, TunedPlan.of(render_forward(CAUSAL, SM_90A, winner)), {})
    assert compiled.plan_for(30, 90, batch=2, heads=8, heads_kv=2) == replace(winner, packed_heads=4)
    assert compiled.plan_for(30, 90, batch=2, heads=8) == winner


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [2, 4, 8, 16, 32, 64])
@pytest.mark.quick_every(3)
def test_packed_and_unpacked_on_a_gpu(packed: int) -> None:
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("packs heads on sm_90 alone")
    for number, spec in enumerate((*VARIANTS[:4], VARIANTS[5], ALIBI)):
        shape = Shape((1, 37, 64, 150)[number % 4], 150, 2, 2 * packed, 2)
        inputs = random_inputs(spec, shape, seed=packed)
        arrays = [cupy.asarray(array) for array in (inputs.q, inputs.k, inputs.v)]
        captures = {name: cupy.asarray(value) for name, value in inputs.captures.items()}
        base = attention.compile(spec, target="sm_90a").plan
        assert isinstance(base, HopperPlan)
        packing = replace(base, packed_heads=packed)
        if refusal := packing.problem(spec, SM_90A):
            assert packed == 64 and "too small to be listed" in refusal, refusal
            continue
        found = []
        for plan in (base, packing):
            out, lse = (cupy.asarray(array) for array in poisoned_outputs(spec, inputs.q))
            compiled = attention.compile(spec, target="sm_90a", plan=plan)
            compiled(*arrays, return_lse=True, out=(out, lse), **captures)
            found.append((cupy.asnumpy(out).astype(np.float32), cupy.asnumpy(lse)))
            verdict = judged(spec, inputs.q, inputs.k, inputs.v, cupy.asnumpy(out), found[-1][1], inputs.captures)
            assert verdict.ok, f"{plan}, {shape}: {verdict}"
        (out, lse), (packed_out, packed_lse) = found
        np.testing.assert_allclose(packed_out, out, atol=2e-2, rtol=2e-2)
        np.testing.assert_allclose(packed_lse, lse, atol=1e-4)
