"""Compilation: NVRTC for GPUs, a host C++ compiler for the emulator, and the cache of compiled kernels.

`nvrtc` compiles for GPUs, `host` for the emulator, `cache` stores compiled kernels, `prebuilt` reads release folders,
and `inspect` shows PTX and machine instructions. CuPy and NVRTC are only imported when something is compiled.
"""

import logging

from flashgen.build.cache import Entry, KernelCache, default_cache
from flashgen.build.entries import Artifacts
from flashgen.build.keys import content_key, kernel_key
from flashgen.build.nvrtc import Compiled
from flashgen.build.resources import Resources

__all__ = ["Artifacts", "Compiled", "Entry", "KernelCache", "Resources", "content_key", "default_cache", "kernel_key"]

# A library logs nothing unless its user configures logging. Warnings go through the `warnings` module.
logging.getLogger("flashgen").addHandler(logging.NullHandler())
