"""Which forward kernels a call runs: those of the default plan, of a tuned plan, or of a plan for the call's sizes."""

from __future__ import annotations

import logging
import shlex
from dataclasses import dataclass

from flashgen.attention.call import Splits
from flashgen.attention.decode_schedule import ScheduledSizes
from flashgen.attention.dispatch import KernelsByPlan, warn, workload_of
from flashgen.attention.problem import Problem
from flashgen.attention.stages import BuiltStages
from flashgen.attention.tile_lists import TileLister
from flashgen.attention.tuned_plans import LengthClass, TunedPlan, TunedPlans
from flashgen.attention.varlen import refuse_varlen
from flashgen.codegen import dispatch
from flashgen.codegen.dispatch import default_plan, is_decode_plan, splits_keys
from flashgen.codegen.families import forward_family
from flashgen.codegen.header import show_command
from flashgen.codegen.mma_sync.splits import MAX_SPLITS
from flashgen.codegen.plan import Plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import Kernels, forward_kernels
from flashgen.errors import ArgumentError, BuildError
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Engine
from flashgen.runtime.gpu import Card

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ForwardKernels:
    """The kernels of a forward pass, ready to run, and the lister of their tiles if they read tile lists."""

    stages: BuiltStages
    lister: TileLister | None

    @classmethod
    def build(cls, spec: AttentionSpec, kernels: Kernels, engine: Engine, prebuild: str) -> ForwardKernels:
        """Builds the kernels. Raises BuildError if one can be neither found nor compiled."""
        lister = TileLister(spec, kernels["lists"], engine, prebuild) if "lists" in kernels else None
        return cls(BuiltStages(spec, kernels, engine, prebuild), lister)

    @property
    def kernel(self) -> RenderedKernel:
        """The attention kernel."""
        return self.stages.kernels["forward"]


