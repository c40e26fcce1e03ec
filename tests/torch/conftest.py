"""Tests of flashgen.torch: on CPU tensors, by the emulator; skipped, saying so, where torch is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

LENGTH, HEADS, DIM = 40, 2, 32


@pytest.fixture(autouse=True)
def on_the_emulator() -> Iterator[None]:
    from flashgen.torch import emulated

    torch.manual_seed(0)
    with emulated():
        yield


@pytest.fixture
def qkv() -> list[Any]:
    return [torch.randn(2, HEADS, LENGTH, DIM, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
