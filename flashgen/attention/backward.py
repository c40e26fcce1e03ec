"""The backward pass: checks a call, makes the gradients and the memory that they are summed in, launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.attention.backward_tile_lists import BackwardListers
from flashgen.attention.call import Call
from flashgen.attention.call_pass import Addresses, Pass, common_device
from flashgen.attention.captures import check_array
from flashgen.attention.gradients import (
    ROWS,
    check_gradients,
    differentiated,
    gradient_argument,
    gradient_shape,
)
from flashgen.attention.launches import Memory
from flashgen.attention.outputs import check_lse, output_strides
from flashgen.attention.problem import Problem, problem_of
from flashgen.attention.sharing import Sharing
from flashgen.attention.stages import NO_LISTS, BuiltStages, PreparedStages
from flashgen.attention.tile_lists import ListsLaunch
from flashgen.codegen.arguments import capture_gradient, member_name, summed_gradient
from flashgen.codegen.stages import Kernels
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Engine, Numbers, Place
from flashgen.runtime.arrays import Library, View, give_back

_IN_ROWS = frozenset(("q", "k", "v", "o", "d_o", "dq", "dk", "dv"))
_Arrays = dict[str, Any]


@dataclass(frozen=True)
class _Prepared:
    """Everything of a call that its shapes, strides, dtypes and device decide.

    stages: None where there are no scores.
    """

    problem: Problem
    device: int
    gradients: Mapping[str, Memory]
    stages: PreparedStages | None
    lists: Mapping[str, ListsLaunch]
    sharing: Sharing


class BackwardPass(Pass[_Prepared]):
    """The backward kernels of a spec, and the listers of their tiles where they read lists."""

    listers: BackwardListers | None

    def __init__(self, spec: AttentionSpec, stages: Kernels, engine: Engine, prebuild: str) -> None:
        super().__init__(spec, engine, _IN_ROWS)
        self.stages = BuiltStages(spec, stages, engine, prebuild)
        self._owners = {capture.name: member_name(capture) for capture in differentiated(spec)}  # others are like q
        self.listers = BackwardListers.of(spec, stages, engine, prebuild)

    def _result_argument(self, name: str) -> str:
        return gradient_argument(name)

    def _run(
        self, prepared: _Prepared, call: Call, library: Library, addresses: Addresses, numbers: Numbers
    ) -> Mapping[str, Any]:
        arrays, made, owner = call.inputs, call.results, self._owners.get
        place = Place(library.stream(arrays["q"]), prepared.device)
        if not made:
            made = {name: self._make(memory, arrays[owner(name, "q")]) for name, memory in prepared.gradients.items()}
        for name, memory in prepared.gradients.items():
            if memory.zeroed:
                self.engine.clear(made[name], place)
        if prepared.stages:
            lists = self._lists(prepared, call, library, numbers, place) if self.listers else NO_LISTS
            arrays.update(self._pointers(made))
            self.stages.launch(prepared.stages, library, arrays, addresses, numbers, place, lists)
        if call.results:
            return made
        libraries = self.engine.library
        return {name: give_back(libraries(arrays[owner(name, "q")], name), array) for name, array in made.items()}

    def _make(self, memory: Memory, like: Any) -> Any:
        """An array of the kind of `like`."""
        return self.engine.library(like, "an array").empty(memory.shape, memory.dtype, like)

    def _lists(
        self, prepared: _Prepared, call: Call, library: Library, numbers: Numbers, place: Place
    ) -> Mapping[str, Mapping[str, Any]]:
        """The lists that the call was given, or those of its mask."""
        assert self.listers, "only a pass that reads lists has any"
        if call.tile_lists is not None:
            return self.listers.check(call.tile_lists, prepared.problem, place)
        return self.listers.of_call(prepared.lists, prepared.problem, library, call.inputs, numbers, place)

    def _pointers(self, gradients: Mapping[str, Any]) -> _Arrays:
        """The gradients as the structs call them: a captured array's is where it is summed, if no kernel rounds it."""
        pointers = {name: gradients[name] for name in ROWS}
        for capture in differentiated(self.spec):
            pointers[summed_gradient(capture)] = pointers[capture_gradient(capture)] = gradients[capture.name]
        return pointers

    def _work_out(self, views: dict[str, View]) -> _Prepared:
        spec, device = self.spec, common_device(views)
        problem = problem_of(spec, views)
        for name, argument in (("o", "out"), ("d_o", "d_out")):
            problem.strides[name] = output_strides(spec, argument, views[name], problem)
        for name in ("lse", "d_lse"):
            if name in views:
                check_lse(name, views[name], problem)
        captured = {capture.name: views[member] for capture, member in self._arrays}
        for capture, _ in self._arrays:
            check_array(spec, capture, captured[capture.name], problem)
        names = (*ROWS, *self._owners)
        given = {name: views[gradient_argument(name)] for name in names if gradient_argument(name) in views}
        check_gradients(spec, given, captured, problem)
        gradients = self._gradient_memory(problem, captured)
        sharing = self._sharing(views, [gradient_argument(name) for name in given])
        if not problem.has_scores:
            return _Prepared(problem, device, gradients, None, {}, sharing)
        lists = self.listers.prepare(problem, captured) if self.listers else {}
        return _Prepared(problem, device, gradients, self.stages.prepare(problem, captured), lists, sharing)

    def _gradient_memory(self, problem: Problem, captured: Mapping[str, View]) -> dict[str, Memory]:
        """The gradients, by the names of `Gradients`. Zeroed where they are added to, or where nothing is written."""
        launched = problem.has_scores
        memory = {
            name: Memory(gradient_shape(self.spec, problem, name), self.spec.dtype, zeroed=not launched)
            for name in ROWS
        }
        written = {called for kernel in self.stages.kernels.values() for called in kernel.pointers.values()}
        for capture in differentiated(self.spec):
            zeroed = not launched or capture_gradient(capture) not in written
            memory[capture.name] = Memory(captured[capture.name].shape, capture.dtype, zeroed)
        return memory
