"""Renders the two kernels of varlen batches over a paged KV cache on Hopper: prefill, and sequences of few queries.

Both read the lengths on the device and apply the same rule for which of them processes a sequence, so launches follow
from the numbers of tokens and sequences alone. They run one after the other and share counters, which each leaves at 0.
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
    """Returns the kernels of a varlen spec with a paged KV cache.

    Raises:
        UnsupportedError: the target or the plan does not support the spec.
    """
    plan = plan or choose_hopper_mixed_plan(spec, target)
    plan.check(spec, target)
    (prompts,) = render_hopper(spec, target, plan.prompt)
    return replace(prompts, plan=plan), *render_mixed(spec, target, plan.of_few)
