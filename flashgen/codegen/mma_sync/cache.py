"""Which of mma.sync's kernels read keys and values as a server keeps them: in pages, or of 8 bits."""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.codegen.mma_sync.decode import render_decode
from flashgen.codegen.mma_sync.decode_plans import DecodePlan, choose_decode_plan
from flashgen.codegen.mma_sync.forward import render_mma_sync
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan, choose_forward_plan, every_forward_plan
from flashgen.codegen.mma_sync.mixed import render_mixed
from flashgen.codegen.mma_sync.mixed_plans import MixedPlan, choose_mixed_plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

CachePlan = DecodePlan | ForwardPlan | MixedPlan


def cache_plans(spec: AttentionSpec) -> tuple[type[CachePlan], ...]:
    """The classes of plans whose kernels read the spec's keys: 8 bits are widened where keys are split alone."""
    if spec.is_ragged:
        return (MixedPlan,)
    return (DecodePlan,) if spec.kv_dtype else (DecodePlan, ForwardPlan)


def cache_plan(spec: AttentionSpec, target: Target) -> CachePlan:
    """The default plan of a spec in pages or of 8 bits: for many queries, where there is a kernel for those."""
    if spec.is_ragged:
        return choose_mixed_plan(spec, target)
    return choose_decode_plan(spec, target) if spec.kv_dtype else choose_forward_plan(spec, target)


def every_cache_plan(spec: AttentionSpec, target: Target) -> Iterator[CachePlan]:
    """Those of many queries that tuning may choose from; of 8 bits all calls take decode kernels."""
    return iter(()) if spec.kv_dtype or spec.is_ragged else every_forward_plan(spec, target)


def render_cache(spec: AttentionSpec, target: Target, plan: CachePlan | None = None) -> tuple[RenderedKernel, ...]:
    """The kernel of a plan; UnsupportedError where the target or the plan cannot do it."""
    if isinstance(plan, MixedPlan):
        return render_mixed(spec, target, plan)
    return render_mma_sync(spec, target, plan) if isinstance(plan, ForwardPlan) else render_decode(spec, target, plan)
