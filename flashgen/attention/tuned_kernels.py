"""Which kernel a call runs: that of the spec's default plan, or of a plan that tuning found for such lengths."""

from __future__ import annotations

import logging
import shlex
import warnings
from dataclasses import dataclass

from flashgen.attention.edits import NO_EDITS, Edits
from flashgen.attention.engines import Engine, Runner
from flashgen.attention.problem import Problem
from flashgen.attention.tile_lists import TileLister
from flashgen.attention.tuned_plans import LengthClass, TunedPlan, TunedPlans
from flashgen.codegen.candidates import Workload
from flashgen.codegen.families import AnyForwardKernel, AnyForwardPlan, render_forward
from flashgen.errors import BuildError, FlashgenWarning, UnsupportedError
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.gpu import Card
from flashgen.runtime.remembered import Remembered

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltForward:
    """A forward kernel that is ready to run, and the lister of its tiles where it reads lists."""

    kernel: AnyForwardKernel
    runner: Runner
    lister: TileLister | None

    @classmethod
    def of(
        cls, spec: AttentionSpec, kernel: AnyForwardKernel, engine: Engine, prebuild: str, edits: Edits = NO_EDITS
    ) -> BuiltForward:
        """BuildError where the kernel, or that which lists its tiles, can be neither found nor built.

        edits: of the lister's kernel; `kernel` is edited already where it is.
        """
        lister = None
        if kernel.uses_lists:
            lister = TileLister(spec, kernel.target, kernel.plan, engine, prebuild, edits=edits)
        return cls(kernel, engine.runner(kernel, prebuild), lister)


class Winners:
    """The kernels of tuned plans, built when a call first wants one, and looked up on disk once for each length class.

    A winner that cannot be had (`FLASHGEN_JIT=0` and it is not in the cache; the cache cannot be read) is said, in a
    warning with the remedy, and the default plan's kernel runs. One of another text than was measured is none.
    """

    def __init__(self, spec: AttentionSpec, default: BuiltForward, engine: Engine, tuned: TunedPlans) -> None:
        self.tuned = tuned
        self._spec, self._default, self._engine = spec, default, engine
        self._built: Remembered[AnyForwardPlan, BuiltForward] = Remembered()
        self._chosen: Remembered[tuple[Card, LengthClass], BuiltForward] = Remembered()

    def forget(self) -> None:
        """Look on disk again."""
        self._chosen.forget()

    def key(self, problem: Problem, device: int) -> tuple[Card, LengthClass]:
        """What a winner is of: the kind of GPU, and the class of a call's lengths."""
        card = self._engine.card(device)
        return card, LengthClass.of(workload_of(problem, card), lists=self._default.lister is not None)

    def of(self, problem: Problem, device: int) -> BuiltForward:
        """The kernel of calls of these sizes, which have scores, on a device."""
        key = self.key(problem, device)
        return self._chosen.get_or_make(key, lambda: self._found(*key))

    def _found(self, card: Card, lengths: LengthClass) -> BuiltForward:
        winner = None
        try:
            winner = self.tuned.find(card, lengths)
            return self._default if winner is None else self._build(winner)
        except BuildError as error:
            what = f"the tuned plan {winner.plan}" if winner else "a tuned plan, if there is one,"
            message = f"{what} of {self._default.kernel.name} is not used, the default one is: {error}"
            _log.warning("%s", message)
            warnings.warn(message, FlashgenWarning, stacklevel=2)
            return self._default

    def _build(self, winner: TunedPlan) -> BuiltForward:
        if winner.plan == self._default.kernel.plan:
            return self._default
        return self._built.get(winner.plan) or self._built_now(winner)

    def _built_now(self, winner: TunedPlan) -> BuiltForward:
        target = self._default.kernel.target
        try:
            kernel = render_forward(self._spec, target, winner.plan)
        except UnsupportedError as error:
            _log.info("a tuned plan of an older version: %s", error)
            return self._default
        if not winner.describes(kernel):
            _log.info("a tuned plan of an older version: %s is another kernel now", winner.plan)
            return self._default
        prebuild = f"flashgen tune --target {target.name} {shlex.quote(self._spec.to_json())}"
        return self._built.get_or_make(winner.plan, lambda: BuiltForward.of(self._spec, kernel, self._engine, prebuild))


def workload_of(problem: Problem, card: Card) -> Workload:
    """The sizes of a call, as plans are ranked for them."""
    return Workload(problem.len_q, problem.len_k, problem.batch * problem.heads_q, card.multiprocessors)
