"""The family of Hopper kernels: TMA, wgmma, mbarriers and warp specialization."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from flashgen.codegen.family import BackwardFamily, ForwardFamily, HeadSplit, Kernels, PlanKind, SizeRules
from flashgen.codegen.hopper.backward import render_hopper_backward
from flashgen.codegen.hopper.backward_plans import HopperBackwardPlan, with_split_heads
from flashgen.codegen.hopper.cluster_backward import render_cluster_backward
from flashgen.codegen.hopper.cluster_plans import HopperClusterPlan, cluster_problem, takes_cluster
from flashgen.codegen.hopper.decode import render_hopper_decode
from flashgen.codegen.hopper.decode_family import HopperDecode
from flashgen.codegen.hopper.decode_plans import HopperDecodePlan, variant_problem
from flashgen.codegen.hopper.every_backward_plan import every_cluster_plan, every_hopper_backward_plan
from flashgen.codegen.hopper.forward import render_hopper
from flashgen.codegen.hopper.head_packing import packed_plan, packing_of
from flashgen.codegen.hopper.head_split import is_split_faster
from flashgen.codegen.hopper.left_to_mma_sync import forward_problem, rows_problem
from flashgen.codegen.hopper.measured_plans import choose_hopper_plan
from flashgen.codegen.hopper.mixed import render_hopper_mixed
from flashgen.codegen.hopper.mixed_plans import HopperMixedPlan, choose_hopper_mixed_plan
from flashgen.codegen.hopper.plans import HopperPlan, every_hopper_plan
from flashgen.codegen.hopper.smaller_tiles import smaller_option, smaller_plan, smaller_tiles
from flashgen.codegen.hopper.wide_plans import HopperWidePlan
from flashgen.codegen.mma_sync.family import MmaSyncBackward, MmaSyncForward, num_splits
from flashgen.codegen.mma_sync.mixed import choose_mixed_work_units
from flashgen.codegen.plan import Plan
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.targets import Target
from flashgen.codegen.workload import Workload
from flashgen.language.spec import AttentionSpec

_MMA_SYNC = MmaSyncForward()
_MMA_SYNC_BACKWARD = MmaSyncBackward()


class HopperSizeRules(SizeRules):
    """Smaller tiles of queries, packed heads, or both."""

    def pack_heads(self, plan: HopperPlan, packed_heads: int, spec: AttentionSpec) -> HopperPlan:
        return plan.packing(packed_heads, spec)

    def smaller_tiles(self, spec: AttentionSpec, target: Target) -> HopperPlan | None:
        return smaller_plan(spec, target)

    def choose(self, plan: HopperPlan, spec: AttentionSpec, target: Target, workload: Workload) -> HopperPlan | None:
        smaller = smaller_tiles(plan, spec, target, workload)
        return packed_plan(smaller or plan, spec, target, workload) or smaller

    def every_plan(
        self, plan: HopperPlan, spec: AttentionSpec, target: Target, heads_per_kv: int
    ) -> Sequence[HopperPlan]:
        unpacked = [plan, *(smaller for smaller in (smaller_plan(spec, target),) if smaller)]
        packed = (packing_of(each, spec, target, heads_per_kv) for each in unpacked)
        return [*unpacked[1:], *(each for each in packed if each)]

    def show_option(self, plan: HopperPlan, spec: AttentionSpec, target: Target) -> str:
        return smaller_option(plan, spec, target)


def _mixed_columns(spec: AttentionSpec, plan: HopperMixedPlan, sizes: Sizes) -> int:
    """Returns the grid's width for the sequences of few queries, which the mixed kernel of mma.sync's plan runs."""
    return choose_mixed_work_units(spec, plan.of_few, sizes)


_CHOOSE: Mapping[type[Plan], Callable[[AttentionSpec, Target], Plan]] = {
    HopperPlan: choose_hopper_plan,
    HopperMixedPlan: choose_hopper_mixed_plan,
}


def _own_class(spec: AttentionSpec) -> type[Plan]:
    """Returns the class of the plans of Hopper's own kernels that run a spec."""
    return HopperMixedPlan if spec.is_mixed else HopperPlan


class HopperForward(ForwardFamily):
    """Hopper's forward kernels. Specs that they cannot run take those of mma.sync (see `forward_problem`)."""

    plan = HopperPlan
    plan_kinds: ClassVar[Mapping[type[Plan], PlanKind]] = {
        **_MMA_SYNC.plan_kinds,
        HopperPlan: PlanKind(render_hopper),
        HopperDecodePlan: PlanKind(render_hopper_decode, num_splits),
        HopperMixedPlan: PlanKind(render_hopper_mixed, _mixed_columns),
    }
    decode = HopperDecode()
    size_rules = HopperSizeRules()

    def plan_classes(self, spec: AttentionSpec) -> tuple[type[Plan], ...]:
        if not spec.of_cache:
            return (HopperPlan, *self.decode.plans)
        decode = (
            (HopperDecodePlan,) if spec.batch_layout.supports("decode kernels") and not variant_problem(spec) else ()
        )
        return (_own_class(spec), *_MMA_SYNC.plan_classes(spec), *decode)

    def default_plan(self, spec: AttentionSpec, target: Target) -> Plan:
        if forward_problem(spec):
            return _MMA_SYNC.default_plan(spec, target)
        return _CHOOSE[_own_class(spec)](spec, target)

    def candidates(self, spec: AttentionSpec, target: Target) -> Iterator[Plan]:
        if forward_problem(spec) or _own_class(spec) is not HopperPlan:
            return _MMA_SYNC.candidates(spec, target)
        return every_hopper_plan(spec, target)


class HopperHeadSplit(HeadSplit):
    """One CTA per query head in the backward, where KV heads are too few to fill the GPU."""

    def split_plan(self, plan: Any) -> HopperBackwardPlan | None:
        return with_split_heads(plan)

    def choose(self, plan: Any, spec: AttentionSpec, target: Target, workload: Workload) -> HopperBackwardPlan | None:
        split = self.split_plan(plan)
        if split is None or workload.heads_per_kv == 1 or not is_split_faster(split, spec, workload):
            return None
        return None if split.problem(spec, target) else split


class HopperBackward(BackwardFamily):
    """Hopper's backward kernels. Specs that they cannot run take those of mma.sync."""

    head_split = HopperHeadSplit()

    def plan_classes(self, spec: AttentionSpec) -> tuple[type[Any], ...]:
        if not rows_problem(spec):
            return HopperBackwardPlan, HopperWidePlan
        others = _MMA_SYNC_BACKWARD.plan_classes(spec)
        return others if cluster_problem(spec) else (HopperClusterPlan, *others)

    def candidates(self, spec: AttentionSpec, target: Target) -> Iterator[Any]:
        if not rows_problem(spec):
            return every_hopper_backward_plan(spec, target)
        return _MMA_SYNC_BACKWARD.candidates(spec, target) if cluster_problem(spec) else every_cluster_plan()

    def render(self, spec: AttentionSpec, target: Target, plan: Any, deterministic: bool) -> Kernels:
        if not rows_problem(spec):
            return render_hopper_backward(spec, target, plan, deterministic)
        if takes_cluster(spec, plan):
            return render_cluster_backward(spec, target, plan, deterministic)
        return _MMA_SYNC_BACKWARD.render(spec, target, plan, deterministic)
