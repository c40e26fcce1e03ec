"""Times a spec under several plans, to choose the default ones: `python -m flashgen.bench`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flashgen.attention import Attention, compile
from flashgen.bench.cases import Timed, case, inputs
from flashgen.bench.ours import ours
from flashgen.bench.timing import median_ms
from flashgen.build.resources import Resources
from flashgen.codegen.mma_sync.backward_plans import BackwardPlan
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.errors import UnsupportedError
from flashgen.language.spec import AttentionSpec
from flashgen.runtime import gpu

_REPEATS = 10


@dataclass(frozen=True)
class PlanRow:
    """A plan's TFLOP/s for a spec by length, with the registers and spilled bytes of its kernel."""

    spec: str
    plan: ForwardPlan | BackwardPlan
    registers: int
    spills: int
    tflops: dict[int, float]


def plan_rows(spec: AttentionSpec, plans: Sequence[ForwardPlan], lengths: Sequence[int]) -> Iterator[PlanRow]:
    """Times a spec's forward under each plan that fits this GPU."""
    for plan in plans:
        try:
            attention = compile(spec, _target(), plan=plan)
        except UnsupportedError:
            continue
        yield _row(attention, plan, attention.resources, lengths, "forward")


def backward_plan_rows(
    spec: AttentionSpec, plans: Sequence[BackwardPlan], lengths: Sequence[int], deterministic: bool = False
) -> Iterator[PlanRow]:
    """Times a spec's whole backward under each plan, of its kernel that walks tiles of keys, that fits this GPU."""
    for plan in plans:
        attention = compile(spec, _target(), backward_plan=plan, deterministic=deterministic)
        try:
            resources = attention.backward_resources[attention.backward_kernels["keys"].name]
        except UnsupportedError:
            continue
        yield _row(attention, plan, resources, lengths, "backward")


def _target() -> str:
    """The target of this GPU whose plans are these, not one that only its own generation runs."""
    return "sm_{}{}".format(*gpu.compute_capability())


def _row(attention: Attention, plan: Any, resources: Resources, lengths: Sequence[int], timed: Timed) -> PlanRow:
    tflops = {}
    for length in lengths:
        this = case(attention.spec, length)
        time = median_ms(ours(attention, timed, inputs(this)), repeats=_REPEATS)
        tflops[length] = this.flops(timed) / time / 1e9
    return PlanRow(attention.spec.name, plan, resources.registers, resources.spill_stores, tflops)


def candidates() -> list[ForwardPlan]:
    """Plans worth timing: tiles, warps, stages and blocks per multiprocessor around the known good ones."""
    shapes = [(128, 128, 4), (128, 64, 4), (128, 32, 4), (128, 64, 8), (128, 128, 8), (256, 64, 8), (64, 64, 4)]
    return [
        ForwardPlan(tile_q, tile_k, warps, stages, blocks)
        for tile_q, tile_k, warps in shapes
        for stages in (1, 2)
        for blocks in (1, 2, 3)
        if blocks * warps <= 16
    ]


def backward_candidates() -> list[BackwardPlan]:
    """The same for the backward: (queries, keys, warps, warps that share keys) around FlashAttention-2's."""
    shapes = [
        *((64, 128, 8, 1), (64, 128, 8, 2), (128, 128, 8, 1), (128, 128, 8, 2), (64, 64, 4, 1), (64, 64, 8, 2)),
        *((32, 128, 8, 1), (32, 128, 4, 1), (64, 128, 4, 1), (32, 64, 4, 1), (64, 64, 4, 2), (64, 96, 6, 1)),
    ]
    return [
        BackwardPlan(tile_q, tile_k, warps, split, stages, blocks)
        for tile_q, tile_k, warps, split in shapes
        for stages in (1, 2)
        for blocks in (1, 2)
        if blocks * warps <= 16
    ]
