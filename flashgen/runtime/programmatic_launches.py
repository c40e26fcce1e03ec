"""Programmatic dependent launches, which CuPy does not wrap.

Such a launch lets a kernel start before the previous kernel of the stream has finished, and hides what its start costs.
The kernel itself waits for the previous one (CUDA C++ Programming Guide, "Programmatic Dependent Launch and
Synchronization").
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from flashgen.runtime.driver import driver

_MIN_DRIVER = 12030  # captures such launches into CUDA graphs

# Values of the driver's enumerations (cuda.h).
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # of CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with a number as its value."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


class _Configuration(ctypes.Structure):
    """CUlaunchConfig: the numbers of blocks and of threads along x, y and z, shared memory, stream and attributes."""

    _fields_ = [
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("blocks", "threads") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


_ATTRIBUTE = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
_ATTRIBUTES = ctypes.addressof(_ATTRIBUTE)


def launcher(cuda: Any) -> Callable[..., None]:
    """Returns the function for programmatic dependent launches, with the parameters of CuPy's `launchKernel`.

    That is `launchKernel` itself if the driver is older than CUDA 12.3.

    Args:
        cuda: the module `cupy.cuda`.
    """
    return _launch_function(cuda) if cuda.runtime.driverGetVersion() >= _MIN_DRIVER else cuda.driver.launchKernel


@cache
def _launch_function(cuda: Any) -> Callable[..., None]:
    function, error_of = driver().cuLaunchKernelEx, cuda.driver.CUDADriverError
    function.argtypes = [ctypes.c_void_p] * 4

    def launch(handle: int, *numbers: int) -> None:
        *sizes, shared_bytes, stream, parameters, extra = numbers
        configuration = _Configuration(*sizes, shared_bytes, stream, _ATTRIBUTES, 1)
        status = function(ctypes.addressof(configuration), handle, parameters, extra)
        if status:
            raise error_of(status)

    return launch
