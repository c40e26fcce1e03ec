"""Timing on a GPU: the median of many runs between events, each with a flushed L2 cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from flashgen.runtime import gpu

Run = Callable[[], Any]

_FLUSH_BYTES = 256 * 2**20  # several times the largest L2
_WARMUP, _MIN_REPEATS, _MAX_REPEATS, _BUDGET_MS = 3, 5, 20, 400.0
_FLUSHES = 4  # a single flush ends before the host has launched the run, so that launch latency would be timed, too


@cache
def _flush_buffer(device: int) -> Any:
    cupy = gpu.cupy()
    return cupy.zeros(_FLUSH_BYTES // 4, cupy.float32)


def free_flush_buffer() -> None:
    """Frees the memory that is read to flush the L2; the next timing allocates it again."""
    _flush_buffer.cache_clear()


def _flush() -> None:
    """Replaces the contents of the L2 by other data, which is only read.

    So the lines are clean, as those of the weights that a model reads before a call of attention are. The lines that a
    flush by writes leaves are dirty, and a run would be charged for writing them back: 3 us where it reads 33 MB, and 9
    us where it reads 500 MB on an H200.
    """
    _flush_buffer(gpu.current_device()).max()


def median_ms(run: Run) -> float:
    """Returns the median time in milliseconds of `run`, which must launch on the current stream, with a cold L2.

    There are 20 repeats, or fewer but at least 5 if they take more than 0.4 s.
    """
    return medians_ms({"": run})[""]


def medians_ms(runs: Mapping[str, Run]) -> dict[str, float]:
    """Returns the median times of several runs by name. They are interleaved, so that clock drift affects all equally.

    Every other round runs in reverse order, so that no run always follows the same one. A run stops once it has used up
    its own budget.
    """
    for _ in range(_WARMUP):
        for run in runs.values():
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    while left := [name for name, taken in times.items() if _wanted(taken)]:
        backwards = max(map(len, times.values())) % 2 == 1
        for name in reversed(left) if backwards else left:
            times[name].append(_cold_ms(runs[name]))
    return {name: statistics.median(taken) for name, taken in times.items()}


def _wanted(times: Sequence[float]) -> bool:
    return len(times) < _MAX_REPEATS and (len(times) < _MIN_REPEATS or sum(times) < _BUDGET_MS)


def _cold_ms(run: Run) -> float:
    """Returns the milliseconds of one run after the L2 was filled with other data."""
    cupy = gpu.cupy()
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    for _ in range(_FLUSHES):
        _flush()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end))
