"""Tuning: times feasible plans on the GPU at hand, for the lengths of a call, and keeps the best one on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashgen.attention.call import Call
from flashgen.attention.forward import ForwardPass
from flashgen.attention.kernel_choice import workload_of
from flashgen.attention.problem import Problem
from flashgen.attention.trials import Bench, Progress, Timer, Trial, Tuning
from flashgen.codegen.candidates import candidates
from flashgen.codegen.plan import Plan
from flashgen.codegen.stages import Kernels, forward_kernels
from flashgen.errors import ArgumentError, LaunchError
from flashgen.runtime.timing import medians_ms

GIVEN = "this attention was compiled with {} or source=..., which win over tuned plans: compile without them"


def check_measures(measures: bool, timer: Timer) -> None:
    """LaunchError where times would say nothing."""
    if not measures and timer is medians_ms:
        raise LaunchError("the emulator's times say nothing of a GPU: tune what was compiled for one, on it")


def check_sizes(problem: Problem) -> None:
    """ArgumentError where there is nothing to time."""
    if not problem.has_scores:
        raise ArgumentError(f"q and k have {problem.len_q} and {problem.len_k} rows: there is nothing to time")


def tune(
    forward: ForwardPass,
    inputs: tuple[Any, Any, Any],
    captures: Mapping[str, Any],
    seed: int | None = None,
    *,
    plans: Sequence[Plan] | None = None,
    timer: Timer = medians_ms,
    progress: Progress = lambda what, done, total: None,
) -> Tuning:
    """`Attention.tune`, its captures in one mapping.

    plans: to try, beside the default one; None is `candidates` for the sizes. timer: what takes the times; on the
    emulator one must be given, as times there say nothing.
    """
    tuned, spec = forward.choice.tuned, forward.spec
    if spec.of_cache:
        raise ArgumentError("kernels over pages, or of 8-bit keys, are not tuned: the default plans are all")
    check_measures(forward.engine.measures, timer)
    if tuned is None:
        raise ArgumentError(GIVEN.format("plan=..."))
    bench = Bench(spec, forward.engine, inputs, captures, timer, progress)
    trials = _Trials(bench, forward, seed)
    with bench.on_the_inputs_stream():
        default = trials.of(forward.kernels)
        default.run()  # refuses wrong arguments before anything is compiled
        problem, device = bench.problem(), bench.device()
        check_sizes(problem)
        if decode := forward.choice.decode_plan(problem, device):
            raise ArgumentError(
                f"{problem.len_q} queries over {problem.len_k} keys take the decode kernel, {decode}, which is not "
                "tuned: tune the lengths that take the forward kernel"
            )
        key = forward.choice.key(problem, device)
        workload, target = workload_of(problem, key[0]), forward.kernel.target
        others = candidates(spec, target, workload) if plans is None else tuple(plans)
        own = default.kernel.plan
        kernels = {plan: forward_kernels(spec, target, plan=plan) for plan in others if plan != own}
        mains = [stages["forward"] for stages in kernels.values()]
        found = bench.tried(default, mains, lambda kernel: trials.of(kernels[kernel.plan]))
    return bench.keep(tuned, key, workload, (forward.kernel.name, own), found)


class _Trials:
    """Calls of the forward by plans, with packed heads or smaller tiles where calls to come take these."""

    def __init__(self, bench: Bench, forward: ForwardPass, seed: int | None) -> None:
        self.bench, self.spec, self.seed = bench, forward.spec, seed
        self._by_sizes = forward.choice.by_sizes is not None

    def of(self, kernels: Kernels) -> Trial:
        forward = ForwardPass(self.spec, kernels, self.bench.engine, "", by_sizes=self._by_sizes)
        return Trial(kernels["forward"], lambda: self._call(forward), lambda: self._results(forward))

    def _call(self, forward: ForwardPass, results: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        return forward(Call(self.bench.inputs, self.bench.captures, self.seed, 0, ("o",), results or {}))

    def _results(self, forward: ForwardPass) -> dict[str, Any]:
        out = self.bench.poisoned(self.bench.problem().output_shape(self.spec))
        self.bench.settle()
        self._call(forward, {"o": out})
        return {"output": out.astype("float32")}
