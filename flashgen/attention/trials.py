"""Plans on trial: compiled, compared with the default one's results, timed in turn. What tuning either pass does."""

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

from flashgen.attention.problem import Problem, problem_of
from flashgen.attention.tuned_plans import LengthClass, TunedPlan, TunedPlans, forget_tuned_plans
from flashgen.build.cache import default_cache
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.workload import Workload
from flashgen.errors import BuildError
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Engine, build
from flashgen.runtime import gpu
from flashgen.runtime.arrays import CUPY, NUMPY, library_of
from flashgen.runtime.gpu import Card
from flashgen.runtime.timing import Run

_LEAST_GAIN = 1.01  # below it, plans are not told apart, and the default one stays
_FINALISTS = 3  # timed once more beside the default one, as the first of many owes some of its place to luck
_MOST_THREADS = 16
# The assembler's words where products of wgmma wait for each other, or setmaxnreg is ignored.
_WARNED = re.compile(r"\(C75\d\d\)[^\n]*")
_ROUNDINGS = 8  # of the largest element: how far apart two plans' results may be
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

    plan: Any
    milliseconds: float | None
    registers: int | None
    left_out: str = ""


@dataclass(frozen=True)
class Tuning:
    """What `attention.tune(...)` or `attention.tune_backward(...)` found.

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
    default: Any
    winner: Any
    timings: tuple[Timing, ...]
    kept: Path

    @property
    def milliseconds(self) -> dict[Any, float]:
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


@dataclass(frozen=True)
class Trial:
    """A plan's calls: the kernel that is the plan's, a run of them, and their results, float32 by name.

    results: of arrays that held NaN before.
    """

    kernel: RenderedKernel
    run: Run
    results: Callable[[], Mapping[str, Any]]


class Bench:
    """Where plans are tried: the arrays of one call on its engine, and the stream of their library."""

    def __init__(
        self,
        spec: AttentionSpec,
        engine: Engine,
        inputs: Mapping[str, Any],
        captures: Mapping[str, Any],
        timer: Timer,
        progress: Progress,
    ) -> None:
        """inputs: q, k and v by name, and what says where keys are. NumPy arrays are copied to the GPU.

        LaunchError where there is none, BuildError where nothing may compile.
        """
        self.spec, self.engine, self.timer, self.progress = spec, engine, timer, progress
        self.on_gpu = engine.measures
        if self.on_gpu:
            gpu.compute_capability()  # says so where there is no GPU
            if not default_cache().jit:
                raise BuildError("tuning compiles kernels, which FLASHGEN_JIT=0 forbids: unset it, or set it to 1")
        bring = engine.bring if self.on_gpu else lambda value: value
        self._inputs = {name: bring(array) for name, array in inputs.items()}
        self.captures = {name: bring(value) for name, value in captures.items()}
        self.q = self._inputs["q"]

    @property
    def inputs(self) -> dict[str, Any]:
        """A call's own mapping of its arrays."""
        return {**self._inputs}

    def problem(self) -> Problem:
        views = {name: self.engine.library(array, name).view(array, name) for name, array in self._inputs.items()}
        return problem_of(self.spec, views)

    def device(self) -> int:
        return library_of(self.q, "q").view(self.q, "q").device or 0

    def poisoned(self, shape: tuple[int, ...]) -> Any:
        """An array of the spec's dtype full of NaN, beside the inputs."""
        array = self.empty(shape, self.spec.dtype)
        array.view(np.uint16)[...] = _NAN
        return array

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return (CUPY if self.on_gpu else NUMPY).empty(shape, dtype, self.device())

    def settle(self) -> None:
        """Waits for the inputs, which may be another library's, on another stream."""
        if self.on_gpu:
            gpu.cupy().cuda.Device().synchronize()

    @contextmanager
    def on_the_inputs_stream(self) -> Iterator[None]:
        """Events and comparisons stand on the stream that launches go to, that of q's library, on q's device."""
        with ExitStack() as stack:
            if self.on_gpu:
                library = self.engine.library(self.q, "q")
                stack.enter_context(gpu.cupy().cuda.Device(self.device()))
                stack.enter_context(gpu.stream_object(library.stream(self.q)))
            yield

    def tried(
        self, default: Trial, others: Sequence[RenderedKernel], trial: Callable[[RenderedKernel], Trial]
    ) -> tuple[tuple[Timing, ...], RenderedKernel]:
        """Compiles the plans, leaves out those that cannot win or are wrong, times the others; the winner of these.

        others: the kernels of the plans beside the default one. trial: makes their calls.
        """
        every = [default.kernel, *others]
        compiled = self._compiled(every)
        reasons = {kernel.plan: reason for kernel, (_, reason) in zip(every, compiled, strict=True)}
        reasons[default.kernel.plan] = ""  # nothing is compared with nothing
        runs, expected = {default.kernel.plan: default.run}, default.results()
        for number, kernel in enumerate(others):
            if not reasons[kernel.plan]:
                made = trial(kernel)
                reasons[kernel.plan] = differences(expected, made.results(), self.spec.dtype)
                runs[kernel.plan] = made.run
            self.progress("comparing outputs", number + 1, len(others))
        timed = {plan: run for plan, run in runs.items() if not reasons[plan]}
        times, winner = self._times(timed, default.kernel.plan)
        timings = tuple(
            Timing(kernel.plan, times.get(kernel.plan), registers, reasons[kernel.plan])
            for kernel, (registers, _) in zip(every, compiled, strict=True)
        )
        return timings, next(kernel for kernel in every if kernel.plan == winner)

    def keep(
        self,
        tuned: TunedPlans,
        key: tuple[Card, LengthClass],
        workload: Workload,
        names: tuple[str, Any],
        found: tuple[tuple[Timing, ...], RenderedKernel],
    ) -> Tuning:
        """Writes the winner to disk, and tells every callable of this process. names: the default kernel's and plan."""
        timings, winner = found
        measured = {"sizes": asdict(workload), "milliseconds": {str(t.plan): t.milliseconds for t in timings}}
        kept = tuned.keep(*key, TunedPlan.of(winner), measured)
        forget_tuned_plans()
        return Tuning(names[0], key[0], workload, key[1], names[1], winner.plan, timings, kept)

    def _times(self, runs: Mapping[Any, Run], default: Any) -> tuple[dict[Any, float], Any]:
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

    def _compiled(self, kernels: list[RenderedKernel]) -> list[tuple[int | None, str]]:
        """Registers of each kernel, and why it is left out or ""; compiled side by side, as NVRTC lets go of Python."""
        if not self.on_gpu:
            return [(None, "") for _ in kernels]
        found = []
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
            for number, outcome in enumerate(pool.map(examined, kernels)):
                self.progress("compiling", number + 1, len(kernels))
                found.append(outcome)
        return found


