"""The common part of tuning both passes: compile candidate plans, compare their results, and time them."""

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
from flashgen.attention.tuned_plans import LengthClass, TunedPlan, TunedPlans, invalidate_tuned_plans
from flashgen.build.cache import default_cache
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.workload import Workload
from flashgen.dtypes import DTYPES
from flashgen.errors import BuildError
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Engine, build
from flashgen.runtime import gpu
from flashgen.runtime.arrays import CUPY, NUMPY, library_of
from flashgen.runtime.gpu import Card
from flashgen.runtime.timing import Run

_MIN_GAIN = 1.01  # below it, the difference is noise and the default plan stays
_FINALISTS = 3  # timed once more with the default plan, because the fastest of many is partly so by chance
_MAX_THREADS = 16
# ptxas warnings that wgmma instructions are serialized, or that setmaxnreg is ignored.
_WARNED = re.compile(r"\(C75\d\d\)[^\n]*")
_ROUNDINGS = 8  # rounding errors of the largest element by which the results of two plans may differ
_NAN = 0x7FFF  # a NaN in float16 and in bfloat16


class Timer(Protocol):
    """Times several runs and returns milliseconds by name. It is called with all plans, then with the best ones."""

    def __call__(self, runs: Mapping[str, Run]) -> Mapping[str, float]: ...


Progress = Callable[[str, int, int], None]
"""Called with the current activity, the number of steps that are done, and the total number of steps."""


@dataclass(frozen=True)
class Timing:
    """The result of one plan: median milliseconds, or None and the reason for leaving it out; registers if compiled."""

    plan: Any
    milliseconds: float | None
    registers: int | None
    left_out: str = ""


