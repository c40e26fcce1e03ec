"""The family of mma.sync kernels, for sm_75 and later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from flashgen.codegen.family import BackwardFamily, DecodeFamily, ForwardFamily, Kernels, PlanKind
from flashgen.codegen.mma_sync.backward import render_mma_sync_backward
from flashgen.codegen.mma_sync.backward_plans import BackwardPlan, every_backward_plan
from flashgen.codegen.mma_sync.decode import render_decode
from flashgen.codegen.mma_sync.decode_plans import (
    DecodePlan,
    choose_decode_plan,
    decode_plan_for,
    decode_plans,
    plan_of_rows,
)
from flashgen.codegen.mma_sync.every_decode_plan import every_decode_plan
from flashgen.codegen.mma_sync.forward import render_mma_sync
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan, choose_forward_plan, every_forward_plan
from flashgen.codegen.mma_sync.merge_splits import render_merge_splits
from flashgen.codegen.mma_sync.mixed import choose_mixed_work_units, render_mixed
from flashgen.codegen.mma_sync.mixed_plans import MixedPlan, choose_mixed_plan
from flashgen.codegen.mma_sync.splits import SplitPlan, choose_splits
from flashgen.codegen.mma_sync.stream_k import choose_work_units, render_schedule, schedule_size
from flashgen.codegen.plan import Plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.targets import Target
from flashgen.codegen.workload import Workload
from flashgen.language.spec import AttentionSpec


def num_splits(spec: AttentionSpec, plan: SplitPlan, sizes: Sizes) -> int:
    """Returns the number of KV splits of a decode call, or the grid's width if blocks run stream-K work units."""
    return choose_work_units(spec, plan, sizes) if plan.scheduled else choose_splits(spec, plan, sizes)


class MmaSyncDecode(DecodeFamily):
    """Split-KV decode kernels by mma.sync, which every target uses."""

    plans: tuple[type[Any], ...] = (DecodePlan,)

    def default_plans(self, spec: AttentionSpec, target: Target) -> tuple[Any, ...]:
        return decode_plans(spec, target)

    def choose(self, spec: AttentionSpec, target: Target, workload: Workload) -> Any:
        return decode_plan_for(spec, target, workload)

    def plan_of_rows(self, spec: AttentionSpec, target: Target, rows: int, scheduled: bool) -> Any:
        return plan_of_rows(spec, target, rows, scheduled)

    def candidates(self, spec: AttentionSpec, target: Target, default: Any) -> Iterator[Any]:
        return every_decode_plan(spec, target, default)

    def render_schedule(self, spec: AttentionSpec, target: Target, plan: Any) -> RenderedKernel:
        return render_schedule(spec, target, plan)

    def schedule_size(self, spec: AttentionSpec, plan: Any, sizes: Sizes) -> int:
        return schedule_size(spec, plan, sizes)


_CHOOSE: Mapping[type[Plan], Callable[[AttentionSpec, Target], Plan]] = {
    ForwardPlan: choose_forward_plan,
    DecodePlan: choose_decode_plan,
    MixedPlan: choose_mixed_plan,
}


def _default_class(spec: AttentionSpec) -> type[Plan]:
    """Returns the class of the default plan: the forward's, or of the only kernel that reads such keys and values."""
    if spec.is_mixed:
        return MixedPlan
    return DecodePlan if spec.kv_dtype else ForwardPlan


def _render_decode(spec: AttentionSpec, target: Target, plan: DecodePlan) -> tuple[RenderedKernel, ...]:
    """Returns the decode kernel of a plan, and the kernel that merges the splits of records of keys."""
    kernels = render_decode(spec, target, plan)
    return (*kernels, render_merge_splits(spec, target, plan)) if spec.kv_record else kernels


class MmaSyncForward(ForwardFamily):
    """Forward kernels by mma.sync. They also read pages; the decode and mixed kernels read 8-bit keys and values."""

    plan = ForwardPlan
    plan_kinds: ClassVar[Mapping[type[Plan], PlanKind]] = {
        ForwardPlan: PlanKind(render_mma_sync),
        DecodePlan: PlanKind(_render_decode, num_splits),
        MixedPlan: PlanKind(render_mixed, choose_mixed_work_units),
    }
    decode = MmaSyncDecode()

    def plan_classes(self, spec: AttentionSpec) -> tuple[type[Plan], ...]:
        default = _default_class(spec)
        return (default, DecodePlan) if default is ForwardPlan else (default,)

    def default_plan(self, spec: AttentionSpec, target: Target) -> Plan:
        return _CHOOSE[_default_class(spec)](spec, target)

    def candidates(self, spec: AttentionSpec, target: Target) -> Iterator[Plan]:
        """Yields plans of the forward kernel: calls on 8-bit keys or mixed batches always run another kernel."""
        return every_forward_plan(spec, target) if _default_class(spec) is ForwardPlan else iter(())


class MmaSyncBackward(BackwardFamily):
    """Backward kernels by mma.sync."""

    def plan_classes(self, spec: AttentionSpec) -> tuple[type[BackwardPlan], ...]:
        return (BackwardPlan,)

    def candidates(self, spec: AttentionSpec, target: Target) -> Iterator[BackwardPlan]:
        return every_backward_plan(spec, target)

    def render(self, spec: AttentionSpec, target: Target, plan: Any, deterministic: bool) -> Kernels:
        return render_mma_sync_backward(spec, target, plan, deterministic)
