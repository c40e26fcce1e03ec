"""The dispatch: which plan a spec has on a target for a call's sizes, and which kernels a plan is rendered to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashgen.codegen.families import backward_family, forward_family, targets_of
from flashgen.codegen.family import PlanKind
from flashgen.codegen.plan import Plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.targets import TARGETS, Target
from flashgen.codegen.workload import Workload
from flashgen.errors import PlanError, UnsupportedError
from flashgen.language.spec import AttentionSpec

_PLAN_KINDS: dict[type[Plan], PlanKind] = {
    plan: kind for family in map(forward_family, TARGETS.values()) for plan, kind in family.plan_kinds.items()
}


def default_plan(spec: AttentionSpec, target: Target) -> Plan:
    """Returns the plan of the spec's forward kernel when none is given. UnsupportedError if the target has none."""
    return forward_family(target).default_plan(spec, target)


def decode_plan(spec: AttentionSpec, target: Target, workload: Workload) -> Plan | None:
    """Returns the decode plan for a call of these sizes, or None if the forward kernel is faster."""
    return forward_family(target).decode.choose(spec, target, workload)


def refine(plan: Plan, spec: AttentionSpec, target: Target, workload: Workload) -> Plan | None:
    """Returns the plan with packed heads or smaller tiles that is faster than `plan` for these sizes, or None."""
    family = forward_family(target)
    if family.size_rules is None or type(plan) is not family.plan:
        return None
    return family.size_rules.choose(plan, spec, target, workload)


def refined_plans(spec: AttentionSpec, target: Target, heads_per_kv: int) -> Sequence[Plan]:
    """Returns every plan that `refine` may return in place of the default plan."""
    plan, family = default_plan(spec, target), forward_family(target)
    if family.size_rules is None or type(plan) is not family.plan:
        return ()
    return family.size_rules.every_plan(plan, spec, target, heads_per_kv)


def plan_with(spec: AttentionSpec, target: Target, packed_heads: int = 1, smaller_tiles: bool = False) -> Plan:
    """Returns the default plan with this many packed heads, or with smaller tiles of queries.

    Raises UnsupportedError if the plans of the target pack no heads, or the spec has no smaller tiles.
    """
    plan, rules = default_plan(spec, target), forward_family(target).size_rules
    if smaller_tiles:
        smaller = rules.smaller_tiles(spec, target) if rules else None
        if smaller is None:
            raise UnsupportedError(f"smaller_tiles=True: {spec.name} has none beside {plan} on {target.name}")
        plan = smaller
    if packed_heads == 1:
        return plan
    if rules is None:
        packers = [name for name, other in TARGETS.items() if forward_family(other).size_rules]
        raise UnsupportedError(
            f"packed_heads={packed_heads}: {target.name} packs no heads; target={' or '.join(map(repr, packers))} does"
        )
    if type(plan) is not forward_family(target).plan:
        raise UnsupportedError(f"packed_heads={packed_heads}: {plan}, which {spec.name} takes, packs no heads")
    return rules.pack_heads(plan, packed_heads, spec)


def is_decode_plan(plan: Any, target: Target) -> bool:
    """Whether the plan is of a decode kernel."""
    return type(plan) in forward_family(target).decode.plans


def num_splits(plan: Plan, spec: AttentionSpec, sizes: Sizes) -> int:
    """Returns the number of KV splits of a call, or the grid's width for stream-K work units; 1 without splits."""
    count = _PLAN_KINDS[type(plan)].num_splits
    return 1 if count is None else count(spec, plan, sizes)


def splits_keys(plan: Plan) -> bool:
    """Whether kernels of the plan split the keys of a sequence over thread blocks."""
    return _PLAN_KINDS[type(plan)].num_splits is not None


def head_split_plan(spec: AttentionSpec, target: Target) -> Any | None:
    """Returns the default backward plan with one CTA per query head, or None if there is none."""
    split = backward_family(target).head_split
    keys = next(kernel for kernel in render_backward_kernels(spec, target) if kernel.role == "dkdv")
    return split.split_plan(keys.plan) if split else None


def required_head_split_plan(spec: AttentionSpec, target: Target) -> Any:
    """Returns the same plan. Raises UnsupportedError if there is none."""
    plan = head_split_plan(spec, target)
    if plan is None:
        raise UnsupportedError(f"heads_apart=True: {target.name} has no such backward of {spec.name}")
    return plan


def render_forward_kernels(spec: AttentionSpec, target: Target, plan: Plan | None = None) -> tuple[RenderedKernel, ...]:
    """Renders the forward kernels of a spec in launch order, without the kernels that list tiles.

    Raises UnsupportedError if the target or the plan cannot run the spec.
    """
    family = forward_family(target)
    plan = plan or default_plan(spec, target)
    if type(plan) not in family.plan_classes(spec):
        if type(plan) is family.plan:
            plan.check(spec, target)
        if spec.of_cache:
            name, own = ("kernel of mixed batches", "MixedPlan") if spec.is_mixed else ("decode kernel", "DecodePlan")
            raise PlanError(f"{plan}: {_cache(spec)} is for the {name}: give a {own}, or none")
        raise _wrong_class("plan", plan, target, family.plan_classes(spec)[:1], targets_of(plan))
    return _PLAN_KINDS[type(plan)].render(spec, target, plan)


def render_forward(spec: AttentionSpec, target: Target, plan: Plan | None = None) -> RenderedKernel:
    """Renders the attention kernel of `render_forward_kernels`."""
    return next(kernel for kernel in render_forward_kernels(spec, target, plan) if kernel.role == "forward")


def render_backward_kernels(
    spec: AttentionSpec, target: Target, plan: Any = None, deterministic: bool = False
) -> tuple[RenderedKernel, ...]:
    """Renders the backward kernels of a spec in launch order, without the kernels that list tiles.

    Raises UnsupportedError if the target or the plan cannot run the spec.
    """
    family = backward_family(target)
    if spec.of_cache:
        raise UnsupportedError(f"{_cache(spec)}: there is no backward of it; gather k and v, in {spec.dtype}")
    if plan is not None and type(plan) not in (own := family.plan_classes(spec)):
        takers = [other for other in TARGETS.values() if type(plan) in backward_family(other).plan_classes(spec)]
        raise _wrong_class("backward_plan", plan, target, own, takers)
    return family.render(spec, target, plan, deterministic)


def _cache(spec: AttentionSpec) -> str:
    """Returns the argument of the spec by which k and v are paged, or have 8 bits."""
    return f"page_size={spec.page_size}" if spec.page_size else f"kv_dtype={spec.kv_dtype!r}"


def _wrong_class(
    argument: str, plan: Any, target: Target, own: tuple[type[Any], ...], takers: list[Target]
) -> PlanError:
    """Returns the error for a plan of another target's class, which names a target that takes the plan."""
    nearest = min(takers, key=lambda taker: taker.compute_capability != target.compute_capability, default=None)
    elsewhere = f"; target={nearest.name!r} takes this one" if nearest else ""
    classes = " or a ".join(each.__name__ for each in own)
    return PlanError(f"{argument}={plan!r}: {target.name} takes a {classes}{elsewhere}")
