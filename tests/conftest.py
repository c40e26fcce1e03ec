"""Shared fixtures: a kernel cache for the run, selection of tests, and the reason why GPU tests are skipped."""

from __future__ import annotations

import errno
import functools
import gc
import os
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import rotation

pytest_plugins = ["random_variants.running"]

_CACHE = "FLASHGEN_CACHE_DIR"
_owned_cache: str | None = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every case of the long sweeps, not only this commit's part")


def pytest_configure(config: pytest.Config) -> None:
    """Gives the run one cache and one part of the sweeps.

    The workers of pytest-xdist inherit the variables: each kernel is compiled once, and all workers collect the same
    tests.
    """
    global _owned_cache
    if not hasattr(config, "workerinput"):
        os.environ[rotation.VARIABLE] = rotation.seed_of_run(config)
    gc.set_threshold(20_000, 20, 20)  # SymPy's expressions are many and long-lived: scanning them takes time
    for name in ("FLASHGEN_JIT", "FLASHGEN_RELEASE"):
        os.environ.pop(name, None)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # otherwise JAX allocates most of a GPU's memory
    # The reference's products are small, and pytest-xdist has one process per core: more threads would only wait.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if _CACHE not in os.environ:  # set it to keep compiled kernels between runs
        _owned_cache = os.environ[_CACHE] = tempfile.mkdtemp(prefix="flashgen-test-cache-")


def pytest_report_header() -> str:
    seed = os.environ[rotation.VARIABLE]
    part = "all cases" if seed == rotation.ALL else f"the part of {seed}; --all runs all cases"
    return f"sweeps: {part} ({rotation.VARIABLE})"


def pytest_unconfigure(config: pytest.Config) -> None:
    if _owned_cache is not None:
        shutil.rmtree(_owned_cache, ignore_errors=True)


def mark_quick(items: list[pytest.Item]) -> None:
    """Marks each n-th case of the tests marked quick_every(n) as quick."""
    numbers: Counter[str] = Counter()
    for item in items:
        mark, function = item.get_closest_marker("quick_every"), item.nodeid.partition("[")[0]
        if mark and numbers[function] % mark.args[0] == 0:
            item.add_marker(pytest.mark.quick)
        numbers[function] += 1


@functools.cache
def why_no_gpu() -> str | None:
    """Returns why GPU tests cannot run here, or None if they can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not installed ({error}); pip install '.[cuda13]'"
    try:
        return None if cupy.cuda.runtime.getDeviceCount() > 0 else "no CUDA GPU is visible"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA GPU: {error}"


@pytest.fixture(scope="session")
def other_target() -> str:
    """Returns the target whose forward kernels this GPU also runs and that is only used on request."""
    from flashgen.codegen.targets import target_of_capability
    from flashgen.runtime.gpu import compute_capability

    major, minor = compute_capability()
    if not target_of_capability(major, minor).is_of_one_generation:
        pytest.skip(f"kernels of one family run on this GPU, sm_{major}{minor}")
    return f"sm_{major}{minor}"


@pytest.fixture(scope="session")
def at_once() -> Callable[..., list[Any]]:
    """`at_once(work, threads=8)` returns the results of `work(number)` of each thread; all start together."""

    def run_all(work: Callable[[int], Any], threads: int = 8) -> list[Any]:
        start = threading.Barrier(threads)

        def run(number: int) -> Any:
            start.wait(60)
            return work(number)

        with ThreadPoolExecutor(threads) as pool:
            return [future.result() for future in [pool.submit(run, number) for number in range(threads)]]

    return run_all


@pytest.fixture
def hurried() -> Iterator[None]:
    """Switches between threads as often as Python allows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:], left = rotation.divided(items, os.environ[rotation.VARIABLE])
    if left:
        config.hook.pytest_deselected(items=left)
    mark_quick(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that accepts names but no data; file systems report that when data is flushed."""

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
