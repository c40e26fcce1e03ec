"""The kernels of a pass on an engine: built once, their launches worked out once for a shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.attention.launches import Memory, captured_launch, launch_of, workspaces
from flashgen.attention.problem import Problem
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import Kernels
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Arrays, Engine, Numbers, Place
from flashgen.launch.launch import Launch
from flashgen.runtime.arrays import Library, View, of_graph

_NO_LISTS: Mapping[str, Mapping[str, Any]] = {}


@dataclass(frozen=True)
class PreparedStages:
    """What calls of one shape share: a launch for each stage, by role, and the memory that they need."""

    launches: Mapping[str, Launch]
    memory: Mapping[str, Memory]


class BuiltStages:
    """The stages of a pass, but for those that list tiles, which TileLister runs."""

    def __init__(self, spec: AttentionSpec, stages: Kernels, engine: Engine, prebuild: str) -> None:
        self.spec, self.engine = spec, engine
        self.kernels = {role: kernel for role, kernel in stages.items() if not kernel.lists}
        self.runners = {role: engine.runner(kernel, prebuild) for role, kernel in self.kernels.items()}

    def prepare(self, problem: Problem, captured: Mapping[str, View]) -> PreparedStages:
        """For calls of these sizes, strides and captured arrays."""
        launches = {role: self._launch_of(kernel, problem, captured) for role, kernel in self.kernels.items()}
        return PreparedStages(launches, workspaces(self.kernels, problem, captured))

    def _launch_of(self, kernel: RenderedKernel, problem: Problem, captured: Mapping[str, View]) -> Launch:
        for space in kernel.workspaces:
            if space.of_capture:
                return captured_launch(kernel, self.spec, problem, math.prod(captured[space.of_capture].shape))
        return launch_of(kernel, self.spec, problem, captured)

    def launch(
        self,
        prepared: PreparedStages,
        library: Library,
        arrays: Mapping[str, Any],
        addresses: Mapping[str, int],
        numbers: Numbers,
        place: Place,
        lists: Mapping[str, Mapping[str, Any]] = _NO_LISTS,
    ) -> None:
        """Everything on the call's stream. Workspaces go back to where they came from when this returns.

        arrays: of the call, q among them. addresses: of those that are known. lists: arrays of tile lists, by the roles
        of the stages that read them.
        """
        work = self._made(prepared.memory, library, arrays["q"], place) if prepared.memory else {}
        everything: Any = self.engine.located({**arrays, **work}, addresses)  # a dictionary of this call's own
        for role, runner in self.runners.items():
            launch, called = prepared.launches[role], self.kernels[role].pointers
            if role in lists:
                everything.update(self.engine.located(lists[role]))
            if launch.counts:
                everything.update(self.engine.located({"next_tile": self.engine.counter(place)}))
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
