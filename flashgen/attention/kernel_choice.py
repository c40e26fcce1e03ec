"""Which kernel a call runs: the default plan's, one that tuning found, its packed form, or one that splits the keys."""

from __future__ import annotations

import logging
import shlex
import warnings
from dataclasses import dataclass
from functools import partial

from flashgen.attention.call import Splits
from flashgen.attention.decode_schedule import ScheduledSizes
from flashgen.attention.problem import Problem
from flashgen.attention.ragged import refuse_ragged
from flashgen.attention.stages import BuiltStages
from flashgen.attention.tile_lists import TileLister
from flashgen.attention.tuned_plans import LengthClass, TunedPlan, TunedPlans
from flashgen.codegen.families import default_plan, forward_family
from flashgen.codegen.family import Decoding, PlansBySizes
from flashgen.codegen.header import show_command
from flashgen.codegen.mma_sync.splits import MOST_SPLITS
from flashgen.codegen.plan import Plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import Kernels, forward_kernels
from flashgen.codegen.workload import Workload
from flashgen.errors import ArgumentError, BuildError, FlashgenWarning
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Engine
from flashgen.runtime.gpu import Card
from flashgen.runtime.remembered import Remembered

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltForward:
    """The stages of a forward pass, ready to run, and the lister of their tiles where they read lists."""

    stages: BuiltStages
    lister: TileLister | None

    @classmethod
    def of(cls, spec: AttentionSpec, kernels: Kernels, engine: Engine, prebuild: str) -> BuiltForward:
        """BuildError where a kernel can be neither found nor built."""
        lister = TileLister(spec, kernels["lists"], engine, prebuild) if "lists" in kernels else None
        return cls(BuiltStages(spec, kernels, engine, prebuild), lister)

    @property
    def kernel(self) -> RenderedKernel:
        """The kernel that attends."""
        return self.stages.kernels["forward"]


