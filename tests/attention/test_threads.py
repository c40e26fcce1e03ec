"""One compiled attention called by many threads on the emulator: shared state stays correct."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.attention import backward, call_pass, forward, forward_dispatch, tile_lists
from flashgen.attention.callable import Attention
from flashgen.attention.dispatch import KernelsByPlan
from flashgen.attention.tuned_plans import TunedPlans, invalidate_tuned_plans
from flashgen.build.cache import KernelCache
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.targets import target_named
from flashgen.launch.engines import Emulator
from flashgen.verify import Shape, random_gradients, random_inputs

AtOnce = Callable[..., list[Any]]

NEAR = fg.trace_mask(lambda b, h, q, k: (abs(q - k) < 20) | (k < 4) | (k >= fg.len_k - 4))  # needs tile lists
LENGTHS = tuple((length, length + 7) for length in (33, 40, 70, 41, 90))


@pytest.fixture
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduces caches below what the calls of a test need, so that calls evict each other's entries."""
    monkeypatch.setattr(call_pass, "_MAX_PREPARED", 2)
    monkeypatch.setattr(tile_lists, "_MAX_CACHED", 1)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_calls_of_many_lengths_in_many_threads(target: str, at_once: AtOnce, hurried: None, small_caches: None) -> None:
    """More lengths than cache entries; every output and LSE has the bits of a single thread."""
    spec = fg.AttentionSpec(16, mask=NEAR)
    compiled = Attention(spec, target_named(target), Emulator())
    inputs = [random_inputs(spec, Shape(*pair, 1, 2, 1), seed) for seed, pair in enumerate(LENGTHS)]

    def call(number: int) -> tuple[Any, Any]:
        given = inputs[number % len(inputs)]
        return compiled(given.q, given.k, given.v, return_lse=True)

    expected = [call(number) for number in range(len(inputs))]

    def check(thread: int) -> None:
        for step in range(25):
            for found, right in zip(call(thread + step), expected[(thread + step) % len(inputs)], strict=True):
                np.testing.assert_array_equal(found, right)

    at_once(check)
    assert len(compiled.forward._prepared) <= 2


def test_gradients_of_many_lengths_in_many_threads(at_once: AtOnce, hurried: None, small_caches: None) -> None:
    spec = fg.AttentionSpec(16, mask=NEAR)
    compiled = Attention(spec, target_named("sm_80"), Emulator(), deterministic=True)
    calls = []
    for seed, pair in enumerate(LENGTHS):
        shape = Shape(*pair, 1, 2, 1)
        given = random_inputs(spec, shape, seed)
        rows = (given.q, given.k, given.v)
        calls.append((random_gradients(spec, shape, seed)[0], *rows, *compiled(*rows, return_lse=True)))
    expected = [compiled.backward(*call) for call in calls]

    def check(thread: int) -> None:
        for step in range(6):
            number = (thread + step) % len(calls)
            for found, right in zip(compiled.backward(*calls[number]), expected[number], strict=True):
                np.testing.assert_array_equal(found, right)

    at_once(check)


