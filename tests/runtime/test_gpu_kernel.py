"""How a kernel is loaded: of the bytes that were checked, once for each device. CuPy is stood in for."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from flashgen.runtime import gpu


class FakeCupy:
    """Records what is loaded on which device, and what is asked of its functions."""

    def __init__(self) -> None:
        self.device = 0
        self.loaded: list[tuple[int, bytes]] = []
        self.shared: list[tuple[int, int, int]] = []
        self.launched: list[tuple[Any, ...]] = []
        fake = self

        class Module:
            def load(self, cubin: bytes) -> None:
                time.sleep(0.02)
                fake.loaded.append((fake.device, cubin))

            def get_function(self, name: str) -> Any:
                device = fake.device

                def function(*arguments: Any) -> None:
                    fake.launched.append((device, name, *arguments[:2]))

                function.ptr = 100 + device  # type: ignore[attr-defined]
                return function

        attribute = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
        driver = SimpleNamespace(**{attribute: 8}, funcSetAttribute=lambda *given: self.shared.append(given))
        self.cuda = SimpleNamespace(function=SimpleNamespace(Module=Module), driver=driver)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setattr(gpu, "cupy", lambda: fake)
    monkeypatch.setattr(gpu, "stream_object", lambda pointer: pointer)
    return fake


def test_the_bytes_are_loaded_once_for_each_device(cupy: FakeCupy) -> None:
    kernel = gpu.GpuKernel(b"the cubin", "attention", threads=128, shared_bytes=100_000)
    assert cupy.loaded == []
    for device in (0, 1, 0, 1):
        cupy.device = device
        kernel.launch((3, 2, 1), bytearray(16), stream=0, device=device)
    assert cupy.loaded == [(0, b"the cubin"), (1, b"the cubin")]
    assert cupy.shared == [(100, 8, 100_000), (101, 8, 100_000)]
    assert cupy.launched == [(device, "attention", (3, 2, 1), (128, 1, 1)) for device in (0, 1, 0, 1)]


def test_little_shared_memory_is_not_asked_for(cupy: FakeCupy) -> None:
    gpu.GpuKernel(b"", "attention", 128, 48 * 1024).launch((1, 1, 1), bytearray(16), 0, 0)
    assert cupy.shared == []


def test_threads_load_once(cupy: FakeCupy) -> None:
    kernel = gpu.GpuKernel(b"the cubin", "attention", 128, 0)
    threads = [threading.Thread(target=kernel.launch, args=((1, 1, 1), bytearray(16), 0, 0)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cupy.loaded == [(0, b"the cubin")] and len(cupy.launched) == 8