class KernelChoice:
    """The kernels of a spec by their plans, each built when a call first wants it.

    One that cannot be had (`FLASHGEN_JIT=0` and it is neither in the cache nor in the release set; the cache cannot be
    read) is said once, in a warning with the remedy, and the kernel in whose place it would run does. A tuned plan
    whose text is another than was measured is none.

    default: of the plan that holds where nothing else does. tuned: the plans that tuning found, or None where they are
    not looked for. by_sizes: the family's rules of plans that some sizes take, or None where one plan is to hold.
    decoding: likewise, of few queries over many keys.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        default: BuiltForward,
        engine: Engine,
        tuned: TunedPlans | None,
        by_sizes: PlansBySizes | None,
        decoding: Decoding | None = None,
    ) -> None:
        self.default, self.tuned, self.by_sizes, self.decoding = default, tuned, by_sizes, decoding
        self._spec, self._engine = spec, engine
        self._built: Remembered[Plan, BuiltForward | None] = Remembered()
        self._found: Remembered[tuple[Plan, Card, LengthClass], BuiltForward] = Remembered()

    def forget(self) -> None:
        """Look for tuned plans on disk again."""
        self._found.forget()

    def key(self, default: BuiltForward, problem: Problem, device: int) -> tuple[Card, LengthClass]:
        """What a plan tuned beside a default one is of: the kind of GPU, and the class of a call's lengths."""
        card, lists = self._engine.card(device), default.lister is not None
        grouped = decodes(default.kernel) and not lists  # who makes lists ahead knows no heads of k
        return card, LengthClass.of(workload_of(problem, card), lists, grouped)

    @property
    def depends_on_sizes(self) -> bool:
        """Whether calls of some sizes may run another kernel than the default."""
        return not (self.by_sizes is None and self.tuned is None and self.decoding is None)

    def of(self, problem: Problem, device: int) -> BuiltForward:
        """The kernel of calls of these sizes, which have scores, on a device."""
        default = self.default_of(problem, device)
        built = self._tuned_beside(default, self.tuned, problem, device) if self.tuned else default
        return self._of_sizes(built, problem, device) if self.by_sizes else built

    def default_of(self, problem: Problem, device: int) -> BuiltForward:
        """The kernel of such calls where nothing is tuned, heads are not packed and tiles are as large as ever."""
        plan = self.decode_plan(problem, device)
        return self._built.get_or_make(plan, lambda: self._decoding(plan)) or self.default if plan else self.default

    def decode_plan(self, problem: Problem, device: int) -> Plan | None:
        """The plan of the decode kernel where calls of these sizes take it."""
        if self.decoding is None:
            return None
        workload = workload_of(problem, self._engine.card(device))
        return self.decoding.chosen(self._spec, self.default.kernel.target, workload)

    def of_splits(self, problem: Problem, num_splits: int) -> BuiltForward:
        """The decode kernel for calls that say into how many parts the keys are split: the batch chooses nothing.

        ArgumentError where there is none to be had, BuildError where it can be neither found nor built.
        """
        if isinstance(num_splits, bool) or not isinstance(num_splits, int) or not 1 <= num_splits <= MOST_SPLITS:
            raise ArgumentError(f"num_splits={num_splits!r} must be an integer from 1 to {MOST_SPLITS}, or None")
        refuse_ragged(self._spec, "num_splits", "leave it out, what a launch does follows from the lengths")
        if decodes(self.default.kernel):
            if self.default.kernel.plan.scheduled:
                raise ArgumentError(f"num_splits={num_splits}: {self.default.kernel.plan} shares keys by their lengths")
            return self.default
        return self._of_rows(problem, f"num_splits={num_splits}", "splits no keys")

    def of_schedule(self, problem: Problem, sizes: ScheduledSizes) -> BuiltForward:
        """The decode kernel for calls with a schedule: a plan that was given, or that of their rows.

        Errors as above, and where the schedule was made for other sizes.
        """
        refuse_ragged(self._spec, "decode_schedule", "leave it out, blocks share keys by their lengths")
        given = self.decoding is None and decodes(self.default.kernel) and self.default.kernel.plan.scheduled
        built = self.default if given else self._of_rows(problem, "decode_schedule", "takes none", scheduled=True)
        sizes.check(built.kernel.plan, problem)
        return built

    def _of_rows(self, problem: Problem, given: str, why: str, scheduled: bool = False) -> BuiltForward:
        """The decode kernel for the rows of a call, whatever else is in the batch."""
        if self.decoding is None:
            raise ArgumentError(
                f"{given}: {self.default.kernel.name} {why}; compile without plan=... and "
                "source=..., or with a plan of the decode kernel"
            )
        rows, target = problem.heads_per_kv * problem.len_q, self.default.kernel.target
        plan = self.decoding.of_rows(self._spec, target, rows, scheduled)
        kernels, prebuild = self._decode_kernels(plan)
        make = partial(BuiltForward.of, self._spec, kernels, self._engine, prebuild)
        return self._built.get(plan) or self._built.get_or_make(plan, make) or make()

    def _decode_kernels(self, plan: Plan) -> tuple[Kernels, str]:
        """The kernels of the plan, and the command that builds them."""
        target = self.default.kernel.target
        options = f"--what resources --target {target.name} {shlex.quote(self._spec.to_json())}"
        return forward_kernels(self._spec, target, plan=plan), f"{show_command(plan, self._spec)} {options}"

    def _decoding(self, plan: Plan) -> BuiltForward | None:
        kernels, prebuild = self._decode_kernels(plan)
        try:
            return BuiltForward.of(self._spec, kernels, self._engine, prebuild)
        except BuildError as error:
            name = self.default.kernel.name
            warn(_log, f"{kernels['forward'].name} would split the keys and is not used, {name} is: {error}")
            return None

    def _of_sizes(self, built: BuiltForward, problem: Problem, device: int) -> BuiltForward:
        """The kernel that fills the card better with calls of these sizes, where there is one, in place of another."""
        assert self.by_sizes, "only families that have such kernels come here"
        kernel, workload = built.kernel, workload_of(problem, self._engine.card(device))
        if not isinstance(kernel.plan, forward_family(kernel.target).plan):  # nor does another family's kernel pack any
            return built
        plan = self.by_sizes.chosen(kernel.plan, self._spec, kernel.target, workload)
        if plan is None:
            return built
        shown = f"{show_command(plan, self._spec)}{self.by_sizes.option(plan, self._spec, kernel.target)}"
        return self._built.get_or_make(plan, lambda: self._in_place_of(built, plan, shown)) or built

    def _tuned_beside(self, default: BuiltForward, tuned: TunedPlans, problem: Problem, device: int) -> BuiltForward:
        """The kernel that tuning found for calls of these sizes, or the default one."""
        key, kept = self.key(default, problem, device), tuned.beside(default.kernel)
        return self._found.get_or_make((default.kernel.plan, *key), lambda: self._tuned(default, kept, *key))

    def _tuned(self, default: BuiltForward, kept: TunedPlans, card: Card, lengths: LengthClass) -> BuiltForward:
        found = None
        try:
            found = kept.find(card, lengths)
            if found is None or found.plan == default.kernel.plan:
                return default
            return self._built.get(found.plan) or self._of_tuned(found) or default
        except BuildError as error:
            what = f"the tuned plan {found.plan}" if found else "a tuned plan, if there is one,"
            warn(_log, f"{what} of {default.kernel.name} is not used, the default one is: {error}")
            return default

    def _of_tuned(self, tuned: TunedPlan) -> BuiltForward | None:
        target = self.default.kernel.target
        kernels = tuned.kernels(lambda plan: forward_kernels(self._spec, target, plan=plan), "forward")
        if kernels is None:
            return None
        prebuild = f"flashgen tune --target {target.name} {shlex.quote(self._spec.to_json())}"
        return self._built.get_or_make(tuned.plan, lambda: BuiltForward.of(self._spec, kernels, self._engine, prebuild))

    def _in_place_of(self, other: BuiltForward, plan: Plan, shown: str) -> BuiltForward | None:
        """The kernel of a plan that takes another's place; `shown` by this command, if that is the default's."""
        target, name = other.kernel.target, other.kernel.name
        kernels = forward_kernels(self._spec, target, plan=plan)
        of_default = other.kernel.plan == default_plan(self._spec, target)
        command = f"{shown} --what resources" if of_default else "flashgen tune"
        prebuild = f"{command} --target {target.name} {shlex.quote(self._spec.to_json())}"
        try:
            return BuiltForward.of(self._spec, kernels, self._engine, prebuild)
        except BuildError as error:
            warn(_log, f"{kernels['forward'].name} would fill the card better and is not used, {name} is: {error}")
            return None


def warn(log: logging.Logger, message: str) -> None:
    """Says to a log and to the program what does not run as it should, and the remedy."""
    log.warning("%s", message)
    warnings.warn(message, FlashgenWarning, stacklevel=3)


def decodes(kernel: RenderedKernel) -> bool:
    """Whether it is a decode kernel."""
    decoding = forward_family(kernel.target).decoding
    return decoding is not None and isinstance(kernel.plan, decoding.plan)


def splits_of(kernel: RenderedKernel, spec: AttentionSpec, problem: Problem, splits: Splits) -> int:
    """Into how many parts a call's keys are split: as many as it says, or as the sizes want; 1 by a forward kernel."""
    decoding = forward_family(kernel.target).decoding
    if decoding is None or not isinstance(kernel.plan, decoding.splitting):
        return 1
    if isinstance(splits, ScheduledSizes):
        return splits.columns
    return splits or decoding.splits(spec, kernel.plan, problem)


def workload_of(problem: Problem, card: Card) -> Workload:
    """The sizes of a call, as plans are ranked for them."""
    heads = problem.batch * problem.heads_q
    return Workload(problem.len_q, problem.len_k, heads, card.multiprocessors, problem.heads_per_kv, problem.batch)
