"""NVIDIA's driver as a C library, for functions that CuPy does not expose."""

from __future__ import annotations

import ctypes
from functools import cache

from flashgen.errors import LaunchError


@cache
def driver() -> ctypes.CDLL:
    """Returns the driver. Raises LaunchError, with a remedy, if there is none."""
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise LaunchError("this needs NVIDIA's driver, and there is none; emulate=True runs on the CPU")
