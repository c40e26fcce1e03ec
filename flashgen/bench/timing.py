"""What a measurement on a GPU is made of: time, by `flashgen.runtime.timing`, and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashgen.runtime.timing import Run, free_flush_buffer, median_ms, medians_ms

__all__ = ["Run", "median_ms", "medians_ms", "peak_bytes"]


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most device memory that is in use at once during a run, with what was in use before it.

    Memory of torch's and of CuPy's allocators, which is where arrays and workspaces come from.
    """
    import cupy
    import torch

    pool = cupy.get_default_memory_pool()
    free_flush_buffer()
    pool.free_all_blocks()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() + pool.total_bytes()  # the pool gives nothing back by itself
    return int(peak)
