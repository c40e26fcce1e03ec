"""Tests of flashgen.torch on CPU tensors with the emulator; skipped with a reason if torch is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

LENGTH, HEADS, DIM = 40, 2, 32


@pytest.fixture(autouse=True)
def on_the_emulator() -> Iterator[None]:
    import torch

    from flashgen.torch import emulated

    torch.manual_seed(0)
    with emulated():
        yield


@pytest.fixture
def qkv() -> list[Any]:
    import torch

    return [torch.randn(2, HEADS, LENGTH, DIM, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


@pytest.fixture
def memory() -> Any:
    from in_torch.recorded import Memory

    return Memory()


@pytest.fixture
def launched(memory: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The launches of the test, which are recorded instead of executed."""
    from in_torch.recorded import record_launches

    return record_launches(memory, monkeypatch)
