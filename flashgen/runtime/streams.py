"""What CuPy does not pass on of streams: which one a handle stands for, and leave to take memory beside captures."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from flashgen.errors import LaunchError
from flashgen.runtime.driver import driver

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: this thread may allocate whatever is being captured


def stream_id(stream: int) -> int:
    """The number of a stream, which no other has in the life of the program.

    A handle is given to a new stream once its first owner has been destroyed, whose work may still be running then.
    Of the default stream of each thread there is a number for each thread.
    """
    number = ctypes.c_uint64()
    _check(driver().cuStreamGetId(ctypes.c_void_p(stream), ctypes.byref(number)), "number of a stream")
    return number.value


@contextmanager
def beside_captures() -> Iterator[None]:
    """In here this thread may take memory and wait, even while streams are being captured into graphs."""
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
