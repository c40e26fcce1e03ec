"""The forward kernel of a spec, by the family of its target."""

from __future__ import annotations

from flashgen.codegen import forward
from flashgen.codegen.forward import ForwardKernel
from flashgen.codegen.hopper import HopperKernel, render_hopper
from flashgen.codegen.hopper_plans import HopperPlan, choose_hopper_plan
from flashgen.codegen.plans import ForwardPlan, choose_forward_plan
from flashgen.codegen.targets import Target
from flashgen.errors import UnsupportedError
from flashgen.language.spec import AttentionSpec

AnyForwardKernel = ForwardKernel | HopperKernel
AnyForwardPlan = ForwardPlan | HopperPlan


def default_plan(spec: AttentionSpec, target: Target) -> AnyForwardPlan:
    """The plan that a spec's forward kernel has on a target where nobody says another."""
    return choose_hopper_plan(spec, target) if target.family == "hopper" else choose_forward_plan(spec, target)


def render_forward(spec: AttentionSpec, target: Target, plan: AnyForwardPlan | None = None) -> AnyForwardKernel:
    """The forward kernel of a spec on a target; UnsupportedError where the target or the plan cannot do it."""
    if target.family == "hopper":
        if isinstance(plan, ForwardPlan):
            raise UnsupportedError(f"{plan}: {target.name} takes a HopperPlan; target='sm_90' takes this one")
        return render_hopper(spec, target, plan)
    if isinstance(plan, HopperPlan):
        raise UnsupportedError(f"{plan}: {target.name} takes a ForwardPlan; target='sm_90a' takes this one")
    return forward.render_forward(spec, target, plan)
