"""The families of kernels, and which of them a target takes for a pass: one registration for all who render or launch.

A new family is a target, or several (targets.py), a folder here and one in templates/, and an entry below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from flashgen.codegen.family import BackwardFamily, Decoding, ForwardFamily, HeadDivision, PlansBySizes
from flashgen.codegen.hopper import cache as hopper_cache
from flashgen.codegen.hopper.backward import render_hopper_backward
from flashgen.codegen.hopper.backward_plans import HopperBackwardPlan
from flashgen.codegen.hopper.by_sizes import every_plan_of_sizes, plan_of_sizes
from flashgen.codegen.hopper.every_backward_plan import every_hopper_backward_plan
from flashgen.codegen.hopper.forward import render_hopper
from flashgen.codegen.hopper.head_division import divided_plan, plan_of_heads_apart
from flashgen.codegen.hopper.measured_plans import choose_hopper_plan
from flashgen.codegen.hopper.mixed_plans import HopperMixedPlan
from flashgen.codegen.hopper.plans import HopperPlan, every_hopper_plan
from flashgen.codegen.hopper.smaller_tiles import smaller_option, smaller_plan
from flashgen.codegen.hopper.wide_plans import HopperWidePlan
from flashgen.codegen.mma_sync.backward import render_mma_sync_backward
from flashgen.codegen.mma_sync.backward_plans import BackwardPlan, every_backward_plan
from flashgen.codegen.mma_sync.cache import cache_plan, cache_plans, every_cache_plan, render_cache
from flashgen.codegen.mma_sync.decode_plans import (
    DecodePlan,
    decode_plan_for,
    decode_plans,
    plan_of_rows,
)
from flashgen.codegen.mma_sync.every_decode_plan import every_decode_plan
from flashgen.codegen.mma_sync.forward import render_mma_sync
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan, choose_forward_plan, every_forward_plan
from flashgen.codegen.mma_sync.mixed_plans import MixedPlan
from flashgen.codegen.mma_sync.parts import parts_of
from flashgen.codegen.mma_sync.runs import render_schedule, schedule_size
from flashgen.codegen.plan import Plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.targets import TARGETS, Target, target_of_capability
from flashgen.errors import UnsupportedError
from flashgen.language.spec import AttentionSpec

_DECODING = Decoding(
    DecodePlan,
    (DecodePlan, MixedPlan),
    decode_plans,
    decode_plan_for,
    plan_of_rows,
    parts_of,
    render_cache,
    cache_plans,
    cache_plan,
    every_decode_plan,
    every_cache_plan,
    render_schedule,
    schedule_size,
)
_MMA_SYNC = ForwardFamily(ForwardPlan, choose_forward_plan, every_forward_plan, render_mma_sync, _DECODING)
_HOPPER_DECODING = replace(
    _DECODING,
    splitting=(*_DECODING.splitting, HopperMixedPlan),
    splits=hopper_cache.parts_of,
    render=hopper_cache.render_cache,
    cache_plans=hopper_cache.cache_plans,
    cache_plan=hopper_cache.cache_plan,
    every_cache_plan=hopper_cache.every_cache_plan,
)
_HOPPER_BY_SIZES = PlansBySizes(HopperPlan.packing, smaller_plan, plan_of_sizes, every_plan_of_sizes, smaller_option)
_HOPPER = ForwardFamily(
    HopperPlan, choose_hopper_plan, every_hopper_plan, render_hopper, _HOPPER_DECODING, _HOPPER_BY_SIZES
)

_FORWARD = {"turing": _MMA_SYNC, "ampere": _MMA_SYNC, "hopper": _HOPPER}
_MMA_SYNC_BACKWARD = BackwardFamily((BackwardPlan,), every_backward_plan, render_mma_sync_backward)
_DIVISION = HeadDivision(plan_of_heads_apart, divided_plan)
_HOPPER_BACKWARD = BackwardFamily(
    (HopperBackwardPlan, HopperWidePlan), every_hopper_backward_plan, render_hopper_backward, _DIVISION
)
_BACKWARD = {"turing": _MMA_SYNC_BACKWARD, "ampere": _MMA_SYNC_BACKWARD, "hopper": _HOPPER_BACKWARD}
_EMULATED_TARGET = "sm_80"


def forward_family(target: Target) -> ForwardFamily:
    """How a target does the forward pass."""
    return _FORWARD[target.family]


def backward_family(target: Target) -> BackwardFamily:
    """How a target does the backward pass."""
    return _BACKWARD[target.backward_family]


def target_of_gpu(major: int, minor: int, plan: Plan | None = None) -> Target:
    """The target that a GPU takes by itself: of the newest family that it runs, or of the one that a plan is of."""
    target = target_of_capability(major, minor)
    own = (other for other in _takers(plan) if other.compute_capability == target.compute_capability)
    return target if plan is None else next(own, target)


def emulated_target(plan: Plan | None = None) -> Target:
    """The target that the emulator takes by itself."""
    target, takers = TARGETS[_EMULATED_TARGET], _takers(plan)
    return takers[0] if takers and target not in takers else target


def _takers(plan: Plan | None) -> list[Target]:
    """The targets whose forward family a plan is of."""
    return [target for target in TARGETS.values() if isinstance(plan, _plans_of(forward_family(target)))]


def _plans_of(family: ForwardFamily) -> tuple[type[Plan], ...]:
    return (family.plan, *family.decoding.splitting) if family.decoding else (family.plan,)


def default_plan(spec: AttentionSpec, target: Target) -> Plan:
    """The plan that a spec's forward kernel has on a target where nobody says another.

    Over pages, or keys of 8 bits, it is a kernel's that reads those; UnsupportedError where the target has none.
    """
    family = forward_family(target)
    if not spec.of_cache:
        return family.default_plan(spec, target)
    if family.decoding is None:
        raise UnsupportedError(f"{_cache(spec)}: {target.name} has no decode kernel, which reads them")
    return family.decoding.cache_plan(spec, target)


def every_plan(spec: AttentionSpec, target: Target) -> Iterator[Plan]:
    """The plans of a spec's forward kernel that tuning may choose from, whether or not they fit."""
    family = forward_family(target)
    if spec.of_cache and family.decoding:
        return family.decoding.every_cache_plan(spec, target)
    return family.every_plan(spec, target)


