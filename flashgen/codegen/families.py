"""The forward kernel of a spec, by the family of its target."""

from __future__ import annotations

from flashgen.codegen import forward
from flashgen.codegen.hopper.forward import HopperKernel, render_hopper
from flashgen.codegen.hopper.measured_plans import choose_hopper_plan
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.mma_sync.forward import ForwardKernel
from flashgen.codegen.plans import ForwardPlan, choose_forward_plan
from flashgen.codegen.targets import Target, target_named, target_of_capability
from flashgen.errors import UnsupportedError
from flashgen.language.spec import AttentionSpec

AnyForwardKernel = ForwardKernel | HopperKernel
AnyForwardPlan = ForwardPlan | HopperPlan


_EMULATED_TARGET = "sm_80"


def target_of_gpu(major: int, minor: int, plan: AnyForwardPlan | None = None) -> Target:
    """The target that a GPU takes by itself: of the newest family that it runs, or of the one that a plan is of."""
    target = target_of_capability(major, minor)
    return target_named(f"sm_{major}{minor}") if isinstance(plan, ForwardPlan) else target


def emulated_target(plan: AnyForwardPlan | None = None) -> Target:
    """The target that the emulator takes by itself."""
    return target_named("sm_90a" if isinstance(plan, HopperPlan) else _EMULATED_TARGET)


def default_plan(spec: AttentionSpec, target: Target) -> AnyForwardPlan:
    """The plan that a spec's forward kernel has on a target where nobody says another."""
    return choose_hopper_plan(spec, target) if target.family == "hopper" else choose_forward_plan(spec, target)


def plan_packing(spec: AttentionSpec, target: Target, packed_heads: int) -> AnyForwardPlan:
    """The default plan with so many heads packed; UnsupportedError where the target's plans cannot pack any."""
    plan = default_plan(spec, target)
    if packed_heads == 1:
        return plan
    if not isinstance(plan, HopperPlan):
        raise UnsupportedError(f"packed_heads={packed_heads}: {target.name} packs no heads; target='sm_90a' does")
    return plan.packing(packed_heads, spec)


def render_forward(spec: AttentionSpec, target: Target, plan: AnyForwardPlan | None = None) -> AnyForwardKernel:
    """The forward kernel of a spec on a target; UnsupportedError where the target or the plan cannot do it."""
    if target.family == "hopper":
        if isinstance(plan, ForwardPlan):
            raise UnsupportedError(f"{plan}: {target.name} takes a HopperPlan; target='sm_90' takes this one")
        return render_hopper(spec, target, plan)
    if isinstance(plan, HopperPlan):
        raise UnsupportedError(f"{plan}: {target.name} takes a ForwardPlan; target='sm_90a' takes this one")
    return forward.render_forward(spec, target, plan)
