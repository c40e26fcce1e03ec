"""The backward pass: checks a call, makes the gradients and the memory that they are summed in, launches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.attention.backward_tile_lists import BackwardListers, BackwardTileLists
from flashgen.attention.captures import check_array, check_captures
from flashgen.attention.engines import Arrays, Engine, Gpu, Numbers, Place
from flashgen.attention.gradients import (
    ROWS,
    Gradients,
    check_gradients,
    differentiated,
    given_gradients,
    gradient_argument,
    gradient_shape,
)
from flashgen.attention.launches import Launch, Memory, captured_launch, launch_of, workspaces
from flashgen.attention.outputs import check_lse, output_strides
from flashgen.attention.passes import Pass, common_device
from flashgen.attention.problem import Problem, problem_of
from flashgen.attention.sharing import Sharing
from flashgen.attention.through_gpu import to_gpu, to_host
from flashgen.attention.tile_lists import ListsLaunch
from flashgen.codegen.arguments import capture_gradient, member_name, summed_gradient
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import Kernels
from flashgen.errors import ArgumentError
from flashgen.language.layouts import BlockLayout
from flashgen.language.spec import AttentionSpec
from flashgen.runtime import gpu
from flashgen.runtime.arrays import NUMPY, Library, View, give_back, of_graph

_IN_ROWS = frozenset(("q", "k", "v", "o", "d_o", "dq", "dk", "dv"))
_Arrays = dict[str, Any]


@dataclass(frozen=True)
class _Prepared:
    """Everything of a call that its shapes, strides, dtypes and device decide.

    launches: by the roles of the kernels; none where there are no scores.
    """

    problem: Problem
    device: int
    gradients: Mapping[str, Memory]
    workspaces: Mapping[str, Memory]
    launches: Mapping[str, Launch]
    lists: Mapping[str, ListsLaunch]
    sharing: Sharing


class BackwardPass(Pass[_Prepared]):
    """The backward kernels of a spec, and the listers of their tiles where they read lists."""

    def __init__(self, spec: AttentionSpec, stages: Kernels, engine: Engine, prebuild: str) -> None:
        super().__init__(spec, engine, _IN_ROWS)
        self._stages = stages
        self._main = {role: kernel for role, kernel in stages.items() if not kernel.lists}
        self._runners = {role: engine.runner(kernel, prebuild) for role, kernel in self._main.items()}
        self._members = {capture.name: member_name(capture) for capture in differentiated(spec)}
        self.listers = BackwardListers(spec, stages, engine, prebuild)

    @property
    def kernels(self) -> tuple[RenderedKernel, ...]:
        """The kernels that a call launches, in order."""
        return tuple(self._stages.values())

    def __call__(
        self,
        inputs: Mapping[str, Any],
        captures: Mapping[str, Any],
        seed: Any,
        offset: Any,
        tile_lists: BackwardTileLists | None,
        into: Any,
    ) -> Gradients:
        """`Attention.backward`: `inputs` are its arrays, by their names in the structs, the captures apart."""
        if captures or self.spec.captures:
            check_captures(self.spec, captures)
        if tile_lists is not None and not self.listers:
            raise ArgumentError(f"tile_lists: the kernels of {self.spec.mask.name} read none; leave them out")
        q = inputs["q"]
        library = self.engine.library(q, "q")
        given = given_gradients(self.spec, into) if into is not None else {}
        if library is NUMPY and isinstance(self.engine, Gpu):
            return self._through_gpu(inputs, captures, seed, offset, tile_lists, given)
        if self.listers and any(isinstance(value, BlockLayout) for value in captures.values()):
            captures = self.listers.without_layouts(captures, library.view(q, "q"), library.view(inputs["k"], "k"))
        numbers = self._call_numbers(captures, seed, offset)
        arrays = dict(inputs)
        for capture, member in self._arrays:
            arrays[member] = captures[capture.name]
        everything = arrays | {gradient_argument(name): array for name, array in given.items()}
        prepared, addresses = self._prepare(everything)
        if self._distances:
            self._check_distances(captures)
        if given:
            prepared.sharing.check(addresses)
        if self.engine.current(prepared.device):
            return self._run(prepared, library, arrays, addresses, numbers, tile_lists, given)
        with gpu.cupy().cuda.Device(prepared.device):
            return self._run(prepared, library, arrays, addresses, numbers, tile_lists, given)

    def _run(
        self,
        prepared: _Prepared,
        library: Library,
        arrays: _Arrays,
        addresses: Mapping[str, int],
        numbers: Numbers,
        tile_lists: BackwardTileLists | None,
        given: Mapping[str, Any],
    ) -> Gradients:
        place = Place(library.stream(arrays["q"]), prepared.device)
        made = given or {
            name: self._make(memory, arrays[self._members.get(name, "q")])
            for name, memory in prepared.gradients.items()
        }
        for name, memory in prepared.gradients.items():
            if memory.zeroed:
                self.engine.clear(made[name], place)
        if prepared.launches:
            self._launch(prepared, library, arrays, addresses, numbers, tile_lists, made, place)
        if given:
            return _gradients(given)
        owners = {name: self.engine.library(arrays[self._members.get(name, "q")], name) for name in made}
        return _gradients({name: give_back(owners[name], array) for name, array in made.items()})

    def _make(self, memory: Memory, like: Any) -> Any:
        """An array of the kind of `like`."""
        return self.engine.library(like, "an array").empty(memory.shape, memory.dtype, like)

    def _launch(
        self,
        prepared: _Prepared,
        library: Library,
        arrays: _Arrays,
        addresses: Mapping[str, int],
        numbers: Numbers,
        tile_lists: BackwardTileLists | None,
        gradients: Mapping[str, Any],
        place: Place,
    ) -> None:
        """Everything on the call's stream. The workspaces go back to where they came from when this returns."""
        own = of_graph(library, place.stream) if self.engine.is_captured(place) else library
        work = {
            name: own.empty(memory.shape, memory.dtype, arrays["q"]) for name, memory in prepared.workspaces.items()
        }
        for name, memory in prepared.workspaces.items():
            if memory.zeroed:
                self.engine.clear(work[name], place)
        lists = (
            self.listers.of_call(prepared.lists, prepared.problem, library, arrays, numbers, place)
            if tile_lists is None
            else self.listers.check(tile_lists, prepared.problem, place)
        )
        everything = self.engine.located({**arrays, **self._pointers(gradients), **work}, addresses)
        for role, runner in self._runners.items():
            called = self._main[role].pointers
            taken = _alike(everything, {name: everything[here] for name, here in called.items()} or everything)
            runner.launch(prepared.launches[role], self._with_lists(taken, lists.get(role)), numbers, place)

    def _pointers(self, gradients: Mapping[str, Any]) -> _Arrays:
        """The gradients as the structs call them: a captured array's is where it is summed, if no kernel rounds it."""
        pointers = {name: gradients[name] for name in ROWS}
        for capture in differentiated(self.spec):
            pointers[summed_gradient(capture)] = pointers[capture_gradient(capture)] = gradients[capture.name]
        return pointers

    def _with_lists(self, arrays: Arrays, lists: _Arrays | None) -> Arrays:
        """What a launch takes, `arrays` as located, and the lists that its kernel reads."""
        return _alike(arrays, {**arrays, **self.engine.located(lists)}) if lists else arrays

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
        names = (*ROWS, *self._members)
        given = {name: views[gradient_argument(name)] for name in names if gradient_argument(name) in views}
        check_gradients(spec, given, captured, problem)
        gradients = self._gradient_memory(problem, captured)
        sharing = self._sharing(views, [gradient_argument(name) for name in given])
        if not problem.has_scores:
            return _Prepared(problem, device, gradients, {}, {}, {}, sharing)
        launches = {role: self._launch_of(kernel, problem, captured) for role, kernel in self._main.items()}
        memory = workspaces(self._main, problem, captured)
        lists = self.listers.prepare(problem, captured)
        return _Prepared(problem, device, gradients, memory, launches, lists, sharing)

    def _launch_of(self, kernel: RenderedKernel, problem: Problem, captured: Mapping[str, View]) -> Launch:
        for space in kernel.workspaces:
            if space.of_capture:
                return captured_launch(kernel, self.spec, problem, math.prod(captured[space.of_capture].shape))
        return launch_of(kernel, self.spec, problem, captured)

    def _gradient_memory(self, problem: Problem, captured: Mapping[str, View]) -> dict[str, Memory]:
        """The gradients, by the names of `Gradients`. Zeroed where they are added to, or where nothing is written."""
        launched = problem.has_scores
        memory = {
            name: Memory(gradient_shape(self.spec, problem, name), self.spec.dtype, zeroed=not launched)
            for name in ROWS
        }
        written = (
            {called for kernel in self._main.values() for called in kernel.pointers.values()} if launched else set()
        )
        for capture in differentiated(self.spec):
            zeroed = capture_gradient(capture) not in written
            memory[capture.name] = Memory(captured[capture.name].shape, capture.dtype, zeroed)
        return memory

    def _through_gpu(
        self,
        inputs: Mapping[str, Any],
        captures: Mapping[str, Any],
        seed: Any,
        offset: Any,
        tile_lists: BackwardTileLists | None,
        given: Mapping[str, Any],
    ) -> Gradients:
        """NumPy arrays: copied to the GPU, and the results back; those of captures that are there stay there."""
        gpu.compute_capability()  # says so where there is no GPU
        there = {name: to_gpu(array) for name, array in inputs.items()}
        moved = {name: to_gpu(array) for name, array in captures.items()}
        results = {gradient_argument(name): array for name, array in given.items()}
        self._check_sharing_on_host({**inputs, **results}, captures, results)
        into = tuple(to_gpu(array) for array in given.values()) or None
        result = self(there, moved, seed, offset, tile_lists, into)
        home = {}
        for name, array in zip((*ROWS, *self._members), result, strict=True):
            stays = name in moved and moved[name] is captures[name] and not given
            home[name] = array if stays else to_host(array, given.get(name))
        return _gradients(home)


def _alike(located: Arrays, entries: Arrays) -> Arrays:
    """Entries of the kind of `located`: addresses on a GPU, arrays on the emulator."""
    return entries if entries is located else type(located)(entries)  # type: ignore[call-arg]


def _gradients(arrays: Mapping[str, Any]) -> Gradients:
    captures = {name: array for name, array in arrays.items() if name not in ROWS}
    return Gradients(arrays["dq"], arrays["dk"], arrays["dv"], captures)