def _cache(spec: AttentionSpec) -> str:
    """What is said of k and v that are in pages, or of 8 bits."""
    return f"page_size={spec.page_size}" if spec.page_size else f"kv_dtype={spec.kv_dtype!r}"


def plan_by_sizes(spec: AttentionSpec, target: Target, packed_heads: int = 1, smaller_tiles: bool = False) -> Plan:
    """The default plan, or that of smaller tiles of queries, with so many heads packed.

    UnsupportedError where the target's plans cannot pack any, or a spec has no other tiles.
    """
    plan, by_sizes = default_plan(spec, target), forward_family(target).by_sizes
    if smaller_tiles:
        smaller = by_sizes.smaller(spec, target) if by_sizes else None
        if smaller is None:
            raise UnsupportedError(f"smaller_tiles=True: {spec.name} has none beside {plan} on {target.name}")
        plan = smaller
    if packed_heads == 1:
        return plan
    if by_sizes is None:
        packers = [name for name, other in TARGETS.items() if forward_family(other).by_sizes]
        raise UnsupportedError(
            f"packed_heads={packed_heads}: {target.name} packs no heads; target={' or '.join(map(repr, packers))} does"
        )
    if not isinstance(plan, forward_family(target).plan):
        raise UnsupportedError(f"packed_heads={packed_heads}: {plan}, which {spec.name} takes, packs no heads")
    return by_sizes.packing(plan, packed_heads, spec)


def every_plan_by_sizes(spec: AttentionSpec, target: Target, heads_per_kv: int) -> Sequence[Plan]:
    """The plans that calls of some sizes take in place of the default one, where so many query heads share k and v."""
    plan, family = default_plan(spec, target), forward_family(target)
    if family.by_sizes is None or not isinstance(plan, family.plan):
        return ()
    return family.by_sizes.every(plan, spec, target, heads_per_kv)


def forward_stages(spec: AttentionSpec, target: Target, plan: Plan | None = None) -> tuple[RenderedKernel, ...]:
    """The forward kernels of a spec on a target, in the order of their launches, but for those that list tiles.

    UnsupportedError where the target or the plan cannot do it.
    """
    family = forward_family(target)
    plan = default_plan(spec, target) if plan is None and spec.of_cache else plan
    if spec.of_cache and not (family.decoding and isinstance(plan, family.decoding.cache_plans(spec))):
        kernel, own = ("kernel of mixed batches", "MixedPlan") if spec.is_ragged else ("decode kernel", "DecodePlan")
        raise UnsupportedError(f"{plan}: {_cache(spec)} is for the {kernel}: give a {own}, or none")
    if family.decoding and (spec.of_cache or isinstance(plan, family.decoding.plan)):
        return family.decoding.render(spec, target, plan)
    if plan is not None and not isinstance(plan, family.plan):
        raise _of_others("plan", plan, target, (family.plan,), _takers(plan))
    return family.render(spec, target, plan)


def render_forward(spec: AttentionSpec, target: Target, plan: Plan | None = None) -> RenderedKernel:
    """The kernel of `forward_stages` that attends."""
    return next(kernel for kernel in forward_stages(spec, target, plan) if kernel.role == "forward")


def plan_dividing(spec: AttentionSpec, target: Target) -> Any:
    """The default plan of the backward with query heads apart; UnsupportedError where there is none."""
    plan = heads_apart_plan(spec, target)
    if plan is None:
        raise UnsupportedError(f"heads_apart=True: {target.name} has no such backward of {spec.name}")
    return plan


def heads_apart_plan(spec: AttentionSpec, target: Target) -> Any | None:
    """The same; None where there is none."""
    dividing = backward_family(target).dividing
    keys = next(kernel for kernel in backward_stages(spec, target) if kernel.role == "keys")
    return dividing.of(keys.plan) if dividing else None


def backward_stages(
    spec: AttentionSpec, target: Target, plan: Any = None, deterministic: bool = False
) -> tuple[RenderedKernel, ...]:
    """The backward kernels of a spec on a target, in the order of their launches, but for those that list tiles.

    UnsupportedError where the target or the plan cannot do it.
    """
    family = backward_family(target)
    if spec.of_cache:
        raise UnsupportedError(f"{_cache(spec)}: there is no backward of it; gather k and v, in {spec.dtype}")
    if plan is not None and not isinstance(plan, family.plans):
        takers = [other for other in TARGETS.values() if isinstance(plan, backward_family(other).plans)]
        raise _of_others("backward_plan", plan, target, family.plans, takers)
    return family.render(spec, target, plan, deterministic)


def _of_others(
    argument: str, plan: Any, target: Target, own: tuple[type[Any], ...], takers: list[Target]
) -> UnsupportedError:
    """What says that a target takes no such plan, what it takes, and which target takes this one, if any does."""
    nearest = min(takers, key=lambda taker: taker.compute_capability != target.compute_capability, default=None)
    elsewhere = f"; target={nearest.name!r} takes this one" if nearest else ""
    classes = " or a ".join(each.__name__ for each in own)
    return UnsupportedError(f"{argument}={plan!r}: {target.name} takes a {classes}{elsewhere}")
