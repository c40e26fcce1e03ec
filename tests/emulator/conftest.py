"""Runs small test kernels on the emulator with Python values as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashgen.build.host import HostKernel, compile_host
from flashgen.runtime.emulator import EmulatorReport, launch
from flashgen.runtime.schedule import Schedule
from kernel_arguments import pack_arguments

Run = Callable[..., EmulatorReport]


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
    """Compiles (or takes from the cache) and launches; the struct's fields are the values in order."""
    kernel: HostKernel = compile_host(source, name, sanitize)
    arguments, pointers = pack_arguments(values)
    return launch(kernel, grid, block, shared, arguments, pointers, schedule or Schedule())


@pytest.fixture(scope="session")
def run() -> Run:
    return run_kernel
