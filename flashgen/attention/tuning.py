"""Tuning: times feasible plans on the GPU at hand, for the lengths of a call, and keeps the best one on disk."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flashgen.attention.call import Call
from flashgen.attention.forward import ForwardPass, forget_tuned_plans
from flashgen.attention.kernel_choice import workload_of
from flashgen.attention.problem import Problem, problem_of
from flashgen.attention.tuned_plans import LengthClass, TunedPlan, TunedPlans
from flashgen.build.cache import default_cache
from flashgen.codegen.candidates import candidates
from flashgen.codegen.plan import Plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import Kernels, forward_kernels
from flashgen.codegen.workload import Workload
from flashgen.errors import ArgumentError, BuildError, LaunchError
from flashgen.launch.engines import build
from flashgen.runtime import gpu
from flashgen.runtime.arrays import CUPY, NUMPY, library_of
from flashgen.runtime.gpu import Card
from flashgen.runtime.timing import Run, medians_ms

_LEAST_GAIN = 1.01  # below it, plans are not told apart, and the default one stays
_FINALISTS = 3  # timed once more beside the default one, as the first of many owes some of its place to luck
_MOST_THREADS = 16
_REGISTER_FILE = 65536  # registers of a multiprocessor
_WARNED = re.compile(
    r"\(C75\d\d\)[^\n]*"
)  # the assembler: products of wgmma wait for each other; setmaxnreg is ignored
_ROUNDINGS = 8  # of the largest output: how far apart two plans' outputs may be
_NAN = 0x7FFF  # in both types
_EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


class Timer(Protocol):
    """Times runs beside each other: milliseconds by name. Called twice: with all plans, then with the best ones."""

    def __call__(self, runs: Mapping[str, Run]) -> Mapping[str, float]: ...


Progress = Callable[[str, int, int], None]
"""Is told what is being done, and how many parts of how many are."""


@dataclass(frozen=True)
class Timing:
    """A plan's outcome: its median milliseconds, or None and why it was left out; registers where it was compiled."""

    plan: Plan
    milliseconds: float | None
    registers: int | None
    left_out: str = ""


@dataclass(frozen=True)
class Tuning:
    """What `attention.tune(...)` found.

    Attributes:
        kernel: the default kernel's name. gpu: what it was timed on. workload: the sizes that were timed.
        lengths: the class of lengths that the winner is kept for.
        default, winner: plans; the same where none was at least 1% faster.
        timings: all plans, in the order in which they were tried, the default one first.
        kept: the winner's entry in the cache.
    """

    kernel: str
    gpu: Card
    workload: Workload
    lengths: LengthClass
    default: Plan
    winner: Plan
    timings: tuple[Timing, ...]
    kept: Path

    @property
    def milliseconds(self) -> dict[Plan, float]:
        """Median times by plan, fastest first, of those that were timed."""
        timed = {row.plan: row.milliseconds for row in self.timings if row.milliseconds is not None}
        return dict(sorted(timed.items(), key=lambda item: item[1]))

    @property
    def gain(self) -> float:
        """How many times as fast as the default plan the winner is."""
        return self.milliseconds[self.default] / self.milliseconds[self.winner]

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        rows = [asdict(row) | {"plan": asdict(row.plan)} for row in self.timings]
        return asdict(self) | {"timings": rows, "kept": str(self.kept), "gain": self.gain}

    def __str__(self) -> str:
        sizes = f"{self.workload.len_q} queries x {self.workload.len_k} keys x {self.workload.heads} heads"
        if self.winner == self.default:
            found = f"the default plan stays, {self.milliseconds[self.default]:.4g} ms"
        else:
            default, winner = self.milliseconds[self.default], self.milliseconds[self.winner]
            found = f"{self.gain:.2f} times as fast: {winner:.4g} ms with {self.winner}, {default:.4g} by default"
        tried = f"{len(self.milliseconds)} of {len(self.timings)} plans timed"
        return f"{self.kernel}, {sizes}, {self.gpu.name}: {found} ({tried}; kept for {self.lengths})"


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
    if forward.choice.tuned is None:
        raise ArgumentError(
            "this attention was compiled with plan=... or source=..., which win over tuned plans: compile without them"
        )
    if not forward.engine.measures and timer is medians_ms:
        raise LaunchError("the emulator's times say nothing of a GPU: tune what was compiled for one, on it")
    return _Tuner(forward, forward.choice.tuned, inputs, captures, seed, timer, progress).tune(plans)