class ForwardDispatch:
    """Chooses the forward kernels of a call by its sizes.

    A kernel that is not available is reported once, and the kernel in whose place it would run is used. A tuned plan
    whose kernel text differs from the text that was measured is ignored.

    Args:
        default: The kernels that run when nothing else is chosen.
        tuned: The tuned plans, or None to ignore them.
        by_sizes: Whether calls may take packed heads or smaller tiles.
        decodes: Whether calls of few queries over many keys take decode kernels.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        default: ForwardKernels,
        engine: Engine,
        tuned: TunedPlans | None,
        by_sizes: bool,
        decodes: bool = False,
    ) -> None:
        self.default, self.tuned, self.decodes = default, tuned, decodes
        self.by_sizes = by_sizes and forward_family(default.kernel.target).size_rules is not None
        self._spec, self._engine = spec, engine
        self._kernels: KernelsByPlan[ForwardKernels] = KernelsByPlan()

    def clear_tuned(self) -> None:
        """Forgets which tuned plans were found, so that the next call looks on disk again."""
        self._kernels.clear_tuned()

    def tuning_key(self, built: ForwardKernels, problem: Problem, device: int) -> tuple[Card, LengthClass]:
        """Returns the kind of GPU and the class of call sizes under which a tuned plan is stored.

        built: The kernels in whose place the tuned ones run.
        """
        card, lists = self._engine.card(device), built.lister is not None
        plan, target = built.kernel.plan, built.kernel.target
        grouped = is_decode_plan(plan, target) and not lists  # lists are made before the number of KV heads is known
        return card, LengthClass.of(workload_of(problem, card), lists, grouped)

    @property
    def depends_on_sizes(self) -> bool:
        """Whether calls of some sizes may run other kernels than the default ones."""
        return self.by_sizes or self.decodes or self.tuned is not None

    def choose(self, problem: Problem, device: int) -> ForwardKernels:
        """Returns the kernels for a call of these sizes, which has at least one score, on a device."""
        built = self.decode_or_default(problem, device)
        if self.tuned:
            key = self.tuning_key(built, problem, device)
            tuned = self.tuned.for_kernel(built.kernel)
            found = self._kernels.tuned(built, built.kernel, tuned, *key, self._render_tuned, self._build_tuned)
            built = found or built
        return self._refined(built, problem, device) if self.by_sizes else built

    def decode_or_default(self, problem: Problem, device: int) -> ForwardKernels:
        """Returns the decode kernels for calls of few queries over many keys, otherwise the default ones.

        Tuned plans, packed heads and smaller tiles are not considered.
        """
        plan = self.decode_plan(problem, device)
        if plan is None:
            return self.default
        command = f"{show_command(plan, self._spec)} --what resources"
        return self._available(plan, command, "split the keys", self.default) or self.default

    def decode_plan(self, problem: Problem, device: int) -> Plan | None:
        """Returns the decode plan if calls of these sizes take it."""
        if not self.decodes:
            return None
        workload = workload_of(problem, self._engine.card(device))
        return dispatch.decode_plan(self._spec, self.default.kernel.target, workload)

    def for_splits(self, problem: Problem, num_splits: int) -> ForwardKernels:
        """Returns the decode kernel for a call with `num_splits`, independently of the batch.

        Raises ArgumentError if there is no such kernel, BuildError if it can be neither found nor compiled.
        """
        if isinstance(num_splits, bool) or not isinstance(num_splits, int) or not 1 <= num_splits <= MAX_SPLITS:
            raise ArgumentError(f"num_splits={num_splits!r} must be an integer from 1 to {MAX_SPLITS}, or None")
        refuse_varlen(self._spec, "num_splits", "leave it out, the kernel splits keys by the sequences' lengths")
        if self._default_decodes:
            if self.default.kernel.plan.scheduled:
                raise ArgumentError(
                    f"num_splits={num_splits}: {self.default.kernel.plan} splits keys by the lengths of the sequences"
                )
            return self.default
        return self._for_rows(problem, f"num_splits={num_splits}", "does not split keys")

    def for_schedule(self, problem: Problem, sizes: ScheduledSizes) -> ForwardKernels:
        """Returns the decode kernel for a call with a schedule: that of the given plan, or of the call's rows.

        Raises the errors of `for_splits`, and ArgumentError if the schedule was made for other sizes.
        """
        refuse_varlen(self._spec, "decode_schedule", "leave it out, the kernel splits keys by the sequences' lengths")
        is_given = not self.decodes and self._default_decodes and self.default.kernel.plan.scheduled
        built = (
            self.default
            if is_given
            else self._for_rows(problem, "decode_schedule", "takes no schedule", scheduled=True)
        )
        sizes.check(built.kernel.plan, problem)
        return built

    @property
    def _default_decodes(self) -> bool:
        return is_decode_plan(self.default.kernel.plan, self.default.kernel.target)

    def _for_rows(self, problem: Problem, argument: str, refusal: str, scheduled: bool = False) -> ForwardKernels:
        """Returns the decode kernel for the number of query rows per KV head.

        argument, refusal: For the error if calls take no decode kernels: the argument that needs one, and what the
            kernel does instead.
        """
        if not self.decodes:
            raise ArgumentError(
                f"{argument}: {self.default.kernel.name} {refusal}; compile without plan=... and "
                "source=..., or with a plan of the decode kernel"
            )
        rows, target = problem.heads_per_kv * problem.len_q, self.default.kernel.target
        plan = forward_family(target).decode.plan_of_rows(self._spec, target, rows, scheduled)
        command = f"{show_command(plan, self._spec)} --what resources"
        return self._kernels.require(plan, lambda: self._build(self._render(plan), command))

    def _refined(self, built: ForwardKernels, problem: Problem, device: int) -> ForwardKernels:
        """Returns the kernels with packed heads or smaller tiles if they fill the GPU better, else `built`."""
        kernel, workload = built.kernel, workload_of(problem, self._engine.card(device))
        plan = dispatch.refine(kernel.plan, self._spec, kernel.target, workload)
        if plan is None:
            return built
        rules = forward_family(kernel.target).size_rules
        assert rules, "only families with size rules refine plans"
        of_default = kernel.plan == default_plan(self._spec, kernel.target)
        shown = show_command(plan, self._spec) + rules.show_option(plan, self._spec, kernel.target)
        command = f"{shown} --what resources" if of_default else "flashgen tune"
        return self._available(plan, command, "fill the card better", built) or built

    def _available(self, plan: Plan, command: str, advantage: str, otherwise: ForwardKernels) -> ForwardKernels | None:
        """Returns the kernels of a plan, or None after a warning if one can be neither found nor compiled.

        advantage: What they would do, for the warning. otherwise: The kernels that run in their place.
        """

        def make() -> ForwardKernels | None:
            kernels = self._render(plan)
            try:
                return self._build(kernels, command)
            except BuildError as error:
                name, used = kernels["forward"].name, otherwise.kernel.name
                warn(_log, f"{name} would {advantage} and is not used, {used} is: {error}")
                return None

        return self._kernels.by_plan.get_or_make(plan, make)

    def _render(self, plan: Plan) -> Kernels:
        return forward_kernels(self._spec, self.default.kernel.target, plan=plan)

    def _build(self, kernels: Kernels, command: str) -> ForwardKernels:
        """Builds kernels; an error names the command that builds them ahead of time."""
        prebuild = f"{command} --target {self.default.kernel.target.name} {shlex.quote(self._spec.to_json())}"
        return ForwardKernels.build(self._spec, kernels, self._engine, prebuild)

    def _render_tuned(self, tuned: TunedPlan) -> Kernels | None:
        return tuned.kernels(self._render, "forward")

    def _build_tuned(self, kernels: Kernels) -> ForwardKernels:
        return self._build(kernels, "flashgen tune")


def num_splits_of(kernel: RenderedKernel, spec: AttentionSpec, problem: Problem, splits: Splits) -> int:
    """Returns the number of KV splits of a call: the given number, or the number that its sizes choose."""
    if not splits_keys(kernel.plan):
        return 1
    if isinstance(splits, ScheduledSizes):
        return splits.num_ctas
    return splits or dispatch.num_splits(kernel.plan, spec, problem)
