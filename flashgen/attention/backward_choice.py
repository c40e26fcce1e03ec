"""Which kernels a backward call runs: those of its plan, of one that tuning found, or with blocks by query head."""

from __future__ import annotations

import logging
import shlex
from typing import Any

from flashgen.attention.kernel_choice import warn, workload_of
from flashgen.attention.problem import Problem
from flashgen.attention.stages import BuiltStages
from flashgen.attention.tuned_plans import LengthClass, TunedPlan, TunedPlans
from flashgen.codegen.family import HeadDivision
from flashgen.codegen.stages import Kernels, backward_kernels
from flashgen.codegen.workload import Workload
from flashgen.errors import BuildError
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Engine
from flashgen.runtime.gpu import Card
from flashgen.runtime.remembered import Remembered

_log = logging.getLogger(__name__)


class BackwardChoice:
    """The kernels of a backward pass by their plans, each built when a call first wants them.

    Those that cannot be had (`FLASHGEN_JIT=0`, and they are neither in the cache nor in the release set) are said once,
    in a warning with the remedy, and the default ones run. A tuned plan says, too, whether heads are divided; one whose
    text is another than was measured is none.

    dividing: the family's rule, or None where heads are not to be divided. tuned: the plans that tuning found, or None
    where they are not looked for.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        default: BuiltStages,
        engine: Engine,
        dividing: HeadDivision | None,
        tuned: TunedPlans | None = None,
        deterministic: bool = False,
    ) -> None:
        self.default, self.tuned, self.deterministic = default, tuned, deterministic
        self._spec, self._engine, self._dividing = spec, engine, dividing
        self._built: Remembered[Any, BuiltStages | None] = Remembered()
        self._found: Remembered[tuple[Card, LengthClass], BuiltStages | None] = Remembered()

    def forget(self) -> None:
        """Look for tuned plans on disk again."""
        self._found.forget()

    def key(self, problem: Problem, device: int) -> tuple[Card, LengthClass]:
        """What a tuned plan is of: the kind of GPU, and the class of a call's lengths."""
        card, lists = self._engine.card(device), self.default.kernels["keys"].reads is not None
        return card, LengthClass.of(workload_of(problem, card), lists, grouped=True)

    def depends_on(self, problem: Problem) -> bool:
        """Whether calls of these sizes may run other kernels than the default ones: those without a score do not.

        Such calls have gradients of their sinks, which no plan makes faster, and lengths that no plan is kept for.
        """
        divides = self._dividing is not None and problem.heads_per_kv > 1
        return problem.has_scores and (self.tuned is not None or divides)

    def plan_of(self, workload: Workload) -> Any:
        """The plan of calls of these sizes for which nothing was tuned."""
        kernel = self.default.kernels["keys"]
        chosen = self._dividing.chosen(kernel.plan, self._spec, kernel.target, workload) if self._dividing else None
        return chosen or kernel.plan

    def of(self, problem: Problem, device: int) -> BuiltStages:
        """The kernels of calls of these sizes on a device."""
        if not self.depends_on(problem):
            return self.default
        if self.tuned:
            tuned, key = self.tuned, self.key(problem, device)
            found = self._found.get_or_make(key, lambda: self._tuned(tuned, *key))
            if found:
                return found
        plan = self.plan_of(workload_of(problem, self._engine.card(device)))
        if plan == self.default.kernels["keys"].plan:
            return self.default
        return self._built.get_or_make(plan, lambda: self._divided(plan)) or self.default

    def kernels_of(self, plan: Any) -> Kernels:
        """The kernels of a plan, in this mode."""
        return backward_kernels(self._spec, self.default.kernels["keys"].target, self.deterministic, plan=plan)

    def _tuned(self, tuned: TunedPlans, card: Card, lengths: LengthClass) -> BuiltStages | None:
        """The kernels of the plan that tuning found; None where it found none, or it cannot be had."""
        found = None
        try:
            found = tuned.find(card, lengths)
            if found is None:
                return None
            return self.default if found.plan == self.default.kernels["keys"].plan else self._of_tuned(found)
        except BuildError as error:
            what = f"the tuned plan {found.plan}" if found else "a tuned plan, if there is one,"
            warn(_log, f"{what} of {self.default.kernels['keys'].name} is not used, the default one is: {error}")
            return None

    def _of_tuned(self, tuned: TunedPlan) -> BuiltStages | None:
        kernels = tuned.kernels(self.kernels_of, "keys")
        if kernels is None:
            return None
        options = "--pass backward --deterministic" if self.deterministic else "--pass backward"
        prebuild = f"flashgen tune {options} {self._shown()}"
        return self._built.get_or_make(tuned.plan, lambda: BuiltStages(self._spec, kernels, self._engine, prebuild))

    def _divided(self, plan: Any) -> BuiltStages | None:
        prebuild = f"flashgen show --pass backward --heads-apart --what resources {self._shown()}"
        try:
            return BuiltStages(self._spec, self.kernels_of(plan), self._engine, prebuild)
        except BuildError as error:
            name = self.default.kernels["keys"].name
            warn(_log, f"{name} with heads apart would fill the card better and is not used: {error}")
            return None

    def _shown(self) -> str:
        return f"--target {self.default.kernels['keys'].target.name} {shlex.quote(self._spec.to_json())}"
