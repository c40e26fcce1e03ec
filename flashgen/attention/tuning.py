"""Tuning of the forward: times candidate plans for the sizes of a call, and stores the fastest on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashgen.attention.call import Call
from flashgen.attention.dispatch import workload_of
from flashgen.attention.forward import ForwardPass
from flashgen.attention.forward_dispatch import ForwardKernels
from flashgen.attention.problem import CACHE, Problem, given_cache
from flashgen.attention.trials import Bench, Progress, Timer, Trial, Tuning
from flashgen.attention.varlen import refuse_varlen
from flashgen.codegen.candidates import candidates
from flashgen.codegen.decode_candidates import decode_candidates
from flashgen.codegen.dispatch import is_decode_plan
from flashgen.codegen.plan import Plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import Kernels, forward_kernels
from flashgen.codegen.workload import Workload
from flashgen.errors import ArgumentError, LaunchError
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.timing import medians_ms

_ADVICE = "tune the spec of layout 'bshd', and give its plan to compile(..., plan=...)"
_ADVICE_OF_PAGES = ": over pages a mixed plan, of that of prompts and that of decode steps"
_NO_CACHE: Mapping[str, Any] = {}
GIVEN = "this attention was compiled with {} or source=..., which win over tuned plans: compile without them"


def check_measures(measures: bool, timer: Timer) -> None:
    """Raises LaunchError if the default timer would time the emulator."""
    if not measures and timer is medians_ms:
        raise LaunchError("the emulator's times say nothing of a GPU: tune what was compiled for one, on it")


def check_sizes(problem: Problem) -> None:
    """Raises ArgumentError if the call has no score, so that there is nothing to time."""
    if not problem.has_scores:
        raise ArgumentError(f"q and k have {problem.len_q} and {problem.len_k} rows: there is nothing to time")


def tune(
    forward: ForwardPass,
    inputs: tuple[Any, ...],
    captures: Mapping[str, Any],
    seed: int | None = None,
    *,
    cache: Mapping[str, Any] = _NO_CACHE,
    plans: Sequence[Plan] | None = None,
    timer: Timer = medians_ms,
    progress: Progress = lambda what, done, total: None,
) -> Tuning:
    """Implements `Attention.tune`, with the captures in one mapping and the arrays of a KV cache in another.

    plans: the plans to try in addition to the default one; None for `candidates` of the sizes, or `decode_candidates`
    if these sizes use a decode kernel. timer: times the runs; required on the emulator, which does not run in GPU time.
    """
    tuned, spec, dispatch = forward.dispatch.tuned, forward.spec, forward.dispatch
    refuse_varlen(spec, "tune", _ADVICE + (_ADVICE_OF_PAGES if spec.page_size else ""))
    arrays = dict(zip(spec.inputs, inputs, strict=True)) | given_cache(
        spec, **{name: cache.get(name) for name in CACHE}
    )
    check_measures(forward.engine.measures, timer)
    if tuned is None:
        raise ArgumentError(GIVEN.format("plan=..."))
    bench = Bench(spec, forward.engine, arrays, captures, timer, progress)
    trials = _Trials(bench, forward, seed)
    with bench.on_input_stream():
        problem, device = bench.problem(), bench.device()
        check_sizes(problem)
        own = dispatch.decode_or_default(problem, device)
        default = trials.create(_stages_of(own, forward))
        default.run()  # raises for wrong arguments before more is compiled
        key, main = dispatch.tuning_key(own, problem, device), own.kernel
        workload, plan = workload_of(problem, key[0]), main.plan
        others = _candidates(spec, main, workload) if plans is None else tuple(plans)
        kernels = {other: forward_kernels(spec, main.target, plan=other) for other in others if other != plan}
        mains = [stages["forward"] for stages in kernels.values()]
        found = bench.compare(default, mains, lambda kernel: trials.create(kernels[kernel.plan]))
    return bench.store(tuned.for_kernel(main), key, workload, (main.name, plan), found)


def _stages_of(built: ForwardKernels, forward: ForwardPass) -> Kernels:
    """Returns the kernels of a plan in use, with the one that lists its tiles."""
    if built is forward.dispatch.default:
        return forward.kernels
    return forward_kernels(forward.spec, built.kernel.target, plan=built.kernel.plan)


def _candidates(spec: AttentionSpec, kernel: RenderedKernel, workload: Workload) -> tuple[Plan, ...]:
    """Returns the plans that are worth timing for calls that use a kernel of this kind."""
    if is_decode_plan(kernel.plan, kernel.target):
        return decode_candidates(spec, kernel.target, kernel.plan)
    return candidates(spec, kernel.target, workload)


class _Trials:
    """Creates trials of forward plans. Calls may replace a plan by sizes, for example by packed heads."""

    def __init__(self, bench: Bench, forward: ForwardPass, seed: int | None) -> None:
        self.bench, self.spec, self.seed = bench, forward.spec, seed
        self._by_sizes = forward.dispatch.by_sizes

    def create(self, kernels: Kernels) -> Trial:
        forward = ForwardPass(self.spec, kernels, self.bench.engine, "", by_sizes=self._by_sizes)
        return Trial(kernels["forward"], lambda: self._call(forward), lambda: self._results(forward))

    def _call(self, forward: ForwardPass, results: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        return forward(Call(self.bench.inputs, self.bench.captures, self.seed, 0, ("o",), results or {}))

    def _results(self, forward: ForwardPass) -> dict[str, Any]:
        out = self.bench.filled_with_nan(self.bench.problem().output_shape(self.spec))
        self.bench.synchronize()
        self._call(forward, {"o": out})
        return {"output": out.astype("float32")}
