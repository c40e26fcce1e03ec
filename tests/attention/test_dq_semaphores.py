"""Blocks ordered by semaphores, which add to dQ, or to dK and dV of split tiles: results for any thread order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.codegen.hopper import backward_scheduler
from flashgen.codegen.hopper.backward_plans import HopperBackwardPlan
from flashgen.codegen.sizes import Sizes
from flashgen.errors import UnsupportedError
from flashgen.language import AttentionSpec
from flashgen.launch.engines import Emulator
from flashgen.runtime.schedule import Schedule
from flashgen.verify import Shape, gradients_by_name, judged_gradients, random_gradients, random_inputs
from flashgen.verify.gradients import poisoned_gradients
from flashgen.verify.variants import learned

PLAN = HopperBackwardPlan(64, in_turns=True)
NARROW = HopperBackwardPlan(128, early_scores=False, in_turns=True)
# At least as many tiles of keys as the emulator has multiprocessors, and fewer, so that heads run side by side.
SHAPES = [Shape(330, 600, 1, 2, 1), Shape(600, 330, 2, 3, 3), Shape(300, 200, 2, 3, 3), Shape(200, 100, 1, 4, 4)]
SIDE_BY_SIDE = [Schedule("random", "random", seed, workers=4) for seed in range(2)]
ONE_BY_ONE = [Schedule("in_order", "late"), Schedule("reverse", "early")]

SPECS: dict[str, tuple[AttentionSpec, HopperBackwardPlan]] = {
    "full": (AttentionSpec(64), PLAN),
    "causal": (AttentionSpec(64, mask=fg.causal()), NARROW),
    "window": (AttentionSpec(128, "bfloat16", mask=fg.sliding_window(100, 40)), PLAN),
    "prefix": (AttentionSpec(64, mask=fg.prefix_lm(200), dropout=0.2), PLAN),
    "learned": (AttentionSpec(64, mask=fg.causal(), score=learned(fg.alibi("slopes"))), PLAN),
    "padding": (AttentionSpec(32, mask=fg.padding("lengths"), layout="bshd"), NARROW),
}


def gradients(
    spec: AttentionSpec, plan: HopperBackwardPlan, shape: Shape, schedule: Schedule, sanitize: Any = None
) -> dict[str, Any]:
    how = {"schedule": schedule, "backward_plan": plan, "deterministic": plan.in_turns, "sanitize": sanitize}
    compiled = attention.compile(spec, target="sm_90a", emulate=True, **how)
    inputs = random_inputs(spec, shape, seed=3)
    given = {**inputs.captures, **({"seed": 7} if spec.dropout else {})}
    out, lse = compiled(inputs.q, inputs.k, inputs.v, return_lse=True, **given)
    d_out, _ = random_gradients(spec, shape, 3)
    into = poisoned_gradients(spec, inputs)
    found = gradients_by_name(compiled.backward(d_out, inputs.q, inputs.k, inputs.v, out, lse, into=into, **given))
    verdicts = judged_gradients(spec, inputs.q, inputs.k, inputs.v, d_out, found, **given)
    assert all(verdict.ok for verdict in verdicts.values()), verdicts
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.rotated(36)
def test_bits_do_not_depend_on_the_thread_order(name: str, shape: Shape) -> None:
    spec, plan = SPECS[name]
    first, *others = [gradients(spec, plan, shape, schedule) for schedule in (*ONE_BY_ONE, *SIDE_BY_SIDE)]
    for other in others:
        for gradient, bits in first.items():
            assert np.array_equal(bits.view(np.uint8), other[gradient].view(np.uint8)), gradient


IN_ANY_ORDER: dict[str, tuple[AttentionSpec, HopperBackwardPlan]] = {
    "full": (AttentionSpec(64), HopperBackwardPlan(64)),
    "causal": (AttentionSpec(64, mask=fg.causal()), HopperBackwardPlan(128, early_scores=False)),
    "lists": (AttentionSpec(40, mask=fg.document("ids")), HopperBackwardPlan(64)),
    "apart": (AttentionSpec(64, mask=fg.causal()), HopperBackwardPlan(64, heads_apart=True)),
    "finished apart": (AttentionSpec(64), HopperBackwardPlan(64, finish_apart=True)),
    "untouched": (
        AttentionSpec(64, mask=fg.sliding_window(0, 40)),
        HopperBackwardPlan(64),
    ),  # the last tiles
}


@pytest.mark.parametrize("schedule", [*SIDE_BY_SIDE, ONE_BY_ONE[1]], ids=str)
@pytest.mark.parametrize("name", IN_ANY_ORDER)
@pytest.mark.rotated(18)
def test_first_cta_of_a_dq_tile_stores(name: str, schedule: Schedule) -> None:
    spec, plan = IN_ANY_ORDER[name]
    gradients(spec, plan, Shape(600, 330, 2, 4, 2), schedule)


IN_PARTS: dict[str, tuple[AttentionSpec, HopperBackwardPlan]] = {
    "full": (AttentionSpec(128, "bfloat16"), HopperBackwardPlan(64)),
    "narrow": (AttentionSpec(64), HopperBackwardPlan(128, early_scores=False)),
    "dropout": (AttentionSpec(64, value_dim=32, dropout=0.2, layout="bshd"), HopperBackwardPlan(64)),
    "learned": (AttentionSpec(32, score=learned(fg.alibi("slopes"))), HopperBackwardPlan(64)),
}
# Numbers of key tiles that leave one or two tiles for three multiprocessors, with and without GQA.
UNEVEN = [Shape(330, 600, 1, 2, 1), Shape(200, 200, 2, 4, 2), Shape(500, 90, 1, 2, 2), Shape(700, 100, 1, 1, 1)]


@pytest.mark.parametrize("shape", UNEVEN, ids=str)
@pytest.mark.parametrize("name", IN_PARTS)
@pytest.mark.rotated(18)
def test_split_tiles(name: str, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, plan = IN_PARTS[name]
    monkeypatch.setattr(backward_scheduler, "_MIN_QUERIES", 64)  # the emulator's calls have few blocks
    counters: list[np.ndarray[Any, Any]] = []
    counter = Emulator.counter
    monkeypatch.setattr(Emulator, "counter", lambda *args: counters.append(counter(*args)) or counters[-1])
    assert backward_scheduler.tile_split(spec, plan, sizes_of(shape, 3)).tiles > 0
    for schedule in (*ONE_BY_ONE, *SIDE_BY_SIDE):
        gradients(spec, plan, shape, schedule)
    assert counters and not any(each.any() for each in counters), "counters are 0 before and after"


@pytest.mark.parametrize("sanitize", ["thread", "address"])
def test_split_tiles_under_sanitizers(sanitize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """These run one block after the other."""
    monkeypatch.setattr(backward_scheduler, "_MIN_QUERIES", 64)
    schedule = Schedule("random", "random", 0)
    gradients(AttentionSpec(64), HopperBackwardPlan(64), UNEVEN[0], schedule, sanitize)


def sizes_of(shape: Shape, multiprocessors: int) -> Sizes:
    lengths = (shape.len_q, shape.len_k)
    return Sizes(shape.batch, shape.heads_q, shape.heads_kv, *lengths, multiprocessors=multiprocessors)


@pytest.mark.parametrize(
    ("shape", "tiles", "parts"),
    [
        (Shape(16384, 16384, 1, 16, 16), 68, 8),  # 2048 tiles of keys, 15.5 for each of 132 multiprocessors
        (Shape(1024, 1024, 16, 16, 16), 0, 2),  # so do 68, whose halves would take two rounds
        (Shape(1024, 1024, 1, 4, 4), 32, 2),
        (Shape(16384, 16384, 1, 32, 1), 0, 8),  # all but four multiprocessors have a tile
        (Shape(128, 128, 1, 1, 1), 0, 1),
        (Shape(4096, 128 * 132, 1, 1, 1), 0, 8),
    ],
    ids=str,
)
def test_which_tiles_are_split(shape: Shape, tiles: int, parts: int) -> None:
    made = backward_scheduler.tile_split(AttentionSpec(128), HopperBackwardPlan(64), sizes_of(shape, 132))
    assert made == (tiles, parts)


@pytest.mark.parametrize("mask", [fg.causal(), fg.document("ids")], ids=["causal", "lists"])
def test_masks_do_not_split_tiles(mask: fg.Mask) -> None:
    compiled = attention.compile(AttentionSpec(64, mask=mask), target="sm_90a", emulate=True)
    assert all("part_sums" not in text for text in compiled.backward_sources.values())


def test_the_default_mode_may_use_semaphores() -> None:
    spec, plan = SPECS["causal"]
    compiled = attention.compile(spec, target="sm_90a", emulate=True, backward_plan=plan)
    source = next(text for name, text in compiled.backward_sources.items() if "-dkdv-" in name)
    assert "semaphore_wait(semaphore, position)" in source


def test_heads_run_side_by_side_to_fill_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, given = AttentionSpec(64, mask=fg.sliding_window(77)), []
    made = backward_scheduler._values
    monkeypatch.setattr(backward_scheduler, "_values", lambda *args: given.append(made(*args)) or given[-1])
    gradients(spec, PLAN, Shape(200, 200, 2, 3, 3), ONE_BY_ONE[0])
    assert [values["heads_at_once"] for values in given] == [2]  # two tiles of keys each; three multiprocessors


def test_one_kernel_computes_all_gradients() -> None:
    """Plans with semaphores need no separate kernel for dQ."""
    spec, plan = SPECS["causal"]
    compiled = attention.compile(spec, target="sm_90a", emulate=True, backward_plan=plan, deterministic=True)
    assert [name.split("-")[1] for name in compiled.backward_sources] == ["preprocess", "dkdv"]


@pytest.mark.parametrize(
    ("spec", "plan", "why"),
    [
        (AttentionSpec(64, mask=fg.document("ids")), PLAN, "not proven to be contiguous"),
        (AttentionSpec(64, mask=~fg.prefix_lm(100)), PLAN, "not proven to be contiguous"),
        (AttentionSpec(64, layout="thd"), PLAN, "varlen batches add to dQ in any order"),
        (AttentionSpec(64), HopperBackwardPlan(64, heads_apart=True, in_turns=True), "leave out one of the two"),
    ],
    ids=["lists", "a gap", "ragged", "heads apart"],
)
def test_specs_that_cannot_use_semaphores_are_refused(spec: AttentionSpec, plan: HopperBackwardPlan, why: str) -> None:
    compiled = attention.compile(spec, target="sm_90a", emulate=True, backward_plan=plan)
    with pytest.raises(UnsupportedError, match=f"in_turns=True: .*{why}"):
        assert compiled.backward_sources


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("name", IN_PARTS)
def test_split_tiles_on_a_gpu(name: str) -> None:
    """Repeated launches, each of which resets its counters."""
    cupy = pytest.importorskip("cupy")
    spec, shape = IN_PARTS[name][0], Shape(1100, 1300, 1, 8, 4)
    compiled, inputs = attention.compile(spec), random_inputs(spec, shape, seed=3)
    arrays = (inputs.q, inputs.k, inputs.v, random_gradients(spec, shape, 3)[0])
    q, k, v, d_out = map(cupy.asarray, arrays)
    given = {name: cupy.asarray(array) for name, array in inputs.captures.items()}
    seed = {"seed": 7} if spec.dropout else {}
    out, lse = compiled(q, k, v, return_lse=True, **given, **seed)
    for _ in range(3):
        found = gradients_by_name(compiled.backward(d_out, q, k, v, out, lse, **given, **seed))
        at_home = {name: cupy.asnumpy(gradient) for name, gradient in found.items()}
        verdicts = judged_gradients(spec, *arrays, at_home, **inputs.captures, **seed)
        assert all(verdict.ok for verdict in verdicts.values()), verdicts


@pytest.mark.gpu
@pytest.mark.parametrize("plan", [PLAN, NARROW], ids=["64", "128"])
@pytest.mark.parametrize("mask", [fg.full(), fg.causal(), fg.sliding_window(300)], ids=lambda mask: mask.name)
def test_deterministic_bits_in_a_hundred_runs(mask: fg.Mask, plan: HopperBackwardPlan) -> None:
    """More blocks than a card can hold, and heads that share KV heads."""
    cupy = pytest.importorskip("cupy")
    spec = AttentionSpec(64, "bfloat16", mask=mask)
    compiled = attention.compile(spec, backward_plan=plan, deterministic=True)
    shape = Shape(1500, 2100, 2, 16, 8)
    inputs = random_inputs(spec, shape, seed=3)
    q, k, v, d_out = (
        cupy.asarray(each) for each in (inputs.q, inputs.k, inputs.v, random_gradients(spec, shape, 3)[0])
    )
    out, lse = compiled(q, k, v, return_lse=True)
    first = compiled.backward(d_out, q, k, v, out, lse)
    for _ in range(100):
        for gradient, other in zip(first[:3], compiled.backward(d_out, q, k, v, out, lse)[:3], strict=True):
            assert bool((gradient.view(cupy.uint8) == other.view(cupy.uint8)).all())
    found = dict(zip(("dq", "dk", "dv"), map(cupy.asnumpy, first[:3]), strict=True))
    verdicts = judged_gradients(spec, inputs.q, inputs.k, inputs.v, cupy.asnumpy(d_out), found)
    assert all(verdict.ok for verdict in verdicts.values()), verdicts
