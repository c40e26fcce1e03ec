"""Heads of more than 256 columns, where the columns of the output and of gradients are split over warps."""

from collections.abc import Mapping
from typing import Any

import pytest

import flashgen as fg
from flashgen import attention
from flashgen.codegen.hopper.measured_plans import choose_hopper_plan
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.mma_sync.decode_plans import DecodePlan, decode_plans
from flashgen.codegen.targets import TARGETS as KNOWN_TARGETS
from flashgen.errors import UnsupportedError
from flashgen.runtime.schedule import Schedule
from flashgen.verify import Case, verify
from flashgen.verify.check import judged
from flashgen.verify.problems import Shape, random_inputs
from paged import call

SPECS: Mapping[str, dict[str, Any]] = {
    "512": {"head_dim": 512, "dtype": "bfloat16", "mask": fg.causal()},
    "264": {"head_dim": 264, "mask": fg.sliding_window(40)},
    "320 and 512": {"head_dim": 320, "value_dim": 512, "score": fg.alibi("slopes")},
    "384 and 64": {"head_dim": 384, "value_dim": 64, "score": fg.softcap(20.0), "mask": fg.causal()},
    "steep scores": {"head_dim": 512, "scale": 1.0},
    "sink": {"head_dim": 512, "sink": fg.Tensor("sinks", "float32", 1), "layout": "bshd"},
    "varlen": {"head_dim": 512, "layout": "thd", "mask": fg.causal(), "dtype": "bfloat16"},
    "documents": {"head_dim": 512, "mask": fg.document("ids"), "out_dtype": "float32"},
    "pages": {"head_dim": 512, "page_size": 16, "mask": fg.causal()},
    "dropout": {"head_dim": 512, "dropout": 0.25},
}
TARGETS = ("sm_80", "sm_86", "sm_90a")  # sm_90a runs the kernels of sm_90
TRAINED = {name: options for name, options in SPECS.items() if "page_size" not in options} | {
    "learned": {
        "head_dim": 320,
        "score": fg.relative_bias(fg.Tensor("table", "float32", 2, grad=True), 30),
        "grad_dtype": "float32",
    },
    "learned sink": {"head_dim": 264, "sink": fg.Tensor("sinks", "float32", 1, grad=True), "layout": "thd"},
}
NO_ROOM = {("dropout", "sm_80"), ("dropout", "sm_86")}  # for the backward
MAX_SPILLS = 60  # bytes


@pytest.mark.rotated(9)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SPECS)
def test_forward(name: str, target: str) -> None:
    if (name, target) == ("dropout", "sm_86"):
        pytest.skip("too little shared memory")
    shape = Shape(70, 70, 2, 4, 2) if name == "documents" else Shape(70, 150, 2, 4, 2)
    for result in verify([Case(fg.AttentionSpec(**SPECS[name]), shape)], target=target, emulate=True):
        assert result.ok, (result.problem, result.verdicts)


@pytest.mark.rotated(9)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", TRAINED)
def test_backward(name: str, target: str, deterministic: bool) -> None:
    if (name, target) in NO_ROOM:
        pytest.skip("too little shared memory")
    shape = Shape(70, 70, 1, 4, 2) if name == "documents" else Shape(70, 100, 1, 4, 2)
    cases = [Case(fg.AttentionSpec(**TRAINED[name]), shape)]
    given: Any = {"passes": ("backward",), "deterministic": deterministic, "target": target, "emulate": True}
    for result in verify(cases, **given):
        assert result.ok, (result.problem, result.verdicts)


@pytest.mark.rotated(9)
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_races_and_overflows(target: Any, direction: Any, sanitize: Any) -> None:
    """One and two stages, two and four warps with the same rows, in several orders of threads and copies."""
    given: Any = {"passes": (direction,), "emulate": True, "sanitize": sanitize, "schedule_count": 2}
    for options in ({"mask": fg.causal()}, {"score": fg.softcap(20.0), "mask": fg.document("ids")}):
        cases = [Case(fg.AttentionSpec(512, **options), Shape(70, 70, 1, 2, 1))]
        for deterministic in (False, True)[: 1 + (direction == "backward")]:
            for result in verify(cases, target=target, deterministic=deterministic, **given):
                assert result.ok, (result.problem, result.verdicts)


HOPPER_PLANS = (
    HopperPlan(2, 64, 1, split=2),
    HopperPlan(2, 48, 1, split=2),
    HopperPlan(2, 32, 2, split=2),
    HopperPlan(2, 16, 3, split=2),
    HopperPlan(2, 32, 2, split=2, packed_heads=4),
    HopperPlan(2, 64, 1, split=2, packed_heads=64),
)


