"""Selects the device of the tests, and imports SGLang or says why it cannot."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import absent

_CACHE = "FLASHGEN_CACHE_DIR"
_owned_cache: str | None = None


def pytest_configure() -> None:
    global _owned_cache
    if _CACHE not in os.environ:  # the workers of pytest-xdist share it
        _owned_cache = os.environ[_CACHE] = tempfile.mkdtemp(prefix="flashgen-test-cache-")


def pytest_unconfigure() -> None:
    if _owned_cache is not None:
        shutil.rmtree(_owned_cache, ignore_errors=True)


@functools.cache
def why_no_engine() -> str | None:
    """Returns why SGLang's classes cannot be imported here; None if they can be. The import takes some seconds."""
    absent.stand_in(*absent.UNUSED)
    try:
        importlib.import_module("sglang.test.kits.attention_unittest.runner_modes.cuda_graph_decode_runner")
    except ImportError as error:
        return f"{error}: see integrations/sglang/requirements.txt"
    return None


def pytest_report_header() -> str:
    if importlib.util.find_spec("sglang") is None:
        return "SGLang: it is not installed, and nothing is tested but the package's own files"
    missing = [name for name in absent.UNUSED if importlib.util.find_spec(name) is None]
    return f"SGLang: its own classes are tested, with stand-ins for {', '.join(missing) or 'nothing'}"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out the tests that import SGLang where it cannot be imported."""
    imports = collection_path.name in ("test_kit.py", "test_backend.py", "test_graphs.py")
    return True if imports and why_no_engine() else None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if why_no_engine.cache_info().currsize and (reason := why_no_engine()):
        terminalreporter.write_line(f"SGLang: nothing was tested but the package's own files: {reason}")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of a test's tensors. On the CPU, kernels run on flashgen's emulator."""
    import torch

    import flashgen.torch

    has_gpu = torch.cuda.is_available()
    if request.param == "cuda" and not has_gpu:
        pytest.skip("torch sees no CUDA GPU")
    if request.param == "cpu" and has_gpu:
        pytest.skip("where there is a GPU, SGLang's pools write by CUDA kernels")
    with torch.no_grad(), flashgen.torch.emulated(request.param == "cpu"):
        yield request.param
