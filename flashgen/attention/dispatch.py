"""What the dispatch of both passes has in common: kernels by plan, built when a call first needs them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from flashgen.attention.problem import Problem
from flashgen.attention.tuned_plans import LengthClass, TunedPlan, TunedPlans
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import Kernels
from flashgen.codegen.workload import Workload
from flashgen.errors import BuildError, FlashgenWarning
from flashgen.runtime.caching import Cache
from flashgen.runtime.gpu import Card

_log = logging.getLogger(__name__)
Built = TypeVar("Built")


class KernelsByPlan(Generic[Built]):
    """Built kernels by plan, and the tuned plan of each class of call sizes.

    Kernels that are not available (`FLASHGEN_JIT=0` and they are neither in the cache nor in the release set, or the
    cache cannot be read) cause one warning that names the remedy; the caller then runs other kernels. Safe to use from
    several threads.
    """

    def __init__(self) -> None:
        self.by_plan: Cache[Any, Built | None] = Cache()
        self._tuned: Cache[Any, Built | None] = Cache()

    def clear_tuned(self) -> None:
        """Looks for tuned plans on disk again."""
        self._tuned.clear()

    def require(self, plan: Any, build: Callable[[], Built]) -> Built:
        """Returns the kernels of a plan. Raises BuildError if they are not available."""
        return self.by_plan.get(plan) or self.by_plan.get_or_make(plan, build) or build()

    def tuned(
        self,
        default: Built,
        kernel: RenderedKernel,
        tuned: TunedPlans,
        card: Card,
        lengths: LengthClass,
        render: Callable[[TunedPlan], Kernels | None],
        build: Callable[[Kernels], Built],
    ) -> Built | None:
        """Returns the kernels of the plan that tuning found for a class of call sizes.

        Args:
            default, kernel: The default kernels, and the main one among them.
            render: Returns the kernels of a tuned plan, or None if this version renders another text for it.
            build: Builds them; one thread does so for each plan, and the others wait for it.

        Returns None if there is no tuned plan, or if its kernels are not available.
        """

        def found() -> Built | None:
            winner = None
            try:
                winner = tuned.find(card, lengths)
                if winner is None or winner.plan == kernel.plan:
                    return default if winner else None
                built = self.by_plan.get(winner.plan)
                kernels = None if built else render(winner)
                return self.by_plan.get_or_make(winner.plan, lambda: build(kernels)) if kernels else built
            except BuildError as error:
                what = f"the tuned plan {winner.plan}" if winner else "a tuned plan, if there is one,"
                warn(_log, f"{what} of {kernel.name} is not used, the default one is: {error}")
                return None

        return self._tuned.get_or_make((kernel.plan, card, lengths), found)


def warn(log: logging.Logger, message: str) -> None:
    """Logs a warning and raises it as a FlashgenWarning, for kernels that do not run as they should."""
    log.warning("%s", message)
    warnings.warn(message, FlashgenWarning, stacklevel=3)


def workload_of(problem: Problem, card: Card) -> Workload:
    """Returns the sizes of a call as plans are compared for them."""
    heads = problem.batch * problem.heads_q
    return Workload(problem.len_q, problem.len_k, heads, card.multiprocessors, problem.heads_per_kv, problem.batch)