class _Tuner:
    """One tuning: the call that is timed, and how."""

    def __init__(
        self,
        forward: ForwardPass,
        tuned: TunedPlans,
        inputs: tuple[Any, Any, Any],
        captures: Mapping[str, Any],
        seed: int | None,
        timer: Timer,
        progress: Progress,
    ) -> None:
        self.forward, self.spec, self.engine = forward, forward.spec, forward.engine
        self.tuned, self.timer, self.progress = tuned, timer, progress
        self.on_gpu = self.engine.measures
        if self.on_gpu:
            gpu.compute_capability()  # says so where there is no GPU
            if not default_cache().jit:
                raise BuildError("tuning compiles kernels, which FLASHGEN_JIT=0 forbids: unset it, or set it to 1")
        moved = [self.engine.bring(value) if self.on_gpu else value for value in (*inputs, *captures.values())]
        self.q, self.k, self.v = moved[:3]
        self.captures, self.seed = dict(zip(captures, moved[3:], strict=True)), seed

    def tune(self, plans: Sequence[Plan] | None) -> Tuning:
        with self._on_the_inputs_stream():
            default = self._pass(self.forward.kernels)
            self._call(default)  # refuses wrong arguments before anything is compiled
            problem, device = self._problem(), self._device()
            if not problem.has_scores:
                raise ArgumentError(f"q and k have {problem.len_q} and {problem.len_k} rows: there is nothing to time")
            if decode := self.forward.choice.decode_plan(problem, device):
                raise ArgumentError(
                    f"{problem.len_q} queries over {problem.len_k} keys take the decode kernel, {decode}, which is not "
                    "tuned: tune the lengths that take the forward kernel"
                )
            if self.spec.of_cache:
                raise ArgumentError("kernels over pages, or of 8-bit keys, are not tuned: the default plans are all")
            card, lengths = self.forward.choice.key(problem, device)
            workload = workload_of(problem, card)
            target = self.forward.kernel.target
            others = candidates(self.spec, target, workload) if plans is None else tuple(plans)
            own = default.kernel.plan
            kernels = [forward_kernels(self.spec, target, plan=plan) for plan in others if plan != own]
            timings, winner = self._timings(default, kernels, problem)
        every = [default.kernel, *(stages["forward"] for stages in kernels)]
        kernel = next(kernel for kernel in every if kernel.plan == winner)
        measured = {"sizes": asdict(workload), "milliseconds": {str(t.plan): t.milliseconds for t in timings}}
        kept = self.tuned.keep(card, lengths, TunedPlan.of(kernel), measured)
        forget_tuned_plans()
        return Tuning(
            self.forward.kernel.name, card, workload, lengths, default.kernel.plan, winner, tuple(timings), kept
        )

    def _timings(self, default: ForwardPass, others: list[Kernels], problem: Problem) -> tuple[list[Timing], Plan]:
        """Compiles the plans, leaves out those that cannot win or are wrong, times the others; the winner of these."""
        every = [default.kernel, *(stages["forward"] for stages in others)]
        compiled = self._compiled(every)
        reasons = {kernel.plan: reason for kernel, (_, reason) in zip(every, compiled, strict=True)}
        reasons[default.kernel.plan] = ""  # nothing is compared with nothing
        ready = {default.kernel.plan: default}
        expected = self._output(default, problem)
        for number, (kernel, stages) in enumerate(zip(every[1:], others, strict=True)):
            if not reasons[kernel.plan]:
                ready[kernel.plan] = self._pass(stages)
                reasons[kernel.plan] = _difference(expected, self._output(ready[kernel.plan], problem), self.spec.dtype)
            self.progress("comparing outputs", number + 1, len(others))
        runs = {plan: _run(self, forward) for plan, forward in ready.items() if not reasons[plan]}
        times, winner = self._times(runs, default.kernel.plan)
        timings = [
            Timing(kernel.plan, times.get(kernel.plan), registers, reasons[kernel.plan])
            for kernel, (registers, _) in zip(every, compiled, strict=True)
        ]
        return timings, winner

    def _times(self, runs: Mapping[Plan, Run], default: Plan) -> tuple[dict[Plan, float], Plan]:
        """Milliseconds by plan, and the winner.

        Those of the best and of the default one are of a second round among themselves, which decides.
        """
        self.progress("timing all", 0, 2)
        first = self.timer({str(plan): run for plan, run in runs.items()})
        best = sorted(runs, key=lambda plan: first[str(plan)])[:_FINALISTS]
        self.progress("timing the best", 1, 2)
        again = self.timer({str(plan): runs[plan] for plan in dict.fromkeys([default, *best])})
        self.progress("timing the best", 2, 2)
        fastest = min(best, key=lambda plan: again[str(plan)])
        gained = again[str(default)] >= _LEAST_GAIN * again[str(fastest)]
        return {plan: float({**first, **again}[str(plan)]) for plan in runs}, fastest if gained else default

    def _pass(self, kernels: Kernels) -> ForwardPass:
        """Calls of these kernels, or, as calls to come have it, of their packed form."""
        return ForwardPass(self.spec, kernels, self.engine, "", packs=self.forward.choice.packing is not None)

    def _compiled(self, kernels: list[RenderedKernel]) -> list[tuple[int | None, str]]:
        """Registers of each kernel, and why it is left out or ""; compiled side by side, as NVRTC lets go of Python."""
        if not self.on_gpu:
            return [(None, "") for _ in kernels]
        found = []
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
            for number, outcome in enumerate(pool.map(_examined, kernels)):
                self.progress("compiling", number + 1, len(kernels))
                found.append(outcome)
        return found

    def _call(self, forward: ForwardPass, out: Any = None) -> Any:
        results = {} if out is None else {"o": out}
        inputs = {"q": self.q, "k": self.k, "v": self.v}
        return forward(Call(inputs, self.captures, self.seed, 0, ("o",), results))["o"]

    def _output(self, forward: ForwardPass, problem: Problem) -> Any:
        """The output of a call as float32, of what held NaN before."""
        library = CUPY if self.on_gpu else NUMPY
        out = library.empty(problem.output_shape(self.spec), self.spec.dtype, self._device())
        out.view(np.uint16)[...] = _NAN
        if self.on_gpu:
            gpu.cupy().cuda.Device().synchronize()  # the inputs may be another library's, on another stream
        self._call(forward, out)
        return out.astype(np.float32)

    def _problem(self) -> Problem:
        arrays = {"q": self.q, "k": self.k, "v": self.v}
        return problem_of(
            self.spec, {name: self.engine.library(array, name).view(array, name) for name, array in arrays.items()}
        )

    def _device(self) -> int:
        return library_of(self.q, "q").view(self.q, "q").device or 0

    @contextmanager
    def _on_the_inputs_stream(self) -> Iterator[None]:
        """Events and comparisons stand on the stream that launches go to, that of q's library, on q's device."""
        with ExitStack() as stack:
            if self.on_gpu:
                library = self.engine.library(self.q, "q")
                stack.enter_context(gpu.cupy().cuda.Device(self._device()))
                stack.enter_context(gpu.stream_object(library.stream(self.q)))
            yield