@dataclass(frozen=True)
class Tuning:
    """The result of `attention.tune(...)` or `attention.tune_backward(...)`.

    Attributes:
        kernel: the name of the default kernel. gpu: the GPU that ran it. workload: the sizes that were timed.
        lengths: the class of lengths that the winner is stored for.
        default, winner: the default and the fastest plan; equal if no plan was at least 1% faster.
        timings: all plans in the order in which they were tried, the default plan first.
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
        """The median times of the plans that were timed, the fastest first."""
        timed = {row.plan: row.milliseconds for row in self.timings if row.milliseconds is not None}
        return dict(sorted(timed.items(), key=lambda item: item[1]))

    @property
    def gain(self) -> float:
        """The speed-up of the winner over the default plan."""
        return self.milliseconds[self.default] / self.milliseconds[self.winner]

    def to_dict(self) -> dict[str, Any]:
        """Returns all attributes as a dictionary for JSON."""
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
    """Calls by one plan.

    kernel: the kernel of the plan. run: makes a call. results: makes a call that writes to arrays full of NaN, and
    returns them as float32 by name.
    """

    kernel: RenderedKernel
    run: Run
    results: Callable[[], Mapping[str, Any]]


class Bench:
    """The arrays of one call on its engine, and the stream of their library, to compare and time plans with."""

    def __init__(
        self,
        spec: AttentionSpec,
        engine: Engine,
        inputs: Mapping[str, Any],
        captures: Mapping[str, Any],
        timer: Timer,
        progress: Progress,
    ) -> None:
        """inputs: q, k and v by name, and the arrays of a KV cache. NumPy arrays are copied to the GPU.

        Raises LaunchError without a GPU, and BuildError if FLASHGEN_JIT forbids compilation.
        """
        self.spec, self.engine, self.timer, self.progress = spec, engine, timer, progress
        self.on_gpu = engine.measures
        if self.on_gpu:
            gpu.compute_capability()  # raises LaunchError if there is no GPU
            if not default_cache().jit:
                raise BuildError("tuning compiles kernels, which FLASHGEN_JIT=0 forbids: unset it, or set it to 1")
        bring = engine.to_device if self.on_gpu else lambda value: value
        self._inputs = {name: bring(array) for name, array in inputs.items()}
        self.captures = {name: bring(value) for name, value in captures.items()}
        self.q = self._inputs["q"]

    @property
    def inputs(self) -> dict[str, Any]:
        """A new dictionary of the arrays for one call."""
        return {**self._inputs}

    def problem(self) -> Problem:
        views = {name: self.engine.library(array, name).view(array, name) for name, array in self._inputs.items()}
        return problem_of(self.spec, views)

    def device(self) -> int:
        return library_of(self.q, "q").view(self.q, "q").device or 0

    def filled_with_nan(self, shape: tuple[int, ...]) -> Any:
        """Returns an array of the spec's dtype full of NaN, on the device of the inputs."""
        array = self.empty(shape, self.spec.dtype)
        array.view(np.uint16)[...] = _NAN
        return array

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return (CUPY if self.on_gpu else NUMPY).empty(shape, dtype, self.device())

    def synchronize(self) -> None:
        """Waits for the device, because another library may have computed the inputs on another stream."""
        if self.on_gpu:
            gpu.cupy().cuda.Device().synchronize()

    @contextmanager
    def on_input_stream(self) -> Iterator[None]:
        """Makes the stream that launches use, that of q's library on q's device, the current one for events."""
        with ExitStack() as stack:
            if self.on_gpu:
                library = self.engine.library(self.q, "q")
                stack.enter_context(gpu.cupy().cuda.Device(self.device()))
                stack.enter_context(gpu.stream_object(library.stream(self.q)))
            yield

    def compare(
        self, default: Trial, others: Sequence[RenderedKernel], trial: Callable[[RenderedKernel], Trial]
    ) -> tuple[tuple[Timing, ...], RenderedKernel]:
        """Compiles the plans, leaves out those that cannot be the fastest or give wrong results, and times the others.

        others: the kernels of the plans except the default one. trial: creates the calls of a kernel. Returns all
        timings, and the kernel of the fastest plan.
        """
        every = [default.kernel, *others]
        compiled = self._compile(every)
        reasons = {kernel.plan: reason for kernel, (_, reason) in zip(every, compiled, strict=True)}
        reasons[default.kernel.plan] = ""  # the default plan is always timed, so that there is a result to compare with
        runs, expected = {default.kernel.plan: default.run}, default.results()
        for number, kernel in enumerate(others):
            if not reasons[kernel.plan]:
                candidate = trial(kernel)
                reasons[kernel.plan] = differences(expected, candidate.results(), self.spec.dtype)
                runs[kernel.plan] = candidate.run
            self.progress("comparing outputs", number + 1, len(others))
        timed = {plan: run for plan, run in runs.items() if not reasons[plan]}
        times, winner = self._times(timed, default.kernel.plan)
        timings = tuple(
            Timing(kernel.plan, times.get(kernel.plan), registers, reasons[kernel.plan])
            for kernel, (registers, _) in zip(every, compiled, strict=True)
        )
        return timings, next(kernel for kernel in every if kernel.plan == winner)

    def store(
        self,
        tuned: TunedPlans,
        key: tuple[Card, LengthClass],
        workload: Workload,
        names: tuple[str, Any],
        found: tuple[tuple[Timing, ...], RenderedKernel],
    ) -> Tuning:
        """Writes the winner to disk, and makes every callable of this process look for it.

        names: the name of the default kernel, and its plan. found: the result of `compare`.
        """
        timings, winner = found
        measured = {"sizes": asdict(workload), "milliseconds": {str(t.plan): t.milliseconds for t in timings}}
        kept = tuned.store(*key, TunedPlan.of(winner), measured)
        invalidate_tuned_plans()
        return Tuning(names[0], key[0], workload, key[1], names[1], winner.plan, timings, kept)

    def _times(self, runs: Mapping[Any, Run], default: Any) -> tuple[dict[Any, float], Any]:
        """Returns milliseconds by plan, and the fastest plan.

        The best plans and the default one are timed in a second round among themselves, which decides.
        """
        self.progress("timing all", 0, 2)
        first = self.timer({str(plan): run for plan, run in runs.items()})
        best = sorted(runs, key=lambda plan: first[str(plan)])[:_FINALISTS]
        self.progress("timing the best", 1, 2)
        second = self.timer({str(plan): runs[plan] for plan in dict.fromkeys([default, *best])})
        self.progress("timing the best", 2, 2)
        fastest = min(best, key=lambda plan: second[str(plan)])
        gained = second[str(default)] >= _MIN_GAIN * second[str(fastest)]
        return {plan: float({**first, **second}[str(plan)]) for plan in runs}, fastest if gained else default

    def _compile(self, kernels: list[RenderedKernel]) -> list[tuple[int | None, str]]:
        """Compiles kernels in parallel threads, because NVRTC releases the GIL; returns as `compile_candidate` does."""
        if not self.on_gpu:
            return [(None, "") for _ in kernels]
        found = []
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
            for number, outcome in enumerate(pool.map(compile_candidate, kernels)):
                self.progress("compiling", number + 1, len(kernels))
                found.append(outcome)
        return found


def compile_candidate(kernel: RenderedKernel) -> tuple[int | None, str]:
    """Compiles a kernel or finds it in the cache; returns its registers and the reason to leave it out, or ""."""
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
    """Returns how results differ from the default plan's by more than rounding; "" if they do not."""
    return "; ".join(
        f"its {name} {text}" for name in expected if (text := _difference(expected[name], found[name], dtype))
    )


def _difference(expected: Any, found: Any, dtype: str) -> str:
    module = np if isinstance(expected, np.ndarray) else gpu.cupy()
    same = (expected == found) | (module.isnan(expected) & module.isnan(found))
    error = float(abs(module.where(same, 0, expected) - module.where(same, 0, found)).max())
    largest = float(module.where(module.isfinite(expected), abs(expected), 0).max())
    bound = _ROUNDINGS * DTYPES[dtype].epsilon * largest + 1e-5
    return "" if error <= bound else f"is {error:.3g} from the default plan's, of at most {largest:.3g}"
