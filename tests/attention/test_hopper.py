"""Hopper's forward kernel on the emulator: variants, plans, lengths, strides, thread orders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import attention
from flashgen.attention.launches import launch_of
from flashgen.attention.problem import Problem
from flashgen.codegen.dispatch import render_forward
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.targets import target_named
from flashgen.errors import ArgumentError
from flashgen.launch.engines import Emulator
from flashgen.launch.tensor_map_writer import TensorMapWriter
from flashgen.runtime.schedule import COPIES, ORDERS, Schedule
from flashgen.verify.check import judged
from flashgen.verify.problems import Shape, poisoned_outputs, random_inputs
from flashgen.verify.variants import Case, named_cases

CAUSAL = fg.AttentionSpec(64, mask=fg.causal())


def assert_right(spec: fg.AttentionSpec, shape: Shape, captures: Any = None, **how: Any) -> None:
    compiled = attention.compile(spec, target="sm_90a", emulate=True, **how)
    inputs = random_inputs(spec, shape, captures=captures)
    out, lse = poisoned_outputs(spec, inputs.q)
    dropout: dict[str, int] = {"seed": 2**40 + 7, "offset": 3} if spec.dropout else {}
    compiled(inputs.q, inputs.k, inputs.v, return_lse=True, out=(out, lse), **inputs.captures, **dropout)
    verdict = judged(spec, inputs.q, inputs.k, inputs.v, out, lse, inputs.captures, **dropout)
    assert verdict.ok, verdict


@pytest.mark.rotated(36)
@pytest.mark.parametrize("case", named_cases(1), ids=str)
def test_every_variant(case: Case) -> None:
    assert_right(case.spec, case.shape, case.captures, schedule=Schedule("random", "late", seed=1))


PLANS = (
    HopperPlan(1, 32, 3),
    HopperPlan(2, 48, 2, takes_turns=True),
    HopperPlan(3, 64, 1, takes_turns=True),
    HopperPlan(2, 256),
    HopperPlan(2, 64, 2, takes_turns=True),
    HopperPlan(3, 128, 2),
)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("order", ["in_order", "random", "greedy_warp"])
@pytest.mark.covering(6)
def test_plans_and_thread_orders(plan: HopperPlan, order: Any) -> None:
    schedule = Schedule(order, "random", seed=3)
    # Tiles of queries without keys between others: a persistent block skips them.
    assert_right(
        fg.AttentionSpec(64, mask=fg.sliding_window(50)), Shape(330, 90, 2, 2, 1), plan=plan, schedule=schedule
    )
    assert_right(fg.AttentionSpec(40, "bfloat16", value_dim=72), Shape(200, 300, 1, 4, 2), plan=plan, schedule=schedule)


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.covering(6)
def test_a_tile_without_separate_output_memory(order: Any, copies: Any) -> None:
    spec, plan = fg.AttentionSpec(256, "bfloat16", mask=fg.causal()), HopperPlan(2, 80)
    assert not plan.output_apart(spec) and plan.output_apart(CAUSAL)
    assert_right(spec, Shape(400, 300, 1, 2, 2), plan=plan, schedule=Schedule(order, copies, seed=1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("growth", [0.01, 0.1, 1.0, 3.0, -1.0], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["full", "window"])
@pytest.mark.covering(6)
def test_row_maxima_of_earlier_tiles(growth: float, dtype: Any, masked: bool) -> None:
    """Scores grow along the keys: slightly, so that old maxima suffice; and much, so that powers of 2 overflow."""
    mask = fg.sliding_window(90, 10) if masked else fg.full()
    spec = fg.AttentionSpec(64, dtype, mask=mask)
    compiled = attention.compile(spec, target="sm_90a", emulate=True, plan=HopperPlan(2, 32))
    inputs = random_inputs(spec, Shape(150, 300, 1, 2, 1))
    q, k = inputs.q.astype(np.float32), inputs.k.astype(np.float32)
    q[..., 0] = 8.0 * (1 + np.arange(150) % 3)  # some of the neighbouring rows exceed their maxima before others
    k[..., 0] = growth * np.arange(300)
    q, k = q.astype(inputs.q.dtype), k.astype(inputs.k.dtype)
    out, lse = poisoned_outputs(spec, q)
    compiled(q, k, inputs.v, return_lse=True, out=(out, lse))
    verdict = judged(spec, q, k, inputs.v, out, lse, {})
    assert verdict.ok, verdict


@pytest.mark.parametrize("lengths", [(1, 1), (0, 5), (5, 0), (1, 300), (193, 1), (64, 64), (129, 127)], ids=str)
def test_lengths(lengths: tuple[int, int]) -> None:
    for spec in (fg.AttentionSpec(64), fg.AttentionSpec(96, mask=fg.causal())):
        assert_right(spec, Shape(*lengths, 2, 2, 1), plan=HopperPlan(2, 64))


@pytest.mark.parametrize(
    "plan", [HopperPlan(3, 64, takes_turns=True), HopperPlan(1, 96), HopperPlan(2, 256, 1)], ids=str
)
def test_dropout_over_more_keys_than_one_draw_covers(plan: HopperPlan) -> None:
    spec = fg.AttentionSpec(16, mask=fg.sliding_window(1100) & fg.causal(), dropout=0.3)
    keys = plan.drawn_steps(spec) * plan.tile_k
    assert 1024 <= keys <= 2048
    assert_right(spec, Shape(200, keys + 500, 1, 1, 1), plan=plan, schedule=Schedule("random", "random", seed=2))
    assert_right(fg.AttentionSpec(16, dropout=0.3), Shape(70, 2 * keys + 1, 1, 1, 1), plan=plan)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_strides(layout: Any) -> None:
    """Views of a larger array, and rows that several heads share."""
    spec = fg.AttentionSpec(32, mask=fg.causal(), layout=layout)
    packed = np.random.default_rng(0).standard_normal((2, 90, 90, 3, 48)).astype(np.float16)[:, ::2]
    q, k, v = (packed[:, :, ::3, i, 8:40] for i in range(3))
    k = np.broadcast_to(k[:, :1], k.shape)
    out = attention.compile(spec, target="sm_90a", emulate=True)(q, k, v)
    expected = attention.compile(spec, target="sm_90a", emulate=True)(*map(np.ascontiguousarray, (q, k, v)))
    np.testing.assert_array_equal(out, expected)


def test_strides_that_tma_does_not_support_are_refused() -> None:
    q, k, v = (np.zeros((1, 2, 40, 64), np.float16) for _ in range(3))
    with pytest.raises(ArgumentError, match=r"k has strides .* target='sm_90'"):
        attention.compile(CAUSAL, target="sm_90a", emulate=True)(q, k[:, :, ::-1], v)


@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_under_sanitizers(sanitize: Any) -> None:
    schedule = Schedule("random", "late", seed=5)
    assert_right(fg.AttentionSpec(128, "bfloat16", mask=fg.causal()), Shape(300, 340, 1, 2, 1), sanitize=sanitize,
                 schedule=schedule)  # fmt: skip
    spec = fg.AttentionSpec(40, value_dim=72, mask=fg.document("ids"), dropout=0.1)
    assert_right(spec, Shape(150, 150, 1, 2, 2), sanitize=sanitize, schedule=schedule)


def test_memory_mapped_by_the_emulator_is_no_race() -> None:
    """At large head dims a warpgroup maps memory for its many products in flight, which others then compare."""
    assert_right(
        fg.AttentionSpec(208), Shape(1, 339, 1, 1, 1), sanitize="thread", schedule=Schedule("in_order", "late")
    )


def problem(batch: int, heads: int, heads_kv: int, length: int) -> Problem:
    return Problem(batch, heads, heads_kv, length, length, {})


def test_persistent_blocks_take_tiles_by_a_counter() -> None:
    spec = fg.AttentionSpec(64, mask=fg.causal())
    kernel = render_forward(spec, target_named("sm_90a"))
    strides = dict.fromkeys("qkvo", (4 * 1000 * 64, 1000 * 64, 64))
    problems = (Problem(batch, 4, 4, 1000, 1000, strides, multiprocessors=132) for batch in (2, 8))
    few, many = (launch_of(kernel, spec, problem, {}) for problem in problems)
    tiles = -(-1000 // kernel.plan.tile_q)
    assert few.grid == (8 * tiles, 1, 1) and many.grid == (132, 1, 1)
    assert isinstance(few.writer, TensorMapWriter) and isinstance(many.writer, TensorMapWriter)
    assert not few.num_counters and many.num_counters
    assert few.writer.pointer_names == ["q", "k", "v", "o", "lse", "next_tile"]
    assert few.writer.offsets["k"] == 128 and few.writer.offsets["lse"] == 512
    struct = few.writer.write_emulated({})
    assert len(struct) % 64 == 0 and struct[512:528] == bytes(16)


@pytest.mark.parametrize("mask", [fg.full(), fg.causal(), fg.document("ids")], ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.covering(6)
def test_a_launch_resets_its_counter(mask: Any, order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of several threads on one stream therefore need no work between them that could be interleaved."""
    counter = np.zeros(1, np.uint32)
    monkeypatch.setattr(Emulator, "counter", lambda engine, place, count: counter)
    for shape in (Shape(500, 500, 2, 3, 3), Shape(130, 70, 1, 4, 2)):
        assert_right(fg.AttentionSpec(64, mask=mask), shape, plan=PLANS[0], schedule=Schedule(order, "random", seed=2))
        assert counter == 0


def test_more_tiles_than_the_counter_holds_are_refused() -> None:
    spec = fg.AttentionSpec(64)
    kernel = render_forward(spec, target_named("sm_90a"))
    strides = dict.fromkeys("qkvo", (0, 0, 64))
    with pytest.raises(ArgumentError, match="split the batch"):
        launch_of(kernel, spec, Problem(60000, 60000, 60000, 1000, 1000, strides), {})


def section(kernel: RenderedKernel, sizes: Problem) -> Any:
    return kernel.values(sizes)["section"]


def test_heads_of_a_section_share_the_l2() -> None:
    kernel, full = (
        render_forward(fg.AttentionSpec(128, mask=mask), target_named("sm_90a")) for mask in (fg.causal(), fg.full())
    )
    assert section(full, problem(1, 16, 16, 16384)) == 1
    assert section(kernel, problem(1, 16, 16, 16384)) == 4  # 8 MiB of K and V each
    assert section(kernel, problem(1, 16, 4, 16384)) == 16
    assert section(kernel, problem(1, 16, 16, 2**20)) == 1
    assert section(kernel, problem(2, 2, 2, 100)) == 4
