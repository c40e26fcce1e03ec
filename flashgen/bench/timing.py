"""Measures time on a GPU, by `flashgen.runtime.timing`, and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashgen.runtime.timing import Run, free_flush_buffer, median_ms, medians_ms

__all__ = ["Run", "median_ms", "medians_ms", "peak_bytes"]


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most device memory, in bytes, that is in use at once during a run, including what was in use before.

    It counts torch's and CuPy's allocators, which arrays and workspaces come from.
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
