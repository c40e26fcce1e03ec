"""Source to binary: NVRTC for GPUs, a host C++ compiler for the emulator, and the cache of both.

`nvrtc` compiles, `cache` keeps what was compiled, `prebuilt` reads release folders, `inspect` shows PTX and machine
instructions, `host` compiles for the emulator. CuPy and NVRTC are imported when something is compiled, not before.
"""

import logging

from flashgen.build.cache import Entry, KernelCache, default_cache
from flashgen.build.entries import Artifacts
from flashgen.build.keys import content_key, kernel_key
from flashgen.build.nvrtc import Compiled
from flashgen.build.resources import Resources

__all__ = ["Artifacts", "Compiled", "Entry", "KernelCache", "Resources", "content_key", "default_cache", "kernel_key"]

# A library logs nothing until its user asks for it; users are warned by the `warnings` module.
logging.getLogger("flashgen").addHandler(logging.NullHandler())