def examined(kernel: RenderedKernel) -> tuple[int | None, str]:
    """Registers of a kernel, compiled now or found, and why it cannot be the best one, or ""."""
    try:
        entry = build(kernel, "flashgen tune")
    except BuildError as error:
        return None, str(error).partition("\n")[0]
    used, warned = entry.resources, _WARNED.search(str(entry.meta.get("log", "")))
    if used.spills:
        return used.registers, f"it spills {used.spills} bytes of registers"
    if used.registers * kernel.threads > kernel.target.registers_per_multiprocessor:
        return used.registers, f"{kernel.threads} threads of {used.registers} registers are too many"
    return used.registers, f"the assembler warns: {warned.group()}" if warned else ""


def differences(expected: Mapping[str, Any], found: Mapping[str, Any], dtype: str) -> str:
    """Why results are not the default plan's up to rounding, or ""."""
    return "; ".join(
        f"its {name} {apart}" for name in expected if (apart := _difference(expected[name], found[name], dtype))
    )


def _difference(expected: Any, found: Any, dtype: str) -> str:
    module = np if isinstance(expected, np.ndarray) else gpu.cupy()
    same = (expected == found) | (module.isnan(expected) & module.isnan(found))
    apart = float(abs(module.where(same, 0, expected) - module.where(same, 0, found)).max())
    largest = float(module.where(module.isfinite(expected), abs(expected), 0).max())
    bound = _ROUNDINGS * _EPSILON[dtype] * largest + 1e-5
    return "" if apart <= bound else f"is {apart:.3g} from the default plan's, of at most {largest:.3g}"
