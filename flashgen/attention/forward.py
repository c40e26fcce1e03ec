"""The forward pass: checks a call, makes the outputs, lists tiles where the mask wants lists, launches."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from flashgen.attention.call_pass import Given, Pass, common_device
from flashgen.attention.captures import check_array
from flashgen.attention.kernel_choice import BuiltForward, KernelChoice
from flashgen.attention.outputs import check_outputs
from flashgen.attention.problem import Problem, problem_of
from flashgen.attention.sharing import Sharing
from flashgen.attention.stages import PreparedStages
from flashgen.attention.tile_lists import ListsLaunch
from flashgen.attention.tuned_plans import TunedPlans
from flashgen.codegen.families import forward_family
from flashgen.codegen.stages import Kernels
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Engine, Place
from flashgen.runtime.arrays import View, give_back


@dataclass(frozen=True)
class _Prepared:
    """Everything of a call that its shapes, strides, dtypes and device decide."""

    problem: Problem
    output_shape: tuple[int, ...]
    device: int
    built: BuiltForward
    stages: PreparedStages
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

    def _run(self, prepared: _Prepared, given: Given) -> Mapping[str, Any]:
        arrays, problem, q = given.arrays, prepared.problem, given.arrays["q"]
        results = dict(given.call.results) or {
            "o": given.library.empty(prepared.output_shape, self.spec.dtype, q),
            **({"lse": given.library.empty(problem.lse_shape, "float32", q)} if "lse" in given.call.wanted else {}),
        }
        if not problem.is_empty:
            self._launch(prepared, given, arrays | results)
        if given.call.results:
            return given.call.results
        return {name: give_back(given.library, array) for name, array in results.items()}

    def _launch(self, prepared: _Prepared, given: Given, arrays: dict[str, Any]) -> None:
        place = Place(given.library.stream(arrays["q"]), prepared.device)
        lister, given_lists, lists = prepared.built.lister, given.call.tile_lists, {}
        if lister and prepared.lists:
            lists["forward"] = (
                lister.of_call(prepared.lists, prepared.problem, given.library, arrays, given.numbers, place)
                if given_lists is None
                else lister.check(given_lists, prepared.problem, place)
            )
        stages = prepared.built.stages
        stages.launch(prepared.stages, given.library, arrays, given.addresses, given.numbers, place, lists)

    def _work_out(self, views: dict[str, View]) -> _Prepared:
        device = common_device(views)
        problem = problem_of(self.spec, views, self.engine.multiprocessors(device))
        check_outputs(self.spec, views, problem)
        captured = {capture.name: views[member] for capture, member in self._arrays}
        for capture, _ in self._arrays:
            check_array(self.spec, capture, captured[capture.name], problem)
        built = self.built_for(problem, device)
        stages = built.stages.prepare(problem, captured)
        lists = built.lister.prepare(problem, captured) if built.lister else None
        sharing = self._sharing(views, _RESULTS)
        return _Prepared(problem, problem.output_shape(self.spec), device, built, stages, lists, sharing)

    def built_for(self, problem: Problem, device: int) -> BuiltForward:
        """The kernel that calls of these sizes run on a device."""
        if not problem.has_scores:
            return self.choice.default
        return self.choice.of(problem, device)


def forget_tuned_plans() -> None:
    """Every callable of this process looks for tuned plans again."""
    with _TUNED_LOCK:
        passes = list(_TUNED)
    for forward in passes:
        forward.forget()
