"""Counters in GPU memory for the CTAs of a launch. They are 0 when a launch begins, and 0 again when it ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from functools import cache
from typing import Any

from flashgen.runtime import gpu
from flashgen.runtime.streams import PER_THREAD, allowed_during_captures, identity

_BYTES = 4
_COUNTERS_PER_ALLOCATION = 16384
_MAX_RETIRED = 1024  # counters of destroyed streams, on which launches may still be running


class Counters:
    """The counters of one GPU. Their memory is allocated outside of pools and never freed.

    Every launch leaves its counters at 0, so no memset is needed and several threads may launch on one stream.
    Launches on one stream run one after the other and share counters. A launch that is captured into a graph has its
    own counters for ever, because graphs run concurrently with each other and with launches on their stream. Two
    instances of one graph must not run at the same time.
    """

    def __init__(self, device: int) -> None:
        self._device, self._lock = device, threading.Lock()
        # (handle, thread if the handle stands for a stream per thread) -> (identity of the stream, its counters)
        self._by_stream: dict[tuple[int, int], tuple[Hashable, Any]] = {}
        self._retired: deque[Any] = deque()
        self._allocations: list[Any] = []  # kept alive for graphs, which hold no references
        self._unused = 0

    def for_launch(self, stream: int, count: int = 1) -> Any:
        """Returns a CuPy array of `count` or more uint32, for the next launch on a stream of the current device."""
        if gpu.cupy().cuda.runtime.streamIsCapturing(stream):
            with self._lock:
                return self._new(count)
        key = (stream, threading.get_ident() if stream == PER_THREAD else 0)
        stream_id = identity(stream)
        found = self._by_stream.get(key)
        if found is not None and found[0] == stream_id and found[1].size >= count:
            return found[1]
        return self._for_new_stream(key, stream_id, count)

    def _for_new_stream(self, key: tuple[int, int], stream_id: Hashable, count: int) -> Any:
        """Returns counters for a stream that has none or too few. Launches may still use the old ones."""
        with self._lock:
            found = self._by_stream.get(key)
            if found is not None and found[0] == stream_id and found[1].size >= count:  # another thread was faster
                return found[1]
            if found is not None:
                self._retired.append(found[1])
            reuse = len(self._retired) > _MAX_RETIRED and self._retired[0].size >= count
            counters = self._retired.popleft() if reuse else self._new(count)
            self._by_stream[key] = stream_id, counters
            return counters

    def _new(self, count: int) -> Any:
        if self._unused < count:
            size = max(_COUNTERS_PER_ALLOCATION, count)
            self._allocations.append(self._allocate(size))
            self._unused = size
        self._unused -= count
        return self._allocations[-1][self._unused : self._unused + count]

    def _allocate(self, size: int) -> Any:
        """Allocates zeros outside of pools, which users limit and measure, and of captures, which own their memory."""
        module = gpu.cupy()
        with module.cuda.Device(self._device), allowed_during_captures():
            memory = module.cuda.Memory(_BYTES * size)
            counters = module.ndarray((size,), "uint32", module.cuda.MemoryPointer(memory, 0))
            stream = module.cuda.Stream(non_blocking=True)
            module.cuda.runtime.memsetAsync(counters.data.ptr, 0, _BYTES * size, stream.ptr)
            stream.synchronize()
        return counters


@cache
def counters(device: int) -> Counters:
    """Returns the counters of a GPU. Two threads that make the first call at once may get separate counters."""
    return Counters(device)
