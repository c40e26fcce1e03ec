"""Times a spec under several plans, to choose the default ones: `flashgen bench --plans`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashgen.attention import compile
from flashgen.bench.cases import case, inputs
from flashgen.bench.timing import median_ms
from flashgen.codegen.plans import ForwardPlan
from flashgen.errors import UnsupportedError
from flashgen.language.spec import AttentionSpec


@dataclass(frozen=True)
class PlanRow:
    """A plan's TFLOP/s for a spec by length, with the registers and spilled bytes of its kernel."""

    spec: str
    plan: ForwardPlan
    registers: int
    spills: int
    tflops: dict[int, float]


def plan_rows(spec: AttentionSpec, plans: Sequence[ForwardPlan], lengths: Sequence[int]) -> Iterator[PlanRow]:
    """Times a spec under each plan that fits this GPU."""
    for plan in plans:
        try:
            attention = compile(spec, plan=plan)
        except UnsupportedError:
            continue
        tflops = {}
        for length in lengths:
            this = case(spec, length)
            q, k, v, _ = inputs(this)
            tflops[length] = this.flops() / median_ms(lambda: attention(q, k, v), repeats=10) / 1e9  # noqa: B023
        resources = attention.resources
        yield PlanRow(spec.name, plan, resources.registers, resources.spill_stores, tflops)


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
