"""Hopper's backward with one CTA per query head, which accumulate shared dK and dV: results and dispatch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import attention
from flashgen.attention import backward_dispatch
from flashgen.codegen.dispatch import render_backward_kernels, required_head_split_plan
from flashgen.codegen.families import backward_family
from flashgen.codegen.targets import target_named
from flashgen.codegen.workload import Workload
from flashgen.errors import BuildError, FlashgenWarning, UnsupportedError
from flashgen.runtime.schedule import Schedule
from flashgen.verify.gradients import gradients_by_name, judged_gradients, poisoned_gradients, random_gradients
from flashgen.verify.problems import Shape, random_inputs

SM_90A = target_named("sm_90a")
CAUSAL = fg.AttentionSpec(64, "bfloat16", mask=fg.causal())


def assert_right(spec: fg.AttentionSpec, shape: Shape, target: str | None = "sm_90a", **how: Any) -> None:
    """Checks dV and dK by the numerics rule; the gradients are NaN before the call."""
    plan = required_head_split_plan(spec, SM_90A)
    compiled = attention.compile(spec, target=target, backward_plan=plan, **how)
    inputs, seed = random_inputs(spec, shape), {"seed": 7} if spec.dropout else {}
    d_out, _ = random_gradients(spec, shape, 3)
    out, lse = compiled(inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.captures, **seed)
    into = poisoned_gradients(spec, inputs)
    found = compiled.backward(d_out, inputs.q, inputs.k, inputs.v, out, lse, into=into, **inputs.captures, **seed)
    verdicts = judged_gradients(
        spec, inputs.q, inputs.k, inputs.v, d_out, gradients_by_name(found), **inputs.captures, **seed
    )
    assert all(verdict.ok for verdict in verdicts.values()), verdicts


VARIANTS = (
    fg.AttentionSpec(64),
    fg.AttentionSpec(40, value_dim=72, mask=fg.causal(), layout="bshd"),
    fg.AttentionSpec(128, "bfloat16", mask=fg.sliding_window(30, 20)),
    fg.AttentionSpec(64, mask=fg.document("ids"), score=fg.softcap(10)),
    fg.AttentionSpec(96, mask=fg.causal(), dropout=0.25),
)


@pytest.mark.parametrize("spec", VARIANTS, ids=lambda spec: spec.name)
@pytest.mark.rotated(6)
def test_variants(spec: fg.AttentionSpec) -> None:
    for shape in (Shape(37, 140, 2, 4, 2), Shape(150, 129, 1, 6, 1)):
        assert_right(spec, shape, emulate=True, schedule=Schedule("random", "late", seed=1))


@pytest.mark.parametrize(("order", "copies"), [("reverse", "early"), ("greedy_warp", "late"), ("random", "random")])
def test_thread_orders(order: Any, copies: Any) -> None:
    assert_right(CAUSAL, Shape(130, 260, 1, 4, 1), emulate=True, schedule=Schedule(order, copies, seed=3))


@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_under_sanitizers(sanitize: Any) -> None:
    schedule = Schedule("random", "late", seed=5)
    assert_right(CAUSAL, Shape(70, 130, 1, 2, 1), emulate=True, sanitize=sanitize, schedule=schedule)


def test_calls_with_few_kv_heads_split_heads() -> None:
    """With 132 multiprocessors: too few blocks, or few blocks of unequal length."""
    split = backward_family(SM_90A).head_split
    assert split is not None

    def divides(mask: fg.Mask, length: int, batch: int, heads_kv: int, head_dim: int = 128) -> bool:
        spec = fg.AttentionSpec(head_dim, "bfloat16", mask=mask)
        plan = next(kernel.plan for kernel in render_backward_kernels(spec, SM_90A) if kernel.role == "dkdv")
        workload = Workload(length, length, batch * 32, 132, 32 // heads_kv)
        chosen = split.choose(plan, spec, SM_90A, workload)
        assert chosen is None or chosen == required_head_split_plan(spec, SM_90A)
        return chosen is not None

    assert divides(fg.causal(), 16384, 1, 1) and divides(fg.causal(), 4096, 4, 1)
    assert not divides(fg.causal(), 16384, 1, 8) and not divides(fg.causal(), 16384, 1, 32)
    assert not divides(fg.full(), 16384, 1, 1)  # 128 blocks of equal length
    assert divides(fg.full(), 4096, 1, 1) and divides(fg.full(), 2048, 10, 1)  # 32 blocks; 160
    assert not divides(fg.causal(), 16384, 1, 1, head_dim=256)


def test_calls_split_heads_unless_a_plan_is_given() -> None:
    compiled = attention.compile(CAUSAL, target="sm_90a", emulate=True)
    given = attention.compile(CAUSAL, target="sm_90a", emulate=True, backward_plan=compiled.backward_plan)
    exact = attention.compile(CAUSAL, target="sm_90a", emulate=True, deterministic=True)
    inputs = random_inputs(CAUSAL, Shape(60, 130, 1, 4, 1))
    d_out, _ = random_gradients(CAUSAL, Shape(60, 130, 1, 4, 1), 3)
    for each, expected in ((compiled, True), (given, False), (exact, False)):
        out, lse = each(inputs.q, inputs.k, inputs.v, return_lse=True)
        each.backward(d_out, inputs.q, inputs.k, inputs.v, out, lse)
        stages = {stage.role for prepared in each._backward._prepared.values() for stage in prepared.stages.stages}
        assert ("postprocess_dk" in stages) == expected


def test_unavailable_kernels_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of the default plan run instead."""
    spec = fg.AttentionSpec(72, "bfloat16", mask=fg.causal())
    compiled = attention.compile(spec, target="sm_90a", emulate=True)
    compiled.build_backward()

    def refuse(*_: Any) -> None:
        raise BuildError("no compiler")

    monkeypatch.setattr(backward_dispatch, "BuiltStages", refuse)
    inputs = random_inputs(spec, Shape(60, 130, 1, 4, 1))
    d_out, _ = random_gradients(spec, Shape(60, 130, 1, 4, 1), 3)
    out, lse = compiled(inputs.q, inputs.k, inputs.v, return_lse=True)
    with pytest.warns(FlashgenWarning, match="heads apart would fill the card better and is not used: no compiler"):
        compiled.backward(d_out, inputs.q, inputs.k, inputs.v, out, lse)
    assert np.isfinite(compiled.backward(d_out, inputs.q, inputs.k, inputs.v, out, lse).dk.astype(np.float32)).all()


def test_plans_that_cannot_split_heads_are_refused() -> None:
    for spec, target in ((CAUSAL, "sm_90"), (fg.AttentionSpec(256), "sm_90a")):
        with pytest.raises(UnsupportedError, match=f"heads_apart=True: {target} has no such backward"):
            required_head_split_plan(spec, target_named(target))
    with pytest.raises(UnsupportedError, match="the deterministic mode cannot accumulate dK and dV"):
        render_backward_kernels(CAUSAL, SM_90A, required_head_split_plan(CAUSAL, SM_90A), deterministic=True)
    with pytest.raises(UnsupportedError, match="varlen batches have no kernel"):
        render_backward_kernels(fg.AttentionSpec(64, layout="thd"), SM_90A, required_head_split_plan(CAUSAL, SM_90A))


@pytest.mark.gpu
@pytest.mark.quick
def test_on_a_gpu() -> None:
    for spec in VARIANTS:
        assert_right(spec, Shape(150, 1029, 2, 8, 2), target=None)
