"""Timing on a GPU: events around each run, the L2 flushed before it, the median of many."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache
from typing import Any

_FLUSH_BYTES = 256 * 2**20  # several times the largest L2


@cache
def _flush_buffer() -> Any:
    import cupy

    return cupy.empty(_FLUSH_BYTES // 4, cupy.float32)


def median_ms(run: Callable[[], Any], repeats: int = 20, warmup: int = 3, budget_ms: float = 400.0) -> float:
    """Median time of `run` in milliseconds, which must launch on the current stream, with a cold L2 each time.

    Fewer repeats, but at least 5, where they would take longer than the budget.
    """
    import cupy

    for _ in range(warmup):
        run()
    times: list[float] = []
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    while len(times) < repeats and (len(times) < 5 or sum(times) < budget_ms):
        _flush_buffer().fill(0)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end))
    return statistics.median(times)


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most device memory that is in use at once during a run, with what was in use before it.

    Memory of torch's and of CuPy's allocators, which is where arrays and workspaces come from.
    """
    import cupy
    import torch

    pool = cupy.get_default_memory_pool()
    _flush_buffer.cache_clear()
    pool.free_all_blocks()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() + pool.total_bytes()  # the pool gives nothing back by itself
    return int(peak)