def test_the_backward_is_compiled_once(at_once: AtOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Counted(backward.BackwardPass):
        def __init__(self, *given: Any) -> None:
            made.append(self)
            super().__init__(*given)

    monkeypatch.setattr(backward, "BackwardPass", Counted)
    compiled = Attention(fg.AttentionSpec(16), target_named("sm_80"), Emulator())
    assert len(set(map(id, at_once(lambda number: compiled._backward)))) == 1 and len(made) == 1


def test_two_attentions_compile_concurrently(at_once: AtOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two finishes compiling its backward only after the other has begun."""
    both = threading.Barrier(2)

    class Met(backward.BackwardPass):
        def __init__(self, *given: Any) -> None:
            both.wait(30)
            super().__init__(*given)

    monkeypatch.setattr(backward, "BackwardPass", Met)
    each = [Attention(fg.AttentionSpec(16), target_named("sm_80"), Emulator()) for _ in range(2)]
    at_once(lambda number: each[number]._backward, 2)


def test_a_packed_kernel_is_built_once(at_once: AtOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 queries of 8 heads that share a KV head, in 16 batches: packed, with a kernel of its own."""
    compiled = Attention(fg.AttentionSpec(16), target_named("sm_90a"), Emulator())
    built: list[Any] = []
    build = forward_dispatch.ForwardKernels.build

    def counted(*given: Any) -> Any:
        built.append(given)
        return build(*given)

    monkeypatch.setattr(forward_dispatch.ForwardKernels, "build", counted)
    plans = at_once(lambda number: compiled.plan_for(16, 64, batch=16, heads=8, heads_kv=1))
    assert plans[0].packed_heads == 8 and len(set(plans)) == 1 and len(built) == 1


def test_winners_are_invalidated_during_calls(tmp_path: Path, at_once: AtOnce, hurried: None) -> None:
    """`tune` in one thread makes calls of the others look up plans again."""
    compiled = Attention(fg.AttentionSpec(16), target_named("sm_80"), Emulator(), tuned=KernelCache(tmp_path))

    def work(thread: int) -> None:
        for step in range(150):
            if thread < 2:
                compiled.forward.clear_cache()
            else:
                assert compiled.plan_for(2 ** (step % 3 + 5)) == compiled.plan

    at_once(work)


def test_a_winner_stored_during_a_lookup_is_looked_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread tunes after a call has found no winner and before it caches that."""
    spec = fg.AttentionSpec(16)
    compiled = Attention(spec, target_named("sm_80"), Emulator(), tuned=KernelCache(tmp_path))
    asked: list[Any] = []

    def find(*given: Any) -> None:
        asked.append(given)
        if len(asked) == 1:
            invalidate_tuned_plans()

    monkeypatch.setattr(TunedPlans, "find", find)
    given = random_inputs(spec, Shape(40, 40, 1, 1, 1))
    for _ in range(3):
        compiled(given.q, given.k, given.v)
    assert len(asked) == 2


def test_attentions_compile_while_winners_are_invalidated(
    tmp_path: Path, at_once: AtOnce, hurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = Attention(fg.AttentionSpec(16), target_named("sm_80"), Emulator(), tuned=KernelCache(tmp_path))
    default, kernel = compiled.forward.dispatch.default, compiled.forward.kernel
    monkeypatch.setattr(forward_dispatch.ForwardKernels, "build", lambda *given: default)
    tuned = compiled.forward.dispatch.tuned

    def work(thread: int) -> list[Any]:
        if thread < 2:
            for _ in range(100):
                invalidate_tuned_plans()
            return []
        return [forward.ForwardPass(compiled.spec, kernel, Emulator(), "", tuned) for _ in range(100)]

    at_once(work)


def test_threads_that_compile_one_spec_get_one_callable(at_once: AtOnce) -> None:
    spec = fg.AttentionSpec(16, scale=0.71875)  # a spec that no other test uses
    plan = ForwardPlan(32, 32, 2)
    assert len({id(each) for each in at_once(lambda number: attention.compile(spec, emulate=True, plan=plan))}) == 1


def test_a_plan_of_two_classes_of_lengths_is_built_once(at_once: AtOnce) -> None:
    """Each thread uses another class; the second one finds the kernels that the first one builds."""
    built: list[object] = []
    kernels = SimpleNamespace(plan="default", name="forward")
    tuned = SimpleNamespace(find=lambda card, lengths: SimpleNamespace(plan="other"))
    by_plan: Any = KernelsByPlan()

    def build(rendered: object) -> object:
        time.sleep(0.05)  # long enough for every thread to ask in the meantime
        built.append(rendered)
        return rendered

    def ask(thread: int) -> object:
        return by_plan.tuned(None, kernels, tuned, "card", thread, lambda winner: {"forward": winner.plan}, build)

    assert at_once(ask, 2) == [{"forward": "other"}] * 2
    assert built == [{"forward": "other"}]
