"""Numbers in a GPU's memory that the blocks of a launch count by: 0 when it begins, and 0 again when it has ended."""

from __future__ import annotations

import threading
from collections import deque
from functools import cache
from typing import Any

from flashgen.runtime import gpu
from flashgen.runtime.streams import beside_captures, stream_id

_BYTES = 4
_OF_AN_ALLOCATION = 16384
_MOST_RETIRED = 1024  # counters of streams that are no more, whose last launches may still be running
_STREAM_OF_EACH_THREAD = 2  # cudaStreamPerThread: one handle, as many streams as threads


class Counters:
    """The counters of one GPU. Their memory is flashgen's own, and is never given back.

    Every launch leaves its counter as it found it, so that nothing but the launch itself goes to the stream: several
    threads may launch on one. Launches on a stream follow each other and share a counter. A launch that is captured
    into a graph has one of its own for ever: graphs run beside each other and beside launches on the stream that they
    were captured from. A graph that is instantiated twice must not run beside itself.
    """

    def __init__(self, device: int) -> None:
        self._device, self._lock = device, threading.Lock()
        self._of_streams: dict[tuple[int, int], tuple[int, Any]] = {}  # by handle and thread: the stream, its counter
        self._retired: deque[Any] = deque()
        self._memory: Any = None
        self._unused = 0

    def of_launch(self, stream: int) -> Any:
        """A uint32, as a CuPy array, for the next launch on a stream of the device, the current one."""
        if gpu.cupy().cuda.runtime.streamIsCapturing(stream):
            with self._lock:
                return self._new()
        key = (stream, threading.get_ident() if stream == _STREAM_OF_EACH_THREAD else 0)
        number = stream_id(stream)
        found = self._of_streams.get(key)
        return found[1] if found is not None and found[0] == number else self._of_new_stream(key, number)

    def _of_new_stream(self, key: tuple[int, int], number: int) -> Any:
        with self._lock:
            found = self._of_streams.get(key)
            if found is not None and found[0] == number:  # another thread has been here
                return found[1]
            if found is not None:
                self._retired.append(found[1])
            counter = self._retired.popleft() if len(self._retired) > _MOST_RETIRED else self._new()
            self._of_streams[key] = number, counter
            return counter

    def _new(self) -> Any:
        if not self._unused:
            self._memory, self._unused = self._allocated(), _OF_AN_ALLOCATION
        self._unused -= 1
        return self._memory[self._unused : self._unused + 1]

    def _allocated(self) -> Any:
        """Zeros in memory of no pool: others use and count what pools hold, and graphs own what they captured."""
        module = gpu.cupy()
        with module.cuda.Device(self._device), beside_captures():
            memory = module.cuda.Memory(_BYTES * _OF_AN_ALLOCATION)
            counters = module.ndarray((_OF_AN_ALLOCATION,), "uint32", module.cuda.MemoryPointer(memory, 0))
            stream = module.cuda.Stream(non_blocking=True)
            module.cuda.runtime.memsetAsync(counters.data.ptr, 0, _BYTES * _OF_AN_ALLOCATION, stream.ptr)
            stream.synchronize()
        return counters


@cache
def counters(device: int) -> Counters:
    """The counters of a GPU. Should two threads be the first at once, each has counters of its own, once."""
    return Counters(device)
