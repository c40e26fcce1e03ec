"""The kernels of a pass on an engine: built once, their launches worked out once for a shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flashgen.attention.launches import Memory, launch_of, workspaces
from flashgen.attention.problem import Problem
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import Kernels
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Arrays, Engine, Launch, Numbers, Place, Runner
from flashgen.runtime.arrays import Library, View, of_graph

NO_LISTS: Mapping[str, Mapping[str, Any]] = {}


class PreparedStage(NamedTuple):
    """One kernel of a pass, and its launch for calls of one shape; `pointers` as of its record."""

    role: str
    runner: Runner
    launch: Launch
    pointers: Mapping[str, str]


@dataclass(frozen=True)
class PreparedStages:
    """What calls of one shape share: the stages in their order, and the memory that they need.

    counts: whether a stage takes tiles by a counter; those of a call follow each other and share one.
    """

    stages: tuple[PreparedStage, ...]
    memory: Mapping[str, Memory]
    counts: bool


class BuiltStages:
    """The stages of a pass, but for those that list tiles, which TileLister runs."""

    def __init__(self, spec: AttentionSpec, stages: Kernels, engine: Engine, prebuild: str) -> None:
        self.spec, self.engine = spec, engine
        self.kernels = {role: kernel for role, kernel in stages.items() if not kernel.lists}
        self.runners = {role: engine.runner(kernel, prebuild) for role, kernel in self.kernels.items()}

    def prepare(self, problem: Problem, captured: Mapping[str, View]) -> PreparedStages:
        """For calls of these sizes, strides and captured arrays."""
        stages = tuple(
            PreparedStage(role, self.runners[role], self._launch_of(kernel, problem, captured), kernel.pointers)
            for role, kernel in self.kernels.items()
        )
        memory, counts = workspaces(self.kernels, problem, captured), any(stage.launch.counts for stage in stages)
        return PreparedStages(stages, memory, counts)

    def _launch_of(self, kernel: RenderedKernel, problem: Problem, captured: Mapping[str, View]) -> Launch:
        for space in kernel.workspaces:
            if space.of_capture:
                problem = replace(problem, count=math.prod(captured[space.of_capture].shape))
        return launch_of(kernel, self.spec, problem, captured)

    def launch(
        self,
        prepared: PreparedStages,
        library: Library,
        arrays: dict[str, Any],
        addresses: Mapping[str, int],
        numbers: Numbers,
        place: Place,
        lists: Mapping[str, Mapping[str, Any]] = NO_LISTS,
    ) -> None:
        """Everything on the call's stream. Workspaces go back to where they came from when this returns.

        arrays: those of the call and its results, a dictionary that is written to. addresses: of those that are known.
        lists: arrays of tile lists, by the roles of the stages that read them.
        """
        engine = self.engine
        if prepared.memory:
            arrays.update(self._made(prepared.memory, library, arrays["q"], place))
        if prepared.counts:
            arrays["next_tile"] = engine.counter(place)
        if len(lists) == 1:  # one look at all arrays is less than two
            arrays.update(*lists.values())
            lists = NO_LISTS
        everything: Any = engine.located(arrays, addresses)
        for role, runner, launch, called in prepared.stages:
            if role in lists:
                everything.update(engine.located(lists[role]))
            taken: Arrays = everything
            if called:  # as addresses on a GPU, as arrays on the emulator
                taken = type(everything)({name: everything[here] for name, here in called.items()})
            runner.launch(launch, taken, numbers, place)

    def _made(self, memory: Mapping[str, Memory], library: Library, like: Any, place: Place) -> dict[str, Any]:
        own = of_graph(library, place.stream) if self.engine.is_captured(place) else library
        made = {name: own.empty(each.shape, each.dtype, like) for name, each in memory.items()}
        for name, each in memory.items():
            if each.zeroed:
                self.engine.clear(made[name], place)
        return made
