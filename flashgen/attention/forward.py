"""The forward pass: checks a call, makes the outputs, lists tiles where the mask wants lists, launches."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from flashgen.attention.captures import check_array, check_captures
from flashgen.attention.edits import NO_EDITS, Edits
from flashgen.attention.engines import Engine, Gpu, Place
from flashgen.attention.kernel_choice import BuiltForward, KernelChoice
from flashgen.attention.launches import Launch, launch_of
from flashgen.attention.outputs import check_outputs, given_outputs
from flashgen.attention.passes import Pass, common_device
from flashgen.attention.problem import Problem, problem_of
from flashgen.attention.sharing import Sharing
from flashgen.attention.through_gpu import to_gpu, to_host
from flashgen.attention.tile_lists import ListsLaunch, TileLists
from flashgen.attention.tuned_plans import TunedPlans
from flashgen.codegen.families import forward_family
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.errors import ArgumentError
from flashgen.language.layouts import BlockLayout
from flashgen.language.spec import AttentionSpec
from flashgen.runtime import gpu
from flashgen.runtime.arrays import NUMPY, Library, View, give_back


@dataclass(frozen=True)
class _Prepared:
    """Everything of a call that its shapes, strides, dtypes and device decide."""

    problem: Problem
    output_shape: tuple[int, ...]
    device: int
    built: BuiltForward
    forward: Launch
    lists: ListsLaunch | None
    sharing: Sharing


_RESULTS = ("o", "lse")
_TUNED: WeakSet[ForwardPass] = WeakSet()
_TUNED_LOCK = threading.Lock()  # a set that grows cannot be gone through


class ForwardPass(Pass[_Prepared]):
    """The forward kernel of a spec, and the lister of its tiles where it reads lists.

    tuned: where plans are found that calls of some lengths take instead of the kernel's; None is the kernel's for all.
    packs: whether calls whose tiles that fills better take the packed form of a plan, where the family has one.
    edits: of the lister's kernel; `kernel` is edited already where it is.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        kernel: RenderedKernel,
        engine: Engine,
        prebuild: str,
        tuned: TunedPlans | None = None,
        packs: bool = False,
        edits: Edits = NO_EDITS,
    ) -> None:
        super().__init__(spec, engine, in_rows=frozenset(("q", "k", "v", "o")))
        default = BuiltForward.of(spec, kernel, engine, prebuild, edits)
        self.kernel, self.lister = kernel, default.lister
        self.choice = KernelChoice(
            spec, default, engine, tuned, forward_family(kernel.target).packing if packs else None
        )
        if tuned:
            with _TUNED_LOCK:
                _TUNED.add(self)

    def forget(self) -> None:
        """Calls to come look for tuned plans again."""
        self.choice.forget()
        self._prepared.forget()

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        captures: Mapping[str, Any],
        seed: Any,
        offset: Any,
        return_lse: bool,
        out: Any,
        tile_lists: TileLists | None,
    ) -> Any:
        """`Attention.__call__`, the captures in one mapping."""
        if captures or self.spec.captures:
            check_captures(self.spec, captures)
        if tile_lists is not None and self.lister is None:
            raise ArgumentError(f"tile_lists: the kernel of {self.spec.mask.name} reads none; leave them out")
        library = self.engine.library(q, "q")
        if library is NUMPY and isinstance(self.engine, Gpu):
            return self._through_gpu(q, k, v, captures, seed, offset, return_lse, out, tile_lists)
        if self.lister and any(isinstance(value, BlockLayout) for value in captures.values()):
            captures = self.lister.without_layouts(captures, library.view(q, "q"), library.view(k, "k"))
        numbers = self._call_numbers(captures, seed, offset)
        arrays = {"q": q, "k": k, "v": v}
        for capture, member in self._arrays:
            arrays[member] = captures[capture.name]
        if out is not None:
            arrays |= given_outputs(out, return_lse)
        prepared, addresses = self._prepare(arrays)
        if self._distances:
            self._check_distances(captures)
        if out is not None:
            prepared.sharing.check(addresses)
        if self.engine.current(prepared.device):
            self._run(prepared, library, arrays, addresses, numbers, return_lse, tile_lists)
        else:
            with gpu.cupy().cuda.Device(prepared.device):
                self._run(prepared, library, arrays, addresses, numbers, return_lse, tile_lists)
        if out is not None:
            return out
        result = give_back(library, arrays["o"])
        return (result, give_back(library, arrays["lse"])) if return_lse else result

    def _run(
        self,
        prepared: _Prepared,
        library: Library,
        arrays: dict[str, Any],
        addresses: Mapping[str, int],
        numbers: dict[str, int | float],
        return_lse: bool,
        tile_lists: TileLists | None,
    ) -> None:
        """Makes the outputs that were not given, into `arrays`, and launches."""
        q, problem = arrays["q"], prepared.problem
        if "o" not in arrays:
            arrays["o"] = library.empty(prepared.output_shape, self.spec.dtype, q)
            if return_lse:
                arrays["lse"] = library.empty(problem.lse_shape, "float32", q)
        if problem.is_empty:
            return
        place = Place(library.stream(q), prepared.device)
        lister = prepared.built.lister
        if lister and prepared.lists:
            arrays |= (
                lister.of_call(prepared.lists, problem, library, arrays, numbers, place)
                if tile_lists is None
                else lister.check(tile_lists, problem, place)
            )
        if prepared.forward.counts:
            arrays["next_tile"] = self.engine.counter(place)
        prepared.built.runner.launch(prepared.forward, self.engine.located(arrays, addresses), numbers, place)

    def _work_out(self, views: dict[str, View]) -> _Prepared:
        device = common_device(views)
        problem = problem_of(self.spec, views, self.engine.multiprocessors(device))
        check_outputs(self.spec, views, problem)
        captured = {capture.name: views[member] for capture, member in self._arrays}
        for capture, _ in self._arrays:
            check_array(self.spec, capture, captured[capture.name], problem)
        built = self.built_for(problem, device)
        forward = launch_of(built.kernel, self.spec, problem, captured)
        lists = built.lister.prepare(problem, captured) if built.lister else None
        sharing = self._sharing(views, _RESULTS)
        return _Prepared(problem, problem.output_shape(self.spec), device, built, forward, lists, sharing)

    def built_for(self, problem: Problem, device: int) -> BuiltForward:
        """The kernel that calls of these sizes run on a device."""
        if not problem.has_scores:
            return self.choice.default
        return self.choice.of(problem, device)

    def _through_gpu(
        self,
        q: Any,
        k: Any,
        v: Any,
        captures: Mapping[str, Any],
        seed: Any,
        offset: Any,
        return_lse: bool,
        out: Any,
        tile_lists: TileLists | None,
    ) -> Any:
        """NumPy arrays: copied to the GPU, and the results back."""
        gpu.compute_capability()  # says so where there is no GPU
        moved = {name: to_gpu(value) for name, value in captures.items()}
        outputs = given_outputs(out, return_lse) if out is not None else {}
        self._check_sharing_on_host({"q": q, "k": k, "v": v, **outputs}, captures, outputs)
        given = tuple(outputs.values())
        there = tuple(to_gpu(array) for array in given)  # copies, so that what is not written is kept
        into = (there if return_lse else there[0]) if there else None
        result = self(to_gpu(q), to_gpu(k), to_gpu(v), moved, seed, offset, return_lse, into, tile_lists)
        results = result if isinstance(result, tuple) else (result,)
        home = tuple(to_host(array, target) for array, target in zip(results, given or (None, None), strict=False))
        return out if out is not None else home if return_lse else home[0]


def forget_tuned_plans() -> None:
    """Every callable of this process looks for tuned plans again."""
    with _TUNED_LOCK:
        passes = list(_TUNED)
    for forward in passes:
        forward.forget()
