"""Numbers in a GPU's memory with which the blocks of a launch count: 0 when it begins, and 0 again when it ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from functools import cache
from typing import Any

from flashgen.runtime import gpu
from flashgen.runtime.streams import OF_EACH_THREAD, beside_captures, identity

_BYTES = 4
_OF_AN_ALLOCATION = 16384
_MOST_RETIRED = 1024  # counters of destroyed streams, whose last launches may still be running


class Counters:
    """The counters of one GPU. Their memory is flashgen's own, and is never given back.

    Every launch leaves its counters as it found them, so that a stream gets nothing but launches, and several threads
    may launch on one. Launches on a stream follow each other and share counters. A launch that is captured into a
    graph keeps counters of its own for ever, as graphs run beside each other and beside launches on their stream. A
    graph that is instantiated twice must not run beside itself.
    """

    def __init__(self, device: int) -> None:
        self._device, self._lock = device, threading.Lock()
        # By a stream's handle, and the thread where the handle has one stream for each: its identity and its counter.
        self._of_streams: dict[tuple[int, int], tuple[Hashable, Any]] = {}
        self._retired: deque[Any] = deque()
        self._allocations: list[Any] = []  # kept for the graphs that use them, which keep nothing
        self._unused = 0

    def of_launch(self, stream: int, count: int = 1) -> Any:
        """So many uint32, as a CuPy array, for the next launch on a stream of the device, the current one."""
        if gpu.cupy().cuda.runtime.streamIsCapturing(stream):
            with self._lock:
                return self._new(count)
        key = (stream, threading.get_ident() if stream == OF_EACH_THREAD else 0)
        who = identity(stream)
        found = self._of_streams.get(key)
        if found is not None and found[0] == who and found[1].size >= count:
            return found[1]
        return self._of_new_stream(key, who, count)

    def _of_new_stream(self, key: tuple[int, int], who: Hashable, count: int) -> Any:
        """For a stream that has none, or too few: the others may be in use by its launches still."""
        with self._lock:
            found = self._of_streams.get(key)
            if found is not None and found[0] == who and found[1].size >= count:  # another thread was faster
                return found[1]
            if found is not None:
                self._retired.append(found[1])
            again = len(self._retired) > _MOST_RETIRED and self._retired[0].size >= count
            counters = self._retired.popleft() if again else self._new(count)
            self._of_streams[key] = who, counters
            return counters

    def _new(self, count: int) -> Any:
        if self._unused < count:
            size = max(_OF_AN_ALLOCATION, count)
            self._allocations.append(self._allocated(size))
            self._unused = size
        self._unused -= count
        return self._allocations[-1][self._unused : self._unused + count]

    def _allocated(self, size: int) -> Any:
        """Zeros outside of all pools: others use and count what pools hold, and graphs own what they captured."""
        module = gpu.cupy()
        with module.cuda.Device(self._device), beside_captures():
            memory = module.cuda.Memory(_BYTES * size)
            counters = module.ndarray((size,), "uint32", module.cuda.MemoryPointer(memory, 0))
            stream = module.cuda.Stream(non_blocking=True)
            module.cuda.runtime.memsetAsync(counters.data.ptr, 0, _BYTES * size, stream.ptr)
            stream.synchronize()
        return counters


@cache
def counters(device: int) -> Counters:
    """The counters of a GPU. Two threads that ask first at the same time may each get counters of their own, once."""
    return Counters(device)
