"""The backward pass: checks a call, allocates the gradients and their accumulators, and launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.attention.aliasing import AliasCheck
from flashgen.attention.backward_dispatch import BackwardDispatch
from flashgen.attention.backward_tile_lists import BackwardListers
from flashgen.attention.call import Call, Splits
from flashgen.attention.call_pass import Makers, Pass, common_device
from flashgen.attention.captures import check_array
from flashgen.attention.gradients import (
    check_gradients,
    differentiated,
    gradient_argument,
    gradient_shape,
    gradient_strides,
    gradients_of_rows,
)
from flashgen.attention.outputs import check_lse, output_strides
from flashgen.attention.problem import Bounds, Problem, problem_of
from flashgen.attention.stages import NO_LISTS, BuiltStages, PreparedStages
from flashgen.attention.tile_lists import ListsLaunch
from flashgen.attention.tuned_plans import TunedPlans, subscribe
from flashgen.codegen.arguments import capture_gradient, member_name, summed_gradient
from flashgen.codegen.family import HeadSplit
from flashgen.codegen.stages import Kernels
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Engine, Operands, Place, ScalarArguments
from flashgen.launch.memory import ArraySpec
from flashgen.runtime.arrays import JAX, Library, View, give_back


@dataclass(frozen=True)
class _Prepared:
    """The state that calls of one cache key share.

    zeroed: the gradients to clear before the launch. of_jax: those to return as JAX arrays. stages: None if there are
    no scores.
    """

    problem: Problem
    device: int
    makers: Makers
    zeroed: tuple[str, ...]
    of_jax: tuple[str, ...]
    stages: PreparedStages | None
    lists: Mapping[str, ListsLaunch]
    alias_check: AliasCheck


class BackwardPass(Pass[_Prepared]):
    """The backward kernels of a spec, and the listers of their tiles if they read lists.

    head_split: plans with one CTA per query head, for calls of few KV heads; None to use none. tuned: the tuned plans;
    None to ignore them.
    """

    listers: BackwardListers | None

    def __init__(
        self,
        spec: AttentionSpec,
        stages: Kernels,
        engine: Engine,
        prebuild: str,
        head_split: HeadSplit | None = None,
        tuned: TunedPlans | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__(spec, engine)
        self.kernels = stages
        self.stages = BuiltStages(spec, stages, engine, prebuild)
        self.dispatch = BackwardDispatch(spec, self.stages, engine, head_split, tuned, deterministic)
        self._rows, self._differentiated = gradients_of_rows(spec), differentiated(spec)
        self._owners = {
            capture.name: member_name(capture) for capture in self._differentiated
        }  # others use the library of q
        self.listers = BackwardListers.of(spec, stages, engine, prebuild)
        if tuned:
            subscribe(self)

    def clear_cache(self) -> None:
        """Removes cached launches and kernels, so that later calls look for tuned plans again."""
        self.dispatch.clear_tuned()
        super().clear_cache()

    def _result_argument(self, name: str) -> str:
        return gradient_argument(name)

    def _run(
        self, prepared: _Prepared, call: Call, stream: int, operands: Operands, numbers: ScalarArguments
    ) -> Mapping[str, Any]:
        place = Place(stream, prepared.device)
        results = call.results or self._make_results(prepared.makers, call.wanted)
        for name in prepared.zeroed:
            self.engine.clear(results[name], place)
        if prepared.stages:
            lists = self._lists(prepared, call, operands, numbers, place) if self.listers else NO_LISTS
            self.engine.add_operands(self._pointers(results), operands)
            self.stages.launch(prepared.stages, operands, numbers, place, lists)
        if call.results or not prepared.of_jax:
            return results
        return {**results, **give_back(JAX, {name: results[name] for name in prepared.of_jax})}

    @property
    def repeats_launches(self) -> bool:
        return super().repeats_launches and not self._differentiated

    def _only_launches(self, prepared: _Prepared) -> bool:
        return not (self.listers or prepared.zeroed or self._differentiated)

    def _lists(
        self, prepared: _Prepared, call: Call, operands: Operands, numbers: ScalarArguments, place: Place
    ) -> Mapping[str, Operands]:
        """Returns the lists that the call was given, or creates those of its mask."""
        assert self.listers, "only a pass that reads lists has any"
        if call.tile_lists is not None:
            return self.listers.check(call.tile_lists, prepared.lists, prepared.problem, place)
        return self.listers.lists_for_call(prepared.lists, prepared.problem, operands, numbers, place)

    def _pointers(self, gradients: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the gradients by their names in the structs.

        The gradient of a capture is also its accumulator, unless a postprocess kernel converts the sums.
        """
        if not self._differentiated:
            return gradients
        pointers = {name: gradients[name] for name in self._rows}
        for capture in self._differentiated:
            pointers[summed_gradient(capture)] = pointers[capture_gradient(capture)] = gradients[capture.name]
        return pointers

    def _prepare(
        self, views: dict[str, View], libraries: Mapping[str, Library], bounds: Bounds, splits: Splits
    ) -> _Prepared:
        spec, device = self.spec, common_device(views)
        problem = problem_of(spec, views, self.engine.multiprocessors(device), bounds)
        problem.strides["o"] = output_strides(spec, "out", views["o"], problem, spec.out_element)
        problem.strides["d_o"] = output_strides(spec, "d_out", views["d_o"], problem, spec.element)
        for name in ("lse", "d_lse"):
            if name in views:
                check_lse(name, views[name], problem)
        captured = {capture.name: views[member] for capture, member in self._arrays}
        for capture, _ in self._arrays:
            check_array(spec, capture, captured[capture.name], problem)
        strides = {name: gradient_strides(spec, problem, name, views) for name in self._rows}
        names = (*self._rows, *self._owners)
        given = {name: views[gradient_argument(name)] for name in names if gradient_argument(name) in views}
        check_gradients(spec, given, captured, problem)
        memory = self._gradient_memory(problem, captured)
        owners = {name: libraries[self._owners.get(name, "q")] for name in memory}
        makers = {
            name: owners[name].maker(each.shape, each.dtype, device, strides.get(name)) for name, each in memory.items()
        }
        zeroed = tuple(name for name, each in memory.items() if each.zeroed)
        of_jax = tuple(name for name, library in owners.items() if library is JAX)
        alias_check = self._alias_check(views, [gradient_argument(name) for name in given])
        if not self._runs(problem):
            return _Prepared(problem, device, makers, zeroed, of_jax, None, {}, alias_check)
        own = captured, libraries["q"], device
        lists = self.listers.prepare(problem, *own) if self.listers else {}
        stages = self.dispatch.choose(problem, device).prepare(problem, *own)
        return _Prepared(problem, device, makers, zeroed, of_jax, stages, lists, alias_check)

    def _runs(self, problem: Problem) -> bool:
        """Whether kernels must run. A call without keys still has gradients of sinks."""
        return problem.has_scores or (self.spec.sink is not None and not problem.is_empty)

    def _gradient_memory(self, problem: Problem, captured: Mapping[str, View]) -> dict[str, ArraySpec]:
        """Returns the memory of the gradients by name; zeroed if kernels accumulate into it or do not write it."""
        launched = self._runs(problem)
        memory = {
            name: ArraySpec(gradient_shape(self.spec, problem, name), self.spec.grad_element.name, zeroed=not launched)
            for name in self._rows
        }
        written = {name for kernel in self.stages.kernels.values() for name in kernel.pointers.values()}
        for capture in self._differentiated:
            zeroed = not launched or capture_gradient(capture) not in written
            memory[capture.name] = ArraySpec(captured[capture.name].shape, capture.dtype, zeroed)
        return memory
