"""The forward pass: checks a call, allocates the outputs, lists tiles if the mask needs lists, and launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flashgen.attention.aliasing import AliasCheck
from flashgen.attention.call import Call, Splits
from flashgen.attention.call_pass import Makers, Pass, common_device
from flashgen.attention.captures import check_array
from flashgen.attention.decode_schedule import ScheduledSizes
from flashgen.attention.forward_dispatch import ForwardDispatch, ForwardKernels, num_splits_of
from flashgen.attention.outputs import check_outputs, result_strides
from flashgen.attention.problem import Bounds, Problem, check_table, problem_of
from flashgen.attention.stages import NO_LISTS, PreparedStages
from flashgen.attention.swapped_axes import warn_if_swapped
from flashgen.attention.tile_lists import ListsLaunch
from flashgen.attention.tuned_plans import TunedPlans, subscribe
from flashgen.codegen.stages import Kernels
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Engine, Operands, Place, ScalarArguments
from flashgen.runtime.arrays import Library, View, give_back


@dataclass(frozen=True)
class _Prepared:
    """The state that calls of one cache key share. stages: None if the output is empty."""

    problem: Problem
    library: Library
    makers: Makers
    device: int
    built: ForwardKernels
    stages: PreparedStages | None
    lists: ListsLaunch | None
    alias_check: AliasCheck


_RESULTS = ("o", "lse")


class ForwardPass(Pass[_Prepared]):
    """The forward kernels of a spec, and the lister of their tiles if they read lists.

    tuned: the tuned plans, which replace that of the kernels for some sizes; None to ignore them. by_sizes: whether
    calls of some sizes use packed heads or smaller tiles, where the family has them. decodes: whether calls of few
    queries over many keys use the decode kernel.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        kernels: Kernels,
        engine: Engine,
        prebuild: str,
        tuned: TunedPlans | None = None,
        by_sizes: bool = False,
        decodes: bool = False,
    ) -> None:
        super().__init__(spec, engine)
        default = ForwardKernels.build(spec, kernels, engine, prebuild)
        self.kernels = kernels
        self.kernel, self.lister, self.listers = default.kernel, default.lister, default.lister
        self.dispatch = ForwardDispatch(spec, default, engine, tuned, by_sizes, decodes)
        if tuned:
            subscribe(self)

    def clear_cache(self) -> None:
        """Removes cached launches and kernels, so that later calls look for tuned plans again."""
        self.dispatch.clear_tuned()
        super().clear_cache()

    def _run(
        self, prepared: _Prepared, call: Call, stream: int, operands: Operands, numbers: ScalarArguments
    ) -> Mapping[str, Any]:
        results = call.results or self._make_results(prepared.makers, call.wanted)
        if prepared.stages:
            self.engine.add_operands(results, operands)
            place = Place(stream, prepared.device)
            lists = self._lists(prepared, call, operands, numbers, place) if prepared.lists else NO_LISTS
            prepared.built.stages.launch(prepared.stages, operands, numbers, place, lists)
        return call.results or give_back(prepared.library, results)

    def _only_launches(self, prepared: _Prepared) -> bool:
        return not prepared.lists

    def _lists(
        self, prepared: _Prepared, call: Call, operands: Operands, numbers: ScalarArguments, place: Place
    ) -> Mapping[str, Operands]:
        """Returns the lists that the call was given, or creates those of its mask."""
        lister, lists = prepared.built.lister, prepared.lists
        assert lister and lists, "only a pass that reads lists has any"
        if call.tile_lists is not None:
            return {"forward": lister.check(call.tile_lists, lists, prepared.problem, place)}
        return {"forward": lister.lists_for_call(lists, prepared.problem, operands, numbers, place)}

    def _prepare(
        self, views: dict[str, View], libraries: Mapping[str, Library], bounds: Bounds, splits: Splits
    ) -> _Prepared:
        device, library = common_device(views), libraries["q"]
        problem = problem_of(self.spec, views, self.engine.multiprocessors(device), bounds)
        warn_if_swapped(self.spec, problem)
        strides = result_strides(self.spec, problem, "o", problem.output_shape(self.spec), views["q"])
        check_outputs(self.spec, views, problem)
        if self.spec.page_size:
            check_table(views)
        captured = {capture.name: views[member] for capture, member in self._arrays}
        for capture, _ in self._arrays:
            check_array(self.spec, capture, captured[capture.name], problem)
        if isinstance(splits, ScheduledSizes):
            built = self.dispatch.for_schedule(problem, splits)
        elif splits is not None:
            built = self.dispatch.for_splits(problem, splits)
        else:
            built = self.built_for(problem, device)
        problem = replace(problem, splits=num_splits_of(built.kernel, self.spec, problem, splits))
        stages = None if problem.is_empty else built.stages.prepare(problem, captured, library, device)
        lists = built.lister.prepare(problem, captured, library, device) if built.lister else None
        makers = {
            "o": library.maker(problem.output_shape(self.spec), self.spec.out_element.name, device, strides),
            "lse": library.maker(problem.lse_shape, "float32", device),
        }
        return _Prepared(problem, library, makers, device, built, stages, lists, self._alias_check(views, _RESULTS))

    def built_for(self, problem: Problem, device: int) -> ForwardKernels:
        """Returns the kernel that calls of these sizes run on a device."""
        return self.dispatch.choose(problem, device) if problem.has_scores else self.dispatch.default
