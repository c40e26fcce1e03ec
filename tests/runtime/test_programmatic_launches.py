"""Programmatic dependent launches: the configuration that the driver gets. CuPy and the driver are mocked."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from flashgen.runtime import programmatic_launches


class DriverError(Exception):
    pass


class FakeDriver:
    """Records the configurations of launches, as cuda.h declares CUlaunchConfig and CUlaunchAttribute."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.launched: list[tuple[Any, ...]] = []
        fake = self

        class Launch:
            argtypes: Any = None

            def __call__(self, configuration: int, handle: int, parameters: int, extra: int) -> int:
                *sizes, stream, attributes, count = struct.unpack("<7I4xQQI", ctypes.string_at(configuration, 52))
                attribute = struct.unpack("<i4xi", ctypes.string_at(attributes, 12))
                fake.launched.append((handle, tuple(sizes), stream, attribute, count, parameters, extra))
                return fake.status

        self.cuLaunchKernelEx = Launch()


class FakeCuda:
    def __init__(self, version: int) -> None:
        self.runtime, self.driver = self, self
        self.driverGetVersion = lambda: version
        self.launchKernel, self.CUDADriverError = object(), DriverError


def test_the_driver_may_start_the_kernel_early(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    monkeypatch.setattr(programmatic_launches, "driver", lambda: fake)
    launch = programmatic_launches.launcher(FakeCuda(13000))
    launch(7, 3, 2, 1, 128, 1, 1, 1024, 2**40, 11, 0)
    assert fake.launched == [(7, (3, 2, 1, 128, 1, 1, 1024), 2**40, (6, 1), 1, 11, 0)]
    assert ctypes.sizeof(programmatic_launches._Attribute) == 72
    assert ctypes.sizeof(programmatic_launches._Configuration) == 56


def test_an_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programmatic_launches, "driver", lambda: FakeDriver(status=719))
    with pytest.raises(DriverError, match="719"):
        programmatic_launches.launcher(FakeCuda(12030))(7, 1, 1, 1, 32, 1, 1, 0, 0, 11, 0)


def test_older_drivers_start_it_in_order() -> None:
    cuda = FakeCuda(12020)
    assert programmatic_launches.launcher(cuda) is cuda.launchKernel, "they capture no such launches"
