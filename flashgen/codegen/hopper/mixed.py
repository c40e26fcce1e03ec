"""Spec and plan -> the two kernels of ragged batches over pages on Hopper: prompts, and sequences of few queries.

Both read the lengths on the device and say by the same rule whose a sequence is, so that launches follow from tokens
and sequences alone. They count by the same counters, of which each leaves 0: one is launched behind the other.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.codegen.hopper.forward import render_hopper
from flashgen.codegen.hopper.mixed_plans import HopperMixedPlan, choose_hopper_mixed_plan
from flashgen.codegen.mma_sync.mixed import render_mixed
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec


def render_hopper_mixed(
    spec: AttentionSpec, target: Target, plan: HopperMixedPlan | None = None
) -> tuple[RenderedKernel, ...]:
    """The kernels of a ragged spec over pages; UnsupportedError where the target or the plan cannot do it."""
    plan = plan or choose_hopper_mixed_plan(spec, target)
    plan.check(spec, target)
    (prompts,) = render_hopper(spec, target, plan.prompt)
    return replace(prompts, plan=plan), *render_mixed(spec, target, plan.of_few)
