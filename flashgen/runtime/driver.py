"""NVIDIA's driver as a C library, for functions that CuPy does not pass on."""

from __future__ import annotations

import ctypes
from functools import cache

from flashgen.errors import LaunchError


@cache
def driver() -> ctypes.CDLL:
    """The driver; LaunchError, with the remedy, where there is none."""
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise LaunchError("this needs NVIDIA's driver, and there is none; emulate=True runs on the CPU")
