"""Tuning of the backward: times candidate plans of its main kernel for the sizes of a call, and stores the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flashgen.attention.backward import BackwardPass
from flashgen.attention.call import Call
from flashgen.attention.dispatch import workload_of
from flashgen.attention.forward import ForwardPass
from flashgen.attention.gradients import differentiated, gradient_shape, gradients_of_rows
from flashgen.attention.trials import Bench, Progress, Timer, Trial, Tuning
from flashgen.attention.tuning import GIVEN, check_measures, check_sizes
from flashgen.codegen.backward_candidates import backward_candidates
from flashgen.codegen.stages import Kernels
from flashgen.dtypes import numpy_dtype
from flashgen.errors import ArgumentError
from flashgen.runtime.timing import medians_ms


def tune_backward(
    backward: BackwardPass,
    forward: ForwardPass,
    inputs: tuple[Any, ...],
    captures: Mapping[str, Any],
    seed: int | None = None,
    *,
    plans: Sequence[Any] | None = None,
    timer: Timer = medians_ms,
    progress: Progress = lambda what, done, total: None,
) -> Tuning:
    """Implements `Attention.tune_backward`, with the captures in one mapping. forward: computes the output.

    plans: the plans to try in addition to the default one; None for `backward_candidates` of the sizes. timer: as in
    `tune`.
    """
    tuned, spec = backward.dispatch.tuned, backward.spec
    check_measures(backward.engine.measures, timer)
    if tuned is None:
        raise ArgumentError(GIVEN.format("backward_plan=..."))
    bench = Bench(spec, backward.engine, dict(zip(spec.inputs, inputs, strict=True)), captures, timer, progress)
    with bench.on_input_stream():
        trials = _Trials(bench, forward, seed)
        problem, device = bench.problem(), bench.device()
        check_sizes(problem)
        key = backward.dispatch.tuning_key(problem, device)
        workload, kernel = workload_of(problem, key[0]), backward.kernels["dkdv"]
        dispatch, own = backward.dispatch, backward.dispatch.untuned_plan(workload)
        others = backward_candidates(spec, kernel, workload, dispatch.deterministic) if plans is None else tuple(plans)
        kernels = {
            plan: backward.kernels if plan == kernel.plan else dispatch.kernels_of(plan)
            for plan in dict.fromkeys((own, *others))
        }
        mains = [stages["dkdv"] for plan, stages in kernels.items() if plan != own]
        found = bench.compare(trials.create(kernels[own]), mains, lambda main: trials.create(kernels[main.plan]))
    return bench.store(tuned, key, workload, (kernel.name, own), found)


class _Trials:
    """Creates trials of backward plans, all with the same output and the same random gradient of it."""

    def __init__(self, bench: Bench, forward: ForwardPass, seed: int | None) -> None:
        """Calls the forward, which raises for wrong arguments before anything is compiled."""
        self.bench, self.spec, self.seed = bench, forward.spec, seed
        call = Call(bench.inputs, bench.captures, seed, 0, ("o", "lse"))
        results = forward(call)
        shape = bench.problem().output_shape(self.spec)
        random = np.random.default_rng(0).standard_normal(shape, dtype=np.float32).astype(numpy_dtype(self.spec.dtype))
        self.inputs = {**bench.inputs, "o": results["o"], "lse": results["lse"], "d_o": bench.engine.to_device(random)}
        self._learned = tuple(capture.name for capture in differentiated(self.spec))
        bench.synchronize()

    def create(self, kernels: Kernels) -> Trial:
        backward = BackwardPass(self.spec, kernels, self.bench.engine, "")
        return Trial(kernels["dkdv"], lambda: self._call(backward), lambda: self._results(backward))

    def _call(self, backward: BackwardPass, results: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        wanted = (*gradients_of_rows(self.spec), *self._learned)
        return backward(Call({**self.inputs}, self.bench.captures, self.seed, 0, wanted, results or {}))

    def _results(self, backward: BackwardPass) -> dict[str, Any]:
        """Returns dq, dk and dv; sums for captures may cancel, so that their size is no scale to compare errors by."""
        problem = self.bench.problem()
        rows = {
            name: self.bench.filled_with_nan(gradient_shape(self.spec, problem, name))
            for name in gradients_of_rows(self.spec)
        }
        captures = {name: self.bench.captures[name] for name in self._learned}
        views = {name: self.bench.engine.library(array, name).view(array, name) for name, array in captures.items()}
        sums = {name: self.bench.empty(view.shape, view.dtype) for name, view in views.items()}
        self.bench.synchronize()
        self._call(backward, {**rows, **sums})
        return {name: array.astype(np.float32) for name, array in rows.items()}
