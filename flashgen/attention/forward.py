"""The forward pass: checks a call, makes the outputs, lists tiles where the mask wants lists, launches."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from flashgen.attention.call import Call
from flashgen.attention.call_pass import Addresses, Pass, common_device
from flashgen.attention.captures import check_array
from flashgen.attention.kernel_choice import BuiltForward, KernelChoice
from flashgen.attention.outputs import check_outputs
from flashgen.attention.problem import Problem, problem_of
from flashgen.attention.sharing import Sharing
from flashgen.attention.stages import NO_LISTS, PreparedStages
from flashgen.attention.tile_lists import ListsLaunch
from flashgen.attention.tuned_plans import TunedPlans
from flashgen.codegen.families import forward_family
from flashgen.codegen.stages import Kernels
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Engine, Numbers, Place
from flashgen.runtime.arrays import JAX, Library, View, give_back


@dataclass(frozen=True)
class _Prepared:
    """Everything of a call that its shapes, strides, dtypes and device decide. stages: None for an empty output."""

    problem: Problem
    output_shape: tuple[int, ...]
    device: int
    built: BuiltForward
    stages: PreparedStages | None
    lists: ListsLaunch | None
    sharing: Sharing


_RESULTS = ("o", "lse")
_TUNED: WeakSet[ForwardPass] = WeakSet()
_TUNED_LOCK = threading.Lock()  # a set that grows cannot be gone through


class ForwardPass(Pass[_Prepared]):
    """The forward kernels of a spec, and the lister of their tiles where they read lists.

    tuned: where plans are found that calls of some lengths take instead of the kernel's; None is the kernel's for all.
    packs: whether calls whose tiles that fills better take the packed form of a plan, where the family has one.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        kernels: Kernels,
        engine: Engine,
        prebuild: str,
        tuned: TunedPlans | None = None,
        packs: bool = False,
    ) -> None:
        super().__init__(spec, engine, in_rows=frozenset(("q", "k", "v", "o")))
        default = BuiltForward.of(spec, kernels, engine, prebuild)
        self.kernels = kernels
        self.kernel, self.lister, self.listers = default.kernel, default.lister, default.lister
        self.choice = KernelChoice(
            spec, default, engine, tuned, forward_family(self.kernel.target).packing if packs else None
        )
        if tuned:
            with _TUNED_LOCK:
                _TUNED.add(self)

    def forget(self) -> None:
        """Calls to come look for tuned plans again."""
        self.choice.forget()
        self._prepared.forget()

    def _run(
        self, prepared: _Prepared, call: Call, library: Library, addresses: Addresses, numbers: Numbers
    ) -> Mapping[str, Any]:
        arrays, results = call.inputs, call.results
        if not results:
            results = {"o": library.empty(prepared.output_shape, self.spec.dtype, arrays["q"])}
            if "lse" in call.wanted:
                results["lse"] = library.empty(prepared.problem.lse_shape, "float32", arrays["q"])
        if prepared.stages:
            arrays.update(results)
            place = Place(library.stream(arrays["q"]), prepared.device)
            lists = self._lists(prepared, call, library, numbers, place) if prepared.lists else NO_LISTS
            prepared.built.stages.launch(prepared.stages, library, arrays, addresses, numbers, place, lists)
        if call.results or library is not JAX:
            return results
        return {name: give_back(library, array) for name, array in results.items()}

    def _lists(
        self, prepared: _Prepared, call: Call, library: Library, numbers: Numbers, place: Place
    ) -> Mapping[str, Mapping[str, Any]]:
        """The lists that the call was given, or those of its mask."""
        lister, lists = prepared.built.lister, prepared.lists
        assert lister and lists, "only a pass that reads lists has any"
        if call.tile_lists is not None:
            return {"forward": lister.check(call.tile_lists, prepared.problem, place)}
        return {"forward": lister.of_call(lists, prepared.problem, library, call.inputs, numbers, place)}

    def _work_out(self, views: dict[str, View]) -> _Prepared:
        device = common_device(views)
        problem = problem_of(self.spec, views, self.engine.multiprocessors(device))
        check_outputs(self.spec, views, problem)
        captured = {capture.name: views[member] for capture, member in self._arrays}
        for capture, _ in self._arrays:
            check_array(self.spec, capture, captured[capture.name], problem)
        built = self.built_for(problem, device)
        stages = None if problem.is_empty else built.stages.prepare(problem, captured)
        lists = built.lister.prepare(problem, captured) if built.lister else None
        sharing = self._sharing(views, _RESULTS)
        return _Prepared(problem, problem.output_shape(self.spec), device, built, stages, lists, sharing)

    def built_for(self, problem: Problem, device: int) -> BuiltForward:
        """The kernel that calls of these sizes run on a device."""
        return self.choice.of(problem, device) if problem.has_scores else self.choice.default


def forget_tuned_plans() -> None:
    """Every callable of this process looks for tuned plans again."""
    with _TUNED_LOCK:
        passes = list(_TUNED)
    for forward in passes:
        forward.forget()
