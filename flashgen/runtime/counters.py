"""Numbers in a GPU's memory that the blocks of a launch count by, 0 when it begins."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from flashgen.runtime import gpu

_BYTES = 4
_OF_AN_ALLOCATION = 16384
_STREAM_OF_EACH_THREAD = 2  # cudaStreamPerThread: one handle, as many streams as threads


class Counters:
    """The counters of one GPU. Their memory is flashgen's own, and is never given back.

    Launches on a stream follow each other, so they share one. A launch that is captured into a graph has one of its own
    for ever: graphs run beside each other and beside launches on the stream that they were captured from, and whenever
    one is replayed, nobody else's data may stand where it counts.
    """

    def __init__(self, device: int) -> None:
        self._device, self._lock = device, threading.Lock()
        self._of_streams: dict[tuple[int, int], Any] = {}
        self._allocations: list[Any] = []
        self._unused = 0
        self._allocate()

    def cleared(self, stream: int) -> Any:
        """An int32, as a CuPy array, for the next launch on a stream of the device, the current one; it is cleared."""
        runtime = gpu.cupy().cuda.runtime
        counter = self._new() if runtime.streamIsCapturing(stream) else self._of_stream(stream)
        runtime.memsetAsync(counter.data.ptr, 0, _BYTES, stream)
        return counter

    def _of_stream(self, stream: int) -> Any:
        key = (stream, threading.get_ident() if stream == _STREAM_OF_EACH_THREAD else 0)
        counter = self._of_streams.get(key)
        return counter if counter is not None else self._of_streams.setdefault(key, self._new())

    def _new(self) -> Any:
        with self._lock:
            if not self._unused:
                self._allocate()
            self._unused -= 1
            return self._allocations[-1][self._unused : self._unused + 1]

    def _allocate(self) -> None:
        module = gpu.cupy()
        with module.cuda.Device(self._device):
            memory = module.cuda.Memory(_BYTES * _OF_AN_ALLOCATION)  # of no pool, whose memory others use and count
        pointer = module.cuda.MemoryPointer(memory, 0)
        self._allocations.append(module.ndarray((_OF_AN_ALLOCATION,), "int32", pointer))
        self._unused = _OF_AN_ALLOCATION


@cache
def counters(device: int) -> Counters:
    """The counters of a GPU. First called outside of a capture, as it takes memory then."""
    return Counters(device)
