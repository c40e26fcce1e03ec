"""The kernels of a pass on an engine: built once, with their launches prepared once for each shape."""

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
from flashgen.launch.engines import Engine, Launch, Operands, Place, Runner, ScalarArguments
from flashgen.launch.memory import Workspace
from flashgen.runtime.arrays import Library, View

NO_LISTS: Mapping[str, Operands] = {}
COUNTERS = ("next_tile", "arrivals")  # the struct members for the counters that the stages of a call share


class PreparedStage(NamedTuple):
    """One kernel of a pass and its launch for calls of one shape; `pointers` is that of its RenderedKernel."""

    role: str
    runner: Runner
    launch: Launch
    pointers: Mapping[str, str]


@dataclass(frozen=True)
class PreparedStages:
    """The stages of all calls of one shape, in order, and their workspaces.

    counts: the number of counters of the stage that needs the most. Stages run one after the other and share them.
    """

    stages: tuple[PreparedStage, ...]
    workspace: Workspace | None
    counts: int


class BuiltStages:
    """The built stages of a pass, except those that list tiles: TileLister runs these."""

    def __init__(self, spec: AttentionSpec, stages: Kernels, engine: Engine, prebuild: str) -> None:
        self.spec, self.engine = spec, engine
        self.kernels = {role: kernel for role, kernel in stages.items() if not kernel.lists}
        self.runners = {role: engine.runner(kernel, prebuild) for role, kernel in self.kernels.items()}

    def prepare(self, problem: Problem, captured: Mapping[str, View], library: Library, device: int) -> PreparedStages:
        """Prepares the launches of calls of these sizes, strides and captured arrays on a device.

        library: that of q, which allocates the workspaces.
        """
        launches = {role: self._launch_of(kernel, problem, captured) for role, kernel in self.kernels.items()}
        stages = tuple(
            PreparedStage(role, self.runners[role], launch, self.kernels[role].pointers)
            for role, launch in launches.items()
            if all(launch.grid)  # without keys, the grid of a kernel over tiles of keys is empty
        )
        memory = workspaces(self.kernels, problem, captured)
        workspace = self.engine.workspace(memory, library, device) if memory else None
        return PreparedStages(stages, workspace, max((stage.launch.num_counters for stage in stages), default=0))

    def _launch_of(self, kernel: RenderedKernel, problem: Problem, captured: Mapping[str, View]) -> Launch:
        for name in (kernel.counts_elements, *(space.of_capture for space in kernel.workspaces)):
            if name:
                problem = replace(problem, count=math.prod(captured[name].shape))
        return launch_of(kernel, self.spec, problem, captured)

    def launch(
        self,
        prepared: PreparedStages,
        operands: Operands,
        numbers: ScalarArguments,
        place: Place,
        lists: Mapping[str, Operands] = NO_LISTS,
    ) -> None:
        """Launches all stages on the call's stream. Workspaces are freed with `operands`, which keeps them alive.

        operands: the arrays and results of the call; workspaces are added. lists: the tile lists, by the roles of the
        stages that read them.
        """
        if prepared.workspace:
            prepared.workspace.take(operands, place.stream)
        if prepared.counts:
            operands.update(dict.fromkeys(COUNTERS, self.engine.counter(place, prepared.counts)))
        for role, runner, launch, pointers in prepared.stages:
            if role in lists:
                operands.update(lists[role])
            stage_operands = operands
            if pointers:  # the struct has names of its own
                stage_operands = type(operands)(
                    {member: operands[name] for member, name in pointers.items() if name in operands}
                )
            runner.launch(launch, stage_operands, numbers, place)
