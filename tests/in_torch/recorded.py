"""Launches that are recorded instead of executed, with CPU tensors in place of those of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.launch import engines
from flashgen.runtime import arrays, gpu, tensor_maps
from flashgen.torch import direct

Launched = list[tuple[Any, ...]]


class Memory:
    """Memory for results at the addresses of the previous call, so that launches can be compared."""

    def __init__(self) -> None:
        self._kept: dict[Any, torch.Tensor] = {}
        self._calls: dict[Any, int] = {}

    def again(self) -> None:
        self._calls.clear()

    def maker(self, *what: Any) -> Callable[[], torch.Tensor]:
        def make() -> torch.Tensor:
            number = self._calls[what] = self._calls.get(what, 0) + 1
            shape, dtype, _, strides = (*what, None)[:4]
            strides = strides or arrays.contiguous_strides(shape)
            made = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype))
            return self._kept.setdefault((what, number), made)

        return make


def record_launches(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Records what a GPU would be given for CPU tensors: (grid, struct, stream, device) of each launch."""
    seen: Launched = []

    def look(tensor: torch.Tensor, _argument: str) -> arrays.View:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return arrays.View(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), dtype, None, tensor)

    def launch(_kernel: Any, grid: Any, parameters: Any, stream: int, device: int) -> None:
        seen.append((grid, bytes(parameters.struct), stream, device))

    library = replace(arrays.TORCH, view=look, maker=memory.maker, stream=lambda _: 7)
    runtime = SimpleNamespace(getDevice=lambda: 0, streamIsCapturing=lambda _: False)
    monkeypatch.setattr(gpu, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(gpu, "clear", lambda *what: seen.append(what))
    monkeypatch.setattr(gpu, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(gpu, "card", lambda _: gpu.Card("none", 132))
    monkeypatch.setattr(engines, "build", lambda *_: SimpleNamespace(cubin=b""))
    monkeypatch.setattr(engines.GpuRunner, "_loaded", SimpleNamespace(launch=lambda *given: launch(None, *given)))
    monkeypatch.setattr(engines.Gpu, "counter", lambda *_: 4096)
    monkeypatch.setattr(tensor_maps, "tensor_map", lambda address, shape: address.to_bytes(8, "little") * 16)
    monkeypatch.setitem(arrays._BY_TYPE, torch.Tensor, library)
    monkeypatch.setattr(direct, "_stream", library.stream)
    return seen
