"""Timing on a GPU: events around each run, the L2 flushed before it, the median of many."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from flashgen.runtime import gpu

Run = Callable[[], Any]

_FLUSH_BYTES = 256 * 2**20  # several times the largest L2
_FLUSHES = 4  # a single one is over before a host has started the run, whose start would then be timed too


@cache
def _flush_buffer(device: int) -> Any:
    cupy = gpu.cupy()
    return cupy.empty(_FLUSH_BYTES // 4, cupy.float32)


def free_flush_buffer() -> None:
    """Gives back the memory that flushes take; the next timing takes it again."""
    _flush_buffer.cache_clear()


def median_ms(run: Run, repeats: int = 20, warmup: int = 3, budget_ms: float = 400.0) -> float:
    """Median time of `run` in milliseconds, which must launch on the current stream, with a cold L2 each time.

    Fewer repeats, but at least 5, where they would take longer than the budget.
    """
    return medians_ms({"": run}, repeats, warmup, budget_ms)[""]


def medians_ms(
    runs: Mapping[str, Run], repeats: int = 20, warmup: int = 3, budget_ms: float = 400.0
) -> dict[str, float]:
    """Median times of several runs, by name, which take turns, so that a clock that drifts is the same for all.

    Every other round goes backwards, so that no run always follows the same other. A run drops out once it has spent
    the budget, which each has for itself.
    """
    for _ in range(warmup):
        for run in runs.values():
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    while left := [name for name, taken in times.items() if _wanted(taken, repeats, budget_ms)]:
        backwards = max(map(len, times.values())) % 2 == 1
        for name in reversed(left) if backwards else left:
            times[name].append(_cold_ms(runs[name]))
    return {name: statistics.median(taken) for name, taken in times.items()}


def _wanted(times: Sequence[float], repeats: int, budget_ms: float) -> bool:
    return len(times) < repeats and (len(times) < 5 or sum(times) < budget_ms)


def _cold_ms(run: Run) -> float:
    """Milliseconds of one run, after the L2 was filled with something else."""
    cupy = gpu.cupy()
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    for _ in range(_FLUSHES):
        _flush_buffer(gpu.current_device()).fill(0)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end))
