"""Kernels of the tests' own, launched on the emulator with Python values for arguments."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashgen.build.host import HostKernel, compile_host
from flashgen.runtime.emulated_maps import encode_map
from flashgen.runtime.emulator import EmulatorReport, launch
from flashgen.runtime.schedule import Schedule

sys.path.insert(0, str(Path(__file__).parent))
from hopper_kernels import TensorMap  # beside this file, which importlib does not put on the path

Run = Callable[..., EmulatorReport]


def pack_arguments(values: tuple[Any, ...]) -> tuple[bytes, list[tuple[int, np.ndarray[Any, Any]]]]:
    """A struct of the values with C's alignment: arrays are pointers, np.int64 long long, int int, float float.

    Tensor maps (of hopper_kernels.py) come first.
    """
    data, pointers, widest = b"", [], 1
    for value in values:
        if isinstance(value, TensorMap):
            pointers.append((len(data), value.array))
            data, widest = data + encode_map(value.dtype, value.sizes, value.byte_strides, value.box, value.swizzle), 64
            continue
        if isinstance(value, np.ndarray):
            field = bytes(8)
        elif isinstance(value, np.int64):
            field = struct.pack("<q", value)
        else:
            field = struct.pack("<f" if isinstance(value, float) else "<i", value)
        data += bytes(-len(data) % len(field))
        if isinstance(value, np.ndarray):
            pointers.append((len(data), value))
        data += field
        widest = max(widest, len(field))
    return data + bytes(-len(data) % widest), pointers


def run_kernel(
    source: str,
    name: str,
    *values: Any,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (32, 1, 1),
    shared: int = 0,
    sanitize: Any = None,
    schedule: Schedule | None = None,
) -> EmulatorReport:
    """Compile (or take from the cache) and launch; the struct's fields are the values in order."""
    kernel: HostKernel = compile_host(source, name, sanitize)
    arguments, pointers = pack_arguments(values)
    return launch(kernel, grid, block, shared, arguments, pointers, schedule or Schedule())


@pytest.fixture(scope="session")
def run() -> Run:
    return run_kernel