def _run(tuner: _Tuner, forward: ForwardPass) -> Run:
    return lambda: tuner._call(forward)


def _examined(kernel: RenderedKernel) -> tuple[int | None, str]:
    """Registers of a kernel, compiled now or found, and why it cannot be the best one, or ""."""
    try:
        entry = build(kernel, "flashgen tune")
    except BuildError as error:
        return None, str(error).partition("\n")[0]
    used, warned = entry.resources, _WARNED.search(str(entry.meta.get("log", "")))
    if used.spills:
        return used.registers, f"it spills {used.spills} bytes of registers"
    if used.registers * kernel.threads > _REGISTER_FILE:
        return used.registers, f"{kernel.threads} threads of {used.registers} registers are too many"
    return used.registers, f"the assembler warns: {warned.group()}" if warned else ""


def _difference(expected: Any, found: Any, dtype: str) -> str:
    """Why an output is not the default plan's up to rounding, or ""."""
    module = np if isinstance(expected, np.ndarray) else gpu.cupy()
    same = (expected == found) | (module.isnan(expected) & module.isnan(found))
    apart = float(abs(module.where(same, 0, expected) - module.where(same, 0, found)).max())
    largest = float(module.where(module.isfinite(expected), abs(expected), 0).max())
    bound = _ROUNDINGS * _EPSILON[dtype] * largest + 1e-5
    return "" if apart <= bound else f"its output is {apart:.3g} from the default plan's, of at most {largest:.3g}"