def assert_hopper_is_right(spec: fg.AttentionSpec, shape: Shape, plan: HopperPlan, **how: Any) -> None:
    compiled = attention.compile(spec, target="sm_90a", emulate=True, plan=plan, **how)
    inputs, dropout = random_inputs(spec, shape), {"seed": 7} if spec.dropout else {}
    found = call(compiled, inputs, **dropout)
    verdict = judged(spec, inputs.q, inputs.k, inputs.v, *found, inputs.captures, **dropout)
    assert verdict.ok, f"{plan}, {shape}: {verdict}"


@pytest.mark.rotated(18)
@pytest.mark.parametrize("sanitize", [None, "thread", "address"])
@pytest.mark.parametrize(("order", "copies"), [("reverse", "early"), ("greedy_warp", "late"), ("random", "random")])
@pytest.mark.parametrize("plan", HOPPER_PLANS, ids=str)
def test_hopper_plans_and_thread_orders(plan: HopperPlan, order: Any, copies: Any, sanitize: Any) -> None:
    """Several stages, sizes of tiles and packs of heads, rows without keys, and several work tiles of a CTA."""
    schedule = Schedule(order, copies, seed=len(order))
    heads = (2 * plan.packed_heads, 1) if plan.packed_heads > 1 else (4, 2)
    steep = fg.AttentionSpec(512, "bfloat16", mask=fg.causal(), scale=1.0)
    floats = fg.AttentionSpec(328, value_dim=448, score=fg.alibi("slopes"), layout="bshd", out_dtype="float32")
    for spec, len_k in ((steep, 60), (floats, 150)):
        shape = Shape(90 // plan.packed_heads + 3, len_k, 1, *heads)
        assert_hopper_is_right(spec, shape, plan, schedule=schedule, sanitize=sanitize)


@pytest.mark.rotated(9)
@pytest.mark.parametrize("sanitize", [None, "thread", "address"])
@pytest.mark.parametrize(("dim", "parts", "tile_k"), [(320, 5, 96), (384, 3, 80), (448, 7, 80)])
def test_default_plans_have_parts_of_tiles_and_more_keys(dim: int, parts: int, tile_k: int, sanitize: Any) -> None:
    """Parts of 128 columns, and of a panel where 128 do not divide the tile, in two work tiles of a CTA."""
    spec = fg.AttentionSpec(dim, "bfloat16", mask=fg.causal(), scale=0.3)
    plan = choose_hopper_plan(spec, KNOWN_TARGETS["sm_90a"])
    assert (plan.key_parts(spec), plan.tile_k, plan.stages) == (parts, tile_k, 1)
    schedule = Schedule("random", "late", seed=5)
    assert_hopper_is_right(spec, Shape(93, 210, 1, 2, 1), plan, schedule=schedule, sanitize=sanitize)


def test_more_keys_need_room() -> None:
    """Score functions and dropout take the registers or the shared memory of larger tiles."""
    bias = fg.Tensor("bias", "float32", 4)
    biased: dict[str, Any] = {"score": lambda score, b, h, q, k: score + bias[b, h, q, k]}
    for options in ({"dropout": 0.25}, biased):
        spec = fg.AttentionSpec(448, **options)
        assert choose_hopper_plan(spec, KNOWN_TARGETS["sm_90a"]).tile_k <= 64


@pytest.mark.rotated(9)
@pytest.mark.parametrize("mask", [fg.full(), fg.causal()], ids=str)
def test_hopper_holds_narrow_outputs_of_wide_heads_in_one_warpgroup(mask: fg.Mask) -> None:
    spec = fg.AttentionSpec(512, value_dim=136, mask=mask)
    for plan in (HopperPlan(1, 48, 1), HopperPlan(2, 32, 1, takes_turns=True), HopperPlan(2, 32, 1, split=2)):
        assert_hopper_is_right(spec, Shape(150, 100, 1, 2, 1), plan, schedule=Schedule("random", "late", seed=3))


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("plan", HOPPER_PLANS, ids=str)
def test_hopper_plans_on_a_gpu(plan: HopperPlan) -> None:
    for mask in (fg.full(), fg.causal()):
        spec = fg.AttentionSpec(512, "bfloat16", mask=mask)
        compiled = attention.compile(spec, target="sm_90a", plan=plan)
        inputs = random_inputs(spec, Shape(1000, 1500, 2, 64, 1))
        assert judged(spec, inputs.q, inputs.k, inputs.v, *call(compiled, inputs), {}).ok


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", SPECS)
def test_on_a_gpu(name: str, direction: Any) -> None:
    shape = Shape(600, 600, 2, 4, 2) if name == "documents" else Shape(600, 1000, 2, 4, 2)
    for result in verify([Case(fg.AttentionSpec(**SPECS[name]), shape)], passes=(direction,)):
        assert result.ok, (result.problem, result.verdicts)


@pytest.mark.rotated(36)
@pytest.mark.parametrize("name", SPECS)
def test_default_plans_spill_no_registers(name: str) -> None:
    for target in TARGETS:
        if (name, target) != ("dropout", "sm_86"):
            assert not fg.compile(fg.AttentionSpec(**SPECS[name]), target=target).resources.spills, target


@pytest.mark.rotated(36)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", TRAINED)
def test_default_backward_plans_spill_few_registers(name: str, deterministic: bool) -> None:
    for target in TARGETS:
        if (name, target) not in NO_ROOM:
            compiled = fg.compile(fg.AttentionSpec(**TRAINED[name]), target=target, deterministic=deterministic)
            for kernel, used in compiled.backward_resources.items():
                assert used.spills <= MAX_SPILLS, (kernel, target, used)


# ---- decode

DECODED: Mapping[str, dict[str, Any]] = SPECS | {
    "narrow heads": {"head_dim": 16, "value_dim": 264, "mask": fg.causal()},
    "384 and 320": {"head_dim": 384, "value_dim": 320, "score": fg.alibi("slopes"), "dtype": "bfloat16"},
    "pages of a key": {"head_dim": 264, "page_size": 1, "score": fg.softcap(8.0)},
    "pages of many keys": {"head_dim": 512, "page_size": 64, "mask": fg.sliding_window(100), "layout": "bshd"},
    "int8": {"head_dim": 512, "kv_dtype": "int8", "mask": fg.causal()},
    "int8, 288": {"head_dim": 288, "kv_dtype": "int8", "sink": fg.Tensor("sinks", "float32", 1)},
    "int8, 320 and 32": {"head_dim": 320, "value_dim": 32, "kv_dtype": "int8", "score": fg.softcap(8.0)},
    "float8 pages": {"head_dim": 288, "value_dim": 512, "kv_dtype": "float8_e4m3fn", "page_size": 16},
    "float32 output": {"head_dim": 512, "out_dtype": "float32", "sink": fg.Tensor("sinks", "float32", 1)},
}
DECODED = {name: options for name, options in DECODED.items() if options.get("layout") != "thd"}
DECODE_TARGETS = ("sm_75", *TARGETS)
SHAPES = (Shape(1, 301, 2, 4, 2), Shape(5, 280, 1, 6, 1), Shape(1, 270, 1, 2, 2), Shape(20, 90, 1, 2, 1))


def assert_decode_is_right(spec: fg.AttentionSpec, shape: Shape, splits: int | None, **how: Any) -> None:
    compiled = attention.compile(spec, emulate=True, **how)
    inputs, dropout = random_inputs(spec, shape), {"seed": 7} if spec.dropout else {}
    verdict = judged(
        spec,
        inputs.q,
        inputs.k,
        inputs.v,
        *call(compiled, inputs, num_splits=splits, **dropout),
        inputs.captures,
        **dropout,
    )
    assert verdict.ok, f"{splits} splits of {shape}: {verdict}"


def fits(spec: fg.AttentionSpec, target: str) -> bool:
    """Whether both the forward and the decode kernels support a spec."""
    try:
        attention.compile(spec, target=target, emulate=True)
    except UnsupportedError:
        return False
    return True


@pytest.mark.rotated(36)
@pytest.mark.parametrize("target", DECODE_TARGETS)
@pytest.mark.parametrize("name", DECODED)
def test_decode(name: str, target: str) -> None:
    """With the plans of few and of many rows, with and without splits, in other orders of threads and copies."""
    spec = fg.AttentionSpec(**DECODED[name])
    if not fits(spec, target):
        pytest.skip("too little shared memory, or no bfloat16")
    for number, plan in enumerate(decode_plans(spec, KNOWN_TARGETS[target])):
        if plan.scheduled:
            continue
        shape = Shape(90, 90, 1, 2, 1) if name == "documents" else SHAPES[(len(name) + number) % len(SHAPES)]
        for splits in (1, 3):
            schedule = Schedule("random", "late", seed=splits)
            assert_decode_is_right(spec, shape, splits, target=target, plan=plan, schedule=schedule)


@pytest.mark.parametrize("plan", [(16, 16, 4, 1), (16, 16, 2, 2), (32, 16, 4, 3), (16, 32, 4, 2)], ids=str)
@pytest.mark.parametrize(("order", "copies"), [("reverse", "early"), ("greedy_warp", "late"), ("random", "random")])
@pytest.mark.rotated(9)
def test_decode_plans_and_thread_orders(plan: tuple[int, int, int, int], order: Any, copies: Any) -> None:
    """One, two and three stages, and two and four warps that share tiles; splits without keys."""
    spec, schedule = fg.AttentionSpec(264, value_dim=320, mask=fg.causal()), Schedule(order, copies, seed=len(order))
    for splits in (1, 2, 9):
        given = DecodePlan(*plan, split=plan[2])
        assert_decode_is_right(spec, Shape(3, 140, 1, 4, 2), splits, target="sm_80", plan=given, schedule=schedule)


@pytest.mark.rotated(36)
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("name", ["512", "sink", "dropout", "pages", "int8", "int8, 288", "float8 pages"])
def test_races_and_overflows_of_decode(name: str, sanitize: Any) -> None:
    spec = fg.AttentionSpec(**DECODED[name])
    for target in ("sm_80", "sm_75")[: 1 if spec.dtype == "bfloat16" or spec.dropout else 2]:
        plan = None if fits(spec, target) else DecodePlan(16, 16, 4, 1, split=4)
        for splits in (1, 3):
            schedule = Schedule("random", "late", seed=splits)
            shape = Shape(3, 130, 1, 4, 2)
            assert_decode_is_right(spec, shape, splits, target=target, plan=plan, sanitize=sanitize, schedule=schedule)


def test_few_queries_of_wide_heads_are_decoded() -> None:
    for target in ("sm_80", "sm_86", "sm_90"):
        for options in ({}, {"page_size": 16}, {"kv_dtype": "int8"}):
            compiled = attention.compile(fg.AttentionSpec(512, **options), target=target, emulate=True)
            assert isinstance(compiled.plan_for(1, 4096, 8, 8, 4), DecodePlan)


@pytest.mark.rotated(36)
@pytest.mark.parametrize("name", DECODED)
def test_default_decode_plans_spill_no_registers(name: str) -> None:
    spec = fg.AttentionSpec(**DECODED[name])
    for target in (*DECODE_TARGETS, "sm_100", "sm_120"):
        for plan in decode_plans(spec, KNOWN_TARGETS[target]) if fits(spec, target) else ():
            assert not fg.compile(spec, target=target, plan=plan).resources.spills, (target, plan)


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("name", [name for name in DECODED if name != "documents"])
def test_decode_on_a_gpu(name: str) -> None:
    case = Case(fg.AttentionSpec(**DECODED[name]), Shape(3, 1500, 3, 8, 2))
    for result in verify([case], passes=("forward",), target="sm_90"):
        assert result.ok, (result.problem, result.verdicts)


# ---- refusals

REFUSALS: Any = [
    ({}, {"target": "sm_75"}, "head_dim=512: a block of sm_75 has 65536 bytes .* tiles of up to 384 columns"),
    ({"dropout": 0.5}, {"target": "sm_86"}, "head_dim=512: a block of sm_86 .* tiles of up to 320 columns"),
    (
        {"dropout": 0.5, "page_size": 16, "layout": "thd"},
        {"target": "sm_75"},
        "head_dim=512: a block of sm_75 has 65536 bytes .* tiles of up to 320 columns",
    ),
    (
        {},
        {"target": "sm_80", "plan": DecodePlan(16, 16, 4, 2)},
        "split=1 must be 1, or warps=4, which is then 2 or 4, if head_dim or value_dim is above 256",
    ),
    ({}, {"target": "sm_90a", "plan": HopperPlan(2, 32)}, "split=1 must be 2, with consumers=2, if value_dim is above"),
    ({}, {"target": "sm_90a", "plan": HopperPlan(3, 32, split=2)}, "split=2 must be 1, or 2 with consumers=2"),
    (
        {"value_dim": 64, "shared_kv": True},
        {"target": "sm_90a", "plan": HopperPlan(1, 32, stages=1)},
        "stages=1 must be at least 2 with shared_kv=True",
    ),
    (
        {"page_size": 16},
        {"target": "sm_90a", "plan": HopperPlan(2, 32, split=2)},
        "page_size=16: head_dim=512 is for the kernels of",
    ),
]


@pytest.mark.parametrize(("options", "where", "message"), REFUSALS)
def test_what_has_no_kernel_is_refused_by_name(options: Any, where: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        fg.compile(fg.AttentionSpec(512, **options), **where)
