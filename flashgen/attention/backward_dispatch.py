"""Which backward kernels a call runs: those of the default plan, of a tuned plan, or with one CTA per query head."""

from __future__ import annotations

import logging
import shlex
from typing import Any

from flashgen.attention.dispatch import KernelsByPlan, warn, workload_of
from flashgen.attention.problem import Problem
from flashgen.attention.stages import BuiltStages
from flashgen.attention.tuned_plans import LengthClass, TunedPlan, TunedPlans
from flashgen.codegen.family import HeadSplit
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import Kernels, backward_kernels
from flashgen.codegen.workload import Workload
from flashgen.errors import BuildError
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Engine
from flashgen.runtime.gpu import Card

_log = logging.getLogger(__name__)


class BackwardDispatch:
    """Chooses the backward kernels of a call by its sizes.

    Kernels that are not available are reported once, and the default kernels run. A tuned plan also decides whether
    query heads have their own CTAs. A tuned plan whose kernel text differs from the text that was measured is ignored.

    Args:
        default: The kernels that run when nothing else is chosen.
        head_split: The family's plans with one CTA per query head, or None to use none of them.
        tuned: The tuned plans, or None to ignore them.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        default: BuiltStages,
        engine: Engine,
        head_split: HeadSplit | None,
        tuned: TunedPlans | None = None,
        deterministic: bool = False,
    ) -> None:
        self.default, self.tuned, self.deterministic = default, tuned, deterministic
        self._spec, self._engine, self._head_split = spec, engine, head_split
        self._kernels: KernelsByPlan[BuiltStages] = KernelsByPlan()

    def clear_tuned(self) -> None:
        """Looks for tuned plans on disk again."""
        self._kernels.clear_tuned()

    @property
    def _main(self) -> RenderedKernel:
        return self.default.kernels["dkdv"]

    def tuning_key(self, problem: Problem, device: int) -> tuple[Card, LengthClass]:
        """Returns the kind of GPU and the class of call sizes under which a tuned plan is stored."""
        card = self._engine.card(device)
        return card, LengthClass.of(workload_of(problem, card), self._main.reads is not None, grouped=True)

    def depends_on(self, problem: Problem) -> bool:
        """Whether a call of these sizes may run other kernels than the default ones.

        A call without a score runs the default ones: it computes gradients of sinks alone, which no plan makes faster.
        """
        splits_heads = self._head_split is not None and problem.heads_per_kv > 1
        return problem.has_scores and (self.tuned is not None or splits_heads)

    def untuned_plan(self, workload: Workload) -> Any:
        """Returns the plan for a call of these sizes without tuned plans."""
        main, split = self._main, self._head_split
        chosen = split.choose(main.plan, self._spec, main.target, workload) if split else None
        return chosen or main.plan

    def choose(self, problem: Problem, device: int) -> BuiltStages:
        """Returns the kernels for a call of these sizes on a device."""
        if not self.depends_on(problem):
            return self.default
        if self.tuned:
            key = self.tuning_key(problem, device)
            ways = self._render_tuned, self._build_tuned
            found = self._kernels.tuned(self.default, self._main, self.tuned, *key, *ways)
            if found:
                return found
        plan = self.untuned_plan(workload_of(problem, self._engine.card(device)))
        if plan == self._main.plan:
            return self.default
        return self._kernels.by_plan.get_or_make(plan, lambda: self._build_split(plan)) or self.default

    def kernels_of(self, plan: Any) -> Kernels:
        """Renders the kernels of a plan, deterministic if this attention is."""
        return backward_kernels(self._spec, self._main.target, self.deterministic, plan=plan)

    def _render_tuned(self, tuned: TunedPlan) -> Kernels | None:
        return tuned.kernels(self.kernels_of, "dkdv")

    def _build_tuned(self, kernels: Kernels) -> BuiltStages:
        options = "--pass backward --deterministic" if self.deterministic else "--pass backward"
        return BuiltStages(self._spec, kernels, self._engine, f"flashgen tune {options} {self._shown()}")

    def _build_split(self, plan: Any) -> BuiltStages | None:
        prebuild = f"flashgen show --pass backward --heads-apart --what resources {self._shown()}"
        try:
            return BuiltStages(self._spec, self.kernels_of(plan), self._engine, prebuild)
        except BuildError as error:
            warn(_log, f"{self._main.name} with heads apart would fill the card better and is not used: {error}")
            return None

    def _shown(self) -> str:
        return f"--target {self._main.target.name} {shlex.quote(self._spec.to_json())}"
