"""What CuPy does not tell about streams: which one a handle stands for, and how to allocate during captures."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from flashgen.errors import LaunchError
from flashgen.runtime.driver import driver

_LEGACY = (0, 1)  # cudaStreamLegacy, and what is so called where a program has no stream for each thread
OF_EACH_THREAD = 2  # cudaStreamPerThread: one handle, as many streams as threads
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: this thread may allocate whatever is being captured
_own = threading.local()


def identity(stream: int) -> Hashable:
    """A value that launches share only if they are on the same stream, and so follow each other.

    It is the driver's number of the stream: a destroyed stream's handle is given to a new one while its work may still
    be running. The legacy stream has two handles that are never another's. For cudaStreamPerThread it is an object of
    the thread's own, as numbers of threads come again too.
    """
    if stream in _LEGACY:
        return _LEGACY
    if stream != OF_EACH_THREAD:
        return _number(stream)
    if not hasattr(_own, "identity"):
        _own.identity = object()
    return _own.identity


def _number(stream: int) -> int:
    number = ctypes.c_uint64()
    _check(driver().cuStreamGetId(ctypes.c_void_p(stream), ctypes.byref(number)), "number of a stream")
    return number.value


@contextmanager
def beside_captures() -> Iterator[None]:
    """Lets this thread take memory and wait inside, even while streams are being captured into graphs."""
    mode = ctypes.c_int(_RELAXED)
    exchange = driver().cuThreadExchangeStreamCaptureMode
    _check(exchange(ctypes.byref(mode)), "mode of captures")
    try:
        yield
    finally:
        _check(exchange(ctypes.byref(mode)), "mode of captures")


def _check(status: int, what: str) -> None:
    if status:
        raise LaunchError(f"the driver does not tell the {what}: CUDA error {status}; is the stream still open?")
