"""The kernels of a pass on an engine: built once, their launches worked out once for a shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from flashgen.attention.launches import launch_of, workspaces
from flashgen.attention.problem import Problem
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import Kernels
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Engine, Launch, Numbers, Place, Runner, Taken
from flashgen.launch.memory import Workspace
from flashgen.runtime.arrays import Library, View

NO_LISTS: Mapping[str, Taken] = {}
COUNTERS = ("next_tile", "arrivals")  # what structs call the counters that the stages of a call share


class PreparedStage(NamedTuple):
    """One kernel of a pass, and its launch for calls of one shape; `pointers` as of its record."""

    role: str
    runner: Runner
    launch: Launch
    pointers: Mapping[str, str]


@dataclass(frozen=True)
class PreparedStages:
    """What calls of one shape share: the stages in their order, and the memory that they need.

    counts: how many counters its stages count by; they follow each other and share them.
    """

    stages: tuple[PreparedStage, ...]
    workspace: Workspace | None
    counts: int


class BuiltStages:
    """The stages of a pass, but for those that list tiles, which TileLister runs."""

    def __init__(self, spec: AttentionSpec, stages: Kernels, engine: Engine, prebuild: str) -> None:
        self.spec, self.engine = spec, engine
        self.kernels = {role: kernel for role, kernel in stages.items() if not kernel.lists}
        self.runners = {role: engine.runner(kernel, prebuild) for role, kernel in self.kernels.items()}

    def prepare(self, problem: Problem, captured: Mapping[str, View], library: Library, device: int) -> PreparedStages:
        """For calls of these sizes, strides and captured arrays on a device, whose q is of a library."""
        launches = {role: self._launch_of(kernel, problem, captured) for role, kernel in self.kernels.items()}
        stages = tuple(
            PreparedStage(role, self.runners[role], launch, self.kernels[role].pointers)
            for role, launch in launches.items()
            if all(launch.grid)  # where there are no keys, no tile of them has a block
        )
        memory = workspaces(self.kernels, problem, captured)
        workspace = self.engine.workspace(memory, library, device) if memory else None
        return PreparedStages(stages, workspace, max((stage.launch.counts for stage in stages), default=0))

    def _launch_of(self, kernel: RenderedKernel, problem: Problem, captured: Mapping[str, View]) -> Launch:
        for space in kernel.workspaces:
            if space.of_capture:
                problem = replace(problem, count=math.prod(captured[space.of_capture].shape))
        return launch_of(kernel, self.spec, problem, captured)

    def launch(
        self,
        prepared: PreparedStages,
        taken: Taken,
        numbers: Numbers,
        place: Place,
        lists: Mapping[str, Taken] = NO_LISTS,
    ) -> None:
        """Everything on the call's stream. Workspaces go back to where they came from when `taken` is gone.

        taken: the arrays of the call and its results, which workspaces are added to. lists: tile lists, by the roles of
        the stages that read them.
        """
        if prepared.workspace:
            prepared.workspace.take(taken, place.stream)
        if prepared.counts:
            taken.update(dict.fromkeys(COUNTERS, self.engine.counter(place, prepared.counts)))
        for role, runner, launch, called in prepared.stages:
            if role in lists:
                taken.update(lists[role])
            own = type(taken)({name: taken[here] for name, here in called.items()}) if called else taken
            runner.launch(launch, own, numbers, place)
