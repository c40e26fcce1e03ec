"""Selects the device of the tests, and imports SGLang or says why it cannot."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import absent

_CACHE = "FLASHGEN_CACHE_DIR"
_absent: list[str] = []
_owned_cache: str | None = None
_reason: str | None = None


def pytest_configure(config: pytest.Config) -> None:
    global _owned_cache, _reason
    if _CACHE not in os.environ:
        _owned_cache = os.environ[_CACHE] = tempfile.mkdtemp(prefix="flashgen-test-cache-")
    # torchvision for the CPU that fits torch's is on no index but torch's own; the kernels of others need CUDA.
    _absent.extend(absent.stand_in("torchvision", "sgl_kernel"))
    try:
        importlib.import_module("sglang.test.kits.attention_unittest.runner_modes.cuda_graph_decode_runner")
    except ImportError as error:
        _reason = f"SGLang cannot be imported ({error}): see integrations/sglang/tests/requirements.txt"


def pytest_unconfigure() -> None:
    if _owned_cache is not None:
        shutil.rmtree(_owned_cache, ignore_errors=True)


def pytest_report_header() -> str:
    if _reason:
        return f"skipped: {_reason}"
    import sglang
    import torch

    missing = f"; stand-ins for {', '.join(_absent)}" if _absent else ""
    return f"SGLang {sglang.__version__}, torch {torch.__version__}{missing}"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out the tests that import SGLang where it cannot be imported."""
    return True if _reason and collection_path.name in ("test_kit.py", "test_backend.py", "test_graphs.py") else None


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: Any) -> Iterator[str]:
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
