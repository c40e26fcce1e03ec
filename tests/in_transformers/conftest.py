"""Shared fixtures of the tests of transformers' models: `architectures`, and the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of the models: a GPU, or the CPU, where the emulator runs the kernels."""
    from flashgen.torch import emulated
    from flashgen.transformers import register

    register()
    with emulated(request.param == "cpu"):
        yield request.param
