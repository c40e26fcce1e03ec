"""Skips everything, with the reason, where vLLM's classes cannot be imported, and GPU tests where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


def why_no_engine() -> str | None:
    """Returns why vLLM's classes cannot be imported here; None if they can be."""
    try:
        import flashgen_vllm.backend  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


WHY_NO_ENGINE = why_no_engine()
collect_ignore_glob = ["test_*.py"] if WHY_NO_ENGINE else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if WHY_NO_ENGINE:
        terminalreporter.write_line(f"vLLM: nothing was tested: {WHY_NO_ENGINE}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if WHY_NO_ENGINE and session.testscollected == 0:
        session.exitstatus = pytest.ExitCode.OK


def pytest_collection_modifyitems(items: list[Any]) -> None:
    if not items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU is visible to torch"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: Any) -> Iterator[Any]:
    """The device of a test: the CPU, where flashgen's emulator runs, and a GPU."""
    import torch

    from flashgen.torch import emulated

    torch.manual_seed(0)
    with emulated(request.param == "cpu"):
        yield torch.device(request.param)


@pytest.fixture(autouse=True)
def writer(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Takes vLLM's Triton kernel to write the cache on a GPU where vLLM's compiled operators cannot be loaded.

    Returns whether the compiled operator is used.
    """
    import torch
    from vllm import _custom_ops

    if hasattr(torch.ops._C_cache_ops, "reshape_and_cache_flash"):
        return True
    if torch.cuda.is_available():
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

        monkeypatch.setattr(_custom_ops, "reshape_and_cache_flash", triton_reshape_and_cache_flash)
    return False
