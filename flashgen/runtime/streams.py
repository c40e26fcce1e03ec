"""Functions for streams that CuPy lacks: the identity of a stream, and allocations during captures."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from flashgen.errors import LaunchError
from flashgen.runtime.driver import driver

_LEGACY = (0, 1)  # the default stream without per-thread streams, and cudaStreamLegacy
PER_THREAD = 2  # cudaStreamPerThread: one handle for a stream of each thread
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: this thread may allocate while streams are being captured
_thread = threading.local()


def identity(stream: int) -> Hashable:
    """Returns a value that two launches share only if they are on the same stream, so that one follows the other.

    This is the driver's id of the stream. A handle is no identity: the handle of a destroyed stream may be reused for a
    new one while its work is still running. The legacy stream has two handles, which are never reused. For
    cudaStreamPerThread it is an object of the thread, because thread ids are reused, too.
    """
    if stream in _LEGACY:
        return _LEGACY
    if stream != PER_THREAD:
        return _number(stream)
    if not hasattr(_thread, "identity"):
        _thread.identity = object()
    return _thread.identity


def _number(stream: int) -> int:
    number = ctypes.c_uint64()
    _check(driver().cuStreamGetId(ctypes.c_void_p(stream), ctypes.byref(number)), "number of a stream")
    return number.value


@contextmanager
def allowed_during_captures() -> Iterator[None]:
    """Allows this thread to allocate and synchronize inside, even while streams are being captured into graphs."""
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
