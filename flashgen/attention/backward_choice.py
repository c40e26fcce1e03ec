"""Which kernels a backward call runs: those of its plan, or those in which query heads have blocks of their own."""

from __future__ import annotations

import logging
import shlex
import warnings
from typing import Any

from flashgen.attention.kernel_choice import workload_of
from flashgen.attention.problem import Problem
from flashgen.attention.stages import BuiltStages
from flashgen.codegen.family import HeadDivision
from flashgen.codegen.stages import backward_kernels
from flashgen.errors import BuildError, FlashgenWarning
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Engine
from flashgen.runtime.remembered import Remembered

_log = logging.getLogger(__name__)


class BackwardChoice:
    """The kernels of a backward pass by their plans, each built when a call first wants them.

    Those that cannot be had (`FLASHGEN_JIT=0`, and they are neither in the cache nor in the release set) are said once,
    in a warning with the remedy, and the default ones run.

    dividing: the family's rule, or None where heads are not to be divided.
    """

    def __init__(
        self, spec: AttentionSpec, default: BuiltStages, engine: Engine, dividing: HeadDivision | None
    ) -> None:
        self.default = default
        self._spec, self._engine, self._dividing = spec, engine, dividing
        self._built: Remembered[Any, BuiltStages | None] = Remembered()

    def of(self, problem: Problem, device: int) -> BuiltStages:
        """The kernels of calls of these sizes, which have scores, on a device."""
        if self._dividing is None or problem.heads_per_kv == 1:
            return self.default
        kernel = self.default.kernels["keys"]
        workload = workload_of(problem, self._engine.card(device))
        plan = self._dividing.chosen(kernel.plan, self._spec, kernel.target, workload)
        if plan is None:
            return self.default
        return self._built.get_or_make(plan, lambda: self._divided(plan)) or self.default

    def _divided(self, plan: Any) -> BuiltStages | None:
        target, name = self.default.kernels["keys"].target, self.default.kernels["keys"].name
        kernels = backward_kernels(self._spec, target, plan=plan)
        shown = f"--what resources --target {target.name} {shlex.quote(self._spec.to_json())}"
        prebuild = f"flashgen show --pass backward --heads-apart {shown}"
        try:
            return BuiltStages(self._spec, kernels, self._engine, prebuild)
        except BuildError as error:
            message = f"{name} with heads apart would fill the card better and is not used: {error}"
            _log.warning("%s", message)
            warnings.warn(message, FlashgenWarning, stacklevel=3)
            return None
