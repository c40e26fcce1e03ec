"""Which kernels read keys and values as a server keeps them, on Hopper: its own where TMA can, else mma.sync's."""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.codegen.hopper.forward import render_hopper
from flashgen.codegen.hopper.measured_plans import choose_hopper_plan
from flashgen.codegen.hopper.mixed import render_hopper_mixed
from flashgen.codegen.hopper.mixed_plans import HopperMixedPlan, choose_hopper_mixed_plan
from flashgen.codegen.hopper.pages import problem_of_cache
from flashgen.codegen.hopper.plans import HopperPlan, every_hopper_plan
from flashgen.codegen.mma_sync import cache as mma_sync
from flashgen.codegen.mma_sync import parts as mma_sync_parts
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

CachePlan = HopperPlan | HopperMixedPlan | mma_sync.CachePlan


def cache_plans(spec: AttentionSpec) -> tuple[type[CachePlan], ...]:
    """The classes of plans whose kernels read the spec's keys; Hopper's own say themselves of which they do not."""
    return HopperMixedPlan if spec.is_ragged else HopperPlan, *mma_sync.cache_plans(spec)


def cache_plan(spec: AttentionSpec, target: Target) -> CachePlan:
    """The default plan of a spec in pages or of 8 bits: for many queries, where there is a kernel for those."""
    if problem_of_cache(spec):
        return mma_sync.cache_plan(spec, target)
    return choose_hopper_mixed_plan(spec, target) if spec.is_ragged else choose_hopper_plan(spec, target)


def every_cache_plan(spec: AttentionSpec, target: Target) -> Iterator[CachePlan]:
    """Those of many queries that tuning may choose from."""
    if problem_of_cache(spec) or spec.is_ragged:
        return mma_sync.every_cache_plan(spec, target)
    return every_hopper_plan(spec, target)


def render_cache(spec: AttentionSpec, target: Target, plan: CachePlan | None = None) -> tuple[RenderedKernel, ...]:
    """The kernels of a plan; UnsupportedError where the target or the plan cannot do it."""
    if isinstance(plan, HopperMixedPlan):
        return render_hopper_mixed(spec, target, plan)
    if isinstance(plan, HopperPlan):
        return render_hopper(spec, target, plan)
    return mma_sync.render_cache(spec, target, plan)


def parts_of(spec: AttentionSpec, plan: mma_sync_parts.SplittingPlan | HopperMixedPlan, sizes: Sizes) -> int:
    """Into how many parts a call's keys are split, in a mixed batch those of few queries."""
    return mma_sync_parts.parts_of(spec, plan.of_few if isinstance(plan, HopperMixedPlan) else plan, sizes)
