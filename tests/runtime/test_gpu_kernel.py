"""Loading of kernels: the checked bytes, once per device. CuPy is mocked."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flashgen.codegen.arguments import Field, ordered
from flashgen.launch.argument_writer import Addresses, ArgumentWriter
from flashgen.launch.engines import GpuRunner, Launch, Place
from flashgen.runtime import gpu


class FakeCupy:
    """Records what is loaded on which device, and requests to its functions."""

    def __init__(self) -> None:
        self.device = 0
        self.loaded: list[tuple[int, bytes]] = []
        self.shared: list[tuple[int, int, int]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.contexts: list[tuple[int, int]] = []
        fake = self

        class Module:
            def load(self, cubin: bytes) -> None:
                time.sleep(0.02)
                fake.loaded.append((fake.device, cubin))

            def get_function(self, name: str) -> Any:
                device = fake.device
                return SimpleNamespace(ptr=100 + device, name=name)

        attribute = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
        driver = SimpleNamespace(
            **{attribute: 8}, funcSetAttribute=lambda *given: self.shared.append(given), launchKernel=self.launch
        )
        runtime = SimpleNamespace(memGetInfo=lambda: self.contexts.append((threading.get_ident(), self.device)))
        self.cuda = SimpleNamespace(function=SimpleNamespace(Module=Module), driver=driver, runtime=runtime)

    def launch(self, function: int, *numbers: int) -> None:
        """Mimics the driver, which needs a context and copies the parameters, here 16 bytes."""
        *sizes, stream, parameters, extra = numbers
        assert (threading.get_ident(), self.device) in self.contexts and not extra
        struct = ctypes.string_at(ctypes.c_void_p.from_address(parameters).value or 0, 16)
        self.launched.append((function, tuple(sizes), stream, struct))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setattr(gpu, "cupy", lambda: fake)
    monkeypatch.setattr(gpu, "_contexts", gpu._Contexts())
    return fake


def test_the_bytes_are_loaded_once_per_device(cupy: FakeCupy) -> None:
    kernel = gpu.GpuKernel(b"the cubin", "attention", threads=128, shared_bytes=100_000)
    assert cupy.loaded == []
    for device in (0, 1, 0, 1):
        cupy.device = device
        kernel.launch((3, 2, 1), gpu.Parameters(bytes([device] * 16)), stream=7 + device, device=device)
    assert cupy.loaded == [(0, b"the cubin"), (1, b"the cubin")]
    assert cupy.shared == [(100, 8, 100_000), (101, 8, 100_000)]
    sizes = (3, 2, 1, 128, 1, 1, 100_000)
    assert cupy.launched == [(100 + device, sizes, 7 + device, bytes([device] * 16)) for device in (0, 1, 0, 1)]
    assert [device for _, device in cupy.contexts] == [0, 1], "a context is created once"


def test_small_shared_memory_is_not_requested(cupy: FakeCupy) -> None:
    gpu.GpuKernel(b"", "attention", 128, 48 * 1024).launch((1, 1, 1), gpu.Parameters(bytes(16)), 0, 0)
    assert cupy.shared == []


def test_threads_load_once(cupy: FakeCupy) -> None:
    kernel = gpu.GpuKernel(b"the cubin", "attention", 128, 0)
    threads = [
        threading.Thread(target=kernel.launch, args=((1, 1, 1), gpu.Parameters(bytes(16)), 0, 0)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cupy.loaded == [(0, b"the cubin")] and len(cupy.launched) == 8
    assert len(cupy.contexts) == 8, "each thread makes the context current"


def test_threads_have_separate_launch_parameters(
    at_once: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread owns its parameters from writing them until the driver has copied them; then others may reuse them."""
    launch, runner = Launch((1, 1, 1), ArgumentWriter(ordered([Field("int*", "p")]), {})), GpuRunner.__new__(GpuRunner)
    wrong = []

    class Driver:
        def launch(self, grid: Any, parameters: gpu.Parameters, stream: int, device: int) -> None:
            time.sleep(0)  # other threads write now
            if int.from_bytes(parameters.struct, "little") != stream:
                wrong.append(stream)

    monkeypatch.setitem(runner.__dict__, "_loaded", Driver())

    def work(number: int) -> None:
        for value in range(1000 * number, 1000 * number + 200):
            runner.launch(launch, Addresses(p=value), {}, Place(stream=value))

    at_once(work)
    assert not wrong and 1 <= len(launch.idle) <= 8
