"""Kernels that pack the query heads of a head of K and V, for the calls whose tiles that fills better."""

from __future__ import annotations

import logging
import shlex
import warnings

from flashgen.attention.engines import Engine
from flashgen.attention.problem import Problem
from flashgen.attention.tuned_kernels import BuiltForward, workload_of
from flashgen.codegen.families import default_plan, render_forward
from flashgen.codegen.hopper.forward import show_command
from flashgen.codegen.hopper.head_packing import Sharing, packed_plan
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.errors import BuildError, FlashgenWarning
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.remembered import Remembered

_log = logging.getLogger(__name__)


class Packing:
    """The packed forms of a spec's kernels, each built when a call first wants it.

    One that cannot be had (`FLASHGEN_JIT=0` and it is neither in the cache nor in the release set) is said once, in a
    warning with the remedy, and the kernel that does not pack runs.
    """

    def __init__(self, spec: AttentionSpec, engine: Engine) -> None:
        self._spec, self._engine = spec, engine
        self._built: Remembered[HopperPlan, BuiltForward | None] = Remembered()

    def of(self, unpacked: BuiltForward, problem: Problem, device: int) -> BuiltForward:
        """The kernel of calls of these sizes, which have scores: the packed form of `unpacked`, or itself."""
        kernel = unpacked.kernel
        if problem.heads_per_kv == 1 or not isinstance(kernel.plan, HopperPlan):
            return unpacked
        sharing = Sharing(workload_of(problem, self._engine.card(device)), problem.heads_per_kv)
        plan = packed_plan(kernel.plan, self._spec, kernel.target, sharing)
        if plan is None:
            return unpacked
        return self._built.get_or_make(plan, lambda: self._build(plan, unpacked)) or unpacked

    def _build(self, plan: HopperPlan, unpacked: BuiltForward) -> BuiltForward | None:
        target, name = unpacked.kernel.target, unpacked.kernel.name
        kernel = render_forward(self._spec, target, plan)
        of_default = unpacked.kernel.plan == default_plan(self._spec, target)
        command = f"{show_command(plan)} --what resources" if of_default else "flashgen tune"
        prebuild = f"{command} --target {target.name} {shlex.quote(self._spec.to_json())}"
        try:
            return BuiltForward.of(self._spec, kernel, self._engine, prebuild)
        except BuildError as error:
            message = f"{kernel.name} would fill its tiles better and is not used, {name} is: {error}"
            _log.warning("%s", message)
            warnings.warn(message, FlashgenWarning, stacklevel=2)
            return None
